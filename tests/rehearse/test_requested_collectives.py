"""What a program asks for in collectives: small jaxprs, whole training steps by closed form, and as
they are compiled.

In the closed forms: B batch, S sequence, D embed, L layers.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxpar.base.layout.plan import Plan
from jaxpar.base.taken_share import taken
from jaxpar.rehearse.report.collectives import scope_of
from jaxpar.rehearse.requested_collectives import Requested, requested_collectives

WIDTH = 64
ROW = 4 * WIDTH  # bytes of one row of float32


@pytest.fixture(scope="module")
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(fsdp=4, tensor=2)


def asked(
    plan: Plan,
    function: Any,
    *rows: int,
    said: list[str] | None = None,
) -> list[Requested]:
    """The collectives of `function`, mapped over the mesh, of local float32 arrays [rows,
    WIDTH].
    """

    def mapped(*arrays: Any) -> Any:
        wrapped = jax.shard_map(
            function,
            mesh=plan.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return wrapped(*arrays)

    shapes = [jax.ShapeDtypeStruct((count, WIDTH), jnp.float32) for count in rows]
    say = (lambda line: None) if said is None else said.append
    return requested_collectives(jax.jit(mapped).trace(*shapes).jaxpr, plan.mesh, say)


def counts(found: Sequence[Requested]) -> dict[tuple[str, int], int]:
    """Executions by kind and bytes."""
    total: defaultdict[tuple[str, int], int] = defaultdict(int)
    for one in found:
        total[one.kind, one.bytes] += one.count
    return dict(total)


def gather(x: Any) -> Any:
    return jax.lax.all_gather(x, "fsdp", tiled=True)


# One collective.


@pytest.mark.parametrize(
    ("function", "kind", "axes", "size"),
    [
        (gather, "all-gather", {"fsdp"}, 32 * ROW),
        (
            lambda x: jax.lax.all_gather(x, ("fsdp", "tensor"), tiled=True),
            "all-gather",
            {"fsdp", "tensor"},
            64 * ROW,
        ),
        (
            lambda x: jax.lax.all_gather(x, "tensor"),
            "all-gather",
            {"tensor"},
            16 * ROW,
        ),
        (
            lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
            "reduce-scatter",
            {"fsdp"},
            8 * ROW,
        ),
        (
            lambda x: jax.lax.psum(x, ("fsdp", "tensor")),
            "all-reduce",
            {"fsdp", "tensor"},
            8 * ROW,
        ),
        (
            lambda x: jax.lax.pmean(x, "tensor"),
            "all-reduce",
            {"tensor"},
            8 * ROW,
        ),
        (
            lambda x: jax.lax.pmax(x, "tensor"),
            "all-reduce",
            {"tensor"},
            8 * ROW,
        ),
        (
            lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
            "all-to-all",
            {"fsdp"},
            8 * ROW,
        ),
        (
            lambda x: jax.lax.ppermute(
                x,
                "tensor",
                [(0, 1), (1, 0)],
            ),
            "ppermute",
            {"tensor"},
            8 * ROW,
        ),
    ],
)
def test_one_collective(plan, function, kind, axes, size):
    (found,) = asked(plan, function, 8)
    assert (found.kind, found.axes, found.bytes, found.count, found.dtype) == (
        kind,
        axes,
        size,
        1,
        "float32",
    )


def test_what_is_sent_is_counted_in_its_own_dtype(plan):
    (found,) = asked(
        plan,
        lambda x: gather(x.astype(jnp.bfloat16)),
        8,
    )
    assert (found.bytes, found.dtype) == (32 * ROW // 2, "bfloat16")


def test_an_axis_of_one_device_sends_nothing(plan):
    assert asked(plan, lambda x: jax.lax.psum(x, "data"), 8) == []
    (found,) = asked(
        plan,
        lambda x: jax.lax.psum(x, ("data", "fsdp")),
        8,
    )
    assert found.axes == {"fsdp"}


def test_several_arrays_in_one_call_are_several_collectives(plan):
    assert counts(asked(plan, lambda x, y: jax.lax.psum((x, y), "fsdp"), 8, 16)) == {
        ("all-reduce", 8 * ROW): 1,
        ("all-reduce", 16 * ROW): 1,
    }


def test_the_scope_is_that_of_the_model_forward_and_backward(plan):
    def loss(x: Any) -> Any:
        with jax.named_scope("block"), jax.named_scope("mlp"):
            return jnp.sum(jnp.sin(gather(x)))

    found = asked(plan, jax.grad(loss), 8)
    assert {(one.kind, scope_of(one)) for one in found} == {
        ("all-gather", "block/mlp"),
        ("reduce-scatter", "block/mlp"),
    }
    assert {one.scope for one in found} == {"jvp(block)/mlp", "transpose(jvp(block))/mlp"}


# The same thing twice, and nothing for nothing.


def test_the_same_gather_written_twice_is_one(plan):
    assert counts(asked(plan, lambda x: gather(x) + 2 * gather(x), 8)) == {
        ("all-gather", 32 * ROW): 1
    }
    assert counts(asked(plan, lambda x: gather(x * 2) + gather(x * 2), 8)) == {
        ("all-gather", 32 * ROW): 1
    }


def test_gathers_of_different_arrays_or_over_different_axes_are_two(plan):
    assert counts(asked(plan, lambda x: gather(x * 2) + gather(x * 3), 8)) == {
        ("all-gather", 32 * ROW): 2
    }
    both = asked(
        plan,
        lambda x: (
            gather(x),
            jax.lax.all_gather(x, "tensor", tiled=True),
        ),
        8,
    )
    assert counts(both) == {
        ("all-gather", 32 * ROW): 1,
        ("all-gather", 16 * ROW): 1,
    }


def test_a_collective_that_nothing_needs_is_not_counted(plan):
    def unused(x: Any) -> Any:
        gather(x)
        return jax.lax.psum(x, "tensor")

    assert counts(asked(plan, unused, 8)) == {("all-reduce", 8 * ROW): 1}


def test_calls_inside_are_read(plan):
    @jax.custom_vjp
    def own(x: Any) -> Any:
        return jax.jit(gather)(x)

    own.defvjp(
        lambda x: (own(x), None), lambda _, dy: (jax.lax.psum_scatter(dy, "fsdp", tiled=True),)
    )

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.square(own(x)))

    assert counts(asked(plan, jax.grad(loss), 8)) == {
        ("all-gather", 32 * ROW): 1,
        ("reduce-scatter", 32 * ROW): 1,
    }
    assert counts(asked(plan, lambda x: jax.jit(gather)(x) + jax.jit(gather)(x), 8)) == {
        ("all-gather", 32 * ROW): 1
    }


# Loops.


def loop(
    body: Callable[[Any], Any],
    x: Any,
    trips: int,
) -> Any:
    return jax.lax.scan(lambda carry, _: (body(carry), None), x, length=trips)[0]


def test_the_trips_of_scans_count_nested_ones_too(plan):
    ring = functools.partial(
        jax.lax.ppermute,
        axis_name="tensor",
        perm=[(0, 1), (1, 0)],
    )
    found = asked(
        plan,
        lambda x: loop(
            lambda y: loop(ring, jax.lax.psum(y, "fsdp"), 3),
            x,
            5,
        ),
        8,
    )
    assert counts(found) == {
        ("all-reduce", 8 * ROW): 5,
        ("ppermute", 8 * ROW): 15,
    }


def test_a_collective_outside_a_loop_that_uses_it_is_counted_once(plan):
    def outside(x: Any) -> Any:
        whole = gather(x)
        return loop(lambda y: y + jnp.sum(whole), x, 5)

    assert counts(asked(plan, outside, 8)) == {("all-gather", 32 * ROW): 1}


def test_a_collective_of_an_outer_array_inside_a_loop_runs_every_trip(plan):
    inside = asked(
        plan,
        lambda x: loop(
            lambda y: y + jnp.sum(gather(x)),
            x,
            5,
        ),
        8,
    )
    assert counts(inside) == {("all-gather", 32 * ROW): 5}


def test_loops_share_nothing_with_each_other_or_with_what_is_outside(plan):
    def twice(x: Any) -> Any:
        first = loop(lambda y: y + jnp.sum(gather(x)), x, 5)
        return loop(lambda y: y * jnp.sum(gather(x)), first, 3) + jnp.sum(gather(x))

    assert counts(asked(plan, twice, 8)) == {("all-gather", 32 * ROW): 5 + 3 + 1}


def test_state_that_nothing_needs_is_not_carried_along(plan):
    def both(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            kept, dropped = carry
            return (jax.lax.psum(kept, "tensor"), jax.lax.psum(dropped, "fsdp")), gather(
                kept,
            )

        return jax.lax.scan(body, (x, x), length=4)[0][0]

    assert counts(asked(plan, both, 8)) == {("all-reduce", 8 * ROW): 4}
    assert {one.axes for one in asked(plan, both, 8)} == {frozenset({"tensor"})}


def test_state_is_needed_through_what_another_part_of_it_becomes(plan):
    def swapped(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            a, b = carry
            return (b, jax.lax.psum(a, "fsdp")), None

        return jax.lax.scan(body, (x, x), length=4)[0][0]

    assert counts(asked(plan, swapped, 8)) == {("all-reduce", 8 * ROW): 4}


def test_gradients_through_a_loop_gather_in_both_directions(plan):
    def loss(weights: Any, x: Any) -> Any:
        def body(carry: Any, weight: Any) -> Any:
            return jnp.tanh(carry @ gather(weight)), None

        stacked = jnp.broadcast_to(weights, (3, *weights.shape))
        return jnp.sum(jax.lax.scan(body, x, stacked)[0])

    found = asked(plan, jax.grad(loss), WIDTH // 4, 8)
    matrix = WIDTH * ROW
    # Stacked by `scan`, a gathered weight would be saved; its transpose reads it again.
    assert counts(found) in (
        {("all-gather", matrix): 3, ("reduce-scatter", matrix): 3},
        {("all-gather", matrix): 6, ("reduce-scatter", matrix): 3},
    )


# What cannot be counted exactly is said.


def test_a_loop_of_unknown_trips_is_counted_once_and_said(plan):
    def until(x: Any) -> Any:
        return jax.lax.while_loop(
            lambda y: jnp.sum(y) < 10,
            lambda y: jax.lax.psum(y, "fsdp"),
            x,
        )

    said: list[str] = []
    assert counts(asked(plan, until, 8, said=said)) == {("all-reduce", 8 * ROW): 1}
    assert said == ["the step: a loop whose trips are not known, its collectives are counted once"]


def test_the_condition_of_a_loop_is_needed_by_whatever_it_makes(plan):
    def until(x: Any) -> Any:
        with jax.named_scope("search"):
            return jax.lax.while_loop(
                lambda y: jax.lax.pmax(jnp.sum(y), "fsdp") < 10, lambda y: y + 1, x
            )

    said: list[str] = []
    assert counts(asked(plan, until, 8, said=said)) == {("all-reduce", 4): 1}
    assert said == ["search: a loop whose trips are not known, its collectives are counted once"]


def test_a_loop_without_collectives_needs_no_word(plan):
    said: list[str] = []
    found = asked(
        plan,
        lambda x: jax.lax.while_loop(
            lambda y: jnp.sum(y) < 10,
            lambda y: y + 1,
            gather(x),
        ),
        8,
        said=said,
    )
    assert (counts(found), said) == (
        {("all-gather", 32 * ROW): 1},
        [],
    )


def test_of_branches_the_one_that_sends_most_is_counted(plan):
    def choose(x: Any) -> Any:
        few, many = lambda y: jax.lax.psum(y, "tensor"), lambda y: jnp.sum(gather(y)) + y
        return jax.lax.cond(
            jnp.sum(gather(2 * x)) > 0,
            few,
            many,
            x,
        )

    said: list[str] = []
    assert counts(asked(plan, choose, 8, said=said)) == {("all-gather", 32 * ROW): 2}
    assert said == ["the step: of 2 branches the one that sends most is counted"]


def test_a_branch_sends_as_often_as_a_scope_says(plan):
    def body(x: Any, is_due: Any) -> tuple[Any, None]:
        with taken(2, 8):
            return jax.lax.cond(is_due, lambda y: y + jnp.sum(gather(y)), lambda y: y, x), None

    said: list[str] = []
    due = jnp.arange(8) % 4 == 0
    found = asked(plan, lambda x: jax.lax.scan(body, x, due)[0], 8, said=said)
    assert (counts(found), said) == ({("all-gather", 32 * ROW): 2}, [])


def test_branches_without_collectives_need_no_word(plan):
    said: list[str] = []
    found = asked(
        plan, lambda x: jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, gather(x)), 8, said=said
    )
    assert (counts(found), said) == (
        {("all-gather", 32 * ROW): 1},
        [],
    )


def test_a_result_of_branches_needs_what_any_of_them_gives_it(plan):
    """And no more: of a loop's state, what nothing reads is not carried along by a branch
    either.
    """

    def both(x: Any) -> Any:
        def body(carry: Any, number: Any) -> Any:
            kept, dropped = carry
            dropped = dropped + jax.lax.psum(kept, "tensor")
            turned = jax.lax.cond(
                number > 2,
                lambda kept, dropped: (
                    kept + jnp.sum(gather(kept)),
                    jax.lax.psum(dropped, ("fsdp", "tensor")),
                ),
                lambda kept, dropped: (kept, dropped),
                kept,
                dropped,
            )
            return turned, None

        return jax.lax.scan(body, (x, x), jnp.arange(4))[0][0]

    assert counts(asked(plan, both, 8)) == {("all-gather", 32 * ROW): 4}

    def passed(x: Any) -> Any:
        least, most = lambda y, z: jnp.sum(gather(y)) + y, lambda y, z: z
        return jax.lax.cond(
            jnp.sum(x) > 0,
            least,
            most,
            2 * x,
            jax.lax.psum(x, "tensor"),
        )

    assert counts(asked(plan, passed, 8)) == {
        ("all-gather", 32 * ROW): 1,
        ("all-reduce", 8 * ROW): 1,
    }


def test_what_is_said_is_said_once(plan):
    def choose(x: Any) -> Any:
        return jax.lax.cond(
            jnp.sum(x) > 0,
            lambda y: jnp.sum(gather(y)) + y,
            lambda y: y,
            x,
        )

    said: list[str] = []
    assert counts(asked(plan, lambda x: choose(choose(x)), 8, said=said)) == {
        ("all-gather", 32 * ROW): 2
    }
    assert said == ["the step: of 2 branches the one that sends most is counted"]


def test_a_collective_that_is_not_known_is_said(plan):
    said: list[str] = []

    def broadcast(x: Any) -> Any:
        with jax.named_scope("block"):
            return jax.lax.pbroadcast(x, ("fsdp",), 0)

    assert asked(plan, broadcast, 8, said=said) == []
    assert said == ["block: pbroadcast over fsdp is not counted"]
    quiet: list[str] = []
    assert asked(plan, lambda x: x * jax.lax.axis_index("fsdp"), 8, said=quiet) == []
    assert quiet == []


def test_groups_inside_an_axis_are_said(plan):
    said: list[str] = []
    pairs = [[0, 1], [2, 3]]
    found = asked(
        plan,
        lambda x: jax.lax.all_gather(x, "fsdp", axis_index_groups=pairs, tiled=True),
        8,
        said=said,
    )
    assert counts(found) == {("all-gather", 16 * ROW): 1}
    assert said == ["the step: all_gather among parts of an axis is counted as over all of it"]


# Inside a `shard_map` over another axis, as a pipeline's stages are.


def test_arrays_are_those_of_a_device_in_a_map_inside_a_map(plan):
    """Over `tensor` only they are whole over `fsdp`, which a second map splits."""

    def stage(x: Any) -> Any:
        rows = PartitionSpec("fsdp")
        inner = jax.shard_map(
            lambda x: (
                jax.lax.ppermute(
                    x,
                    "tensor",
                    [(0, 1), (1, 0)],
                ),
                gather(x),
            ),
            in_specs=rows,
            out_specs=(rows, PartitionSpec()),
            axis_names={"data", "fsdp"},
            check_vma=False,
        )
        sent, whole = inner(x)
        return jax.lax.psum(sent, "tensor"), whole

    def mapped(x: Any) -> Any:
        return jax.shard_map(
            stage,
            mesh=plan.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={"tensor"},
            check_vma=False,
        )(x)

    found = requested_collectives(
        jax.jit(mapped).trace(jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)).jaxpr, plan.mesh
    )
    assert counts(found) == {
        ("ppermute", 8 * ROW): 1,
        ("all-gather", 32 * ROW): 1,
        ("all-reduce", 32 * ROW): 1,
    }


# Recomputation.


def recomputed(plan: Plan, prevent_cse: bool) -> dict[tuple[str, int], int]:
    """Of a weight gathered in a block that is run again for its backward, all but its input
    dropped.
    """

    def loss(weight: Any, x: Any) -> Any:
        def block(weight: Any, x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ gather(weight)) @ gather(weight))

        save_nothing = jax.checkpoint_policies.nothing_saveable
        return jnp.sum(
            jax.checkpoint(block, policy=save_nothing, prevent_cse=prevent_cse)(weight, x)
        )

    return counts(asked(plan, jax.value_and_grad(loss), WIDTH // 4, 8))


def test_a_recomputed_gather_is_the_backwards_own(plan):
    """One for the forward, and one for both the recomputation and the transposed matmul, which are
    kept apart from the forward; where they are not, one for all three."""
    matrix = WIDTH * ROW
    assert recomputed(plan, prevent_cse=True)["all-gather", matrix] == 2
    assert recomputed(plan, prevent_cse=False)["all-gather", matrix] == 1
