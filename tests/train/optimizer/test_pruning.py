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

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.config.checks import check
from jaxpar.base.config.pruning import Pruning
from jaxpar.base.errors import UserError
from jaxpar.hlo.collective_order import find_unordered
from jaxpar.launch.local import train_config as train
from jaxpar.models import Model
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan
from jaxpar.train.optimizer.given_optimizer import as_optimizer
from jaxpar.train.optimizer.pruning import PruningState, cubic
from jaxpar.train.optimizer.ranks import highest, largest
from jaxpar.train.restore import load_params
from jaxpar.train.step import make_train_step, step_shapes
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


def test_the_largest_of_each_matrix_are_found_by_counting() -> None:
    sizes = jnp.abs(jax.random.normal(jax.random.key(0), (3, 8, 16)))
    found = np.asarray(largest(sizes, jnp.float32(10.9), outer=1)).reshape(3, -1)
    for mask, row in zip(found, np.asarray(sizes).reshape(3, -1), strict=True):
        assert set(np.flatnonzero(mask)) == set(np.argsort(-row)[:10])
    tied = jnp.array([[0.0, 0.0, 1.0, 2.0, -1.0]])
    counts = [int(largest(tied, jnp.float32(n), 1).sum()) for n in (0, 1, 3, 4, 5)]
    assert counts == [0, 1, 2, 4, 4]  # zeros are tied, and what is below zero is never chosen


def test_the_highest_scores_are_found_with_their_signs_and_ties_go_to_the_largest() -> None:
    scores = jax.random.normal(jax.random.key(0), (3, 8, 16))
    sizes = jnp.abs(jax.random.normal(jax.random.key(1), scores.shape))
    for number in (0, 50, 110, 128):
        found = np.asarray(highest(scores, sizes, jnp.float32(number), outer=1)).reshape(3, -1)
        for mask, row in zip(found, np.asarray(scores).reshape(3, -1), strict=True):
            assert set(np.flatnonzero(mask)) == set(np.argsort(-row)[:number])
    tied = jnp.array([[3.0, 0.0, 0.0, 0.0, -1.0]])
    sizes = jnp.array([[0.1, 0.2, 0.9, 0.5, 7.0]])
    found = highest(tied, sizes, jnp.float32(3), outer=1)
    assert found.tolist() == [[True, False, True, True, False]]


def test_shares_of_the_matrices() -> None:
    sizes = {"q": (64, 64), "up": (64, 256), "down": (256, 64)}
    assert set(Pruning("rigl").kept(sizes, 0.75).values()) == {0.25}
    shares = Pruning("rigl", distribution="erdos_renyi").kept(sizes, 0.75)
    total = sum(rows * columns for rows, columns in sizes.values())
    kept = sum(shares[name] * rows * columns for name, (rows, columns) in sizes.items())
    assert kept == pytest.approx(total / 4)
    # 128 / 64^2 beside 320 / (64 x 256)
    assert shares["q"] / shares["up"] == pytest.approx((128 / 4096) / (320 / 16384))
    dense = Pruning("rigl", distribution="erdos_renyi").kept(sizes, 0.2)
    assert dense["q"] == 1 and dense["up"] < 1


def run_steps(config: Config, steps: int) -> tuple[list[Any], list[PruningState]]:
    """Steps of SGD with random gradients, of all parameters."""
    return run_steps_with_gradients(config, steps)[:2]


def run_steps_with_gradients(
    config: Config, steps: int
) -> tuple[list[Any], list[PruningState], list[Any]]:
    """As `run_steps`, with the gradients."""
    model = Model(config.model)
    params = jax.jit(model.init)(jax.random.key(0))
    optimizer = as_optimizer(optax.sgd(0.1), config).make(model.axes)
    state = optimizer.init(params)
    seen = [params]
    states = [state]
    gradients = []

    @jax.jit
    def step(params: Any, state: Any, key: Any) -> Any:
        leaves, form = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        grads = jax.tree.unflatten(form, drawn)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    for number in range(steps):
        params, state, grads = step(params, state, jax.random.key(number))
        seen.append(params)
        states.append(state)
        gradients.append(grads)
    return seen, states, gradients


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_movement_scores_every_weight_and_one_that_comes_back_has_its_value() -> None:
    """Against the rules of arXiv:2005.07683 in NumPy: scores, the highest, and what pruned weights
    keep.
    """
    config = config_of(pruning__method="movement", pruning__every=1, pruning__targets=["up"])
    seen, states, steps_grads = run_steps_with_gradients(config, 6)
    L, rows, columns = seen[0]["blocks"]["up"].shape
    dense = np.asarray(seen[0]["blocks"]["up"])
    scores = np.zeros_like(dense)
    kept = np.ones(dense.shape, bool)
    returned = 0
    for step, grads in enumerate(steps_grads, start=1):
        grad = np.asarray(grads["blocks"]["up"])
        scores -= dense * grad
        dense = np.where(kept, dense - np.float32(0.1) * grad, dense)
        share = float(cubic(jnp.float32(step / 6), 0.25))
        number = int(np.float32(share) * rows * columns)
        order = np.argsort(-scores.reshape(L, -1), axis=1)[:, :number]
        chosen = np.zeros((L, rows * columns), bool)
        np.put_along_axis(chosen, order, True, axis=1)
        returned += int((chosen.reshape(dense.shape) & ~kept).sum())
        kept = chosen.reshape(dense.shape)
        state = states[step]
        # the same sums of float32, of which XLA may round a product and a sum at once
        np.testing.assert_allclose(state.movement.scores["blocks"]["up"], scores, atol=1e-6)
        np.testing.assert_array_equal(state.pruned["blocks"]["up"], ~kept)
        np.testing.assert_allclose(
            seen[step]["blocks"]["up"], np.where(kept, dense, 0), rtol=1e-6, atol=1e-7
        )
    assert returned > 0


def test_shares_by_depth_are_those_of_their_layers_in_any_order() -> None:
    shares = Pruning("magnitude", sparsity_by_depth=(0.2, 0.4, 0.8))
    found = [shares.sparsity_at(layer, 5) for layer in range(5)]
    assert found == pytest.approx([0.2, 0.3, 0.4, 0.6, 0.8])
    changes = {"model__layers": 3, "pruning__sparsity_by_depth": (0.25, 0.5, 0.75)}
    for stages in (1, 2):
        config = config_of(mesh__data=1, mesh__stage=stages, **changes)
        plan = make_plan(config)
        order = stored_order(plan, 3) or range(3)
        assert (-1 in order) == (stages == 2)
        weights = jax.random.normal(jax.random.key(0), (len(order), 16, 32))
        params = {"blocks": {"up": weights}}
        optimizer = as_optimizer(optax.sgd(0.1), config, plan)
        transformation = optimizer.make({"blocks": {"up": ("layers", "embed", "mlp")}})
        state = transformation.init(params)._replace(steps=jnp.int32(5))  # the last choice is next
        _, state = jax.jit(transformation.update)(params, state, params)
        pruned = jnp.mean(state.pruned["blocks"]["up"], axis=(1, 2)).tolist()
        wanted = {0: 0.25, 1: 0.5, 2: 0.75}
        for layer, share in zip(order, pruned, strict=True):
            assert layer < 0 or share == wanted[layer]


@pytest.mark.parametrize("method", ["magnitude", "movement"])
def test_the_state_lies_as_the_weights_do(method: str) -> None:
    config = config_of(mesh__fsdp=2, mesh__tensor=2, mesh__data=2, pruning__method=method)
    experiment = make_experiment(config)
    state = Experiment(config, experiment.model, experiment.plan).state
    up = state.params["blocks"]["up"]
    mask = state.opt_state.pruned["blocks"]["up"]
    assert (mask.shape, mask.dtype, mask.sharding) == (up.shape, bool, up.sharding)
    assert len(jax.tree.leaves(state.opt_state.pruned)) == 2
    beside = jax.tree.leaves(state.opt_state.movement)
    assert len(beside) == (4 if method == "movement" else 0)
    assert all(array.dtype == jnp.float32 for array in beside)
    if method == "movement":
        assert state.opt_state.movement.scores["blocks"]["up"].sharding == up.sharding


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pruning__begin": 7}, "pruning.begin=7 .*step 6"),
        ({"pruning__targets": ["mlp"]}, "no matrix 'mlp'"),
        (
            {"pruning__sparsity_by_depth": [0.1, 0.2, 0.3]},
            "sparsity_by_depth has 3 shares, and model.layers=2",
        ),
        ({"model__sparsity__form": "2:4"}, "both choose"),
        ({"model__lora__rank": 2}, "frozen beside LoRA"),
        ({"memory__optimizer": "offload"}, "with memory.optimizer=offload"),
    ],
)
def test_what_cannot_be_pruned_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        check(config_of(**changes))


def test_a_matrix_that_is_not_there_and_an_average_are_refused() -> None:
    devices = jax.devices()[:1]
    with pytest.raises(UserError, match="blocks of gpt2 have no matrix 'gate'"):
        make_experiment(config_of(pruning__targets=["gate"]), devices)
    with pytest.raises(UserError, match=r"optimizer\.name=schedule_free"):
        make_experiment(config_of(optimizer__name="schedule_free"), devices)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["magnitude", "movement", "rigl"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh.data": 4, "rules.state_embed": ["data"]},
        {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.data": 2},
        {
            "mesh.stage": 2,
            "mesh.fsdp": 2,
            "model.layers": 3,
            "pruning.sparsity_by_depth": [0.25, 0.5, 0.75],
        },
        {"mesh.expert": 2, "mesh.tensor": 2, "model.family": "llama", "model.experts": 4},
    ],
)
def test_every_layout_chooses_the_same(method: str, mesh: dict[str, Any]) -> None:
    config = override(Config(), SMALL | mesh | {"pruning.method": method, "pruning.targets": []})
    assert verify.verify(config).equal


@pytest.mark.slow
def test_no_later_sum_over_devices_may_run_beside_those_of_a_choice() -> None:
    """XLA takes what a branch only passes through out of it, and sums of that were not held."""
    small = {"model.embed": 32, "model.mlp": 64, "train.steps": 20, "train.warmup_steps": 2}
    changes = {"pruning.method": "magnitude", "pruning.every": 50, "mesh.platform": "cpu"}
    config = override(load_config("tiny"), small | changes)
    experiment = make_experiment(config)
    step = make_train_step(Experiment(config, experiment.model, experiment.plan))
    shapes = step_shapes(Experiment(config, experiment.model, experiment.plan))
    assert find_unordered(step.lower(*shapes).compile().as_text()) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["movement", "rigl"])
def test_a_run_goes_on_to_the_bit_and_on_another_mesh(method: str, tmp_path: Path) -> None:
    changes = {
        "model.vocab_size": 256,
        "data.max_bytes": 50_000,
        "pruning.method": method,
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
