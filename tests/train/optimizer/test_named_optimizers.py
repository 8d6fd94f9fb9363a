"""Every optimizer that a config names, and one of the caller's: the same training on any mesh."""

from __future__ import annotations

import functools
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from traced_steps import config_of

from jaxpar.base.config import CheckpointConfig, Config, load_config, override, parse
from jaxpar.base.config.checks import check
from jaxpar.base.config.optimizer import OptimizerConfig, OptimizerSettings
from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import local_bytes
from jaxpar.base.layout.sharding import path_name
from jaxpar.base.registry import OPTIMIZERS
from jaxpar.models import Model
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.rehearse.targets import load_target
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan, plan_notes
from jaxpar.train.optimizer.learning_rate import learning_rate
from jaxpar.train.optimizer.named_optimizers import config_optimizer
from jaxpar.train.optimizer.per_matrix import (
    hidden_matrices,
    matrix_dims,
    muon_dimensions,
    per_matrix,
)
from jaxpar.train.optimizer.update import update
from jaxpar.train.optimizer.updated_part import Part
from jaxpar.train.restore import restore_state, state_metadata
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.state import TrainState
from jaxpar.train.state_memory import state_bytes
from jaxpar.train.step import evaluation_params, init_state, make_train_step

SMALL = {
    "data.seq_len": 16,
    "model.vocab_size": 250,
    "train.batch": 8,
    "train.steps": 10,
    "train.warmup_steps": 2,
    "train.learning_rate": 1e-3,
    "optimizer.adafactor.least_size_to_factor": 4,
}
ZERO1 = {"rules.state_embed": ("fsdp", "data")}
NAMES = {
    "adam": {},
    "lion": {},
    "sgd": {"optimizer.sgd.nesterov": True, "optimizer.sgd.weight_decay": 0.1},
    "adafactor": {"optimizer.adafactor.weight_decay": 0.1},
    "muon": {},
    "schedule_free": {"train.schedule": "constant"},
}
GIVEN = "given"


def marked(name: str, fast: tuple[str, ...]) -> Any:
    return name if name in fast else pytest.param(name, marks=pytest.mark.slow)


# Of the other kinds (factored moments, some by matrix, an average beside them) each takes seconds.
QUICK = (GIVEN,)
EVERY = [marked(name, QUICK) for name in (*NAMES, GIVEN)]


def mine() -> optax.GradientTransformation:
    """A transformation of the caller's, with a clip that is global and bites."""
    return optax.chain(optax.clip_by_global_norm(0.01), optax.lion(1e-3, weight_decay=0.1))


def config(name: str, **mesh: int) -> Config:
    changes = {} if name == GIVEN else {"optimizer.name": name} | NAMES[name]
    if mesh.get("data", 1) > 1:
        changes |= ZERO1
    return override(config_of("llama", **mesh), SMALL | changes)


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 250, (count, 8, 17), np.int32)
    return [{"tokens": rows[:, :-1], "labels": rows[:, 1:]} for rows in ids]


def trained(
    config: Config,
    name: str,
    steps: int = 3,
    state: TrainState | None = None,
) -> tuple[TrainState, list[float]]:
    """The state after some steps, and the losses."""
    mesh = config.mesh
    devices = jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor * mesh.stage]
    plan = make_plan(config, devices)
    model = Model(config.model)
    optimizer = mine() if name == GIVEN else None
    begun = 0 if state is None else int(state.step)
    experiment = Experiment(config, model, plan, optimizer)
    if state is None:
        state = init_state(experiment)
    step = make_train_step(experiment)
    losses = []
    for batch in batches(begun + steps)[begun:]:
        state, metrics = step(state, put_batch(batch, plan))
        losses.append(float(metrics["loss"]))
        assert metrics["overflows"] == 0
    return state, losses


@functools.cache
def on_one_device(name: str) -> tuple[Any, list[float]]:
    state, losses = trained(config(name), name)
    return jax.tree.map(np.asarray, state), losses


@functools.cache
def on_eight(name: str) -> tuple[TrainState, list[float]]:
    return trained(config(name, data=2, fsdp=2, tensor=2), name)


def assert_near(state: Any, want: Any, tolerance: float) -> None:
    """Root mean squares of the difference, relative to those of the array."""
    rows = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), other in zip(rows, jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(one, np.float64) for one in (leaf, other))
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y) + 1e-12, path_name(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_training_on_eight_devices_with_zero1_is_that_of_one(name: str) -> None:
    """Float32 over three steps. A gradient is off by a few ulps (6e-8) of its largest entry, and
    an update that divides by a gradient's size makes more of it where that is small.
    """
    state, losses = on_eight(name)
    want, want_losses = on_one_device(name)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_near(state, want, 2e-5)


LAYOUT = {
    ".q": P(None, ("fsdp", "data"), "tensor"),
    ".out": P(None, "tensor", None, ("fsdp", "data")),
    ".down": P(None, "tensor", ("fsdp", "data")),
    ".mlp_norm.scale": P(None, ("fsdp", "data")),
    "embed.tokens": P("tensor", ("fsdp", "data")),
    "head.norm.scale": P(("fsdp", "data")),
}
ROWS = P(None, ("fsdp", "data"))
COLUMNS = P(None, "tensor")


@pytest.mark.parametrize("name", EVERY)
def test_every_array_of_the_state_lies_where_its_parameter_does(name: str) -> None:
    """And the memory account counts the bytes that are there."""
    eight = config(name, data=2, fsdp=2, tensor=2)
    experiment = make_experiment(eight, jax.devices(), optimizer=mine() if name == GIVEN else None)
    shapes = experiment.state
    state, _ = on_eight(name)
    rows = jax.tree_util.tree_leaves_with_path(state.opt_state)
    for (path, leaf), shape in zip(rows, jax.tree.leaves(shapes.opt_state), strict=True):
        where = path_name(path)
        assert leaf.sharding == shape.sharding, where
        spec = leaf.sharding.spec
        if leaf.ndim == 0 or where.endswith("ns_coeffs") or leaf.shape[-1] == 1:
            assert spec == P(), where
        elif "v_row" in where or "v_col" in where:
            if ".blocks." in where:
                assert spec in (ROWS, COLUMNS), where
        else:
            wanted = [spec for end, spec in LAYOUT.items() if where.endswith(end)]
            assert spec in wanted or not wanted, where
    held = state_bytes(experiment, "cpu")
    assert held.optimizer.device == local_bytes(state.opt_state)
    assert held.parameters.device == local_bytes(state.params)


@pytest.mark.slow
def test_factored_moments_are_of_a_layers_matrix() -> None:
    """Of [embed, heads, head_dim] the heads and their dims are one side; no sum goes over layers,
    and sums over rows lie as columns do.
    """
    state, _ = on_eight("adafactor")
    factored = optax.tree.get(state.opt_state, "v_row"), optax.tree.get(state.opt_state, "v_col")
    by_row, by_column = (
        {name: tree["blocks"][name] for name in ("q", "down")} for tree in factored
    )
    model = state.params["blocks"]
    L, D, H, h = model["q"].shape
    assert by_row["q"].shape == (L, D) and by_column["q"].shape == (L, H * h)
    assert by_row["q"].sharding.spec == ROWS and by_column["q"].sharding.spec == COLUMNS
    # optax takes the larger dim out of the rows' sums: of down it is mlp
    assert by_row["down"].sharding.spec == ROWS and by_column["down"].sharding.spec == COLUMNS


@pytest.mark.slow
def test_adafactor_and_muon_update_a_layer_as_if_it_were_alone() -> None:
    """Of optax's own, on one layer's matrix as two dims."""
    axes = {"blocks": {"q": ("layers", "embed", "heads", "head_dim")}}
    key = jax.random.key(0)
    q_LDHh, grad_LDHh = jax.random.normal(key, (2, 3, 8, 2, 6))
    params = {"blocks": {"q": q_LDHh}}
    for name, alone in (
        ("adafactor", optax.adafactor(1e-3 / 3, 4, weight_decay_rate=1e-4 / 3)),
        ("muon", optax.contrib.muon(1e-3 / 3, weight_decay=0.1, consistent_rms=0.2)),
    ):
        transformation = config_optimizer(config(name)).make(axes)
        updates, _ = transformation.update(
            {"blocks": {"q": grad_LDHh}}, transformation.init(params), params
        )
        for layer in range(3):
            matrix, gradient = (x[layer].reshape(8, 12) for x in (q_LDHh, grad_LDHh))
            want, _ = alone.update(gradient, alone.init(matrix), matrix)
            # float32: sums of a hundred numbers, in another order
            np.testing.assert_allclose(
                updates["blocks"]["q"][layer].reshape(8, 12), want, rtol=2e-5, atol=1e-9
            )


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(("layers", "embed", "mlp"), marks=pytest.mark.slow),
        ("embed", "mlp", "experts"),  # dims that come back by no exchange of two
        ("layers", "embed", "mlp", "experts"),
    ],
)
def test_each_matrix_is_updated_by_itself_and_lies_as_before(axes: tuple[str, ...]) -> None:
    batch, inner = (
        [axis for axis in axes if (axis in ("layers", "experts")) == stacked]
        for stacked in (True, False)
    )
    sizes = {"layers": 2, "experts": 3, "embed": 4, "mlp": 5}
    shape = [sizes[axis] for axis in axes]
    values, gradient = jax.random.normal(jax.random.key(0), (2, *shape))
    alone = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    each = per_matrix(alone, {"w": axes})
    updates, _ = each.update({"w": gradient}, each.init({"w": values}), {"w": values})
    order = [axes.index(axis) for axis in (*batch, *inner)]
    update, value, slope = (x.transpose(order) for x in (updates["w"], values, gradient))
    for place in np.ndindex(*(sizes[axis] for axis in batch)):
        want, _ = alone.update(slope[place], alone.init(value[place]), value[place])
        # float32: sums of twenty numbers, in another order
        np.testing.assert_allclose(update[place], want, rtol=2e-5, atol=1e-9)


def test_the_decay_of_adafactor_follows_the_learning_rate() -> None:
    axes = {"w": ("embed", "mlp")}
    params = {"w": jax.random.normal(jax.random.key(0), (8, 12))}
    grads = {"w": jax.random.normal(jax.random.key(1), (8, 12))}
    made = dict[float, list[Any]]()
    for decay in (0.0, 0.1):
        given = override(config("adafactor"), {"optimizer.adafactor.weight_decay": decay})
        transformation = config_optimizer(given).make(axes)
        state = transformation.init(params)
        made[decay] = []
        for _ in range(4):
            updates, state = transformation.update(grads, state, params)
            made[decay].append(updates["w"])
    rate = learning_rate(config("adafactor").train)
    assert float(rate(0)) != float(rate(3))
    for step, (with_it, without) in enumerate(zip(made[0.1], made[0.0], strict=True)):
        # float32: a difference of numbers a thousand times as large
        np.testing.assert_allclose(
            with_it - without, -0.1 * rate(step) * params["w"], rtol=1e-3, atol=1e-8
        )


def test_the_matrices_of_a_model_are_known_by_their_axes() -> None:
    experts = ("layers", "experts", "embed", "mlp")
    assert matrix_dims(experts) == ((0, 1), (2,), (3,))
    assert matrix_dims(("layers", "heads", "head_dim", "embed")) == ((0,), (1, 2), (3,))
    assert matrix_dims(("layers", "embed", None)) == ((0,), (1,), (2,))  # a router
    assert matrix_dims(("layers", "heads", "head_dim")).rows == ()
    assert matrix_dims(("layers", None, "mlp")) == ((0,), (1,), (2,))  # a stranger's
    assert matrix_dims((None, "mlp", None)).rows == ()
    dimensions = hidden_matrices(Model(config("muon").model).axes)
    assert dimensions["embed"]["tokens"] is None and dimensions["head"]["table"] is None
    assert dimensions["blocks"]["mlp_norm"]["scale"] is None
    assert dimensions["blocks"]["q"] == ((1,), (2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name, (GIVEN,)) for name in (*NAMES, GIVEN)])
def test_a_run_goes_on_on_another_mesh(name: str, tmp_path: Path) -> None:
    """From eight devices to two stages of two: to within 1e-5 of one that was never interrupted."""
    state, _ = on_eight(name)
    want, want_losses = trained(
        config(name, data=2, fsdp=2, tensor=2), name, 1, jax.tree.map(jnp.copy, state)
    )
    checkpoints = TrainingCheckpoints(tmp_path / "checkpoints", CheckpointConfig())
    beside = {"iterator": None, "training_tokens": None, "layer_order": None}
    checkpoints.save(3, state, beside, None)
    changes = {"pipeline.schedule": "looped", "pipeline.microbatches": 2, "pipeline.virtual": 1}
    other = override(config(name, fsdp=2, stage=2), changes)
    given = mine() if name == GIVEN else None
    experiment = make_experiment(other, jax.devices()[:4], optimizer=given)
    found, _ = restore_state(checkpoints, 3, experiment)
    checkpoints.close()
    after, losses = trained(other, name, 1, found)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_near(after.params, want.params, 1e-5)


@pytest.mark.slow
def test_schedule_free_evaluates_its_average_and_restores_it(tmp_path: Path) -> None:
    state, _ = on_eight("schedule_free")
    eight = config("schedule_free", data=2, fsdp=2, tensor=2)
    want = optax.contrib.schedule_free_eval_params(
        jax.tree.map(np.asarray, state.opt_state), jax.tree.map(np.asarray, state.params)
    )
    assert np.linalg.norm(want["embed"]["tokens"] - state.params["embed"]["tokens"]) > 1e-4
    experiment = make_experiment(eight, jax.devices())
    assert_near(evaluation_params(experiment, state), want, 1e-6)
    checkpoints = TrainingCheckpoints(tmp_path / "checkpoints", CheckpointConfig())
    beside = {"iterator": None, "training_tokens": None, "layer_order": None}
    checkpoints.save(3, state, beside, None)
    one = config("schedule_free")
    here = jax.devices()[:1]
    found, _ = restore_state(checkpoints, 3, make_experiment(one, here), whole=False)
    assert_near(found.params, want, 1e-6)
    assert not jax.tree.leaves((found.step, found.opt_state))
    with pytest.raises(UserError, match="trained with a schedule-free optimizer"):
        restore_state(checkpoints, 3, make_experiment(config("adam"), here), whole=False)
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [marked(name, ("sgd",)) for name in ("lion", "sgd", "muon", "adafactor")]
)
def test_first_moments_in_bfloat16_and_in_host_memory(name: str) -> None:
    """Layer by layer; a bfloat16 has 8 bits, and Muon and momentum move as the moment does."""
    changes = {"precision.moments": "bfloat16", "memory.optimizer": "offload"}
    if name == "adafactor":
        changes["optimizer.adafactor.momentum"] = 0.9
    eight = override(config(name, data=2, fsdp=2, tensor=2), changes)
    check(eight)
    state, _ = trained(eight, name)
    exact, _ = trained(override(eight, {"precision.moments": "float32"}), name)
    rows = jax.tree_util.tree_leaves_with_path(state.opt_state)
    kinds = {path_name(path): (leaf.dtype, leaf.sharding.memory_kind) for path, leaf in rows}
    moment = next(key for key in kinds if key.endswith(".q") and kinds[key][0] == jnp.bfloat16)
    assert kinds[moment] == (jnp.bfloat16, "pinned_host")
    vector = moment.replace(".q", ".mlp_norm.scale")
    if name != "muon":  # whose vectors are AdamW's
        assert kinds[vector] == (jnp.float32, "device")
    start, _ = trained(eight, name, 0)
    for x, y, begun in zip(
        *(jax.tree.leaves(one.params) for one in (state, exact, start)), strict=True
    ):
        moved = np.linalg.norm(np.asarray(y) - np.asarray(begun))
        # Lion takes a sign, which turns where a moment is near zero
        limit = 0.2 if name == "lion" else 0.02
        assert np.linalg.norm(np.asarray(x) - np.asarray(y)) < limit * moved


def test_each_optimizer_of_ours_has_its_settings_in_the_table_of_its_name() -> None:
    """And first moments where it registers them, but for a momentum of 0."""
    tables = {one.name: type(one.default) for one in fields(OptimizerConfig)}
    assert {name: one.settings for name, one in OPTIMIZERS.items()} == {
        name: kind for name, kind in tables.items() if issubclass(kind, OptimizerSettings)
    }
    momentum = {"optimizer.sgd.momentum": 0.9, "optimizer.adafactor.momentum": 0.9}
    for name, one in OPTIMIZERS.items():
        chosen = override(Config(), {"optimizer.name": name} | momentum).optimizer
        assert chosen.rounds_first_moments == bool(one.first_moments), name
    for name in ("sgd", "adafactor"):
        none = {"optimizer.name": name, f"optimizer.{name}.momentum": 0.0}
        assert not override(Config(), none).optimizer.rounds_first_moments


@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name, ("adafactor",)) for name in NAMES])
def test_a_step_that_is_not_finite_keeps_the_state_of_any_optimizer(name: str) -> None:
    one = config(name)
    plan = make_plan(one, jax.devices()[:1])
    model = Model(one.model)
    experiment = Experiment(one, model, plan)
    state = init_state(experiment)
    state.params["head"]["norm"]["scale"] = jnp.full(one.model.embed, math.nan)
    before = jax.tree.map(np.asarray, state)
    (batch,) = batches(1)
    after, metrics = make_train_step(experiment)(state, put_batch(batch, plan))
    assert not np.isfinite(metrics["loss"]) and metrics["overflows"] == 0
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def test_an_update_that_is_not_finite_is_counted_and_leaves_a_finite_state() -> None:
    """Of an optimizer of the caller's whose state would become infinite."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: g / 0.0, updates), jax.tree.map(lambda x: x / 0.0, state)

    broken = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.ones_like, params), update
    )
    one = config(GIVEN)
    plan = make_plan(one, jax.devices()[:1])
    model = Model(one.model)
    experiment = Experiment(one, model, plan, broken)
    state = init_state(experiment)
    before = jax.tree.map(np.asarray, state)
    (batch,) = batches(1)
    after, metrics = make_train_step(experiment)(state, put_batch(batch, plan))
    entries = sum(leaf.size for leaf in jax.tree.leaves(before.params))
    assert np.isfinite(metrics["loss"]) and metrics["overflows"] == 2 * entries
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def test_sgd_without_momentum_has_no_state_but_its_count() -> None:
    one = override(config("sgd"), {"optimizer.sgd.momentum": 0.0, "optimizer.sgd.nesterov": False})
    plan = make_plan(one, jax.devices()[:1])
    shapes = Experiment(one, Model(one.model), plan).state
    assert [leaf.shape for leaf in jax.tree.leaves(shapes.opt_state)] == [()]


REFUSED = {
    "schedule": (
        {"optimizer.name": "schedule_free"},
        "train.schedule=cosine with optimizer.name=schedule_free",
    ),
    "rounded average": (
        {
            "optimizer.name": "schedule_free",
            "train.schedule": "constant",
            "precision.params": "bfloat16",
        },
        "precision.params=bfloat16 with optimizer.name=schedule_free",
    ),
    "no first moments": (
        {"optimizer.name": "adafactor", "precision.moments": "bfloat16"},
        "precision.moments=bfloat16 .*optimizer.name=adafactor",
    ),
    "momentum that a bfloat16 cannot follow": (
        {
            "optimizer.name": "sgd",
            "optimizer.sgd.momentum": 0.99,
            "precision.moments": "bfloat16",
        },
        "try optimizer.sgd.momentum=0.95",
    ),
    "decay": (
        {
            "optimizer.name": "lion",
            "optimizer.lion.weight_decay": 100.0,
            "train.learning_rate": 0.1,
        },
        "optimizer.lion.weight_decay=100 is 1 or more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_contradict_each_other_are_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        check(override(Config(), {"train.learning_rate": 1e-3} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory.optimizer": "offload"}, "memory.optimizer=offload updates one layer after"),
        ({"memory.parameters": "offload"}, "memory.parameters=offload updates one layer after"),
        ({"precision.moments": "bfloat16"}, "precision.moments=bfloat16 rounds the first moments"),
    ],
)
def test_a_given_optimizer_is_not_taken_apart(changes: dict[str, Any], message: str) -> None:
    one = override(config(GIVEN), changes)
    with pytest.raises(UserError, match=message):
        make_experiment(one, jax.devices()[:1], optimizer=mine())


def test_a_given_optimizer_is_one() -> None:
    one = config(GIVEN)
    plan = make_plan(one, jax.devices()[:1])
    with pytest.raises(UserError, match="an optimizer is an"):
        _ = Experiment(one, Model(one.model), plan, "lion").state  # pyright: ignore[reportArgumentType]


def test_optax_muon_is_told_the_matrices_of_a_model() -> None:
    one = config(GIVEN)
    model = Model(one.model)
    dimensions = muon_dimensions(model.axes)
    muon = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dimensions)
    state = make_experiment(one, jax.devices()[:1], optimizer=muon).state.opt_state
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert any(name.startswith("inner_states.muon") and name.endswith("blocks.q") for name in names)
    assert not any("muon" in name and name.endswith("embed.tokens") for name in names)


def _grown() -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: jnp.zeros(1), lambda updates, state, params: (updates, jnp.zeros(2))
    )


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.polyak_sgd(), "update.gradients.*'value'"),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "nothing more .AttributeError: .*'fast'"),
        (_grown(), r"state of another form .*float32\[1\] -> float32\[2\]"),
    ],
)
def test_a_given_optimizer_that_makes_no_plain_step_is_refused(
    optimizer: optax.GradientTransformation, message: str
) -> None:
    one = config(GIVEN)
    experiment = make_experiment(one, jax.devices()[:1], optimizer=optimizer)
    with pytest.raises(UserError, match=message):
        _ = experiment.state


@pytest.mark.slow
def test_a_state_is_not_read_as_that_of_another_optimizer(tmp_path: Path) -> None:
    """The two keep arrays of the same form, and mean something else."""
    one = config("adam")
    ours = make_experiment(one, jax.devices()[:1])
    theirs = make_experiment(one, jax.devices()[:1], optimizer=optax.adam(lambda count: 0.1))
    for number, (saved, other, message) in enumerate(
        [
            (ours, theirs, "trained with optimizer.name=adam, and here an optimizer is given"),
            (theirs, ours, "an optimizer that a program gave, and here it is optimizer.name=adam"),
        ]
    ):
        state = init_state(Experiment(one, saved.model, saved.plan, saved.optimizer))
        checkpoints = TrainingCheckpoints(tmp_path / str(number), CheckpointConfig())
        checkpoints.save(0, state, state_metadata(saved, None, None, None))
        checkpoints.wait()
        with pytest.raises(UserError, match=message):
            restore_state(checkpoints, 0, other)
        restore_state(checkpoints, 0, saved)
        restore_state(checkpoints, 0, other, whole=False)  # its parameters are anyone's


@pytest.mark.slow
def test_a_rate_in_the_state_is_reported() -> None:
    one = config(GIVEN)
    plan = make_plan(one, jax.devices()[:1])
    model = Model(one.model)
    rates = []
    for optimizer in (mine(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)):
        experiment = Experiment(one, model, plan, optimizer)
        state = init_state(experiment)
        (batch,) = batches(1)
        _, metrics = make_train_step(experiment)(state, put_batch(batch, plan))
        rates.append(metrics.get("learning_rate"))
    assert rates == [None, 0.25]


def test_keys_of_adamw_of_an_earlier_version_are_taken() -> None:
    old = parse("[train]\nbeta1 = 0.8\nbeta2 = 0.99\neps = 1e-6\nweight_decay = 0.2")
    today = "[optimizer.adamw]\nbeta1 = 0.8\nbeta2 = 0.99\neps = 1e-6\nweight_decay = 0.2"
    assert old == parse(today)
    assert override(Config(), {"train.beta2": 0.99}).optimizer.adamw.beta2 == 0.99
    with pytest.raises(UserError, match="keep optimizer"):
        parse("[train]\nbeta2 = 0.99\n[optimizer.adamw]\nbeta2 = 0.9")
    with pytest.raises(UserError, match="keep optimizer"):
        override(Config(), {"train.beta2": 0.99, "optimizer.adamw.beta2": 0.9})


def test_a_large_array_that_lies_whole_everywhere_is_said() -> None:
    """It belongs to no parameter, so that there is no dim to split it by."""
    large = optax.GradientTransformation(
        lambda params: (jnp.zeros((1024, 512)), jnp.zeros(())),
        lambda updates, state, params=None: (updates, state),
    )
    eight = config(GIVEN, data=2, fsdp=2, tensor=2)
    for optimizer, said in ((large, True), (mine(), False)):
        notes = plan_notes(make_experiment(eight, jax.devices(), optimizer=optimizer))
        assert any("the optimizer's 0 lie whole on every device" in note for note in notes) == said


def test_the_memory_account_has_the_matrices_that_muon_gathers() -> None:
    """Newton-Schulz works with three stacks of the largest matrix, whole on every device; where
    the state goes layer by layer, with those of one layer.
    """
    sizes = config("muon").model
    matrix = 4 * sizes.embed * (sizes.mlp or 0)

    def works_with(name: str, **changes: Any) -> int:
        changed = override(config(name, fsdp=4, tensor=2), changes)
        return state_bytes(make_experiment(changed, jax.devices()), "tpu").update

    assert works_with("muon") == 3 * sizes.layers * matrix
    assert works_with("lion") == 0
    streamed = works_with("muon", **{"memory.optimizer": "offload"})
    assert 3 * matrix < streamed < 3 * (sizes.layers + 1) * matrix


def test_the_memory_account_has_the_parameters_that_zero_1_gathers() -> None:
    """The new ones, which stand beside the old ones until all are there, and their pieces."""
    experiment = make_experiment(config("lion", data=8), jax.devices())
    gathered = local_bytes(experiment.state.params)
    assert state_bytes(experiment, "tpu").update == gathered + gathered // 8
    whole = override(experiment.config, {"rules.state_embed": ()})
    assert state_bytes(make_experiment(whole, jax.devices()), "tpu").update == 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_what_muons_step_works_with_is_what_the_compiler_says(mesh: dict[str, int]) -> None:
    """Within 10 % by libtpu 0.0.42.1: on a TPU's memory the rest are the tables' steps, which fuse
    into little. libtpu 0.0.50.1 begins the steps of other matrices early, and so holds 22 % and
    50 % more; a budget learns that from the first program that it compiles.
    """
    early = jax.__version_info__ >= (0, 11)
    target = load_target("v5e-8")
    changes = {"optimizer.name": "muon", "model.layers": 4}
    one = override(load_config("llama32_1b"), changes | {f"mesh.{k}": v for k, v in mesh.items()})
    experiment = make_experiment(one, target.devices())
    model = experiment.model
    plan = experiment.plan
    axes = model.trained(model.axes)
    state = experiment.state
    params = model.trained(state.params)
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), params
    )

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        sums = LossSums(*jnp.ones(3))
        part = Part(params, opt_state, grads, axes)
        done = update(part, sums, experiment.optimizer, plan)
        return done.params, done.opt_state

    places = jax.tree.map(lambda x: x.sharding, (params, state.opt_state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=places)
    lowered = jitted.trace(params, state.opt_state, grads).lower(lowering_platforms=("tpu",))
    stats = lowered.compile().memory_analysis()
    works_with = stats.peak_memory_in_bytes - stats.argument_size_in_bytes
    assert 0.9 <= works_with / state_bytes(experiment, "tpu").update <= (1.6 if early else 1.1)
