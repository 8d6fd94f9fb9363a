"""Moves between layouts on eight devices, on whole numbers: sums are exact, so every comparison is
exact too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.parallel.collectives import further_split, gather, manual, reduce, split_over
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.rehearse.requested_collectives import requested_collectives


class Case(NamedTuple):
    """A move from `stored` to `used` and back from a sum that is partial over `partial`."""

    mesh: dict[str, int]
    rules: dict[str, tuple[str, ...]]
    stored: tuple[Any, ...]
    used: tuple[Any, ...]
    partial: tuple[Any, ...]
    expected: list[str]
    """The collectives of `reduce`: kind and mesh axes."""
    shape: tuple[int, ...] = (8, 16, 24)


CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
CASES = {
    "middle dim of the residual stream": Case(
        {"fsdp": 2, "context": 2, "tensor": 2},
        {},
        STORED,
        GATHERED,
        ("tensor",),
        ["reduce-scatter tensor"],
    ),
    "axis that the stored layout lacks": Case(
        CUBE, {"residual_seq": ()}, STORED, GATHERED, ("tensor",), ["all-reduce tensor"]
    ),
    "first dim, and an axis besides": Case(
        CUBE,
        {},
        ("embed", "mlp", None),
        (None, "mlp", None),
        ("data", "fsdp"),
        ["reduce-scatter fsdp", "all-reduce data"],
    ),
    "last dim": Case(
        {"fsdp": 4, "tensor": 2},
        {},
        ("heads", "head_dim", "embed"),
        ("heads", "head_dim", None),
        ("fsdp",),
        ["reduce-scatter fsdp"],
    ),
    "last dim of four": Case(
        {"fsdp": 8},
        {},
        (None, None, None, "embed"),
        (None,) * 4,
        ("fsdp",),
        ["reduce-scatter fsdp"],
        (2, 3, 2, 8),
    ),
    "middle dim of four": Case(
        {"fsdp": 8},
        {},
        (None, "embed", None, None),
        (None,) * 4,
        ("fsdp",),
        ["reduce-scatter fsdp"],
        (2, 8, 2, 3),
    ),
    "the same on every device": Case(
        {"fsdp": 8},
        {},
        ("embed", None, None),
        (None,) * 3,
        (),
        [],
    ),
    "two dims at once": Case(
        {"fsdp": 2, "context": 2, "tensor": 2},
        {},
        ("residual_seq", "embed", None),
        ("seq", None, None),
        ("fsdp", "tensor"),
        ["reduce-scatter tensor", "reduce-scatter fsdp"],
    ),
    "one dim over two axes, both summed": Case(
        CUBE,
        {"embed": ("fsdp", "tensor")},
        ("embed", None, None),
        (None,) * 3,
        ("tensor", "fsdp"),
        ["reduce-scatter fsdp tensor"],
    ),
    "one dim over two axes, the inner summed": Case(
        CUBE,
        {"embed": ("data", "fsdp")},
        ("embed", None, None),
        (None,) * 3,
        ("fsdp",),
        ["reduce-scatter fsdp"],
    ),
    "one dim over two axes, the outer summed": Case(
        CUBE,
        {"embed": ("fsdp", "data")},
        ("embed", None, None),
        (None,) * 3,
        ("fsdp",),
        ["reduce-scatter fsdp"],
    ),
    "one dim over three axes, outer and inner summed": Case(
        CUBE,
        {"embed": ("tensor", "data", "fsdp")},
        (None, "embed", None),
        (None,) * 3,
        ("tensor", "fsdp"),
        ["reduce-scatter tensor", "reduce-scatter fsdp"],
    ),
}


def plan_of(
    mesh: dict[str, int],
    rules: dict[str, Any] | None = None,
) -> Plan:
    spec = MeshSpec(**mesh)
    return Plan(
        make_mesh(spec, jax.devices()[: devices_needed(spec)]), ShardingRules(**(rules or {}))
    )


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def whole_numbers(*shape: int) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(0).integers(-9, 10, shape),
        jnp.float32,
    )


def assert_on_every_device(found: jax.Array, want: jax.Array) -> None:
    """Each device's own part, copies too: a global value is read from one copy only."""
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(want)[shard.index])


def moved(case: Case, plan: Plan) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`gather` and `reduce` as functions of global arrays; the partial sums are stacked on a
    leading dim.
    """
    stored = plan.spec(case.stored)
    used = plan.spec(case.used)
    split = P(case.partial or None, *used)

    def on_devices(
        local: Callable[..., Any],
        before: P,
        after: P,
    ) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(local, mesh=plan.mesh, in_specs=before, out_specs=after, check_vma=False)
        )

    def back(x: jax.Array) -> jax.Array:
        return reduce(x[0], case.partial, case.used, case.stored, plan)

    return on_devices(lambda x: gather(x, case.stored, case.used, plan), stored, used), on_devices(
        back, split, stored
    )


def test_gather_gives_every_device_its_part_of_the_same_array(case: Case) -> None:
    plan = plan_of(case.mesh, case.rules)
    x = whole_numbers(*case.shape)
    there, _ = moved(case, plan)
    y = there(x)
    assert y.sharding.is_equivalent_to(plan.sharding(case.used), y.ndim)
    assert_on_every_device(y, x)


def test_reduce_adds_up_the_parts_and_leaves_each_device_its_own(case: Case) -> None:
    plan = plan_of(case.mesh, case.rules)
    parts = whole_numbers(plan.pieces(case.partial), *case.shape)
    _, back = moved(case, plan)
    y = back(parts)
    assert y.sharding.is_equivalent_to(plan.sharding(case.stored), y.ndim)
    assert_on_every_device(y, jnp.sum(parts, axis=0))
    found = requested_collectives(back.trace(parts).jaxpr, plan.mesh)
    assert Counter((p.kind, p.axes) for p in found) == Counter(
        (kind, frozenset(axes)) for kind, *axes in (text.split() for text in case.expected)
    )


@pytest.mark.parametrize(
    "name", ["middle dim of the residual stream", "last dim", "two dims at once"]
)
def test_gather_and_reduce_are_transposes_of_one_another(name: str) -> None:
    case = CASES[name]
    plan = plan_of(case.mesh, case.rules)
    x = whole_numbers(*case.shape)
    assert {
        axis for _, axes in further_split(case.stored, case.used, plan) for axis in axes
    } == set(case.partial)
    there, back = moved(case, plan)
    parts = whole_numbers(plan.pieces(case.partial), *case.shape)
    # <gather x, y> over every device's own y is <x, reduce y>.
    assert float(jnp.vdot(there(x), jnp.sum(parts, axis=0))) == float(jnp.vdot(x, back(parts)))


WRONG: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    (
        {"residual_seq": ("tensor", "context")},
        r"dim 1 is used split over context \(rules.seq\) and stored split over tensor x context "
        r"\(rules.residual_seq\), which does not begin with it: try "
        r"rules.residual_seq=\(context, tensor\)",
        ("context", "tensor"),
    ),
    (
        {"residual_seq": ()},
        r"stored split over nothing \(rules.residual_seq\), which .*: try "
        r"rules.residual_seq=\(context\)",
        ("context",),
    ),
]


@pytest.mark.parametrize(("rules", "message", "fitting"), WRONG)
def test_layouts_that_no_gather_connects_are_refused_with_the_rule_to_change(
    rules: dict[str, Any], message: str, fitting: tuple[str, ...]
) -> None:
    plan = plan_of({"context": 2, "tensor": 4}, rules)
    x = jnp.zeros((2, 8, 8))
    with pytest.raises(UserError, match=message):
        gather(x, STORED, GATHERED, plan)
    with pytest.raises(UserError, match=message):
        reduce(x, (), GATHERED, STORED, plan)
    with pytest.raises(UserError, match=message):
        jax.jit(lambda x: MeshOps(plan).column_linear(x, (jnp.zeros((8, 8)),), (("mlp",),)))(x)
    mended = plan_of({"context": 2, "tensor": 4}, {"residual_seq": fitting})
    assert further_split(STORED, GATHERED, mended) == (
        [(1, ("tensor",))] if "tensor" in fitting else []
    )


def test_a_layout_that_only_differs_by_axes_of_one_device_is_none_to_refuse() -> None:
    plan = plan_of(
        {"fsdp": 8},
        {"residual_seq": ("tensor", "context"), "seq": ("context",)},
    )
    assert further_split(STORED, GATHERED, plan) == []


def test_tokens_and_rows_over_the_same_mesh_axis_are_refused() -> None:
    plan = plan_of({"fsdp": 8}, {"vocab": ("fsdp",), "embed": ()})
    message = r"lookup: mesh axis fsdp=8 is used twice, by dim 0 \(batch\) and dim 2 \(vocab\)"
    with pytest.raises(UserError, match=message):
        MeshOps(plan).lookup(
            jnp.zeros((8, 4)),
            jnp.zeros((8, 2), jnp.int32),
            "vocab",
        )


def test_manual_on_one_device_is_the_function_itself() -> None:
    assert manual(math.sin, plan_of({}), ("batch",), ()) is math.sin


class Pair(NamedTuple):
    total: Any
    rows: Any


def test_manual_takes_trees_of_layouts_and_leaves_out_what_is_none() -> None:
    plan = plan_of(CUBE)
    x = whole_numbers(8, 6)

    def local(
        x: jax.Array,
        weights: tuple[jax.Array, ...],
        nothing: None,
    ) -> Pair:
        assert x.shape == (2, 6)
        assert weights[0].shape == (3, 6)
        assert nothing is None
        return Pair(
            jax.lax.psum(jnp.sum(x), split_over(("batch",), plan)),
            x @ weights[0].T,
        )

    axes = (("batch", None), (("embed", None),), None)
    pair = jax.jit(manual(local, plan, axes, Pair((), ("batch", None))))(
        x,
        (x[:6],),
        None,
    )
    assert_on_every_device(pair.total, jnp.sum(x))
    # fsdp splits the rows of both factors, so each device has the block of its own: what `manual`
    # does not mend.
    want = jnp.concatenate(
        [x[i * 2 : i * 2 + 2] @ x[(i % 2) * 3 : (i % 2) * 3 + 3].T for i in range(4)]
    )
    assert_on_every_device(pair.rows, want)


def test_split_over_names_the_axes_of_more_than_one_device_in_order() -> None:
    plan = plan_of({"fsdp": 2, "context": 2, "tensor": 2})
    assert split_over(("batch", "seq", None), plan) == ("fsdp", "context")
    assert split_over(("mlp", "embed"), plan) == ("tensor", "fsdp")
    assert split_over((None, "head_dim"), plan) == ()
