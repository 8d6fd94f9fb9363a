"""Every strategy of context parallelism against one device: values, gradients, what is sent, the
work of each device.

Tolerance: as in test_attention, sums of at most a few hundred float32 terms in another order: 1e-5
of the largest entry. In bfloat16 outputs and gradients pass a few roundings by half an ulp (2^-9):
2^-6 of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Context, Plan
from jaxpar.base.layout.sharding import ShardingRules, kv_copy_axes
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.kernels.attention import chunked
from jaxpar.kernels.attention.call import Call, reference
from jaxpar.kernels.masks import Causal, First, Full, Mask, Segments, Window, bigbird
from jaxpar.parallel.context import check_split, split_attention
from jaxpar.parallel.context import ring as ring_attention
from jaxpar.parallel.context import split as context
from jaxpar.parallel.context.task import UNROLLED
from jaxpar.parallel.mesh_ops import split_of
from jaxpar.parallel.zigzag import chunk_order, inverse, reorder
from jaxpar.rehearse.requested_collectives import requested_collectives

STRATEGIES = ("ring", "ulysses")


def plan_on(
    strategy: str = "ring",
    rules: dict[str, Any] | None = None,
    **mesh: int,
) -> Plan:
    spec = MeshSpec(**mesh)
    made = make_mesh(spec, jax.devices()[: devices_needed(spec)])
    return Plan(made, ShardingRules(**(rules or {})), context=Context(strategy))  # pyright: ignore[reportArgumentType]


def projections(
    B: int, S: int, H: int, K: int, h: int, dtype: str = "float32", size: float = 1
) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(size * rng.standard_normal((B, S, heads, h)), dtype) for heads in (H, K, K)]


def documents(B: int, S: int) -> jax.Array:
    """Random documents of ten tokens on average."""
    return jnp.asarray(
        np.cumsum(
            np.random.default_rng(1).random((B, S)) < 0.1,
            axis=1,
        ),
        jnp.int32,
    )


def values_and_gradients(attention: Any, args: list[jax.Array]) -> Any:
    towards = jnp.asarray(
        np.random.default_rng(2).standard_normal(args[0].shape),
        jnp.float32,
    )

    def projected(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(*args)
        return jnp.sum(out.astype(jnp.float32) * towards), out

    (_, out), gradients = jax.jit(jax.value_and_grad(projected, (0, 1, 2), has_aux=True))(*args)
    return out, *gradients


def mask_of(window: int | Mask, segments: jax.Array | None = None) -> Mask:
    """A causal window, 0 for one without an end, or the mask that is given; of each document."""
    if isinstance(window, Mask):
        mask = window
    else:
        mask = Causal() & Window(window - 1) if window else Causal()
    if segments is None:
        return mask
    return mask & Segments(segments, segments)


def whole(
    *args: jax.Array,
    window: int | Mask = 0,
    segments: jax.Array | None = None,
) -> jax.Array:
    """On one device, by the definition."""
    q, k, v = args
    return reference(q, k, v, mask_of(window, segments))[0]


def split(
    plan: Plan,
    window: int | Mask = 0,
    segments: jax.Array | None = None,
    unrolled: int = UNROLLED,
) -> Any:
    """The attention under a plan of arrays in natural order."""
    how = split_of(plan)._replace(unrolled=unrolled)
    order = chunk_order(plan, plan.context.strategy)

    def attention(*args: jax.Array) -> jax.Array:
        if segments is None:
            documents = None
        else:
            documents = reorder(segments, order, 1)
        out = split_attention(
            how, mask_of(window), *(reorder(x, order, 1) for x in args), documents
        )
        return reorder(out, inverse(order), 1)

    return attention


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(found, wanted, strict=True):
        a = np.asarray(a, np.float32)
        b = np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.all(np.isfinite(a))
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


SPLIT_IN_ALL = {"heads": (), "kv_heads": (), "attention_seq": ("context", "tensor")}


# Strategy, mesh, rules, heads, kv heads, window, packed.
@pytest.fixture
def ragged_tiles() -> Iterator[None]:
    """Several tiles of attention, the last of them ragged."""
    with chunked.tiles_at_most(chunked.TileSize(5, 7)):
        yield


@pytest.fixture
def square_tiles() -> Iterator[None]:
    with chunked.tiles_at_most(chunked.TileSize(16, 16)):
        yield


CASES = [
    ("ring", {"context": 2}, {}, 3, 1, 0, False),
    (
        "ring",
        {"context": 2, "tensor": 2},
        {},
        6,
        2,
        0,
        True,
    ),
    pytest.param(
        "ring",
        {"context": 8},
        {},
        5,
        5,
        13,
        False,
        marks=pytest.mark.slow,
    ),
    ("ring", {"context": 4}, {}, 4, 2, 7, True),
    pytest.param(
        "ring", {"context": 2, "tensor": 4}, SPLIT_IN_ALL, 3, 3, 0, True, marks=pytest.mark.slow
    ),
    (
        "ring",
        {"context": 2, "tensor": 4},
        {"kv_heads": ()},
        8,
        2,
        0,
        False,
    ),
    (
        "ring",
        {"context": 2, "tensor": 2},
        {"kv_heads": ()},
        6,
        2,
        5,
        False,
    ),
    pytest.param(
        "ring",
        {"context": 2, "tensor": 4},
        {"kv_heads": ()},
        12,
        3,
        0,
        False,
        marks=pytest.mark.long,
    ),
    pytest.param(
        "ring", {"data": 2, "fsdp": 2, "context": 2}, {}, 3, 1, 0, True, marks=pytest.mark.long
    ),
    ("ulysses", {"context": 2}, {}, 6, 3, 0, True),
    (
        "ulysses",
        {"context": 4, "tensor": 2},
        {},
        8,
        2,
        9,
        False,
    ),
    ("ulysses", {"context": 8}, {}, 24, 3, 0, False),  # a device's heads cut through a group
    # 12 copies for four devices
    pytest.param(
        "ulysses",
        {"context": 4},
        {},
        24,
        6,
        0,
        False,
        marks=pytest.mark.long,
    ),
    ("ulysses", {"context": 4}, {}, 12, 12, 0, True),
]


@pytest.mark.parametrize(
    ("strategy", "mesh", "rules", "H", "K", "window", "packed"), CASES, ids=str
)
@pytest.mark.usefixtures("ragged_tiles")
def test_a_strategy_gives_the_answer_of_one_device(strategy, mesh, rules, H, K, window, packed):
    args = projections(4, 48, H, K, 6)
    segments = documents(4, 48) if packed else None
    plan = plan_on(strategy, rules, **mesh)
    copies = math.lcm(K, plan.pieces(kv_copy_axes(plan))) // K  # as column_linear leaves them

    def ours(q: jax.Array, *kv: jax.Array) -> Any:
        return split(plan, window, segments)(
            q,
            *(jnp.repeat(x, copies, axis=2) for x in kv),
        )

    found = values_and_gradients(ours, args)
    assert_close(
        found, values_and_gradients(lambda *x: whole(*x, segments=segments, window=window), args)
    )


BOTH_WAYS = [
    pytest.param("ring", {"context": 4}, 3, 1, Full(), True, marks=pytest.mark.slow),
    ("ring", {"context": 2, "tensor": 2}, 2, 2, Window(9, 5), True),
    pytest.param("ring", {"context": 4}, 2, 1, Causal() | First(7), False, marks=pytest.mark.slow),
    pytest.param("ring", {"context": 8}, 2, 1, Full(), False, marks=pytest.mark.slow),
    pytest.param("ring", {"context": 8}, 2, 2, Window(9, 9), True, marks=pytest.mark.slow),
    pytest.param(
        "ring",
        {"context": 2},
        2,
        1,
        bigbird(48, 3, 1, 1, block=5) | Window(2, 3),
        False,
        marks=pytest.mark.slow,
    ),
    ("ulysses", {"context": 2}, 4, 2, Window(9, 5), True),
    ("ulysses", {"context": 4}, 4, 2, Full(), True),
    # Fewer heads than devices: two of them, or all four, share the heads out.
    ("ulysses", {"context": 4}, 2, 1, Window(9, 5), True),
    ("ulysses", {"context": 4}, 3, 3, Full(), False),
    pytest.param(
        "ulysses",
        {"context": 4, "tensor": 2},
        4,
        2,
        Causal() & (First(2) | Window(5)),
        True,
        marks=pytest.mark.slow,
    ),
    pytest.param("ulysses", {"context": 8}, 12, 3, Causal(), True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "mesh", "H", "K", "mask", "packed"), BOTH_WAYS, ids=str)
@pytest.mark.usefixtures("ragged_tiles")
def test_a_mask_that_looks_ahead_gives_the_answer_of_one_device(strategy, mesh, H, K, mask, packed):
    """A ring visits every pair of chunks, whichever of the two is the later one."""
    args = projections(2, 48, H, K, 6)
    segments = documents(2, 48) if packed else None
    plan = plan_on(strategy, **mesh)
    found = values_and_gradients(split(plan, mask, segments), args)
    whole_mask = mask_of(mask, segments)
    assert_close(found, values_and_gradients(lambda *x: reference(*x, whole_mask)[0], args))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("ragged_tiles")
def test_a_document_of_a_split_row_is_computed_as_if_it_were_alone(strategy: str) -> None:
    """Documents begin and end within chunks, and reach over several."""
    args = projections(1, 48, 4, 2, 6)
    plan = plan_on(strategy, context=2)
    bounds = [0, 5, 31, 48]
    mask = Causal() & (Window(1) | First(2) | bigbird(48, 1, 0, 1, block=3, causal=True))
    documents = jnp.repeat(
        jnp.arange(3),
        jnp.diff(jnp.array(bounds)),
        total_repeat_length=48,
    )
    segments = documents[None]
    order = chunk_order(plan, strategy)

    def packed(*args: jax.Array) -> jax.Array:
        found = split_attention(
            split_of(plan), mask, *(reorder(x, order, 1) for x in args), reorder(segments, order, 1)
        )
        return reorder(found, inverse(order), 1)

    def one_by_one(*args: jax.Array) -> jax.Array:
        alone = (reference(*(x[:, a:b] for x in args), mask)[0] for a, b in pairwise(bounds))
        return jnp.concatenate(list(alone), axis=1)

    assert_close(values_and_gradients(packed, args), values_and_gradients(one_by_one, args))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_rounds_as_often_as_on_one_device(strategy):
    args = projections(2, 48, 8, 4, 6, "bfloat16")
    found = values_and_gradients(split(plan_on(strategy, context=2)), args)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    assert_close(
        found,
        values_and_gradients(whole, [x.astype(jnp.float32) for x in args]),
        2**-6,
    )


def test_scores_of_some_hundreds_merge():
    """exp of them would be infinite: the largest is taken out of every sum."""
    args = projections(2, 32, 2, 1, 6, size=12)
    found = values_and_gradients(split(plan_on(context=2)), args)
    assert_close(found, values_and_gradients(whole, args), 1e-4)  # an ulp of a score of 300 is 3e-5


@pytest.mark.slow
def test_a_long_ring_is_a_loop_with_the_same_answer():
    """Steps in the middle of a ring of many devices are one loop: fewer to compile, as many
    hops.
    """
    args = projections(2, 48, 3, 1, 6)
    segments = documents(2, 48)
    unrolled = values_and_gradients(split(plan_on(context=8), 0, segments), args)
    plan = plan_on(context=8)
    looped = values_and_gradients(split(plan, 0, segments, unrolled=3), args)
    assert_close(looped, unrolled, 1e-6)
    ring = split(plan, unrolled=3)
    traced = jax.jit(lambda *x: values_and_gradients(ring, list(x))).trace(*args)
    assert sum(row.count for row in requested_collectives(traced.jaxpr, plan.mesh)) == 2 * (
        7 + 7 + 7
    )


@pytest.mark.parametrize("n", [3, 8, 9, 13])
def test_in_a_ring_of_any_length_each_device_s_keys_are_visited_once(n: int) -> None:
    """The keys here are the number of hops that they have made, written at the visit's own count of
    them.
    """
    work: Any = SimpleNamespace(
        size=n,
        unrolled=UNROLLED,
        hop=lambda kv: jax.tree.map(lambda x: x + 1, kv),
    )

    def visit(seen: jax.Array, kv: Any, hops: Any) -> jax.Array:
        return seen.at[hops].add(kv[0])

    found = ring_attention._around(
        work,
        [jnp.int32(0)],
        lambda: jnp.zeros(n, jnp.int32),
        visit,
    )
    assert found.tolist() == list(range(n))


# The order of tokens.


def test_every_device_has_the_same_work():
    for n in (2, 4, 8):
        order = chunk_order(plan_on(context=n), "ring")
        assert sorted(order) == list(range(2 * n))
        assert [sum(chunk + 1 for chunk in order[2 * i : 2 * i + 2]) for i in range(n)] == [
            2 * n + 1
        ] * n
    assert chunk_order(plan_on(context=2), "ring") == [0, 3, 1, 2]
    assert (
        chunk_order(plan_on("ulysses", context=4), "ulysses")
        == chunk_order(plan_on(tensor=4), "ring")
        == [0]
    )


@pytest.mark.parametrize(
    "n",
    [2, 4, pytest.param(8, marks=pytest.mark.slow)],
)
def test_a_ring_computes_the_pairs_that_see_something_and_no_other(n, monkeypatch):
    """Of 4 n pairs of chunks a device computes 2 n + 1: all that are not empty, three of its own
    block, two a hop.
    """
    seen: list[Mask] = []
    forward = chunked.forward

    def counted(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        call: Call,
        dropout: None,
    ) -> Any:
        seen.append(mask)
        return forward(q, k, v, mask, call, dropout)

    monkeypatch.setattr(chunked, "forward", counted)
    jax.eval_shape(
        split(plan_on(context=n)),
        *projections(1, 48, 2, 1, 6),
    )
    assert len(seen) == 2 * n + 1
    assert seen.count(Causal()) == 2, "diagonals"
    assert seen.count(Full()) == 2 * n - 1


def test_an_order_is_undone():
    x = jnp.arange(24).reshape(2, 12)
    order = chunk_order(plan_on(context=2), "ring")
    moved = reorder(x, order, 1)
    assert moved[0].tolist() == [
        0,
        1,
        2,
        9,
        10,
        11,
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    assert reorder(moved, inverse(order), 1).tolist() == x.tolist()


# What is sent.


def laid_out(plan: Plan, args: list[jax.Array]) -> list[jax.Array]:
    """q, k and v as a plan splits them, and a gradient of the output."""
    axes = ("heads", "kv_heads", "kv_heads", "heads")
    return [
        jax.device_put(x, plan.sharding(("batch", "attention_seq", axis, None)))
        for x, axis in zip((*args, args[0]), axes, strict=True)
    ]


def forward_and_backward(plan: Plan, unrolled: int = UNROLLED) -> Any:
    how = split_of(plan)._replace(unrolled=unrolled)

    def gradients(*args: jax.Array) -> Any:
        _, pull = jax.vjp(lambda *x: split_attention(how, Causal(), *x), *args[:3])
        return pull(args[3])

    return gradients


def sent(plan: Plan, function: Any, args: list[jax.Array]) -> tuple[Counter[str], Counter[str]]:
    """How many collectives of each kind one device runs in the compiled program, and their
    bytes.
    """
    kinds = Counter[str]()
    size = Counter[str]()
    for task, times in walk(read_program(jax.jit(function).lower(*args).compile().as_text()).nodes):
        if task.collective:
            kinds[task.collective.kind] += times
            size[task.collective.kind] += times * task.collective.bytes
    return kinds, size


@pytest.mark.parametrize(
    "n",
    [4, pytest.param(8, marks=pytest.mark.long)],
)
def test_a_ring_sends_keys_and_values_round_and_in_the_backward_their_gradients_too(n):
    """Keys and values make n - 1 hops, in the backward once more, and so do dk and dv."""
    B = 2
    S = 48
    H = 4
    K = 2
    h = 6
    plan = plan_on(context=n)
    args = laid_out(plan, projections(B, S, H, K, h))
    hop = B * (S // n) * K * h * 4
    kinds, size = sent(
        plan,
        lambda *x: split_attention(split_of(plan), Causal(), *x),
        args[:3],
    )
    assert (kinds, size) == (
        {"ppermute": 2 * (n - 1)},
        {"ppermute": 2 * (n - 1) * hop},
    )
    # The backward alone: its residuals are the arguments.
    *qkv, dout = args
    _, residuals = jax.jit(lambda *x: context._forward(split_of(plan), Causal(), *x, None))(*qkv)
    kinds, size = sent(
        plan,
        lambda *x: context._backward(split_of(plan), Causal(), x[:-1], x[-1])[:3],
        [*residuals, dout],
    )
    assert (kinds, size) == (
        {"ppermute": 4 * (n - 1)},
        {"ppermute": 4 * (n - 1) * hop},
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_plan_asks_for_in_closed_form(strategy):
    n = 4
    B = 2
    S = 48
    H = 8
    K = 4
    h = 6
    plan = plan_on(strategy, context=n)
    args = projections(B, S, H, K, h, "bfloat16")
    q = B * S // n * H * h
    kv = 2 * B * S // n * K * h
    w = 2
    rows = B * S // n * H * 4  # delta

    def asked(function: Any, *args: jax.Array) -> Counter[str]:
        total = Counter[str]()
        for one in requested_collectives(
            jax.jit(function).trace(*args).jaxpr,
            plan.mesh,
        ):
            total[one.kind] += one.bytes * one.count
        return total

    def forward(*args: jax.Array) -> jax.Array:
        return split_attention(split_of(plan), Causal(), *args)

    backward = asked(forward_and_backward(plan), *args, args[0])
    want, of_both = {
        "ring": (
            {"ppermute": (n - 1) * kv * w},
            {"ppermute": (n - 1) * kv * (w + w + 4)},
        ),
        "ulysses": (
            {"all-to-all": (2 * q + kv) * w},
            {"all-to-all": (5 * q + 3 * kv) * w + rows},
        ),
    }[strategy]
    assert asked(forward, *args) == want
    assert backward == of_both


# What is held.


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("ring", marks=pytest.mark.slow), "ulysses"],
)
@pytest.mark.usefixtures("square_tiles")
def test_memory_of_a_device_falls_with_their_number(strategy):
    """Forward and backward hold some 20 arrays of the size of a device's queries, and a tile,
    whatever n is.
    """
    args = projections(1, 1024, 8, 2, 8)

    def alone(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        dout: jax.Array,
    ) -> Any:
        out, lse = chunked.forward(q, k, v, Causal(), Call())
        delta = jnp.sum(out * dout, axis=-1).swapaxes(1, 2)
        return chunked.backward(
            q,
            k,
            v,
            dout,
            lse,
            delta,
            Causal(),
            Call(),
        )

    def temporaries(n: int) -> int:
        plan = plan_on(strategy, context=n)
        if n == 1:
            function = alone
        else:
            # XLA:CPU runs ahead where it can: a loop holds it to one hop
            function = forward_and_backward(plan, unrolled=2)
        options = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
        compiled = (
            jax.jit(function, compiler_options=options).lower(*laid_out(plan, args)).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    for n in (1, 2, 4, 8):
        assert temporaries(n) < 24 * args[0].nbytes / n


# What is refused.


@pytest.mark.parametrize(
    ("strategy", "mesh", "rules", "sizes", "says"),
    [
        (
            "ring",
            {"context": 4},
            {},
            (20, 4, 4),
            r"^data.seq_len=20 is not cut into 8 equal chunks, which ring over context=4 needs: "
            r"try data.seq_len=16 or "
            "data.seq_len=24$",
        ),
        ("ulysses", {"context": 4}, {}, (6, 4, 4), r"=6 is not cut into 4 equal chunks"),
        (
            "ring",
            {"context": 2},
            {"heads": ("context",)},
            (8, 4, 4),
            r"queries: mesh axis context=2 is used twice",
        ),
        (
            "ring",
            {"context": 2, "tensor": 2},
            {"heads": ()},
            (8, 4, 4),
            r"dim 0 is used split over tensor \(rules.kv_heads\)",
        ),
        (
            "ring",
            {"context": 2},
            {},
            (8, 4, 4, 0.1),
            r"model.dropout=0.1 with the sequence split over context=2",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(strategy, mesh, rules, sizes, says):
    with pytest.raises(UserError, match=says):
        check_split(plan_on(strategy, rules, **mesh), strategy, *sizes)
