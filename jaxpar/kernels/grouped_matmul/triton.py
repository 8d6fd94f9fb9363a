"""Grouped matmuls on NVIDIA GPUs by Pallas' Triton lowering.

A program of the product has a tile of rows of one expert, and a tile of columns; the tiles of an
expert begin at its first row, so that each row is in one tile. How many tiles an expert has is
known only when the program runs, so there are as many programs as there may be at most, and the
last ones have nothing to do. A program of the matrices' gradient has a tile of one expert's matrix,
and walks the expert's rows (as megablocks, arXiv:2211.15841, section 5).

Shapes: E experts, R rows, I and O the dims of a matrix; r, i and o the same dims of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from jaxpar.kernels.attention.call import Ref
from jaxpar.kernels.attention.triton_kernels import product

_COLUMNS = 128
_STEP = 32
"""The rows and columns of a tile, and the dim that one step sums over: three stages of bfloat16
take 48 KB of shared memory, with 128 x 128 sums in the registers of eight warps."""
_NARROW = 64
"""The rows and columns of a tile of float32, whose sums are of full precision."""
_LEAST = 16
"""The least side of a tile that tensor cores multiply."""


class _Tiles(NamedTuple):
    """The tiles of rows: of each the expert, the first row, and the end of the expert's rows.

    Empty rows count as those of an expert E, which has no matrix; tiles that are left over have no
    rows.
    """

    expert_T: Array
    row_T: Array
    end_T: Array


def multiply(
    x_RK: Array, weight_EIO: Array, sizes_E: Array, transposed: bool, interpret: bool
) -> Array:
    """Multiply each row by the matrix of its expert, or with `transposed` by its transpose, summed
    in float32; empty rows become zeros.
    """
    rows, inner = x_RK.shape
    columns = weight_EIO.shape[1 if transposed else 2]
    side = _side(x_RK)
    block_r = _block(rows, side)
    tiles = _tiles_of(sizes_E, rows, block_r)
    out = jax.ShapeDtypeStruct((rows, columns), weight_EIO.dtype)
    kernel = partial(
        _multiply_kernel, block_r, _block(inner, _STEP), _block(columns, side), transposed
    )
    grid = (pl.cdiv(columns, _block(columns, side)), len(tiles.row_T))
    cost = _cost(rows * inner * columns, [x_RK, weight_EIO, out])
    return _call(kernel, "grouped_multiply", grid, [*tiles, x_RK, weight_EIO], out, cost, interpret)


def weight_gradient(x_RI: Array, dy_RO: Array, sizes_E: Array, interpret: bool) -> Array:
    """Sum the outer products of each expert's rows, [E, I, O] in float32."""
    rows, inner = x_RI.shape
    columns = dy_RO.shape[1]
    side = _side(x_RI)
    block_i = _block(inner, side)
    block_o = _block(columns, side)
    out = jax.ShapeDtypeStruct((len(sizes_E), inner, columns), jnp.float32)
    ends_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    kernel = partial(_weight_gradient_kernel, _block(rows, _STEP), block_i, block_o)
    grid = (pl.cdiv(columns, block_o), pl.cdiv(inner, block_i), len(sizes_E))
    cost = _cost(rows * inner * columns, [x_RI, dy_RO, out])
    arrays = [ends_E - sizes_E, ends_E, x_RI, dy_RO]
    return _call(kernel, "grouped_weight_gradient", grid, arrays, out, cost, interpret)


def _tiles_of(sizes_E: Array, rows: int, block_r: int) -> _Tiles:
    """List the tiles of all experts' rows, one expert after another, and of the empty rows."""
    empty = rows - jnp.sum(sizes_E)
    sizes = jnp.concatenate([sizes_E, empty[None]]).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    last = jnp.cumsum(pl.cdiv(sizes, block_r))
    tile_T = jnp.arange(pl.cdiv(rows, block_r) + len(sizes) - 1, dtype=jnp.int32)
    expert_T = jnp.sum(tile_T[:, None] >= last, axis=1).astype(jnp.int32)
    known_T = jnp.minimum(expert_T, len(sizes) - 1)
    within_T = tile_T - (last - pl.cdiv(sizes, block_r))[known_T]
    row_T = (ends - sizes)[known_T] + block_r * within_T
    left_over_T = expert_T == len(sizes)
    return _Tiles(
        expert_T=known_T,
        row_T=jnp.where(left_over_T, rows, row_T),
        end_T=ends[known_T],
    )


def _multiply_kernel(
    block_r: int,
    block_k: int,
    block_o: int,
    transposed: bool,
    experts: Ref,
    starts: Ref,
    ends: Ref,
    x: Ref,
    weight: Ref,
    y: Ref,
) -> None:
    tile = pl.program_id(1)
    expert = experts[tile]
    rows = _Span(starts[tile], block_r, ends[tile])
    columns = _span(pl.program_id(0), block_o, y.shape[1])

    @pl.when(rows.start < rows.end)
    def _() -> None:
        def add(k: Array, total: Array) -> Array:
            inner = _span(k, block_k, x.shape[1])
            taken = _load(x, rows, inner)
            if transposed:
                return total + product(taken, _load(weight, columns, inner, expert), 1, 1)
            return total + product(taken, _load(weight, inner, columns, expert), 1, 0)

        has_matrix = (expert < weight.shape[0]).astype(jnp.int32)
        zeros = jnp.zeros((block_r, block_o), jnp.float32)
        total = lax.fori_loop(0, has_matrix * pl.cdiv(x.shape[1], block_k), add, zeros)
        place = y.at[rows.slice, columns.slice]
        plt.store(place, total.astype(y.dtype), mask=_mask(rows, columns))


def _weight_gradient_kernel(
    block_r: int,
    block_i: int,
    block_o: int,
    starts: Ref,
    ends: Ref,
    x: Ref,
    dy: Ref,
    dweight: Ref,
) -> None:
    expert = pl.program_id(2)
    inner = _span(pl.program_id(1), block_i, x.shape[1])
    columns = _span(pl.program_id(0), block_o, dy.shape[1])
    start = starts[expert]
    end = ends[expert]

    def add(step: Array, total: Array) -> Array:
        rows = _Span(start + step * block_r, block_r, end)
        return total + product(_load(x, rows, inner), _load(dy, rows, columns), 0, 0)

    zeros = jnp.zeros((block_i, block_o), jnp.float32)
    steps = (end - start + block_r - 1) // block_r
    total = lax.fori_loop(0, steps.astype(jnp.int32), add, zeros)
    place = dweight.at[expert, inner.slice, columns.slice]
    plt.store(place, total, mask=_mask(inner, columns))


class _Span(NamedTuple):
    """Some places along a dim, of which those from `end` on do not count; None = all count."""

    start: Any
    size: int
    end: Any

    @property
    def slice(self) -> Any:
        """The places, for a reference."""
        return pl.ds(self.start, self.size)

    @property
    def counts(self) -> Array | None:
        """Whether each place counts."""
        return None if self.end is None else self.start + jnp.arange(self.size) < self.end


def _span(tile: Any, size: int, whole: int) -> _Span:
    """Return a tile's places along a dim."""
    return _Span(tile * size, size, whole if whole % size else None)


def _mask(first: _Span, second: _Span) -> Array | None:
    """Find which entries of a tile count; None = all."""
    rows = first.counts
    columns = second.counts
    if rows is None:
        return None if columns is None else jnp.broadcast_to(columns[None], _shape(first, second))
    if columns is None:
        return jnp.broadcast_to(rows[:, None], _shape(first, second))
    return rows[:, None] & columns[None]


def _shape(first: _Span, second: _Span) -> tuple[int, int]:
    return first.size, second.size


def _load(ref: Ref, first: _Span, second: _Span, *matrix: Array) -> Array:
    """Load a tile, of one of several matrices where they are, with zeros for entries that do not
    count.
    """
    mask = _mask(first, second)
    other = None if mask is None else 0.0
    return plt.load(ref.at[*matrix, first.slice, second.slice], mask=mask, other=other)


def _side(x: Array) -> int:
    return _COLUMNS if x.dtype == jnp.bfloat16 else _NARROW


def _block(size: int, most: int) -> int:
    """Return the side of a tile along a dim: a power of two."""
    return min(most, max(_LEAST, pl.next_power_of_2(size)))


def _cost(multiplied: int, arrays: list[Any]) -> dict[str, str]:
    """State what a kernel computes and moves, where a rehearsal reads it."""
    moved = sum(array.size * array.dtype.itemsize for array in arrays)
    return {"flops": str(2 * multiplied), "bytes_accessed": str(moved)}


def _call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    arrays: list[Array],
    out: jax.ShapeDtypeStruct,
    cost: dict[str, str],
    interpret: bool,
) -> Array:
    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole(x) for x in arrays],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name=name,
        metadata=cost,
    )(*arrays)
