"""Experts on any layout give the answer of every expert on every token; what is sent is what the
docstring says.

Tolerance: as in test_collective_matmul, sums of at most a few hundred float32 terms in another
order: 1e-5 of the largest entry.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import some

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.parallel.experts.expert_choice import choose_tokens
from jaxpar.parallel.experts.token_choice import choose_experts
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import ExpertsCall
from jaxpar.rehearse.requested_collectives import requested_collectives
from jaxpar.verify.reference_ops import ReferenceOps

B = 8
S = 24
D = 12
F = 24
E = 8
K = 3


def plan_on(
    rules: ShardingRules | None = None,
    compute: str = "float32",
    **mesh: int,
) -> Plan:
    spec = MeshSpec(**mesh)
    return Plan(
        make_mesh(spec, jax.devices()[: devices_needed(spec)]), rules or ShardingRules(), compute
    )  # pyright: ignore[reportArgumentType]


@functools.cache
def given() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = (
        (B, S, D),
        (D, E),
        (E, D, F),
        (E, D, F),
        (
            E,
            F,
            D,
        ),
    )
    x, *weights = (rng.standard_normal(shape) for shape in shapes)
    return tuple(
        jnp.asarray(a, jnp.float32) for a in (x, *(w / np.sqrt(w.shape[-2]) for w in weights))
    )


def values_and_gradients(ops: Any, plan: Plan, *how: Any) -> Any:
    """The answer, the router's sums, and the gradients of a loss that has all of them."""

    def loss(args: Any) -> Any:
        y, sums = ops(plan).expert_mlp(ExpertsCall(*args, K, *how))
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + 0.3 * sums.balance + 0.2 * sums.z, (
            y,
            sums,
        )

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(given())


@functools.cache
def expected() -> Any:
    return values_and_gradients(ReferenceOps, plan_on())


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        a = np.asarray(a, np.float32)
        b = np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


ZERO1 = ShardingRules(state_embed=("fsdp", "data"))
# the residual stream is the same on the devices along tensor
WHOLE = ShardingRules(residual_seq=("context",))
LAYOUTS = {
    "one device": (None, {}),
    "expert=2": (None, {"expert": 2}),
    "expert=8": (None, {"expert": 8}),
    "expert x fsdp x tensor": (None, {"expert": 2, "fsdp": 2, "tensor": 2}),
    "expert x context": (None, {"expert": 4, "context": 2}),
    "context x tensor": (None, {"context": 2, "tensor": 4}),
    "expert x tensor, residual stream whole": (WHOLE, {"expert": 2, "tensor": 4}),
    "mlp whole": (ShardingRules(mlp=()), {"expert": 2, "tensor": 4}),
    "data x fsdp x expert, ZeRO-1": (ZERO1, {"data": 2, "fsdp": 2, "expert": 2}),
    "experts over context": (ShardingRules(experts=("context",)), {"context": 4, "tensor": 2}),
    "experts over data x context": (
        ShardingRules(experts=("data", "context")),
        {"data": 2, "context": 4},
    ),
    "experts on every device": (
        ShardingRules(experts=()),
        {"expert": 2, "fsdp": 2, "tensor": 2},
    ),
}


COVERED = ("expert=2", "experts over context")  # by others together


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] * (name in COVERED)) for name in LAYOUTS]
)
def test_every_layout_gives_the_plain_answer(layout):
    rules, mesh = LAYOUTS[layout]
    assert_close(values_and_gradients(MeshOps, plan_on(rules, **mesh)), expected())


BY_EXPERTS = {
    "one device": True,
    "expert x fsdp x tensor": True,
    "expert x context": False,
    "context x tensor": False,
    "expert x tensor, residual stream whole": False,
    "mlp whole": False,
    "experts over data x context": False,
}
"""Layouts, and whether the quick tier has each."""


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (not quick))
        for name, quick in BY_EXPERTS.items()
    ],
)
def test_experts_that_choose_give_the_plain_answer_on_every_layout(layout):
    """Nine of 24 tokens each, none of them padding, of which some rows have more than others."""
    rules, mesh = LAYOUTS[layout]
    lengths = jnp.array([S, 7, S, 12, 0, S, 20, S])
    how = (jnp.arange(S) < lengths[:, None], "expert_choice")
    wanted = values_and_gradients(ReferenceOps, plan_on(), *how)
    assert_close(values_and_gradients(MeshOps, plan_on(rules, **mesh), *how), wanted)


def test_each_expert_takes_as_many_tokens_of_each_sequence():
    x, router, *_ = given()
    text = jnp.ones((B, S), bool)
    plan = plan_on(expert=2, tensor=2)
    choice = jax.jit(lambda x, router: choose_tokens(x, router, text, plan, K))(x, router)
    np.testing.assert_array_equal(jnp.sum(choice.chosen_BSE, axis=1), np.full((B, E), S * K // E))
    assert len(np.unique(jnp.sum(choice.chosen_BSE, axis=2))) > 2
    scores = jax.nn.softmax(jnp.matmul(x, router, precision="highest"), axis=-1)
    lowest_taken = jnp.min(jnp.where(choice.chosen_BSE, scores, 1), axis=1)
    highest_left = jnp.max(jnp.where(choice.chosen_BSE, 0, scores), axis=1)
    assert (lowest_taken >= highest_left).all()


def test_bfloat16_is_as_far_off_as_in_plain_form():
    """The same rounded arrays are routed, in float32, so the choices are the same; the rest rounds
    a few times more.
    """
    plan = plan_on(compute="bfloat16", expert=2, fsdp=2, tensor=2)
    (_, (y, _)), _ = values_and_gradients(MeshOps, plan)
    (_, (wanted, _)), _ = values_and_gradients(ReferenceOps, plan_on(compute="bfloat16"))
    assert y.dtype == jnp.bfloat16
    assert_close(y, wanted, 2**-6)


@pytest.mark.parametrize("router", ["token_choice", "expert_choice"])
def test_a_router_s_gradient_has_the_dtype_of_the_router(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX lets another one pass for now; the name of that exception says temporary."""
    monkeypatch.setattr(
        "jax._src.custom_derivatives._temporary_dtype_exception", lambda *_: False, raising=False
    )
    layout = plan_on(compute="bfloat16", fsdp=2)
    x_BSD = jnp.ones((B, S, D), jnp.bfloat16)
    router_DE = jnp.ones((D, E), jnp.bfloat16)
    text_BS = jnp.ones((B, S), bool)

    def weight(router_DE: jax.Array) -> jax.Array:
        if router == "token_choice":
            choice = choose_experts(x_BSD, router_DE, text_BS, layout, 2)
        else:
            choice = choose_tokens(x_BSD, router_DE, text_BS, layout, 2)
        return jnp.sum(choice[0])

    assert jax.eval_shape(jax.grad(weight), router_DE).dtype == jnp.bfloat16


def test_no_buffer_overflows_where_all_tokens_choose_one_device():
    x, _, *experts = given()
    x = x.at[..., 0].set(1.0)
    # all choose the first K experts
    router = jnp.zeros((D, E)).at[0].set(-jnp.arange(E, dtype=jnp.float32))
    plan = plan_on(expert=2, tensor=2)
    found, sums = jax.jit(lambda *args: MeshOps(plan).expert_mlp(ExpertsCall(*args, K)))(
        x,
        router,
        *experts,
    )
    wanted = ReferenceOps(plan_on()).expert_mlp(ExpertsCall(x, router, *experts, K))[0]
    assert np.max(np.abs(found - wanted)) < 1e-5
    assert sums.balance > B * S * 1.5  # of at most E / K


def test_rows_without_a_group_change_nothing():
    """What a ragged matmul makes of rows past its groups is not ours to say: here they are
    poisoned.
    """
    own = jax.lax.ragged_dot

    def poisoned(x, weight, sizes, **rest):
        return jnp.where(
            jnp.arange(len(x))[:, None] < jnp.sum(sizes), own(x, weight, sizes, **rest), jnp.nan
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_dot", poisoned)
        assert_close(values_and_gradients(MeshOps, plan_on(expert=2, tensor=2)), expected())


# What is refused.


def test_experts_over_an_axis_that_splits_no_tokens_are_refused():
    plan = plan_on(ShardingRules(batch=("data", "fsdp")), expert=2)
    with pytest.raises(
        UserError,
        match=r"rules.experts splits .* over expert=2, which splits no tokens.*rules.batch",
    ):
        MeshOps(plan).expert_mlp(ExpertsCall(*given(), K))


def test_experts_that_do_not_divide_are_refused_with_what_does():
    plan = plan_on(expert=3)
    with pytest.raises(UserError) as error:
        plan.sharding(
            ("layers", "experts", "embed", "mlp"),
            (2, 8, 12, 24),
            "blocks.gate",
        )
    assert str(error.value) == (
        "blocks.gate: dim 1 (experts) has size 8, which expert=3 does not divide: "
        "try mesh.expert=2, or take expert out of rules.experts"
    )


# What is sent.


def sent(plan: Plan, function: Any, *args: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Operand bytes of all-to-alls of one device, as asked for and as compiled, by element type."""
    traced = jax.jit(function).trace(*args)
    asked = defaultdict(int)
    made = defaultdict(int)
    for one in requested_collectives(traced.jaxpr, plan.mesh):
        if one.kind == "all-to-all":
            asked[one.dtype] += one.bytes * one.count
    for task, times in walk(read_program(traced.lower().compile().as_text()).nodes):
        if task.collective and task.collective.kind == "all-to-all":
            made["all"] += times * task.collective.bytes
    return dict(asked), dict(made)


@pytest.mark.parametrize(
    "mesh", some([{"expert": 2, "tensor": 4}, {"expert": 2}, {"expert": 8}], 3), ids=str
)
def test_two_all_to_alls_forward_and_two_backward(mesh):
    plan = plan_on(**mesh)
    X = mesh["expert"]
    T = B * S // plan.mesh.size
    rows = X * T * min(K, E // X)

    def forward(*args: Any) -> Any:
        return MeshOps(plan).expert_mlp(ExpertsCall(*args, K))[0]

    def both(*args: Any) -> Any:
        return jax.grad(lambda args: jnp.sum(jnp.sin(forward(*args))))(args)

    for function, moves in ((forward, 2), (both, 4)):
        asked, made = sent(plan, function, *given())
        assert asked == {"float32": moves * rows * D * 4, "int32": E * 4}
        assert made["all"] == sum(asked.values())


def test_one_device_along_expert_sends_no_rows():
    plan = plan_on(fsdp=4, tensor=2)
    assert sent(plan, lambda *args: MeshOps(plan).expert_mlp(ExpertsCall(*args, K)), *given()) == (
        {},
        {},
    )
