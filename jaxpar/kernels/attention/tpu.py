"""Attention on TPUs: three Pallas kernels after FlashAttention-2 (arXiv:2307.08691, algorithms 1
and 2).

Each step of the grid is a visited tile. The tiles stand row after row in one flat list; a row is a
tile of queries for the output and dq, and a tile of keys for dk and dv. A grid of all rows by the
longest row would idle where rows differ in length, as with BigBird's global blocks. Where ids or
places are traced, the number of steps is traced too. The list goes to SMEM ahead of the kernel
(scalar prefetch), so that the arrays of a step are copied during the step before.

A row's sums stay in VMEM from its first step to its last; dk and dv sum over the query heads of a
kv head there too. Scores lie as [keys, queries], so that a number for each query, such as its
maximum, lies along the lanes, and sums over keys need no shuffles between lanes. In this layout
libtpu 0.0.42 makes 1,440 bundles of instructions on v5e and 1,058 on v6e for the forward of a tile
of 512 x 512 with head_dim 128; for [queries, keys] it makes 1,832 and 1,779.

Arrays whose head_dim fills no whole tiles of 128 lanes lie with their places along the lanes
instead, as [h, S]. They then take no padding in HBM, half the room of [S, 64], and XLA's matmuls
read and write them as they are, whereas XLA copied every array of the other kind to a layout
without gaps. A visited tile of 512 x 512 with head_dim 64 takes 1,166, 1,155 and 1,899 bundles on
v5e (forward, dq, dkv), against 1,196, 1,287 and 1,902 with [S, 64]. To pack two heads of 64 into
one tile of lanes gained nothing: for the forward 1,178 bundles a head on v5e and 953 on v6e,
against 1,197 and 942.

Shapes: as in `jaxpar.kernels.attention.call`; Q tiles of q queries, N tiles of t keys; R rows of up
to W; L steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.base.hardware import LANES
from jaxpar.kernels.attention.call import (
    BLIND,
    DEFAULT,
    MASKED,
    Call,
    Index,
    Ref,
    Unserved,
    cap_scores,
    pad_to,
    through_cap,
)
from jaxpar.kernels.attention.visits import (
    block_units,
    check_list,
    flatten_visits,
    in_tile,
    most_steps,
    visits,
)
from jaxpar.kernels.masks import FULL, PARTIAL, Mask, Tiles, segments_in

TILE = 512
LONG_TILE = 1024
"""The most queries, and the most keys, of a tile; LONG_TILE is for sequences longer than 16 TILE.

A long tile takes 10 to 22% fewer bundles for each score on v6e, but computes more scores that no
query sees.
"""
_SUBLANES = 8
_HEAD_DIM = 256

ArrayKind = Literal["queries", "keys", "per_query", "q_ids", "kv_ids"]
"""The kinds of arrays: [B, H, S, h], [B, K, T, h] (or with `_Walk.across` [B, H, h, S], [B, K, h,
T]), [B, H, Q, 1, q], and ids [B, Q, 1, q] and [B, N, 1, t]."""


def refusal(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: DTypeLike,
    mask: Mask,
    call: Call = DEFAULT,
) -> str:
    """Why these arrays cannot be served; empty = they can."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(dtype).name} is not float32 or bfloat16"
    if q_shape[-1] > _HEAD_DIM:
        return f"head_dim {q_shape[-1]} is more than {_HEAD_DIM}"
    try:
        tiles = _tiles(q_shape, k_shape[1], dtype, mask, call)
        batch = q_shape[0] if segments_in(mask) else 1
        check_list(batch * max(most_steps(mask, tiles, by_keys) for by_keys in (False, True)))
    except Unserved as unserved:
        return str(unserved)
    return ""


def forward(
    q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, mask: Mask, call: Call = DEFAULT, tile: int = 0
) -> tuple[Array, Array]:
    """Return (out, lse), as in `jaxpar.kernels.attention.call`.

    Args:
      q_BSHh: the queries.
      k_BTKh, v_BTKh: the keys and values.
      mask: what a query sees.
      call: the options of the call.
      tile: the most queries, and the most keys, of a tile; 0 = as fits.

    Raises:
      Unserved: what `refusal` says.
    """
    B, S, H, h = q_BSHh.shape
    walk = _walk(q_BSHh, k_BTKh, mask, call, tile)
    q = walk.tiles.block_q
    t = walk.tiles.block_k
    arrays: dict[ArrayKind, list[Array]] = {
        "queries": [walk.by_head(q_BSHh, q)],
        "keys": [walk.by_head(k_BTKh, t), walk.by_head(v_BTKh, t)],
    }
    outputs: list[tuple[ArrayKind, DTypeLike]] = [
        ("queries", call.out_dtype or q_BSHh.dtype),
        ("per_query", jnp.float32),
    ]
    sums = [(1, q), (1, q), (h, q)]
    out, lse_BHQ1q = _launch(_forward_kernel, walk, arrays, outputs, sums, products=2)
    lse_BHS = lse_BHQ1q.reshape(B, H, -1)[:, :, :S]
    return walk.by_place(out, S), lse_BHS


def backward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    dout_BSHh: Array,
    lse_BHS: Array,
    delta_BHS: Array,
    mask: Mask,
    call: Call = DEFAULT,
    tile: int = 0,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), as in `jaxpar.kernels.attention.call`; the arguments are the forward's,
    and what its gradient needs.

    Raises:
      Unserved: what `refusal` says.
    """
    _, S, _, h = q_BSHh.shape
    T = k_BTKh.shape[1]
    of_queries = _walk(q_BSHh, k_BTKh, mask, call, tile)
    of_keys = _walk(q_BSHh, k_BTKh, mask, call, tile, of_keys=True)
    q = of_queries.tiles.block_q
    t = of_queries.tiles.block_k
    arrays: dict[ArrayKind, list[Array]] = {
        "queries": [
            of_queries.by_head(q_BSHh, q),
            of_queries.by_head(dout_BSHh.astype(v_BTKh.dtype), q),
        ],
        "keys": [of_keys.by_head(k_BTKh, t), of_keys.by_head(v_BTKh, t)],
        "per_query": [
            _by_tile(jnp.maximum(lse_BHS, BLIND), q),
            _by_tile(delta_BHS, q),
        ],
    }
    of_q, of_k, of_v = (call.out_dtype or x.dtype for x in (q_BSHh, k_BTKh, v_BTKh))
    of_dq: list[tuple[ArrayKind, DTypeLike]] = [("queries", of_q)]
    of_dkv: list[tuple[ArrayKind, DTypeLike]] = [("keys", of_k), ("keys", of_v)]
    (dq,) = _launch(
        _dq_kernel,
        of_queries,
        arrays,
        of_dq,
        sums=[(h, q)],
        products=3,
    )
    dk, dv = _launch(
        _dkv_kernel,
        of_keys,
        arrays,
        of_dkv,
        sums=[(t, h), (t, h)],
        products=4,
    )
    return (
        of_queries.by_place(dq, S),
        of_keys.by_place(dk, T),
        of_keys.by_place(
            dv,
            T,
        ),
    )


# The kernels. Each takes a step, refs to the tile's arrays and outputs, and refs to the row's sums.
# `rows` gives an array as [places, h] and `columns` gives it as [h, places], whichever way it lies.


def _forward_kernel(
    step: _Step,
    q,
    k,
    v,
    out,
    lse,
    most,
    total,
    weighted,
) -> None:
    @pl.when(step.first)
    def _() -> None:
        most[...] = jnp.full_like(most, BLIND)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    @step.visit
    def _(shown: _Shown) -> None:
        scores = shown(step.scores(q, k), MASKED)
        before = most[...]
        now = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp(scores - now)
        kept = jnp.exp(before - now)
        most[...] = now
        total[...] = total[...] * kept + jnp.sum(
            weights,
            axis=0,
            keepdims=True,
        )
        added = product(step.columns(v), weights.astype(v.dtype))
        weighted[...] = weighted[...] * kept + added

    @pl.when(step.last)
    def _() -> None:
        divisor = jnp.where(total[...] == 0, 1, total[...])
        out[...] = step.columns(weighted[...] / divisor).astype(out.dtype)
        lse[...] = most[...] + jnp.log(divisor)


def _dq_kernel(
    step: _Step,
    q,
    dout,
    k,
    v,
    lse,
    delta,
    dq,
    dq_sum,
) -> None:
    @pl.when(step.first)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @step.visit
    def _(shown: _Shown) -> None:
        _, dscores = step.gradients(shown, q, dout, k, v, lse, delta)
        dq_sum[...] += product(step.columns(k), dscores.astype(k.dtype))

    @pl.when(step.last)
    def _() -> None:
        dq[...] = step.columns(dq_sum[...] * step.scale).astype(dq.dtype)


def _dkv_kernel(
    step: _Step,
    q,
    dout,
    k,
    v,
    lse,
    delta,
    dk,
    dv,
    dk_sum,
    dv_sum,
) -> None:
    @pl.when(step.first)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @step.visit
    def _(shown: _Shown) -> None:
        weights, dscores = step.gradients(shown, q, dout, k, v, lse, delta)
        dv_sum[...] += product(weights.astype(dout.dtype), step.rows(dout))
        dk_sum[...] += product(dscores.astype(q.dtype), step.rows(q))

    @pl.when(step.last)
    def _() -> None:
        dk[...] = step.rows(dk_sum[...] * step.scale).astype(dk.dtype)
        dv[...] = step.rows(dv_sum[...]).astype(dv.dtype)


def product(a: Array, b: Array, dim_a: int = 1, dim_b: int = 0) -> Array:
    """A matrix product over one dim of each, summed in float32; float32 factors keep all their
    bits.
    """
    if a.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    else:
        precision = jax.lax.Precision.DEFAULT
    dims = ((dim_a,), (dim_b,)), ((), ())
    return jax.lax.dot_general(a, b, dims, precision, jnp.float32)


# Steps.

_Shown = Callable[[Array, float], Array]
"""Takes a tile's array and a value for the places that are not seen, and gives an array that may be
summed.
"""


class _Step(NamedTuple):
    """A step of a kernel."""

    call: Call
    scale: float
    first: Array
    """Whether it is the first of its row, where sums begin."""
    last: Array
    """Whether it is the last of its row, where sums are written."""
    state: Array
    """Whether its tile is EMPTY, PARTIAL or FULL."""
    seen: Callable[[], Array]
    """Gives which places of a partial tile are seen, [t, q]."""
    across: bool
    """As in `_Walk`."""

    def rows(self, x: Ref) -> Array:
        """Turn an array as it lies into [places, h], or turn such rows into an array that lies
        so.
        """
        return x[...].T if self.across else x[...]

    def columns(self, x: Ref) -> Array:
        """Turn an array as it lies into [h, places], or turn such columns into an array that
        lies so.
        """
        return x[...] if self.across else x[...].T

    def scores(self, q: Ref, k: Ref) -> Array:
        scores = product(self.rows(k), self.columns(q)) * self.scale
        return cap_scores(scores, self.call.softcap)

    def gradients(
        self, shown: _Shown, q: Ref, dout: Ref, k: Ref, v: Ref, lse: Ref, delta: Ref
    ) -> tuple[Array, Array]:
        """Return the weights of the tile, made again from the log-sum-exp, and the gradient of its
        scores.
        """
        scores = self.scores(q, k)
        weights = shown(jnp.exp(scores - lse[...]), 0.0)
        dcapped = weights * (product(self.rows(v), self.columns(dout)) - delta[...])
        return weights, through_cap(dcapped, scores, self.call.softcap)

    def visit(self, body: Callable[[_Shown], None]) -> None:
        pl.when(self.state == FULL)(lambda: body(lambda x, hidden: x))
        pl.when(self.state == PARTIAL)(
            lambda: body(lambda x, hidden: jnp.where(self.seen(), x, hidden))
        )


class _Walk(NamedTuple):
    """The steps of a grid."""

    mask: Mask
    call: Call
    scale: float
    """The factor of the scores."""
    tiles: Tiles
    of_keys: bool
    """Whether rows are tiles of keys."""
    rows: Array | np.ndarray
    """The row of each step, int32 [L], or [B * L] where sequences differ."""
    codes: Array | np.ndarray
    """For each step `entry << 2 | state`: the entry of `Visits`, and the state of its tile."""
    length: int | Array
    """How many steps there are; it is on the device where ids or places are."""
    stride: int
    """How many steps each sequence has in the lists; 0 = all sequences share one list."""
    across: bool
    """Whether arrays lie with their places along the lanes."""

    def by_head(self, x_BSHh: Array, block: int) -> Array:
        """Turn [B, S, H, h] into [B, H, S, h], or across into [B, H, h, S], with zeros up to whole
        tiles.
        """
        if self.across:
            return pad_to(x_BSHh.transpose(0, 2, 3, 1), 3, block)
        return pad_to(x_BSHh.transpose(0, 2, 1, 3), 2, block)

    def by_place(self, x: Array, S: int) -> Array:
        """The inverse of `by_head`."""
        if self.across:
            return x[..., :S].transpose(0, 3, 1, 2)
        return x[:, :, :S].swapaxes(1, 2)

    def at(
        self,
        b: Index,
        n: Index,
        rows: Ref,
        codes: Ref,
    ) -> tuple[Array, Array]:
        """The tile of queries and the tile of keys of a step, read from the lists in SMEM."""
        row = rows[self.stride * b + n]
        tile = codes[self.stride * b + n] >> 2
        if self.of_keys:
            return (tile, row)
        return (row, tile)


def _walk(
    q_BSHh: Array, k_BTKh: Array, mask: Mask, call: Call, tile: int, of_keys: bool = False
) -> _Walk:
    """List the steps of a grid.

    Args:
      q_BSHh, k_BTKh: the queries and keys; only their shapes and dtype are looked at.
      mask: what a query sees.
      call: the options of the call.
      tile: the most queries, and the most keys, of a tile; 0 = as fits.
      of_keys: whether rows are tiles of keys.

    Raises:
      Unserved: no tile divides the mask's blocks, or the list is longer than SMEM holds.
    """
    tiles = _tiles(
        q_BSHh.shape,
        k_BTKh.shape[1],
        q_BSHh.dtype,
        mask,
        call,
        tile,
    )
    steps = flatten_visits(visits(mask, tiles, of_keys))
    B, L = steps.rows_BL.shape
    in_whole_lanes = tiles.block_q % LANES == 0 and tiles.block_k % LANES == 0
    codes_BL = steps.entries_BL << 2 | steps.states_BL
    return _Walk(
        mask=mask,
        call=call,
        scale=call.scale_of(q_BSHh),
        tiles=tiles,
        of_keys=of_keys,
        rows=steps.rows_BL.astype(np.int32).reshape(-1),
        codes=codes_BL.astype(np.int32).reshape(-1),
        length=steps.length,
        stride=L if B > 1 else 0,
        across=in_whole_lanes and q_BSHh.shape[3] % LANES != 0,
    )


def _tiles(
    q_shape: Sequence[int], T: int, dtype: DTypeLike, mask: Mask, call: Call, tile: int = 0
) -> Tiles:
    _, S, _, h = q_shape
    # With more bytes for each place, a long tile does not fit in the 16 MiB of VMEM that all chips
    # have.
    long = max(S, T) > 16 * TILE and h * jnp.dtype(dtype).itemsize <= 2 * LANES
    tile = tile or (LONG_TILE if long else TILE)
    unit_q, unit_k = block_units(mask, call)
    block_q = _block(S, tile, unit_q)
    block_k = _block(T, tile, unit_k)
    return Tiles(S, T, block_q, block_k, call.q_start, call.k_start, call.multiple)


def _block(length: int, most: int, unit: int) -> int:
    """How many places a tile has: of the fewest equal tiles, or for a mask of blocks a number that
    divides `unit`.

    Raises:
      Unserved: no size of a tile divides `unit`.
    """
    if not unit:
        lanes = min(LANES, most)
        return -(-math.ceil(length / math.ceil(length / most)) // lanes) * lanes
    sizes = [size for size in range(_SUBLANES, min(most, unit) + 1, _SUBLANES) if unit % size == 0]
    if not sizes:
        raise Unserved(
            f"blocks of a mask at multiples of {unit} places are no tiles of a multiple of "
            f"{_SUBLANES}"
        )
    return sizes[-1]


def _step(
    walk: _Walk, G: int, lists: Sequence[Ref], q_ids: Sequence[Ref], kv_ids: Sequence[Ref]
) -> _Step:
    """The step that a kernel is at; the refs are those of its lists and of its tile's ids."""
    rows, codes, starts = lists
    T = walk.tiles.T
    block_q = walk.tiles.block_q
    block_k = walk.tiles.block_k
    if walk.of_keys:
        of_n = 2
        of_g = 3
    else:
        of_n = 3
        of_g = 2
    b = pl.program_id(0)
    g = pl.program_id(of_g)
    n = pl.program_id(of_n)
    at = walk.stride * b + n
    end = rows.shape[0] - 1
    first = (n == 0) | (rows[jnp.maximum(at - 1, 0)] != rows[at])
    last = (n == pl.num_programs(of_n) - 1) | (rows[jnp.minimum(at + 1, end)] != rows[at])
    if walk.of_keys:
        first = first & (g == 0)
        last = last & (g == G - 1)
    query_tile, key_tile = walk.at(b, n, rows, codes)
    code = codes[at]

    def seen() -> Array:
        row = query_tile * block_q + jax.lax.broadcasted_iota(jnp.int32, (1, block_q), 1)
        column = key_tile * block_k + jax.lax.broadcasted_iota(jnp.int32, (block_k, 1), 0)
        ids = [
            (of_keys[0], of_queries[0]) for of_keys, of_queries in zip(kv_ids, q_ids, strict=True)
        ]
        seen = in_tile(walk.mask, starts[0] + row, starts[1] + column, ids)
        if T % block_k:
            return seen & (column < T)
        return seen

    state = code & 3
    return _Step(walk.call, walk.scale, first, last, state, seen, walk.across)


# Launching.


def _launch(
    kernel: Callable[..., None],
    walk: _Walk,
    arrays: dict[ArrayKind, list[Array]],
    outputs: list[tuple[ArrayKind, DTypeLike]],
    sums: list[tuple[int, int]],
    products: int,
) -> list[Array]:
    """Run a kernel that reads arrays filled up to whole tiles, writes `outputs` and has float32
    `sums` of these shapes.

    It makes `products` matrix products for a tile, which is for XLA's estimate of its time.
    """
    B, H, *last = arrays["queries"][0].shape
    K = arrays["keys"][0].shape[1]
    tiles = walk.tiles
    h = last[0] if walk.across else last[1]
    segments = segments_in(walk.mask)
    ids: dict[ArrayKind, list[Array]] = {
        "q_ids": [_by_tile(leaf.q_ids, tiles.block_q) for leaf in segments],
        "kv_ids": [_by_tile(leaf.kv_ids, tiles.block_k) for leaf in segments],
    }
    kinds = (*ids.items(), *arrays.items())
    given: list[tuple[ArrayKind, Array]] = [(kind, x) for kind, some in kinds for x in some]
    specs = _specs(walk, H // K, h)

    def body(*refs: Ref) -> None:
        n = len(segments)
        lists = refs[:3]
        q_ids = refs[3 : 3 + n]
        kv_ids = refs[3 + n : 3 + 2 * n]
        others = refs[3 + 2 * n :]
        kernel(_step(walk, H // K, lists, q_ids, kv_ids), *others)

    shapes: dict[ArrayKind, tuple[int, ...]] = {
        kind: found[0].shape for kind, found in arrays.items()
    }
    shapes["per_query"] = B, H, tiles.shape[0], 1, tiles.block_q
    moved = sum(x.size * x.dtype.itemsize for _, x in given)
    steps = walk.stride or len(walk.rows)
    places = B * H * steps * tiles.block_q * tiles.block_k
    # sums of dk and dv go on over the query heads of a kv head, which are then the innermost dim
    if walk.of_keys:
        grid = (B, K, walk.length, H // K)
        semantics = ("parallel", "parallel", "arbitrary", "arbitrary")
    else:
        grid = (B, K, H // K, walk.length)
        semantics = ("parallel", "parallel", "parallel", "arbitrary")
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(shapes[kind], dtype) for kind, dtype in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[specs[kind] for kind, _ in given],
            out_specs=[specs[kind] for kind, _ in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * places * h, transcendentals=places, bytes_accessed=moved
        ),
        interpret=walk.call.interpret,
        name=f"attention{kernel.__name__.removesuffix('_kernel')}",
    )(walk.rows, walk.codes, walk.call.starts(), *(x for _, x in given))


def _specs(
    walk: _Walk,
    G: int,
    h: int,
) -> dict[ArrayKind, pl.BlockSpec]:
    """The block of each kind of array that a step takes."""
    q = walk.tiles.block_q
    t = walk.tiles.block_k

    def spec(shape: Sequence[int | None], index: Callable[..., tuple[Index, ...]]) -> pl.BlockSpec:
        """Make a spec; `index` takes a sequence, a kv head, a query head, a tile of queries and a
        tile of keys.
        """

        def of_step(
            b: Index, kv_head: Index, outer: Index, inner: Index, rows: Ref, codes: Ref, _: Ref
        ) -> tuple[Index, ...]:
            if walk.of_keys:
                n = outer
                g = inner
            else:
                n = inner
                g = outer
            Q, N = walk.at(b, n, rows, codes)
            return index(b, kv_head, kv_head * G + g, Q, N)

        return pl.BlockSpec(shape, of_step)

    if walk.across:
        block_of_q = (None, None, h, q)
        block_of_k = (None, None, h, t)
    else:
        block_of_q = (None, None, q, h)
        block_of_k = (None, None, t, h)

    def place(tile: Index) -> tuple[Index, Index]:
        return (0, tile) if walk.across else (tile, 0)

    return {
        "queries": spec(
            block_of_q,
            lambda b, kv_head, head, Q, N: (b, head, *place(Q)),
        ),
        "keys": spec(
            block_of_k,
            lambda b, kv_head, head, Q, N: (b, kv_head, *place(N)),
        ),
        "per_query": spec(
            (None, None, None, 1, q),
            lambda b, kv, head, Q, N: (b, head, Q, 0, 0),
        ),
        "q_ids": spec(
            (None, None, 1, q),
            lambda b, kv_head, head, Q, N: (b, Q, 0, 0),
        ),
        "kv_ids": spec(
            (None, None, 1, t),
            lambda b, kv_head, head, Q, N: (b, N, 0, 0),
        ),
    }


def _by_tile(x: Array, block: int) -> Array:
    """Turn [..., S] into [..., Q, 1, q], zeros up to whole tiles; a block has the last two dims
    whole for any q.
    """
    return pad_to(x, -1, block).reshape(
        *x.shape[:-1],
        -1,
        1,
        block,
    )
