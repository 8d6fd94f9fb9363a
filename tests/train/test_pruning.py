"""Pruning while training: how many weights are zero, which ones, and that it is state like any
other.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.base.checks import check
from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.pruning_config import Pruning
from jaxpar.launch.local import train_config as train
from jaxpar.models import Model
from jaxpar.train.given_optimizer import as_optimizer
from jaxpar.train.plans import make_experiment
from jaxpar.train.pruning import PruningState, cubic, largest
from jaxpar.train.restore import load_params
from jaxpar.train.step import state_shapes
from jaxpar.verify.of_config import checks as verify

SMALL: dict[str, Any] = {
    "model.vocab_size": 61,
    "model.layers": 2,
    "model.embed": 16,
    "model.heads": 2,
    "model.mlp": 32,
    "model.max_seq_len": 16,
    "data.seq_len": 16,
    "train.batch": 8,
    "train.steps": 8,
    "train.warmup_steps": 0,
    "pruning.method": "magnitude",
    "pruning.every": 2,
    "pruning.targets": ["up", "down"],
    "mesh.platform": "cpu",
}


def config_of(**changes: Any) -> Config:
    return override(Config(), SMALL | {key.replace("__", "."): x for key, x in changes.items()})


@pytest.mark.quick
def test_the_largest_of_each_matrix_are_found_by_counting() -> None:
    sizes = jnp.abs(jax.random.normal(jax.random.key(0), (3, 8, 16)))
    found = np.asarray(largest(sizes, jnp.float32(10.9), outer=1)).reshape(3, -1)
    for mask, row in zip(found, np.asarray(sizes).reshape(3, -1), strict=True):
        assert set(np.flatnonzero(mask)) == set(np.argsort(-row)[:10])
    tied = jnp.array([[0.0, 0.0, 1.0, 2.0, -1.0]])
    counts = [int(largest(tied, jnp.float32(n), 1).sum()) for n in (0, 1, 3, 4, 5)]
    assert counts == [0, 1, 2, 4, 4]  # zeros are tied, and what is below zero is never chosen


@pytest.mark.quick
def test_shares_of_the_matrices() -> None:
    sizes = {"q": (64, 64), "up": (64, 256), "down": (256, 64)}
    assert set(Pruning("rigl", 0.75).kept(sizes).values()) == {0.25}
    shares = Pruning("rigl", 0.75, "erdos_renyi").kept(sizes)
    total = sum(rows * columns for rows, columns in sizes.values())
    kept = sum(shares[name] * rows * columns for name, (rows, columns) in sizes.items())
    assert kept == pytest.approx(total / 4)
    # 128 / 64^2 beside 320 / (64 x 256)
    assert shares["q"] / shares["up"] == pytest.approx((128 / 4096) / (320 / 16384))
    dense = Pruning("rigl", 0.2, "erdos_renyi").kept(sizes)
    assert dense["q"] == 1 and dense["up"] < 1


def run_steps(config: Config, steps: int) -> tuple[list[Any], list[PruningState]]:
    """Steps of SGD with random gradients, of all parameters."""
    model = Model(config.model)
    params = jax.jit(model.init)(jax.random.key(0))
    optimizer = as_optimizer(optax.sgd(0.1), config).make(model.axes)
    state = optimizer.init(params)
    seen = [params]
    states = [state]

    @jax.jit
    def step(params: Any, state: Any, key: Any) -> Any:
        leaves, form = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        grads = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        updates, state = optimizer.update(jax.tree.unflatten(form, grads), state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, jax.random.key(number))
        seen.append(params)
        states.append(state)
    return seen, states


@pytest.mark.quick
def test_magnitude_follows_the_cubic_schedule_and_what_is_pruned_stays_zero() -> None:
    seen, states = run_steps(config_of(), 8)
    shares = [float(jnp.mean(params["blocks"]["up"] != 0)) for params in seen]
    at = {step: float(cubic(jnp.float32(step / 6), 0.25)) for step in (1, 2, 4, 6)}
    wanted = [1, at[1], at[2], at[2], at[4], at[4], at[6], at[6], at[6]]
    # rounded down to a whole number of 512 entries
    np.testing.assert_allclose(shares, wanted, atol=1 / 512)
    assert at[6] == 0.25
    for before, after in itertools.pairwise(states):
        was = before.pruned["blocks"]["up"]
        assert bool(jnp.all(after.pruned["blocks"]["up"] | ~was))
    assert bool(jnp.all(seen[-1]["blocks"]["q"] != 0))
    # at the last choice each layer has lost its smallest
    assert [float(x) for x in jnp.mean(seen[-1]["blocks"]["down"] != 0, axis=(1, 2))] == [0.25] * 2


@pytest.mark.quick
def test_rigl_keeps_as_many_and_grows_where_the_gradient_is_largest() -> None:
    config = config_of(pruning__method="rigl", pruning__regrow=0.5, pruning__end=8)
    seen, states = run_steps(config, 3)
    first = states[1].pruned["blocks"]["up"]
    assert float(jnp.mean(~first)) == 0.25  # from the first step on
    second = states[2].pruned["blocks"]["up"]
    assert float(jnp.mean(~second)) == 0.25
    grown = first & ~second
    dropped = ~first & second
    # a quarter of the schedule has passed: cosine from a half
    moved = 0.5 * (1 + np.cos(np.pi / 4)) / 2
    # some of those that are dropped grow at once, as their gradient is large
    most = 2 * (128 - int((1 - moved) * 128))
    assert most / 2 < int(grown.sum()) == int(dropped.sum()) <= most
    # what has grown begins at zero and is trained at the next step
    assert not seen[2]["blocks"]["up"][grown].any() and seen[3]["blocks"]["up"][grown].all()


@pytest.mark.quick
def test_the_masks_lie_as_the_weights_do() -> None:
    config = config_of(mesh__fsdp=2, mesh__tensor=2, mesh__data=2)
    experiment = make_experiment(config)
    state = state_shapes(experiment.model, config, experiment.plan)
    up = state.params["blocks"]["up"]
    mask = state.opt_state.pruned["blocks"]["up"]
    assert (mask.shape, mask.dtype, mask.sharding) == (up.shape, bool, up.sharding)
    assert len(jax.tree.leaves(state.opt_state.pruned)) == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pruning__begin": 7}, "pruning.begin=7 is not before the last choice, after step 6"),
        ({"pruning__targets": ["mlp"]}, "no matrix 'mlp'"),
        ({"model__sparsity__form": "2:4"}, "both choose which entries count"),
        ({"model__lora__rank": 2}, "frozen beside LoRA"),
        ({"memory__optimizer": "offload"}, "with memory.optimizer=offload"),
    ],
)
def test_what_cannot_be_pruned_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        check(config_of(**changes))


@pytest.mark.quick
def test_a_matrix_that_is_not_there_and_an_average_are_refused() -> None:
    devices = jax.devices()[:1]
    with pytest.raises(UserError, match="blocks of gpt2 have no matrix 'gate'"):
        make_experiment(config_of(pruning__targets=["gate"]), devices)
    with pytest.raises(UserError, match=r"optimizer\.name=schedule_free"):
        make_experiment(config_of(optimizer__name="schedule_free"), devices)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["magnitude", "rigl"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh.data": 4, "rules.state_embed": ["data"]},
        {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.data": 2},
        {"mesh.stage": 2, "mesh.fsdp": 2},
        {"mesh.expert": 2, "mesh.tensor": 2, "model.family": "llama", "model.experts": 4},
    ],
)
def test_every_layout_chooses_the_same(method: str, mesh: dict[str, Any]) -> None:
    config = override(Config(), SMALL | mesh | {"pruning.method": method, "pruning.targets": []})
    assert verify.verify(config).equal


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_on_another_mesh(tmp_path: Path) -> None:
    changes = {
        "model.vocab_size": 256,
        "data.max_bytes": 50_000,
        "pruning.method": "rigl",
        "pruning.end": 8,
        "train.learning_rate": 0.01,
        "train.eval_batches": 1,
        "train.final_eval_batches": 1,
        "checkpoint.every": 3,
    }
    config = override(Config(), SMALL | changes | {"mesh.fsdp": 2, "mesh.tensor": 2})
    whole = train(config, tmp_path / "whole")
    train(override(config, {"train.stop_at": 3}), tmp_path / "part")
    assert train(config, tmp_path / "part").loss == whole.loss
    train(override(config, {"train.stop_at": 3}), tmp_path / "moved")
    other = override(config, {"mesh.fsdp": 1, "mesh.data": 2, "mesh.stage": 2, "mesh.tensor": 1})
    # float32 sums in another order
    assert train(other, tmp_path / "moved").loss == pytest.approx(whole.loss, abs=1e-5)
    params = load_params(tmp_path / "moved", make_experiment(config))
    assert float(jnp.mean(params["blocks"]["up"] != 0)) <= 0.25
