"""Block-sparse matmuls on TPUs: two Pallas kernels whose grids have a step for each tile that is
kept.

The tiles stand row after row in one flat list, which goes to SMEM ahead of the kernel, as in
`jaxpar.kernels.attention.tpu`. For a product the list is by columns of the matrix, or by rows for
the product with its transpose; a sum stays in VMEM from the first step of its row to its last.
Where values say which tiles are kept, the number of steps is traced too.

Shapes: T rows of x, I and O the dims of the matrix; t, i and o the same dims of a tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxpar.base.hardware import LANES
from jaxpar.kernels.attention.call import Index, Ref, pad_to
from jaxpar.kernels.attention.tpu_kernels import product
from jaxpar.kernels.attention.visits import Unserved, check_list, flatten_visits
from jaxpar.kernels.block_sparse.blocks import Blocks, SparseTiles, cut_into_tiles, stated_cost
from jaxpar.kernels.masks import FULL

ROWS = 512
"""The most rows of x in a tile: with fewer, reading the matrix would take longer than multiplying
by it."""
SIDE = 512
"""The most rows, and the most columns, of the matrix in a tile."""
_STAYING_BYTES = 6 * 2**20
"""The most bytes of the rows that stay in VMEM, with the rows that are copied for the next step: of
the 16 MiB of VMEM, the tiles of the matrix, of the output and of the sum take up to 5."""
_SUBLANES = 16


def refusal(map_MN: Blocks, shape: tuple[int, int], unit: int = LANES) -> str:
    """Say why a matrix cannot be served; empty = it can."""
    tiles = cut_into_tiles(map_MN, shape, (SIDE, SIDE), unit)
    if tiles is None:
        return (
            f"blocks of {shape[0] // map_MN.shape[0]} x {shape[1] // map_MN.shape[1]} are no "
            + (f"multiples of {unit} lanes")
        )
    try:
        check_list(max(tiles.most, *tiles.map_MN.shape))
    except Unserved as unserved:
        return str(unserved)
    return ""


def multiply(
    x_TI: Array,
    weight_IO: Array,
    map_MN: Blocks,
    transposed: bool = False,
    interpret: bool = False,
    unit: int = LANES,
) -> Array:
    """Return x @ W, or with `transposed` x @ W.T where x is [T, O], summed in float32, in the dtype
    of x.

    Args:
      weight_IO: the matrix W; tiles that are not kept are not read.
      map_MN: which blocks of the matrix are kept.
      transposed: whether to multiply by W.T.
      interpret: whether the kernel is interpreted.
      unit: the number that a tile's sides are multiples of: LANES on a chip.
    """
    tiles = _tiles(map_MN, weight_IO, unit)
    steps = flatten_visits(tiles.visits(by_column=not transposed))
    tile_i = tiles.tile_i
    tile_o = tiles.tile_o
    if transposed:
        taken = tile_o
        made = tile_i
        columns = weight_IO.shape[0]
    else:
        taken = tile_i
        made = tile_o
        columns = weight_IO.shape[1]
    block_t = _row_block(len(x_TI))
    x = pad_to(x_TI, 0, block_t)
    # Rows that stay in VMEM while all tiles pass by are read once, and not for each tile.
    stays = 2 * block_t * x.shape[1] * x.dtype.itemsize <= _STAYING_BYTES

    def of_weight(t: Index, n: Index, rows: Ref, codes: Ref) -> tuple[Index, Index]:
        entry = codes[n] >> 2
        return (rows[n], entry) if transposed else (entry, rows[n])

    def of_x(t: Index, n: Index, rows: Ref, codes: Ref) -> tuple[Index, Index]:
        return (t, 0) if stays else (t, codes[n] >> 2)

    out = jax.ShapeDtypeStruct((len(x), columns), x.dtype)
    blocks_of_rows = len(x) // block_t
    read_each = tiles.entry_bytes(weight_IO.dtype) * blocks_of_rows
    if not stays:
        read_each += len(x) * taken * x.dtype.itemsize
    cost = stated_cost(tiles, len(x), read_each, [x, out] if stays else [out])
    y = pl.pallas_call(
        partial(_multiply_kernel, taken if stays else 0, transposed),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks_of_rows, steps.length),
            in_specs=[
                pl.BlockSpec((block_t, x.shape[1] if stays else taken), of_x),
                pl.BlockSpec((tile_i, tile_o), of_weight),
            ],
            out_specs=pl.BlockSpec((block_t, made), lambda t, n, rows, codes: (t, rows[n])),
            scratch_shapes=[pltpu.VMEM((block_t, made), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(transcendentals=0, **cost._asdict()),
        interpret=interpret,
        name="block_sparse_multiply",
    )(*_lists(steps), x, weight_IO)
    return y[: len(x_TI)]


def weight_gradient(
    x_TI: Array,
    dy_TO: Array,
    map_MN: Blocks,
    interpret: bool = False,
    unit: int = LANES,
) -> Array:
    """Return x.T @ dy [I, O] in float32 where blocks are kept, and anything elsewhere.

    Args:
      dy_TO: the gradients of the product.
      map_MN: which blocks of the matrix are kept.
      interpret: whether the kernel is interpreted.
      unit: the number that a tile's sides are multiples of: LANES on a chip.
    """
    out = jax.ShapeDtypeStruct((x_TI.shape[1], dy_TO.shape[1]), jnp.float32)
    tiles = _tiles(map_MN, out, unit)
    tile = (tiles.tile_i, tiles.tile_o)
    steps = flatten_visits(tiles.visits(by_column=False))
    block_t = _row_block(len(x_TI))
    x = pad_to(x_TI, 0, block_t)
    dy = pad_to(dy_TO, 0, block_t)
    read_each = len(x) * (tiles.tile_i + tiles.tile_o) * x.dtype.itemsize
    cost = stated_cost(tiles, len(x), read_each, [out])
    return pl.pallas_call(
        _weight_gradient_kernel,
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps.length, len(x) // block_t),
            in_specs=[
                pl.BlockSpec((block_t, tile[0]), lambda n, t, rows, codes: (t, rows[n])),
                pl.BlockSpec((block_t, tile[1]), lambda n, t, rows, codes: (t, codes[n] >> 2)),
            ],
            out_specs=pl.BlockSpec(tile, lambda n, t, rows, codes: (rows[n], codes[n] >> 2)),
            scratch_shapes=[pltpu.VMEM(tile, jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(transcendentals=0, **cost._asdict()),
        interpret=interpret,
        name="block_sparse_weight_gradient",
    )(*_lists(steps), x, dy)


def _multiply_kernel(
    width: int,
    transposed: bool,
    rows: Ref,
    codes: Ref,
    x: Ref,
    weight: Ref,
    y: Ref,
    total: Ref,
) -> None:
    """Add a tile's product to its row's sum.

    Args:
      width: how many columns of x a tile takes, where all columns are in VMEM; 0 = only the tile's
        own are.
      transposed: whether to multiply by the transpose.
      rows, codes: the lists of steps.
      x, weight, y, total: the step's part of each array.
    """
    n = pl.program_id(1)
    first = (n == 0) | (rows[jnp.maximum(n - 1, 0)] != rows[n])
    end = rows.shape[0] - 1
    last = (n == pl.num_programs(1) - 1) | (rows[jnp.minimum(n + 1, end)] != rows[n])

    @pl.when(first)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(codes[n] & 3 == FULL)
    def _() -> None:
        if width:
            taken = x[:, pl.ds(pl.multiple_of((codes[n] >> 2) * width, width), width)]
        else:
            taken = x[...]
        total[...] += product(taken, weight[...], 1, 1 if transposed else 0)

    @pl.when(last)
    def _() -> None:
        y[...] = total[...].astype(y.dtype)


def _weight_gradient_kernel(
    rows: Ref, codes: Ref, x: Ref, dy: Ref, dweight: Ref, total: Ref
) -> None:
    t = pl.program_id(1)

    @pl.when(t == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(codes[pl.program_id(0)] & 3 == FULL)
    def _() -> None:
        total[...] += product(x[...], dy[...], 0, 0)

    @pl.when(t == pl.num_programs(1) - 1)
    def _() -> None:
        dweight[...] = total[...]


def _tiles(map_MN: Blocks, matrix: Any, unit: int) -> SparseTiles:
    tiles = cut_into_tiles(map_MN, matrix.shape, (SIDE, SIDE), unit)
    if tiles is None:
        raise Unserved(refusal(map_MN, matrix.shape, unit))
    return tiles


def _row_block(rows: int) -> int:
    """Return the number of rows of x in a tile, of the fewest equal tiles."""
    tiles = -(-rows // ROWS)
    return -(-rows // (tiles * _SUBLANES)) * _SUBLANES


def _lists(steps: Any) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Return the row of each step, and `entry << 2 | state` of its tile, int32 [L]."""
    codes_BL = steps.entries_BL << 2 | steps.states_BL
    return steps.rows_BL.astype(np.int32).reshape(-1), codes_BL.astype(np.int32).reshape(-1)
