"""The optimizer's step, its state and the parameters in host memory or in fewer bits: the same
training.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from traced_steps import config_of, staged

from jaxpar.base.config import CheckpointConfig, Config, TrainConfig, override
from jaxpar.base.config.optimizer import AdamW, OptimizerConfig
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.host_memory import on_device, on_host
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan
from jaxpar.train.optimizer import decay_mask, pack_moments
from jaxpar.train.optimizer.learning_rate import learning_rate
from jaxpar.train.optimizer.named_optimizers import config_optimizer
from jaxpar.train.optimizer.update import update
from jaxpar.train.optimizer.updated_part import Part
from jaxpar.train.restore import restore_state
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.state import TrainState
from jaxpar.train.step import init_state, make_train_step

OPTIMIZER = {"memory.optimizer": "offload"}
PARAMETERS = {"memory.parameters": "offload", "memory.policy": "full"}
STATE = OPTIMIZER | PARAMETERS
HOST = {"memory.optimizer": "host"}
BLOCK_INPUT = {"memory.policy": "full", "memory.keep.block_input": "offload"}
ZERO1 = {"rules.embed": (), "rules.state_embed": ("data",)}
SMALL = {"data.seq_len": 32, "model.vocab_size": 250, "train.steps": 10, "train.warmup_steps": 2}

PLANS: dict[str, tuple[Config, dict[str, Any]]] = {
    "optimizer, alone": (config_of("gpt2"), OPTIMIZER),
    "optimizer, fsdp x tensor": (config_of("llama", fsdp=4, tensor=2), OPTIMIZER),
    "optimizer, ZeRO-1": (override(config_of("llama", data=4), ZERO1), OPTIMIZER),
    "optimizer, stages": (
        staged(config_of("llama", stage=2, fsdp=2), "1f1b", 2),
        OPTIMIZER,
    ),
    "parameters, alone": (config_of("llama"), PARAMETERS),
    "parameters, none recomputed": (config_of("gpt2"), {"memory.parameters": "offload"}),
    "parameters, fsdp x tensor, unrolled": (
        config_of("gpt2", scan=False, fsdp=2, tensor=2),
        PARAMETERS,
    ),
    "parameters, context, rings, accumulation": (
        override(
            config_of("llama", accumulation=2, context=2, tensor=2), {"overlap.gather": "ring"}
        ),
        PARAMETERS,
    ),
    "parameters and optimizer, fsdp x tensor": (
        config_of("llama", "dots", fsdp=2, tensor=2),
        STATE | BLOCK_INPUT,
    ),
    "parameters and optimizer, context": (
        config_of("gpt2", context=2, data=2),
        STATE | {"memory.policy": "dots"},
    ),
    "parameters and optimizer, stages": (
        staged(config_of("gpt2", stage=2, tensor=2), "gpipe", 4),
        STATE,
    ),
    "parameters and optimizer, stages, blocks": (
        staged(config_of("llama", stage=2), "1f1b", 4, pipeline_stash="blocks"),
        STATE | BLOCK_INPUT,
    ),
    "updated by the host, fsdp x tensor": (config_of("llama", fsdp=4, tensor=2), HOST),
    "updated by the host, ZeRO-1": (override(config_of("llama", data=4), ZERO1), HOST),
    "updated by the host, parameters, ZeRO-1": (
        override(config_of("gpt2", data=4), ZERO1),
        HOST | PARAMETERS,
    ),
    "updated by the host, stages": (staged(config_of("llama", stage=2, fsdp=2), "1f1b", 2), HOST),
    "updated by the host, parameters": (
        config_of("llama", "dots", fsdp=2, tensor=2),
        HOST | PARAMETERS | BLOCK_INPUT,
    ),
}
FAST = ("parameters and optimizer, fsdp x tensor",)
IN_CI = (
    "updated by the host, fsdp x tensor",
    "updated by the host, ZeRO-1",
    "updated by the host, parameters, ZeRO-1",
    "updated by the host, stages",
    "updated by the host, parameters",
    "optimizer, fsdp x tensor",
    "optimizer, stages",
    "parameters, context, rings, accumulation",
    "parameters and optimizer, stages",
    "parameters and optimizer, stages, blocks",
)
# Float32 over three steps, root mean squares: a loop over layers may be fused otherwise than all of
# them at once, an ulp (6e-8) here or there, which AdamW's first steps make more of where a gradient
# is small.
TOLERANCE = 1e-5


def batches(config: Config, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (config.train.batch, config.data.seq_len + 1)
    ids = [rng.integers(0, config.model.vocab_size, shape, np.int32) for _ in range(count)]
    return [{"tokens": rows[:, :-1], "labels": rows[:, 1:]} for rows in ids]


def trained(
    config: Config,
    steps: int = 3,
) -> tuple[TrainState, list[float], Any]:
    """The state after some steps, the losses and gradient norms, and the compiled step's plan."""
    count = math.prod(
        config.mesh.__dict__[axis]
        for axis in ("data", "fsdp", "stage", "context", "tensor", "expert")
    )
    plan = make_plan(config, jax.devices()[:count])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state = init_state(experiment)
    step = make_train_step(experiment)
    numbers = []
    for batch in batches(config, steps):
        state, metrics = step(state, put_batch(batch, plan))
        numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return state, numbers, plan


def moments_of(state: optax.OptState) -> tuple[Any, Any]:
    """The first and second moments of Adam's state."""
    return optax.tree.get(state, "mu"), optax.tree.get(state, "nu")


@functools.cache
def plain(name: str) -> tuple[Any, list[float]]:
    config = override(PLANS[name][0], SMALL)
    state, numbers, _ = trained(config)
    return jax.tree.map(np.asarray, state), numbers


def marked(name: str) -> Any:
    if name in FAST:
        return name
    return pytest.param(
        name,
        marks=pytest.mark.slow if name in IN_CI else pytest.mark.long,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name) for name in PLANS])
def test_training_is_the_same_with_state_in_host_memory(name: str) -> None:
    config, changes = PLANS[name]
    state, numbers, plan = trained(override(config, SMALL | changes))
    want, want_numbers = plain(name)
    np.testing.assert_allclose(numbers, want_numbers, rtol=TOLERANCE)
    ours = jax.tree_util.tree_leaves_with_path(jax.tree.map(np.asarray, state))
    for (path, x), y in zip(
        ours,
        jax.tree.leaves(want),
        strict=True,
    ):
        # its gradient is zero by mathematics, and AdamW makes steps of what is rounding
        if "k_bias" not in str(path):
            assert np.linalg.norm(x - y) <= TOLERANCE * np.linalg.norm(y), path
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params["blocks"])}
    assert kinds == {"pinned_host" if plan.parameters == "offload" else "device"}
    assert state.params["embed"]["tokens"].sharding.memory_kind == "device"
    for moments in moments_of(state.opt_state):
        kinds = jax.tree.map(lambda leaf: leaf.sharding.memory_kind, moments)
        wanted = jax.tree.map(
            lambda matrix: "pinned_host" if matrix and plan.optimizer != "device" else "device",
            decay_mask(Model(config.model).axes),
        )
        assert kinds == wanted


@pytest.mark.slow
def test_a_state_in_host_memory_is_saved_and_restored(tmp_path: Any) -> None:
    """Onto the device, too: where it lies is no part of a checkpoint."""
    config = override(config_of("llama", fsdp=2), SMALL | STATE)
    state, *_ = trained(config, 1)
    with_state = TrainingCheckpoints(tmp_path / "checkpoints", CheckpointConfig())
    with_state.save(
        1, state, {"iterator": None, "training_tokens": None, "layer_order": None}, None
    )
    for changes in (STATE, {"memory.optimizer": "device", "memory.parameters": "device"}):
        other = override(config, changes)
        experiment = make_experiment(other, jax.devices()[:2])
        found, _ = restore_state(with_state, 1, experiment)
        jax.tree.map(np.testing.assert_array_equal, found, state)
        kind = "pinned_host" if changes is STATE else "device"
        assert found.params["blocks"]["q"].sharding.memory_kind == kind
    with_state.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"fsdp": 4, "tensor": 2}, id="fsdp x tensor"),
        pytest.param({"stage": 2, "fsdp": 2}, id="stages"),
    ],
)
def test_moments_in_bfloat16_train_alike(mesh: dict[str, int]) -> None:
    """The update of three steps, relative to that of float32 moments: a bfloat16 has 8 bits, and a
    moment's root goes into the update."""
    config = override(
        config_of("llama", **mesh),
        SMALL | {"precision.moments": "bfloat16", "train.learning_rate": 1e-3},
    )
    if "stage" in mesh:
        config = staged(config, "1f1b", 2)
    exact = override(config, {"precision.moments": "float32"})
    (state, _, plan), (want, _, _) = trained(config), trained(exact)
    start = init_state(Experiment(config, Model(config.model), plan))
    moved, wanted = (
        jax.tree.map(
            lambda a, b: np.asarray(a) - np.asarray(b),
            x.params,
            start.params,
        )
        for x in (state, want)
    )
    for a, b in zip(
        jax.tree.leaves(moved),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.02, error
    first, second = moments_of(state.opt_state)
    assert first["blocks"]["q"].dtype == jnp.bfloat16 and second["blocks"]["q"].dtype == jnp.float32
    assert first["head"]["norm"]["scale"].dtype == jnp.float32


@pytest.mark.slow
def test_the_update_is_adamw_on_clipped_gradients() -> None:
    """Beside optax's own chain, from the gradients that the step itself reports nothing of but
    their norm.
    """
    config = override(config_of("llama"), SMALL | {"train.clip_norm": 0.1})
    plan = make_plan(config, jax.devices()[:1])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state = init_state(experiment)
    (batch,) = batches(config, 1)

    def mean(params: Any) -> Any:
        sums = model.loss(params, batch, plan)
        return sums.loss / sums.tokens

    grads = jax.jit(jax.grad(mean))(state.params)
    train = config.train
    adamw = config.optimizer.adamw
    want = optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(
            learning_rate(train),
            adamw.beta1,
            adamw.beta2,
            adamw.eps,
            weight_decay=adamw.weight_decay,
            mask=decay_mask(model.axes),
        ),
    )
    updates, _ = jax.jit(lambda grads, params: want.update(grads, want.init(params), params))(
        grads, state.params
    )
    wanted = jax.tree.map(np.asarray, optax.apply_updates(state.params, updates))
    new, metrics = make_train_step(experiment)(state, put_batch(batch, plan))
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    # A first step is the sign of a gradient, but for those near eps; a gradient is off by some 1e-6
    # of the largest.
    chex.assert_trees_all_close(new.params, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("norm", [0.0, 0.5, 0.99, 1.01, 1.2, 7.0])
def test_gradients_are_clipped_from_the_norm_on(norm: float, plan_of: Callable[..., Plan]) -> None:
    """By the norm of their mean over the tokens."""
    tokens = 8.0
    changes = {
        "optimizer.name": "sgd",
        "optimizer.sgd.momentum": 0.0,
        "train.clip_norm": 1.0,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
    }
    config = override(Config(), changes)
    axes = {"head": {"w": ("embed", "mlp")}}
    params = {"head": {"w": jnp.zeros((3, 4))}}
    optimizer = config_optimizer(config)
    state = optimizer.make(axes).init(params)
    grads = {"head": {"w": jnp.full((3, 4), norm * tokens / 12**0.5)}}
    sums = LossSums(jnp.float32(1), jnp.float32(1), jnp.float32(tokens))
    new = update(Part(params, state, grads, axes), sums, optimizer, plan_of())
    np.testing.assert_allclose(new.norm, norm, rtol=1e-6)
    made = np.linalg.norm(new.params["head"]["w"]) / config.train.learning_rate
    # float32 sums of 12 squares
    np.testing.assert_allclose(made, min(norm, 1.0), rtol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"optimizer": "offload", "parameters": "offload", "moments": "bfloat16"},
            marks=pytest.mark.slow,
            id="streamed",
        ),
        pytest.param({"optimizer": "host"}, id="by the host"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(
    changes: dict[str, Any], plan_of: Callable[..., Plan]
) -> None:
    """Nor does a number that overflows in a step whose loss and gradients are finite: it stays as
    it was.
    """
    plan = dataclasses.replace(plan_of(data=2, fsdp=2), **changes)
    axes = {"blocks": {"w": ("layers", "embed", "mlp")}}
    train = TrainConfig(learning_rate=1e3, warmup_steps=1, clip_norm=0.0)
    largest = float(jnp.finfo(jnp.float32).max)
    params = {"blocks": {"w": jnp.ones((2, 4, 32)).at[0, 0, 0].set(largest)}}
    optimizer = config_optimizer(Config(train=train))
    first_state = optimizer.make(axes).init(params)
    opt_state = pack_moments(optimizer, first_state, params, axes, plan.moments)

    @jax.jit
    def stepped(opt_state: Any, slope: jax.Array, nll: jax.Array) -> Any:
        grads = {"blocks": {"w": jnp.ones((2, 4, 32)).at[1, 2, 3].set(slope)}}
        place = on_host if plan.streams else lambda x: x
        moments = (jax.tree.map(place, moment) for moment in moments_of(opt_state))
        state = (
            jax.tree.map(place, params),
            optax.tree.set(opt_state, mu=next(moments), nu=next(moments)),
        )
        sums = LossSums(nll, nll, jnp.float32(8))
        new = update(Part(*state, grads, axes), sums, optimizer, plan)
        return jax.tree.map(on_device, (new.params, new.opt_state, new.overflows))

    *first, overflows = jax.tree.map(np.asarray, stepped(opt_state, 2.0, 5.0))
    assert overflows == 1
    weights = first[0]["blocks"]["w"]
    assert weights[0, 0, 0] == largest and np.all(weights[1] < 0) and np.all(np.isfinite(weights))
    assert not np.array_equal(
        moments_of(first[1])[0]["blocks"]["w"],
        0,
    )
    for slope, nll in ((math.nan, 5.0), (-math.inf, 5.0), (2.0, math.nan), (1e30, 5.0)):
        new_params, new_state, overflows = stepped(first[1], slope, nll)
        jax.tree.map(
            np.testing.assert_array_equal,
            (new_params, new_state),
            (params, first[1]),
        )
        assert overflows == 0  # the loss or the norm says it


@pytest.mark.parametrize(
    ("beta2", "dtype"),
    [(0.999, "bfloat16"), (0.95, "bfloat16")],
)
def test_moments_follow_gradients_that_grow_and_shrink(
    beta2: float, dtype: Literal["bfloat16"], plan_of: Callable[..., Plan]
) -> None:
    """Both moments, in closed form, with 16 bits asked for: 1,000 steps of gradients of 1e-2, then
    5,000 of 1e-4.
    """
    plan = dataclasses.replace(plan_of(), moments=dtype)
    axes = {"head": {"w": ("embed", "mlp")}}
    adamw = AdamW(beta2=beta2, weight_decay=0.0)
    optimizer = config_optimizer(
        Config(train=TrainConfig(clip_norm=0.0), optimizer=OptimizerConfig(adamw=adamw))
    )
    params = {"head": {"w": jnp.ones((2, 2))}}
    first_state = optimizer.make(axes).init(params)
    opt_state = pack_moments(optimizer, first_state, params, axes, plan.moments)
    one = jnp.float32(1)

    @jax.jit
    def run(params: Any, opt_state: Any, slope: float, steps: int) -> Any:
        def step(_: Any, state: Any) -> Any:
            grads = {"head": {"w": jnp.full((2, 2), slope)}}
            sums = LossSums(one, one, one)
            new = update(Part(*state, grads, axes), sums, optimizer, plan)
            return new.params, new.opt_state

        return jax.lax.fori_loop(0, steps, step, (params, opt_state))

    exact = np.zeros(2)
    for slope, steps in ((1e-2, 1000), (1e-4, 5000)):
        params, opt_state = run(params, opt_state, slope, steps)
        decay = np.array([adamw.beta1, beta2]) ** steps
        exact = decay * exact + (1 - decay) * np.array([slope, slope**2])
        found = [
            np.asarray(moment["head"]["w"], np.float64)[0, 0] for moment in moments_of(opt_state)
        ]
        # A bfloat16 is off by 2^-8 at most, so that a first moment of beta1 0.9 stops within 2^-8 /
        # 0.1 of a gradient that stays the same; the second moment has float32's rounding, over 1 /
        # (1 - beta2) steps.
        np.testing.assert_allclose(found[0], exact[0], rtol=0.04)
        np.testing.assert_allclose(found[1], exact[1], rtol=1e-4)


@pytest.mark.slow
def test_second_moments_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """They were bfloat16 where first moments were."""
    config = override(config_of("llama"), SMALL | {"precision.moments": "bfloat16"})
    plan = make_plan(config, jax.devices()[:1])
    state = init_state(Experiment(config, Model(config.model), plan))
    first, second = moments_of(state.opt_state)
    half = jax.tree.map(
        lambda x: jnp.full_like(x, 0.3, jnp.bfloat16),
        second,
    )
    old = state._replace(
        opt_state=optax.tree.set(
            state.opt_state,
            mu=first,
            nu=half,
        )
    )
    checkpoints = TrainingCheckpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(0, old, {"iterator": None, "training_tokens": None, "layer_order": None}, None)
    _, found = moments_of(
        restore_state(checkpoints, 0, make_experiment(config, jax.devices()[: plan.mesh.size]))[
            0
        ].opt_state
    )
    checkpoints.close()
    for got, wanted in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(half),
        strict=True,
    ):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, wanted.astype(jnp.float32))


# untied, and tied
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("gpt2", marks=pytest.mark.slow)],
)
def test_matrices_in_bfloat16(family: str) -> None:
    config = override(
        config_of(family, fsdp=2), SMALL | {"precision.params": "bfloat16", "train.accumulation": 2}
    )
    state, numbers, _ = trained(config)
    want = trained(override(config, {"precision.params": "float32"}))[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {
        jnp.dtype("bfloat16"),
        jnp.dtype("float32"),
    }
    assert (
        state.params["blocks"]["q"].dtype == jnp.bfloat16
        and state.params["head"]["norm"]["scale"].dtype == "float32"
    )
    np.testing.assert_allclose(numbers, want, rtol=0.01)  # weights of 8 bits
