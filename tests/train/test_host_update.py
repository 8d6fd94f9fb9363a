"""Which optimizers a host can update by itself, and where an absent GPU's state lies."""

import jax
import jax.numpy as jnp
import optax
import pytest
from traced_steps import config_of

from jaxpar.base.config import override
from jaxpar.base.errors import UserError
from jaxpar.train.host_update import require_host_update
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.plans import make_experiment

PARAMS = {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
AXES = {"w": ("embed", "mlp")}


def optimizer(made: optax.GradientTransformation) -> Optimizer:
    return Optimizer("mine", lambda axes: made, by_layer=False, clip_norm=0.0)


def reversed_update() -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(lambda x: x[::-1], updates))


def largest_is_one() -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(lambda x: x / jnp.max(x), updates))


def noise() -> optax.GradientTransformation:
    key = jax.random.key(0)
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: x * jax.random.uniform(key, x.shape), updates)
    )


@pytest.mark.parametrize(
    "made",
    [optax.adamw(1e-3), optax.lion(1e-3), optax.contrib.schedule_free_adamw(1e-3)],
    ids=["adamw", "lion", "schedule free"],
)
def test_a_host_updates_where_entries_do_not_look_at_others(made, plan_of):
    require_host_update(optimizer(made), PARAMS, AXES, plan_of(fsdp=2))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        pytest.param(largest_is_one(), "several entries", id="one array"),
        pytest.param(optax.clip_by_global_norm(1.0), "arrays of its own", id="all arrays"),
        pytest.param(reversed_update(), "several entries", id="order"),
        pytest.param(noise(), "several entries|arrays of its own", id="noise"),
        pytest.param(optax.adafactor(1e-3), "several entries|arrays of its own", id="adafactor"),
    ],
)
def test_a_host_refuses_what_it_would_need_others_for(made, why, plan_of):
    with pytest.raises(UserError, match=why):
        require_host_update(optimizer(made), PARAMS, AXES, plan_of(fsdp=2))


def test_one_device_has_all_entries(plan_of):
    require_host_update(optimizer(largest_is_one()), PARAMS, AXES, plan_of())


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_optimizer_of_the_config_is_refused_by_name(name):
    config = config_of("llama", fsdp=2)
    asked = {"memory.optimizer": "host", "optimizer.name": name}
    with pytest.raises(UserError, match=rf"memory.optimizer=host.*{name}"):
        _ = make_experiment(override(config, asked), jax.devices()[:2]).state


@pytest.mark.slow
@pytest.mark.parametrize("place", ["offload", "host"])
def test_the_state_of_an_absent_gpu_lies_in_host_memory(place):
    """Its shardings forget that, and the step was lowered with all of it on the device."""
    targets = pytest.importorskip("jaxpar.rehearse.targets")
    if not targets.compilers()["cuda"].startswith("jax-cuda"):
        pytest.skip(targets.compilers()["cuda"])
    from jaxpar.rehearse.of_config import rehearse
    from jaxpar.rehearse.targets import load_target

    target = load_target("a100x2")
    config = override(config_of("gpt2", fsdp=2), {"memory.optimizer": place})
    experiment = make_experiment(config, target.devices())
    report = rehearse(experiment, target)
    assert report["memory"]["host"]["arguments"] > 0
    assert report["time"]["host_stall"] > 0
    computed = report["time"]["by_category"].get("host_compute", 0.0)
    assert (computed > 0) == (place == "host")
