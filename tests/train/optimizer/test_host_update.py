"""Which optimizers a host can update by itself, and where an absent GPU's state lies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from traced_steps import config_of

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.train.experiments import make_experiment
from jaxpar.train.loop import run
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.host_update import require_host_update
from jaxpar.train.restore import restore_state
from jaxpar.train.runs.checkpoints import Checkpoints

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


@pytest.mark.parametrize(
    ("changes", "instead"),
    [
        ({"optimizer.name": "muon"}, "offload"),
        # which looks at all layers at once, and so is not streamed either
        ({"pruning.method": "magnitude", "pruning.end": 10}, "device"),
    ],
)
def test_what_is_advised_in_place_of_a_host_is_taken(
    changes: dict[str, object], instead: str
) -> None:
    config = override(config_of("llama", fsdp=2), changes | {"memory.optimizer": "host"})
    with pytest.raises(UserError, match=f"try memory.optimizer={instead}\\b"):
        _ = make_experiment(config, jax.devices()[:2]).state
    advised = override(config, {"memory.optimizer": instead})
    assert make_experiment(advised, jax.devices()[:2]).state is not None


@pytest.mark.slow
@pytest.mark.parametrize("place", ["offload", "host"])
def test_the_state_of_an_absent_gpu_lies_in_host_memory(place):
    """Its shardings forget that, and the step was lowered with all of it on the device."""
    topologies = pytest.importorskip("jaxpar.rehearse.topologies")
    if not topologies.compilers()["cuda"].startswith("jax-cuda"):
        pytest.skip(topologies.compilers()["cuda"])
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


@pytest.mark.slow
def test_a_run_whose_host_updates_resumes_to_the_bit(tmp_path):
    """The moments are saved from host memory and come back there, on the same mesh."""
    changes = {
        "memory.optimizer": "host",
        "mesh.platform": "cpu",
        "mesh.data": 1,
        "mesh.tensor": 1,
        "data.max_bytes": 200_000,
        "data.seq_len": 32,
        "model.layers": 2,
        "model.embed": 32,
        "model.mlp": 64,
        "train.batch": 8,
        "train.steps": 4,
        "train.warmup_steps": 1,
        "train.eval_every": 0,
        "train.final_eval_batches": 1,
        "checkpoint.every": 2,
    }
    config = override(load_config("tiny"), changes)
    run(config, tmp_path / "whole")
    run(override(config, {"train.stop_at": 2}), tmp_path / "cut")
    run(config, tmp_path / "cut")
    experiment = make_experiment(config)
    states = [
        restore_state(Checkpoints(tmp_path / name / "checkpoints"), 4, experiment)[0]
        for name in ("whole", "cut")
    ]
    assert any(jax.tree.leaves(experiment.in_host.opt_state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    first = restore_state(Checkpoints(tmp_path / "cut" / "checkpoints"), 2, experiment)[0]
    assert not np.array_equal(first.params["blocks"]["up"], states[0].params["blocks"]["up"])


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["device", "offload"])
def test_what_the_host_works_with_is_what_the_compiler_takes(parameters):
    """The account's host memory beside that of the step, compiled for two A100.

    Tolerance: arrays are padded to whole pages and a few scalars go down, 0.3 % here. A compiler may
    update the table first, and give back its gradient and its parameter before those of the layers
    come down: that of jax 0.12 does.
    """
    topologies = pytest.importorskip("jaxpar.rehearse.topologies")
    if not topologies.compilers()["cuda"].startswith("jax-cuda"):
        pytest.skip(topologies.compilers()["cuda"])
    from jaxpar.plan.memory_account import memory_account
    from jaxpar.rehearse.of_config import compile_step
    from jaxpar.rehearse.targets import load_target

    target = load_target("a100x2")
    sizes = {"model.embed": 256, "model.mlp": 1024, "model.layers": 4, "model.vocab_size": 4096}
    asked = {"memory.optimizer": "host", "memory.parameters": parameters}
    config = override(config_of("gpt2", fsdp=2), asked | sizes)
    experiment = make_experiment(config, target.devices())
    taken = compile_step(experiment, target).compiled.stats
    new = taken.host_output_size_in_bytes - taken.host_alias_size_in_bytes
    compiled = taken.host_argument_size_in_bytes + new + taken.host_temp_size_in_bytes
    parts = {part.name: part.host for part in memory_account(experiment, "cuda")}
    assert parts["host update"] > parts["optimizer"]
    counted = sum(parts.values())
    table = 4 * config.model.vocab_size * config.model.embed // config.mesh.fsdp
    assert compiled <= counted * 1.02
    assert counted <= (compiled + 2 * table) * 1.02
