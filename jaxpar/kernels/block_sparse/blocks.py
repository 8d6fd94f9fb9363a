"""The blocks of a matrix that a kernel multiplies, cut into its tiles and listed.

Shapes: I and O the dims of the matrix; M by N its blocks, or the tiles that they are cut into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from jaxpar.kernels.attention.visits import Visits, list_tiles
from jaxpar.kernels.masks import EMPTY, FULL, numpy_for

Blocks: TypeAlias = Bool[Array, "M N"] | Bool[np.ndarray, "M N"]
"""Which blocks are kept. In numpy it is known while tracing; in JAX it may depend on values."""


class SparseTiles(NamedTuple):
    """A map cut into tiles of a kernel: none of them lies in two blocks."""

    map_MN: Blocks
    tile_i: int
    """Rows of the matrix in a tile."""
    tile_o: int
    """Columns of the matrix in a tile."""

    @property
    def most(self) -> int:
        """How many tiles are visited at most: those that are kept, or all where values say so."""
        if isinstance(self.map_MN, jax.Array):
            return self.map_MN.size
        return int(np.sum(self.map_MN))

    def entry_bytes(self, dtype: DTypeLike) -> int:
        """The bytes of a tile's entries."""
        return self.tile_i * self.tile_o * jnp.dtype(dtype).itemsize

    def visits(self, by_column: bool) -> Visits:
        """The tiles that are kept: for each row of tiles their columns, or for each column their
        rows. There is one list, as of one sequence.
        """
        xp = numpy_for(self.map_MN)
        states_MN = xp.where(self.map_MN, FULL, EMPTY)
        if by_column:
            states_MN = states_MN.T
        if xp is np:
            longest = None
        else:
            longest = states_MN.shape[1]
        return list_tiles(states_MN[None], longest)


def cut_into_tiles(
    map_MN: Blocks, shape: Sequence[int], largest: tuple[int, int], unit: int
) -> SparseTiles | None:
    """Cut blocks into tiles.

    Args:
      map_MN: which blocks are kept.
      shape: the matrix, [I, O].
      largest: the most rows and columns of a tile.
      unit: what a tile's sides are multiples of.

    Returns:
      The tiles; None where no multiple of `unit` divides a block.
    """
    block_i, block_o = block_size(map_MN, shape)
    tile_i = largest_divisor(block_i, largest[0], unit)
    tile_o = largest_divisor(block_o, largest[1], unit)
    if not tile_i or not tile_o:
        return None
    xp = numpy_for(map_MN)
    finer_MN = xp.repeat(xp.repeat(map_MN, block_i // tile_i, axis=0), block_o // tile_o, axis=1)
    return SparseTiles(finer_MN, tile_i, tile_o)


def block_size(map_MN: Blocks, shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of a block of a matrix of this shape, which the map divides."""
    return shape[0] // map_MN.shape[0], shape[1] // map_MN.shape[1]


def largest_divisor(size: int, most: int, unit: int) -> int:
    """The largest number up to `most` that divides `size` and is a multiple of `unit`; 0 = there is
    none.
    """
    sizes = [n for n in range(unit, min(size, most) + 1, unit) if size % n == 0]
    return max(sizes, default=0)


class Cost(NamedTuple):
    """What a compiler and a rehearsal are told of a kernel."""

    flops: int
    bytes_accessed: int


def stated_cost(
    tiles: SparseTiles, rows: int, read_each: int, others: Sequence[Array | jax.ShapeDtypeStruct]
) -> Cost:
    """The cost of one product; where values say which tiles are kept, that of all.

    Args:
      tiles: the matrix.
      rows: of the other factor.
      read_each: the bytes that are read for each tile that is visited.
      others: the arrays that are read or written once.
    """
    flops = 2 * rows * tiles.most * tiles.tile_i * tiles.tile_o
    once = sum(math.prod(x.shape) * x.dtype.itemsize for x in others)
    return Cost(flops, tiles.most * read_each + once)
