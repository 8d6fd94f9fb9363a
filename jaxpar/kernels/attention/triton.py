"""Attention on NVIDIA GPUs by Pallas' Triton lowering, after FlashAttention-2 (arXiv:2307.08691,
algorithms 1 and 2).

There are three kernels. One gives the output and its log-sum-exp, and one gives dq; both have a
program for each tile of queries of a head. The third gives dk and dv: it has a program for each
tile of keys of a kv head, which walks the query heads of that kv head, so that nothing is added
atomically. A program walks a row of `visits`.

Arrays are read where they lie. The part of a tile past the end of the sequence, or past a head_dim
that is no power of two, is masked out of loads and stores, and costs no copy. Exponentials are in
base 2, the base that the hardware has.

jax 0.12 still has this lowering, but warns that a later version will not.

Shapes: as in `jaxpar.kernels.attention.call`; q and k places in a tile of queries and of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.kernels.attention.call import BLIND, DEFAULT, MASKED, Arrays, Call, Index, Ref, Unserved
from jaxpar.kernels.attention.triton_tiles import LEAST, Tile, TileSizes, tile_sizes_here
from jaxpar.kernels.attention.visits import block_units, in_tile, visits
from jaxpar.kernels.masks import Mask, Tiles, segments_in

Carry = TypeVar("Carry")
LOG2_E = math.log2(math.e)
MOST_HEAD_DIM = 256
ONLY = np.int32(0)
"""The head in a program that has only one. It is a numpy integer, as the interpreter asks an index
for its shape.
"""


def refusal(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: DTypeLike,
    mask: Mask,
    call: Call = DEFAULT,
) -> str:
    """Why these arrays cannot be served; empty = they can."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(dtype)} is neither float32 nor bfloat16"
    if not LEAST <= q_shape[-1] <= MOST_HEAD_DIM:
        return f"head_dim {q_shape[-1]} is not between {LEAST} and {MOST_HEAD_DIM}"
    try:
        _fit_tile(Tile(LEAST, LEAST), q_shape[1], k_shape[1], mask, call)
    except Unserved as refused:
        return str(refused)
    return ""


def forward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    call: Call = DEFAULT,
    sizes: TileSizes | None = None,
) -> tuple[Array, Array]:
    """Return (out, lse), as in `jaxpar.kernels.attention.call`.

    Args:
      q_BSHh: the queries.
      k_BTKh, v_BTKh: the keys and values.
      mask: what a query sees.
      call: the options of the call.
      sizes: those of the tiles; None = as suits the chip.

    Raises:
      Unserved: no tile divides the mask's blocks.
    """
    B, S, H, h = q_BSHh.shape
    tile = (sizes or tile_sizes_here(h, q_BSHh.dtype)).forward
    out = jax.ShapeDtypeStruct(q_BSHh.shape, call.out_dtype or q_BSHh.dtype)
    lse = jax.ShapeDtypeStruct((B, H, S), jnp.float32)
    out_BSHh, lse_BHS = _run(
        attention_forward, 2, tile, [q_BSHh, k_BTKh, v_BTKh], [out, lse], mask, call
    )
    return out_BSHh, lse_BHS


def backward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    dout_BSHh: Array,
    lse_BHS: Array,
    delta_BHS: Array,
    mask: Mask,
    call: Call = DEFAULT,
    sizes: TileSizes | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), as in `jaxpar.kernels.attention.call`; the arguments are the forward's,
    and what its gradient needs.

    Raises:
      Unserved: no tile divides the mask's blocks.
    """
    _, dq_tile, dkv_tile = sizes or tile_sizes_here(q_BSHh.shape[-1], q_BSHh.dtype)
    arrays = [q_BSHh, k_BTKh, v_BTKh, dout_BSHh.astype(v_BTKh.dtype), lse_BHS, delta_BHS]
    dq, dk, dv = (jax.ShapeDtypeStruct(x.shape, call.out_dtype or x.dtype) for x in arrays[:3])
    (dq_BSHh,) = _run(attention_dq, 3, dq_tile, arrays, [dq], mask, call)
    dk_BTKh, dv_BTKh = _run(
        attention_dkv,
        4,
        dkv_tile,
        arrays,
        [dk, dv],
        mask,
        call,
        of_keys=True,
    )
    return dq_BSHh, dk_BTKh, dv_BTKh


class _Plan(NamedTuple):
    """What a kernel knows while it is traced."""

    mask: Mask
    # the tiles, with places counted within the arrays; the kernel adds where queries and keys start
    tiles: Tiles
    h: int  # head_dim
    scale: float  # the factor of the scores
    softcap: float  # see `Call`

    @property
    def unit(self) -> float:
        """The factor that turns the result of `_scores` into scores in base 2."""
        return (self.softcap or self.scale) * LOG2_E


def _run(
    kernel: Callable[..., None],
    products: int,
    tile: Tile,
    arrays: Sequence[Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    mask: Mask,
    call: Call,
    of_keys: bool = False,
) -> list[Array]:
    """Run a program for each tile of queries of each head; with `of_keys`, for each tile of keys of
    each kv head.

    Args:
      kernel: one of the kernels below.
      products: the matrix products that a visited tile takes. The program states their FLOPs, which
        with ids are an upper bound.
      tile: its size, before it is fitted to the sequence.
      arrays: the queries, the keys, and what else the kernel reads.
      outs: what it writes.
      mask: what a query sees.
      call: the options of the call.
      of_keys: see above.
    """
    B, S, H, h = arrays[0].shape
    T, K = arrays[1].shape[1:3]
    tile = _fit_tile(tile, S, T, mask, call)
    tiles = Tiles(
        S,
        T,
        tile.block_q,
        tile.block_k,
        call.q_start,
        call.k_start,
        call.multiple,
    )
    lists = visits(mask, tiles, of_keys)
    ids = [(leaf.q_ids, leaf.kv_ids) for leaf in segments_in(mask)]
    heads = K if of_keys else H
    given = (
        [jnp.asarray(x) for x in lists],
        call.starts(),
        ids,
        list(arrays),
    )
    plan = _Plan(mask, tiles, h, call.scale_of(arrays[0]), call.softcap)
    if isinstance(lists.some, jax.Array):
        most_visits = lists.entries.size
    else:
        most_visits = int(lists.some.sum())
    visited = most_visits * B // len(lists.some)
    flops = 2 * products * H * h * visited * tile.block_q * tile.block_k
    moved = sum(x.size * x.dtype.itemsize for x in (*arrays, *outs))
    return pl.pallas_call(
        partial(kernel, plan),
        grid=(lists.entries.shape[1], heads, B),
        in_specs=(
            [_of_sequence(x) for x in lists],
            pl.BlockSpec((2,), lambda *_: (0,)),
            [(_of_sequence(q), _of_sequence(kv)) for q, kv in ids],
            [_of_head(x, heads) for x in arrays],
        ),
        out_specs=[_of_head(x, heads) for x in outs],
        out_shape=list(outs),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=call.interpret,
        name=kernel.__name__,
        metadata={"flops": str(flops), "bytes_accessed": str(moved)},
    )(*given)


def _fit_tile(
    tile: Tile,
    S: int,
    T: int,
    mask: Mask,
    call: Call,
) -> Tile:
    """The tile, made smaller where the sequence is short or where it would cut a block mask's
    blocks.

    Raises:
      Unserved: no tile divides the blocks.
    """
    unit_q, unit_k = block_units(mask, call)
    enough_q = pl.next_power_of_2(max(S, LEAST))
    enough_k = pl.next_power_of_2(max(T, LEAST))
    block_q = math.gcd(min(tile.block_q, enough_q), unit_q)
    block_k = math.gcd(min(tile.block_k, enough_k), unit_k)
    if min(block_q, block_k) < LEAST:
        raise Unserved(f"tiles of less than {LEAST} places: {block_q} x {block_k} of {mask}")
    # eight would do the same work twice in a small tile
    warps = min(tile.warps, max(4, block_q * block_k // 256))
    return tile._replace(block_q=block_q, block_k=block_k, warps=warps)


def _of_sequence(x: Arrays) -> pl.BlockSpec:
    """A sequence's part of an array [B, ...], or of an array [1, ...] that all sequences share."""
    shared = x.shape[0] == 1
    rest = x.shape[1:]

    def index(_: Index, n: Index, b: Index) -> tuple[Index, ...]:
        sequence = 0 if shared else b
        return (sequence, *[0] * len(rest))

    return pl.BlockSpec((None, *rest), index)


def _of_head(x: Arrays, programs: int) -> pl.BlockSpec:
    """The heads of [B, S, H, h] or [B, H, S] that program n reads: its own, or one that several
    programs share.
    """
    H = x.shape[2] if x.ndim == 4 else x.shape[1]
    own = max(H // programs, 1)
    sharing = max(programs // H, 1)
    if x.ndim == 3:
        return pl.BlockSpec(
            (None, own, x.shape[2]),
            lambda _, n, b: (b, n // sharing, 0),
        )
    shape = (
        None,
        x.shape[1],
        own,
        pl.next_power_of_2(x.shape[3]),
    )
    return pl.BlockSpec(
        shape,
        lambda _, n, b: (b, 0, n // sharing, 0),
    )


# The kernels. They are given a plan, the lists of visits, where queries and keys start, the ids,
# and the arrays above.


def attention_forward(
    plan: _Plan, lists: Ref, starts: Ref, ids: Ref, arrays: Ref, out_ref: Ref, lse_ref: Ref
) -> None:
    """Compute the output and log-sum-exp of a tile of queries, by a running maximum and total
    (algorithm 1).
    """
    q_ref, k_ref, v_ref = arrays
    # Under a causal mask the last queries have the most to do. They go first, so no long program is
    # left at the end.
    row = plan.tiles.shape[0] - 1 - pl.program_id(0)
    queries = _queries(plan, row)
    q_qh = queries.load(q_ref, ONLY)

    def visit(
        entry: Array, masked: bool, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        out_qh, most_q, total_q = carry
        keys = _keys(plan, entry, masked)
        scores_qk = _scores(plan, q_qh, keys.load(k_ref, ONLY))
        if masked:
            seen_qk = _visible(plan, starts, ids, queries, keys)
            scores_qk = jnp.where(seen_qk, scores_qk, -jnp.inf)
        next_q = jnp.maximum(most_q, jnp.max(scores_qk, axis=1) * plan.unit)
        weights_qk = jnp.exp2(scores_qk * plan.unit - next_q[:, None])
        before_q = jnp.exp2(most_q - next_q)
        v_kh = keys.load(v_ref, ONLY)
        added_qh = product(weights_qk.astype(v_kh.dtype), v_kh, 1, 0)
        out_qh = out_qh * before_q[:, None] + added_qh
        return out_qh, next_q, total_q * before_q + jnp.sum(weights_qk, axis=1)

    # The maximum is finite even where nothing is seen, so that hidden scores, minus infinity, get
    # weight 0 and not NaN.
    block = q_qh.shape[:1]
    begin = (
        _zeros(q_qh.shape),
        jnp.full(block, BLIND, jnp.float32),
        _zeros(block),
    )
    out_qh, most_q, total_q = _walk(lists, row, visit, begin)
    blind_q = total_q == 0
    total_q = jnp.where(blind_q, 1, total_q)
    queries.store(out_ref, ONLY, out_qh / total_q[:, None])
    lse_q = most_q / LOG2_E + jnp.log(total_q)
    queries.store_row(lse_ref, ONLY, jnp.where(blind_q, MASKED, lse_q))


def attention_dq(
    plan: _Plan,
    lists: Ref,
    starts: Ref,
    ids: Ref,
    arrays: Ref,
    dq_ref: Ref,
) -> None:
    """Compute the gradient of a tile of queries (algorithm 2, by rows)."""
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref = arrays
    row = plan.tiles.shape[0] - 1 - pl.program_id(0)
    queries = _queries(plan, row)
    q_qh = queries.load(q_ref, ONLY)
    dout_qh = queries.load(dout_ref, ONLY)
    lse_q1 = queries.load_row(lse_ref, ONLY)[:, None]
    delta_q1 = queries.load_row(delta_ref, ONLY)[:, None]

    def visit(entry: Array, masked: bool, dq_qh: Array) -> Array:
        keys = _keys(plan, entry, masked)
        k_kh = keys.load(k_ref, ONLY)
        if masked:
            seen_qk = _visible(plan, starts, ids, queries, keys)
        else:
            seen_qk = None
        scores_qk = _scores(plan, q_qh, k_kh)
        weights_qk = _weights(plan, scores_qk, seen_qk, lse_q1)
        dweights_qk = product(dout_qh, keys.load(v_ref, ONLY), 1, 1)
        dscores_qk = _dscores(plan, scores_qk, weights_qk, dweights_qk, delta_q1)
        return dq_qh + product(dscores_qk.astype(k_kh.dtype), k_kh, 1, 0)

    dq_qh = _walk(lists, row, visit, _zeros(q_qh.shape))
    queries.store(dq_ref, ONLY, dq_qh * plan.scale)


def attention_dkv(
    plan: _Plan, lists: Ref, starts: Ref, ids: Ref, arrays: Ref, dk_ref: Ref, dv_ref: Ref
) -> None:
    """Compute the gradients of a tile of keys and values (algorithm 2, by columns), with scores
    transposed.
    """
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref = arrays
    row = pl.program_id(0)
    keys = _keys(plan, row, True)
    k_kh = keys.load(k_ref, ONLY)
    v_kh = keys.load(v_ref, ONLY)

    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def visit(
            entry: Array,
            masked: bool,
            carry: tuple[Array, Array],
        ) -> tuple[Array, Array]:
            dk_kh, dv_kh = carry
            queries = _queries(plan, entry)
            q_qh = queries.load(q_ref, head)
            dout_qh = queries.load(dout_ref, head)
            lse_1q = queries.load_row(lse_ref, head)[None]
            delta_1q = queries.load_row(delta_ref, head)[None]
            if masked:
                seen_kq = _visible(plan, starts, ids, queries, keys, transposed=True)
            else:
                seen_kq = None
            scores_kq = _scores(plan, k_kh, q_qh)
            weights_kq = _weights(plan, scores_kq, seen_kq, lse_1q)
            dv_kh += product(weights_kq.astype(dout_qh.dtype), dout_qh, 1, 0)
            dweights_kq = product(v_kh, dout_qh, 1, 1)
            dscores_kq = _dscores(plan, scores_kq, weights_kq, dweights_kq, delta_1q)
            dk_kh += product(dscores_kq.astype(q_qh.dtype), q_qh, 1, 0)
            return dk_kh, dv_kh

        return _walk(lists, row, visit, carry)

    begin = (_zeros(k_kh.shape), _zeros(k_kh.shape))
    dk_kh, dv_kh = lax.fori_loop(0, q_ref.shape[1], of_head, begin)
    keys.store(dk_ref, ONLY, dk_kh * plan.scale)
    keys.store(dv_ref, ONLY, dv_kh)


def _walk(
    lists: Ref, row: Index, visit: Callable[[Array, bool, Carry], Carry], carry: Carry
) -> Carry:
    """Call `visit(entry, masked, carry)` for each tile of a row: first those seen in full, then the
    others.
    """
    entries, full, some = lists
    for masked, begin, end in ((False, 0, full[row]), (True, full[row], some[row])):
        carry = lax.fori_loop(
            begin, end, lambda w, carry, masked=masked: visit(entries[row, w], masked, carry), carry
        )
    return carry


class _Part(NamedTuple):
    """The places of a sequence that a tile has."""

    start: int | Array
    size: int
    end: int | None  # the end of the sequence where the tile may go past it, else None
    h: int

    @property
    def places(self) -> Array:
        return self.start + jnp.arange(self.size)

    def load(self, ref: Ref, head: Index) -> Array:
        """Load [size, h'] from [T, heads, h'], h' a power of two, with zeros where there is
        nothing.
        """
        mask = self._entries(ref.shape[-1])
        other = None if mask is None else 0.0
        return plt.load(ref.at[self._slice, head], mask=mask, other=other)

    def store(self, ref: Ref, head: Index, value: Array) -> None:
        mask = self._entries(ref.shape[-1])
        plt.store(
            ref.at[self._slice, head],
            value.astype(ref.dtype),
            mask=mask,
        )

    def load_row(self, ref: Ref, *head: Index) -> Array:
        """Load [size] from [heads, T] or from [T], with zeros where there is nothing."""
        mask = self._rows
        other = None if mask is None else 0
        return plt.load(
            ref.at[*head, self._slice],
            mask=mask,
            other=other,
        )

    def store_row(self, ref: Ref, head: Index, value: Array) -> None:
        plt.store(ref.at[head, self._slice], value, mask=self._rows)

    @property
    def _slice(self) -> slice | pl.Slice:
        return pl.ds(self.start, self.size)

    @property
    def _rows(self) -> Array | None:
        """Which places exist [size]; None = all."""
        if self.end is None:
            return None
        return self.places < self.end

    def _entries(self, width: int) -> Array | None:
        """Which entries exist [size, width]; None = all."""
        rows = self._rows
        if width == self.h:
            if rows is None:
                return None
            return rows[:, None]
        columns = (jnp.arange(width) < self.h)[None]
        if rows is None:
            return columns
        return rows[:, None] & columns


def _queries(plan: _Plan, tile: int | Array) -> _Part:
    block = plan.tiles.block_q
    S = plan.tiles.S
    return _Part(tile * block, block, S if S % block else None, plan.h)


def _keys(plan: _Plan, tile: int | Array, last: bool) -> _Part:
    """The part of a tile of keys; only with `last`, where it may be the last one, can it go past
    the end.
    """
    block = plan.tiles.block_k
    T = plan.tiles.T
    return _Part(tile * block, block, T if last and T % block else None, plan.h)


def _visible(
    plan: _Plan, starts: Ref, ids: Ref, queries: _Part, keys: _Part, transposed: bool = False
) -> Array:
    """Which places of a partial tile are seen, [q, k], or transposed [k, q]."""
    pairs = [(queries.load_row(q_ids), keys.load_row(kv_ids)) for q_ids, kv_ids in ids]
    if transposed:  # ids are compared for equality, so the two sides may change places
        i = queries.places[None]
        j = keys.places[:, None]
        pairs = [(kv_ids, q_ids) for q_ids, kv_ids in pairs]
    else:
        i = queries.places[:, None]
        j = keys.places[None]
    seen = in_tile(plan.mask, i + starts[0], j + starts[1], pairs)
    if keys.end is None:
        return seen
    return seen & (j < keys.end)


def product(a: Array, b: Array, dim_a: int, dim_b: int) -> Array:
    """A product over one dim of each, in float32; float32 factors are not rounded to TF32, as they
    would by default.
    """
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    else:
        precision = None
    dims = ((dim_a,), (dim_b,)), ((), ())
    return lax.dot_general(a, b, dims, precision, jnp.float32)


def _scores(plan: _Plan, a: Array, b: Array) -> Array:
    """The scores without the factor `plan.unit`: the products, or their tanh under a soft cap."""
    products = product(a, b, 1, 1)
    if plan.softcap:
        return jnp.tanh(products * (plan.scale / plan.softcap))
    return products


def _weights(plan: _Plan, scores: Array, seen: Array | None, lse: Array) -> Array:
    """The weights, made again from the log-sum-exp."""
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.exp2(scores * plan.unit - jnp.maximum(lse, BLIND) * LOG2_E)


def _dscores(
    plan: _Plan,
    scores: Array,
    weights: Array,
    dweights: Array,
    delta: Array,
) -> Array:
    """The gradient with respect to the products, without the factor `plan.scale`."""
    dscores = weights * (dweights - delta)
    if plan.softcap:
        return dscores * (1 - scores * scores)
    return dscores


def _zeros(shape: tuple[int, ...]) -> Array:
    return jnp.zeros(shape, jnp.float32)
