"""The walk of the TPU kernels of attention over the visited tiles: the list of steps, the part of
each array that a step takes, and the call that runs a kernel over the steps.

Each step of the grid is a visited tile. The tiles stand row after row in one flat list; a row is a
tile of queries for the output and dq, and a tile of keys for dk and dv. A grid of all rows by the
longest row would idle where rows differ in length, as with BigBird's global blocks. Where ids or
places are traced, the number of steps is traced too. The list goes to SMEM ahead of the kernel
(scalar prefetch), so that the arrays of a step are copied during the step before.

Arrays whose head_dim fills no whole tiles of 128 lanes lie with their places along the lanes
instead, as [h, S]. They then take no padding in HBM, half the room of [S, 64], and XLA's matmuls
read and write them as they are, whereas XLA copied every array of the other kind to a layout
without gaps. A visited tile of 512 x 512 with head_dim 64 takes 1,166, 1,155 and 1,899 bundles on
v5e (forward, dq, dkv), against 1,196, 1,287 and 1,902 with [S, 64]. To pack two heads of 64 into
one tile of lanes gained nothing: for the forward 1,178 bundles a head on v5e and 953 on v6e,
against 1,197 and 942.

Shapes: as in `jaxpar.kernels.attention.call`; Q tiles of q queries, N tiles of t keys; R rows of up
to W; L steps; G query heads of a kv head.
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
from jaxpar.kernels.attention.call import Call, Index, Ref, Unserved, pad_to
from jaxpar.kernels.attention.tpu_kernels import Step
from jaxpar.kernels.attention.visits import block_units, flatten_visits, in_tile, visits
from jaxpar.kernels.masks import Mask, Tiles, segments_in

TILE = 512
LONG_TILE = 1024
"""The most queries, and the most keys, of a tile; LONG_TILE is for sequences longer than 16 TILE.

A long tile takes 10 to 22% fewer bundles for each score on v6e, but computes more scores that no
query sees.
"""
_SUBLANES = 8

ArrayKind = Literal["queries", "keys", "per_query", "q_ids", "kv_ids"]
"""The kinds of arrays: [B, H, S, h], [B, K, T, h] (or with `Walk.across` [B, H, h, S], [B, K, h,
T]), [B, H, Q, 1, q], and ids [B, Q, 1, q] and [B, N, 1, t]."""


class Walk(NamedTuple):
    """The steps of a grid."""

    mask: Mask
    call: Call
    scale: float
    """The factor of the scores."""
    tiles: Tiles
    of_keys: bool
    """Whether rows are tiles of keys, and not tiles of queries."""
    rows: Array | np.ndarray
    """The row of each step, int32 [L], or [B * L] where sequences differ."""
    codes: Array | np.ndarray
    """For each step `entry << 2 | state`: the entry of `Visits`, and the state of its tile."""
    length: int | Array
    """How many steps there are; it is traced where ids or places are."""
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
        """Turn an array that `by_head` made back into [B, S, H, h], without padding."""
        if self.across:
            return x[..., :S].transpose(0, 3, 1, 2)
        return x[:, :, :S].swapaxes(1, 2)

    def at(self, b: Index, n: Index, rows: Ref, codes: Ref) -> tuple[Array, Array]:
        """Read the tile of queries and the tile of keys of a step from the lists in SMEM."""
        row = rows[self.stride * b + n]
        tile = codes[self.stride * b + n] >> 2
        if self.of_keys:
            return tile, row
        return row, tile


def make_walk(
    q_BSHh: Array, k_BTKh: Array, mask: Mask, call: Call, tile: int, of_keys: bool = False
) -> Walk:
    """List the steps of a grid.

    Args:
      q_BSHh, k_BTKh: the queries and keys, of which only shapes and dtype are read.
      mask: which keys a query sees.
      tile: the most queries, and the most keys, of a tile; 0 = as fits.
      of_keys: whether rows are tiles of keys, and not tiles of queries.

    Raises:
      Unserved: no tile divides the mask's blocks, or the list is longer than SMEM holds.
    """
    tiles = cut_tiles(q_BSHh.shape, k_BTKh.shape[1], q_BSHh.dtype, mask, call, tile)
    steps = flatten_visits(visits(mask, tiles, of_keys))
    B, L = steps.rows_BL.shape
    in_whole_lanes = tiles.block_q % LANES == 0 and tiles.block_k % LANES == 0
    codes_BL = steps.entries_BL << 2 | steps.states_BL
    return Walk(
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


def cut_tiles(
    q_shape: Sequence[int], T: int, dtype: DTypeLike, mask: Mask, call: Call, tile: int = 0
) -> Tiles:
    """Cut queries and keys into the fewest equal tiles, or into parts of the mask's blocks.

    Args:
      q_shape: the shape of the queries, [B, S, H, h].
      T: the number of keys.
      dtype: the dtype of the arrays.
      mask: which keys a query sees.
      call: the options of the call, which say where places begin.
      tile: the most queries, and the most keys, of a tile; 0 = as fits.

    Raises:
      Unserved: no tile divides the mask's blocks.
    """
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
    """Return the number of places of a tile: of the fewest equal tiles, or for a mask of blocks a
    number that divides `unit`.

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
    walk: Walk, G: int, lists: Sequence[Ref], q_ids: Sequence[Ref], kv_ids: Sequence[Ref]
) -> Step:
    """Make the step that a kernel is at, from the refs of its lists and of its tile's ids."""
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

    return Step(
        call=walk.call,
        scale=walk.scale,
        first=first,
        last=last,
        state=code & 3,
        seen=seen,
        across=walk.across,
    )


def launch(
    kernel: Callable[..., None],
    walk: Walk,
    arrays: dict[ArrayKind, list[Array]],
    outputs: list[tuple[ArrayKind, DTypeLike]],
    sums: list[tuple[int, int]],
    products: int,
) -> list[Array]:
    """Run a kernel that reads arrays padded to whole tiles, writes `outputs` and has float32 `sums`
    of these shapes.

    Args:
      products: the number of matrix products for each tile, by which XLA estimates the time.
    """
    B, H, *last = arrays["queries"][0].shape
    K = arrays["keys"][0].shape[1]
    tiles = walk.tiles
    h = last[0] if walk.across else last[1]
    segments = segments_in(walk.mask)
    ids: dict[ArrayKind, list[Array]] = {
        "q_ids": [by_tile(leaf.q_ids, tiles.block_q) for leaf in segments],
        "kv_ids": [by_tile(leaf.kv_ids, tiles.block_k) for leaf in segments],
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
        name=f"attention_{kernel.__name__.removesuffix('_kernel')}",
    )(walk.rows, walk.codes, walk.call.starts(), *(x for _, x in given))


def _specs(walk: Walk, G: int, h: int) -> dict[ArrayKind, pl.BlockSpec]:
    """Make the block of each kind of array that a step takes."""
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
        "queries": spec(block_of_q, lambda b, kv, head, Q, N: (b, head, *place(Q))),
        "keys": spec(block_of_k, lambda b, kv, head, Q, N: (b, kv, *place(N))),
        "per_query": spec((None, None, None, 1, q), lambda b, kv, head, Q, N: (b, head, Q, 0, 0)),
        "q_ids": spec((None, None, 1, q), lambda b, kv, head, Q, N: (b, Q, 0, 0)),
        "kv_ids": spec((None, None, 1, t), lambda b, kv, head, Q, N: (b, N, 0, 0)),
    }


def by_tile(x: Array, block: int) -> Array:
    """Turn [..., S] into [..., Q, 1, q], with zeros up to whole tiles; a block has the last two
    dims whole for any q.
    """
    return pad_to(x, -1, block).reshape(*x.shape[:-1], -1, 1, block)
