"""Column and row linears in every form: the answer, and exactly the hops that the ring needs.

Tolerance: sums of at most a few hundred float32 terms of size one, in another order: 1e-5 of the
largest entry, as in test_parallel. In bfloat16 a sum is rounded once a hop, at most eight times by
half an ulp (2^-9): 2^-6 of it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import some

import jaxpar
from jaxpar import parallel
from jaxpar.base import registry
from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Overlap, Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.parallel.linear.ring_matmul import Lane, register_form, ring_forms
from jaxpar.parallel.mesh_ops import MeshOps, overlap_notes
from jaxpar.parallel.ops import LogitsCall
from jaxpar.rehearse.requested_collectives import requested_collectives

FORMS = ("ring", "bidirectional")
B = 4
D = 12
H = 8
K = 8
h = 3


def plan_on(overlap: Overlap, rules: ShardingRules | None = None, **mesh: int) -> Plan:
    spec = MeshSpec(**mesh)
    return Plan(
        make_mesh(spec, jax.devices()[: devices_needed(spec)]),
        rules or ShardingRules(),
        overlap=overlap,
    )


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def pair(
    plan: Plan,
    x: jax.Array,
    *weights: jax.Array,
) -> tuple[jax.Array, ...]:
    """A column linear of three weights, and a row linear of what it gives."""
    q, k, up, out = weights
    ys = MeshOps(plan).column_linear(
        x,
        (q, k, up),
        (
            ("heads", "head_dim"),
            ("kv_heads", "head_dim"),
            ("mlp",),
        ),
    )
    return (
        *ys,
        MeshOps(plan).row_linear(
            jnp.tanh(ys[0]) * ys[1],
            out,
            ("heads", "head_dim"),
        ),
    )


def values_and_gradients(plan: Plan, args: list[jax.Array]) -> Any:
    def projected(args: list[jax.Array]) -> tuple[jax.Array, Any]:
        ys = pair(plan, *args)
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in ys), ys

    return jax.jit(jax.value_and_grad(projected, has_aux=True))(args)


@functools.cache
def expected(rows: int, compute: str = "float32") -> Any:
    return values_and_gradients(
        Plan(make_mesh(MeshSpec(), jax.devices()[:1]), compute=compute), given(rows)
    )  # pyright: ignore[reportArgumentType]


def given(rows: int) -> list[jax.Array]:
    return arrays(
        (B, rows, D),
        (D, H, h),
        (D, K, h),
        (D, 40),
        (H, h, D),
    )


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    for a, b in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        a = np.asarray(a, np.float32)
        b = np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


# Twelve rows a chunk, three (halves of one and two), or a single one, which goes one way.
@pytest.mark.parametrize(
    ("form", "rows", "mesh"),
    [
        ("ring", 24, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("ring", 24, {"tensor": 8}),
        ("bidirectional", 24, {"fsdp": 2, "tensor": 4}),
        ("bidirectional", 24, {"context": 2, "tensor": 4}),
        ("bidirectional", 8, {"tensor": 8}),
    ],
    ids=str,
)
def test_rings_give_the_answer_of_one_device(form, rows, mesh):
    found = values_and_gradients(plan_on(Overlap(form, form), **mesh), given(rows))
    assert_close(found, expected(rows), 1e-5)


@pytest.mark.parametrize(
    "overlap", [Overlap("ring", "xla"), Overlap("xla", "bidirectional")], ids=str
)
def test_gathers_and_scatters_may_differ(overlap):
    assert_close(
        values_and_gradients(plan_on(overlap, fsdp=2, tensor=4), given(24)), expected(24), 1e-5
    )


def test_each_site_may_have_a_form_of_its_own():
    """Of the four linears only the one after the MLP scatters in a ring: so many hops forward, none
    back.
    """
    plan = plan_on(
        Overlap("xla", "ring", heads_scatter="xla", mlp_gather="bidirectional"), tensor=4
    )
    assert [
        plan.overlap.form(move, site)
        for site in ("heads", "mlp", "vocab")
        for move in ("gather", "scatter")
    ] == ["xla", "xla", "bidirectional", "ring", "xla", "ring"]
    x, up, down, q = arrays(
        (B, 24, D),
        (D, 40),
        (40, D),
        (D, H, h),
    )
    for out, args, hops in (
        (("mlp",), (up, down), 3 + 2 * 3),
        (
            ("heads", "head_dim"),
            (q, jnp.moveaxis(q, 0, 2)),
            0,
        ),
    ):

        def both(x, w, back, out=out):
            return MeshOps(plan).row_linear(
                MeshOps(plan).column_linear(x, (w,), (out,))[0],
                back,
                out,
            )

        kinds, _ = sent(plan, both, x, *args)
        assert kinds["ppermute"] == hops
        assert kinds["all-gather"] == kinds["reduce-scatter"] == (hops == 0)


def test_a_form_that_nobody_chose_is_refused():
    x, up = arrays((B, 24, D), (D, 40))
    with pytest.raises(UserError, match=r"overlap\.gather is auto.* try overlap\.gather=xla"):
        MeshOps(plan_on(Overlap("auto"), tensor=2)).column_linear(
            x,
            (up,),
            (("mlp",),),
        )


def through_column(plan: Plan, axis: Any) -> Any:
    """Value and gradients of a product of two outputs of a column linear, the second's heads along
    `axis`.
    """

    def loss(args: list[jax.Array]) -> jax.Array:
        q, k = MeshOps(plan).column_linear(
            args[0], args[1:], (("heads", "head_dim"), (axis, "head_dim"))
        )
        return jnp.sum(
            jnp.sin(q)
            * jnp.repeat(
                k,
                q.shape[2] // k.shape[2],
                axis=2,
            )
        )

    return jax.jit(jax.value_and_grad(loss))


ONE = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))


def test_outputs_that_are_not_split_have_no_sum_to_scatter():
    plan = plan_on(Overlap("bidirectional", "bidirectional"), tensor=8)
    args = given(24)[:3]
    assert_close(through_column(plan, None)(args), through_column(ONE, None)(args), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_kv_heads_that_are_copied_take_the_same_ring(form):
    args = arrays(
        (B, 24, D),
        (D, H, h),
        (D, 2, h),
    )
    plan = plan_on(Overlap(form, form), ShardingRules(kv_heads=()), tensor=8)
    assert_close(
        through_column(plan, "kv_heads")(args), through_column(ONE, "kv_heads")(args), 1e-5
    )
    kinds = Counter[str]()
    for row in requested_collectives(through_column(plan, "kv_heads").trace(args).jaxpr, plan.mesh):
        kinds[row.kind] += row.count
    hops = 7 * (2 if form == "bidirectional" else 1)
    assert kinds == {"ppermute": 2 * hops, "all-reduce": 1}  # of x, of dx; the gradient of k


def test_a_residual_stream_that_is_whole_needs_no_ring():
    plan = plan_on(Overlap("ring", "ring"), ShardingRules(residual_seq=()), tensor=4)
    assert_close(values_and_gradients(plan, given(8)), expected(8), 1e-5)
    assert hops_of(plan, given(8)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_rounded_once_a_hop(form):
    plan = plan_on(Overlap(form, form), tensor=8)
    plan = Plan(plan.mesh, compute="bfloat16", overlap=plan.overlap)
    found, wanted = (
        values_and_gradients(p, given(24))[0][1]
        for p in (plan, Plan(plan.mesh, compute="bfloat16"))
    )
    assert_close(found, wanted, 2**-6)


def test_logits_take_a_ring_too():
    plan = plan_on(Overlap("ring", "ring"), tensor=4)
    one = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
    x, table = arrays((B, 12, D), (56, D))
    assert_close(
        jax.jit(lambda x, w: MeshOps(plan).logits(LogitsCall(x, w, 50)))(
            x,
            table,
        ),
        MeshOps(one).logits(LogitsCall(x, table, 50)),
        1e-5,
    )


# What gives way is said.


@pytest.mark.parametrize(
    ("overlap", "rules", "mesh", "notes"),
    [
        (Overlap("ring", "bidirectional"), {}, {"tensor": 4}, []),
        (Overlap(), {}, {"data": 2}, []),
        (Overlap("ring", "ring"), {}, {"fsdp": 2}, ["overlap.gather and overlap.scatter: no ring"]),
        (
            Overlap("xla", "ring"),
            {"mlp": ("context", "tensor")},
            {"context": 2, "tensor": 2},
            [
                "overlap.scatter: sums over context x tensor (rules.mlp) take a collective, the "
                "ring is tensor"
            ],
        ),
        (
            Overlap("ring", "ring"),
            {"kv_heads": ()},
            {"tensor": 8},
            [],
        ),
        (
            Overlap("xla", "ring"),
            {"heads": (), "kv_heads": (), "attention_seq": ("tensor",)},
            {"tensor": 4},
            [
                "overlap.scatter: no ring at attention, whose sequence is split over tensor "
                "(rules.attention_seq)"
            ],
        ),
        (
            Overlap("ring", "xla"),
            {"residual_seq": ("expert", "tensor"), "attention_seq": ("expert",)},
            {"expert": 2, "tensor": 4},
            [
                "overlap.gather: the ring is tensor at attention, whose sequence is split over "
                "expert"
            ],
        ),
    ],
    ids=str,
)
def test_a_ring_that_gives_way_says_so(overlap, rules, mesh, notes):
    found = overlap_notes(plan_on(overlap, ShardingRules(**rules), **mesh))
    assert len(found) == len(notes)
    assert all(line.startswith(start) for line, start in zip(found, notes, strict=True))


# What is sent.


def hops_of(plan: Plan, args: list[jax.Array]) -> int:
    """The ppermutes that the traced function asks for."""
    traced = jax.jit(lambda args: values_and_gradients(plan, args)).trace(args)
    return sum(
        row.count
        for row in requested_collectives(traced.jaxpr, plan.mesh)
        if row.kind == "ppermute"
    )


def sent(
    plan: Plan,
    function: Any,
    *args: Any,
) -> tuple[Counter[str], int]:
    """Collectives of the compiled program by kind, and the bytes of its ppermutes, of one
    device.
    """
    program = read_program(jax.jit(function).lower(*args).compile().as_text())
    kinds = Counter[str]()
    size = 0
    for task, times in walk(program.nodes):
        if task.collective:
            kinds[task.collective.kind] += times
            size += times * task.collective.bytes if task.collective.kind == "ppermute" else 0
    return kinds, size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tensor", some([8, 2, 4], 3))
def test_the_compiled_program_has_the_hops_and_nothing_else(tensor, form):
    """A chunk of the residual stream makes `tensor - 1` hops at each of the four moves of a pair of
    linears; in the backward the input is gathered once more, for the weight gradients."""
    rows = 3 * tensor
    plan = plan_on(Overlap(form, form), tensor=tensor)
    x, up, down = arrays(
        (B, rows, D),
        (D, 40),
        (40, D),
    )
    lanes = 2 if form == "bidirectional" else 1
    chunk = B * (rows // tensor) * D * 4

    def gather(x, up):
        return MeshOps(plan).column_linear(x, (up,), (("mlp",),))[0]

    def scatter(y, down):
        return MeshOps(plan).row_linear(y, down, ("mlp",))

    y = jax.jit(gather)(x, up)
    hops = tensor - 1
    size = (tensor - 1) * chunk
    for function, args in ((gather, (x, up)), (scatter, (y, down))):
        kinds, bytes_sent = sent(plan, function, *args)
        assert kinds == {"ppermute": lanes * hops}
        assert bytes_sent == size
    # The backward alone: its residuals are the arguments.
    for function, args, moves in ((gather, (x, up), 2), (scatter, (y, down), 1)):
        out = jax.jit(function)(*args)
        kinds, bytes_sent = sent(
            plan, lambda dy, *args, f=function: jax.vjp(f, *args)[1](dy), out, *args
        )
        assert kinds == {"ppermute": lanes * hops * moves}
        assert bytes_sent == size * moves


def test_the_plan_asks_for_what_is_sent():
    plan = plan_on(Overlap("ring", "ring"), tensor=4)
    args = given(24)
    text = jax.jit(lambda args: values_and_gradients(plan, args)).lower(args).compile().as_text()
    assert hops_of(plan, args) == len(re.findall(r"= \S+ collective-permute\(", text)) == 12


def test_a_form_that_there_is_not_is_refused():
    x, weight = arrays((B, 8, D), (D, H, h))
    with pytest.raises(
        UserError, match=r"form of a collective is one of .*found 'rnig' \(did you mean 'ring'\?\)"
    ):
        MeshOps(plan_on(Overlap(gather="rnig"), tensor=4)).column_linear(
            x, (weight,), (("heads", "head_dim"),)
        )  # pyright: ignore[reportArgumentType]


@pytest.fixture
def thirds():
    """A form of one's own: each chunk in three parts, of which the middle one goes the other
    way.
    """

    @register_form("thirds")
    def lanes(rows: int) -> list[Lane]:
        if rows < 3:
            return [Lane(0, rows, 1)]
        third = rows // 3
        return [Lane(0, third, 1), Lane(third, third, -1), Lane(2 * third, rows - 2 * third, 1)]

    yield lanes
    registry.FORMS.remove("thirds")


def test_a_form_of_ones_own_gives_the_same_answer_and_is_listed(thirds: Any) -> None:
    layout = jaxpar.Layout(jaxpar.make_mesh(tensor=8))
    rng = np.random.default_rng(0)
    shapes = ((2, 24, 8), (8, 16), (16, 8))
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def loss(form: str) -> Any:
        def of(x: Any, up: Any, down: Any) -> Any:
            hidden = parallel.column_linear(x, up, ("mlp",), layout, overlap=form)
            y = parallel.row_linear(hidden, down, ("mlp",), layout, overlap=form)
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.grad(of, (0, 1, 2)))

    for ours, wanted in zip(loss("thirds")(*args), loss("xla")(*args), strict=True):
        # sums of float32 in another order
        assert np.max(np.abs(ours - wanted)) <= 1e-5 * np.max(np.abs(wanted))
    # three parts go round at each of seven hops
    assert str(jax.make_jaxpr(loss("thirds"))(*args)).count("ppermute") % (3 * 7) == 0
    config = override(Config(), {"overlap.gather": "thirds"})
    assert check(config) is config
    assert "thirds" in ring_forms()
    with pytest.raises(UserError, match=r"overlap.gather is one of .*thirds, auto, found 'thrids'"):
        check(override(Config(), {"overlap.gather": "thrids"}))
