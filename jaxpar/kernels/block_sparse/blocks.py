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
"""The map of the blocks that are kept. A numpy array is known while tracing; a JAX array may depend
on values."""


class SparseTiles(NamedTuple):
    """A map cut into tiles of a kernel; no tile lies in two blocks."""

    map_MN: Blocks
    tile_i: int
    """The rows of the matrix in a tile."""
    tile_o: int
    """The columns of the matrix in a tile."""

    @property
    def most(self) -> int:
        """The most tiles that are visited: the tiles that are kept, or all tiles where values say
        which are kept.
        """
        if isinstance(self.map_MN, jax.Array):
            return self.map_MN.size
        return int(np.sum(self.map_MN))

    def entry_bytes(self, dtype: DTypeLike) -> int:
        """Count the bytes of a tile's entries."""
        return self.tile_i * self.tile_o * jnp.dtype(dtype).itemsize

    def visits(self, by_column: bool) -> Visits:
        """List the tiles that are kept: for each row of tiles their columns, or for each column
        their rows. There is one list, as there is for one sequence of attention.
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
      shape: the shape of the matrix, [I, O].
      largest: the most rows and columns of a tile.
      unit: the number that a tile's sides are multiples of.

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
    """Return the rows and columns of a block of a matrix of this shape, which the map divides."""
    return shape[0] // map_MN.shape[0], shape[1] // map_MN.shape[1]


def largest_divisor(size: int, most: int, unit: int) -> int:
    """Return the largest number up to `most` that divides `size` and is a multiple of `unit`; 0 =
    there is none.
    """
    sizes = [n for n in range(unit, min(size, most) + 1, unit) if size % n == 0]
    return max(sizes, default=0)


class Cost(NamedTuple):
    """The cost of a kernel that a compiler and a rehearsal are told."""

    flops: int
    bytes_accessed: int


def stated_cost(
    tiles: SparseTiles, rows: int, read_each: int, others: Sequence[Array | jax.ShapeDtypeStruct]
) -> Cost:
    """Count the cost of one product; where values say which tiles are kept, all tiles count.

    Args:
      tiles: the tiles of the matrix.
      rows: the number of rows of the other factor.
      read_each: the bytes that are read for each tile that is visited.
      others: the arrays that are read or written once.
    """
    flops = 2 * rows * tiles.most * tiles.tile_i * tiles.tile_o
    once = sum(math.prod(x.shape) * x.dtype.itemsize for x in others)
    return Cost(flops, tiles.most * read_each + once)
