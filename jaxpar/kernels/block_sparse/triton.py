"""Block-sparse matmuls on NVIDIA GPUs by Pallas' Triton lowering.

A program of the product has a tile of its output, and walks the tiles of the matrix that are kept
in its column, or in its row for the product with the transpose. A program of the matrix's gradient
has a tile that is kept, and walks all rows of x. Arrays are read where they lie; the part of a tile
past the last row of x is masked out of loads and stores.

Shapes: T rows of x, I and O the dims of the matrix; t, i and o the same dims of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from jaxpar.kernels.attention.call import Ref
from jaxpar.kernels.attention.triton_kernels import product
from jaxpar.kernels.attention.triton_tiles import LEAST
from jaxpar.kernels.attention.visits import Unserved
from jaxpar.kernels.block_sparse.blocks import (
    Blocks,
    Cost,
    SparseTiles,
    cut_into_tiles,
    largest_divisor,
    stated_cost,
)

SIDE = 64
"""The most rows of x, and the most rows and columns of the matrix, in a tile: three
stages of bfloat16 take 48 KB of shared memory."""


def refusal(map_MN: Blocks, shape: tuple[int, int]) -> str:
    """Say why a matrix cannot be served; empty = it can."""
    if _cut(map_MN, shape) is None:
        return (
            f"blocks of {shape[0] // map_MN.shape[0]} x {shape[1] // map_MN.shape[1]} are no "
            f"multiples of {LEAST}"
        )
    return ""


def multiply(
    x_TI: Array,
    weight_IO: Array,
    map_MN: Blocks,
    transposed: bool = False,
    interpret: bool = False,
) -> Array:
    """Return x @ W, or with `transposed` x @ W.T where x is [T, O], summed in float32, in the dtype
    of x. Tiles that are not kept are not read.
    """
    tiles = _tiles(map_MN, weight_IO.shape)
    entries_BRW, _, some_BR = tiles.visits(by_column=not transposed)
    columns = weight_IO.shape[0] if transposed else weight_IO.shape[1]
    block_t = _row_block(len(x_TI))
    out = jax.ShapeDtypeStruct((len(x_TI), columns), x_TI.dtype)
    return _call(
        partial(_multiply_kernel, tiles.tile_i, tiles.tile_o, block_t, transposed),
        "block_sparse_multiply",
        (some_BR.shape[1], pl.cdiv(len(x_TI), block_t)),
        [jnp.asarray(entries_BRW[0]), jnp.asarray(some_BR[0]), x_TI, weight_IO],
        out,
        stated_cost(tiles, len(x_TI), tiles.entry_bytes(weight_IO.dtype), [x_TI, out]),
        interpret,
    )


def weight_gradient(x_TI: Array, dy_TO: Array, map_MN: Blocks, interpret: bool = False) -> Array:
    """Return x.T @ dy [I, O] in float32 where blocks are kept, and anything elsewhere."""
    out = jax.ShapeDtypeStruct((x_TI.shape[1], dy_TO.shape[1]), jnp.float32)
    tiles = _tiles(map_MN, out.shape)
    entries_BRW, _, some_BR = tiles.visits(by_column=False)
    return _call(
        partial(_weight_gradient_kernel, tiles.tile_i, tiles.tile_o, _row_block(len(x_TI))),
        "block_sparse_weight_gradient",
        entries_BRW.shape[1:],
        [jnp.asarray(entries_BRW[0]), jnp.asarray(some_BR[0]), x_TI, dy_TO],
        out,
        stated_cost(tiles, len(x_TI), tiles.entry_bytes(out.dtype), [x_TI, dy_TO]),
        interpret,
    )


def _multiply_kernel(
    tile_i: int,
    tile_o: int,
    block_t: int,
    transposed: bool,
    entries: Ref,
    some: Ref,
    x: Ref,
    weight: Ref,
    y: Ref,
) -> None:
    row = pl.program_id(0)
    T = x.shape[0]
    rows = _Rows(pl.program_id(1) * block_t, block_t, T)

    def visit(w: Array, total: Array) -> Array:
        entry = entries[row, w]
        if transposed:
            taken = rows.load(x, entry * tile_o, tile_o)
            tile = _load_tile(weight, row * tile_i, tile_i, entry * tile_o, tile_o)
            return total + product(taken, tile, 1, 1)
        taken = rows.load(x, entry * tile_i, tile_i)
        tile = _load_tile(weight, entry * tile_i, tile_i, row * tile_o, tile_o)
        return total + product(taken, tile, 1, 0)

    width = tile_i if transposed else tile_o
    zeros = jnp.zeros((block_t, width), jnp.float32)
    rows.store(y, row * width, lax.fori_loop(0, some[row], visit, zeros))


def _weight_gradient_kernel(
    tile_i: int,
    tile_o: int,
    block_t: int,
    entries: Ref,
    some: Ref,
    x: Ref,
    dy: Ref,
    dweight: Ref,
) -> None:
    row = pl.program_id(0)
    w = pl.program_id(1)
    T = x.shape[0]

    @pl.when(w < some[row])
    def _() -> None:
        column = entries[row, w]

        def add(t: Array, total: Array) -> Array:
            rows = _Rows(t * block_t, block_t, T)
            return total + product(
                rows.load(x, row * tile_i, tile_i), rows.load(dy, column * tile_o, tile_o), 0, 0
            )

        zeros = jnp.zeros((tile_i, tile_o), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(T, block_t), add, zeros)
        place = dweight.at[pl.ds(row * tile_i, tile_i), pl.ds(column * tile_o, tile_o)]
        plt.store(place, total)


class _Rows:
    """Some rows of an array; those from the row `end` on do not exist."""

    def __init__(self, start: int | Array, size: int, end: int):
        self.slice = pl.ds(start, size)
        # a mask where the last tile goes past the end
        self.mask = None if end % size == 0 else (start + jnp.arange(size) < end)[:, None]

    def load(self, ref: Ref, column: int | Array, width: int) -> Array:
        """Load columns of the rows, with zeros where there is no row."""
        other = None if self.mask is None else 0.0
        return plt.load(ref.at[self.slice, pl.ds(column, width)], mask=self.mask, other=other)

    def store(self, ref: Ref, column: int | Array, value: Array) -> None:
        """Store columns of the rows that exist."""
        place = ref.at[self.slice, pl.ds(column, value.shape[1])]
        plt.store(place, value.astype(ref.dtype), mask=self.mask)


def _load_tile(
    weight: Ref, row: int | Array, height: int, column: int | Array, width: int
) -> Array:
    return plt.load(weight.at[pl.ds(row, height), pl.ds(column, width)])


def _call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    arrays: list[Array],
    out: jax.ShapeDtypeStruct,
    cost: Cost,
    interpret: bool,
) -> Array:
    """Run programs over whole arrays, and state their cost where a rehearsal reads it."""

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole(x) for x in arrays],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name=name,
        metadata={name: str(number) for name, number in cost._asdict().items()},
    )(*arrays)


def _cut(map_MN: Blocks, shape: tuple[int, ...]) -> SparseTiles | None:
    """Cut the blocks into tiles whose sides are powers of two."""
    found = cut_into_tiles(map_MN, shape, (SIDE, SIDE), LEAST)
    if found is None:
        return None
    side_i = largest_divisor(found.tile_i & -found.tile_i, SIDE, LEAST)
    side_o = largest_divisor(found.tile_o & -found.tile_o, SIDE, LEAST)
    return cut_into_tiles(map_MN, shape, (side_i, side_o), LEAST)


def _tiles(map_MN: Blocks, shape: tuple[int, ...]) -> SparseTiles:
    tiles = _cut(map_MN, shape)
    if tiles is None:
        raise Unserved(refusal(map_MN, (shape[0], shape[1])))
    return tiles


def _row_block(rows: int) -> int:
    """Return the number of rows of x in a tile."""
    return min(SIDE, max(LEAST, pl.next_power_of_2(rows)))
