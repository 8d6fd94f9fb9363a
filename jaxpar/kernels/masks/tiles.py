"""Queries and keys cut into tiles, and the states of a tile under a mask: it can be left out, it
needs no mask, or the kernel looks at each place.

Places are int32: i of a query, j of a key, and d = i - j. Shapes: S queries, T keys, Q and K their
tiles.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

EMPTY = 0
PARTIAL = 1
FULL = 2
"""How much of a tile may be seen: nothing, some of it, or all of it."""
Places: TypeAlias = Any
"""Places, or truth values or states of places: a numpy array, a jax array or a number. Kernels
compute with all of them alike.
"""
Start: TypeAlias = int | Array
"""The place of the first query or key, which may be traced."""


class Tiles(NamedTuple):
    """Queries and keys cut into tiles; the last ones may be smaller.

    Attributes:
      S, T: how many queries and keys there are.
      block_q, block_k: how many queries and keys a tile has.
      q_start, k_start: the places of the first query and the first key, each an int or a traced
        scalar.
      multiple: a number that traced starts are multiples of.
    """

    S: int
    T: int
    block_q: int
    block_k: int
    q_start: Start = 0
    k_start: Start = 0
    multiple: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers [Q, K] of tiles of queries and of keys."""
        return -(-self.S // self.block_q), -(-self.T // self.block_k)

    @property
    def traced(self) -> bool:
        """Whether the places are known only when the program runs."""
        return _any_traced(self.q_start, self.k_start)

    def spans(self) -> tuple[Places, Places, Places, Places]:
        """Return the places of each tile's first and last query [Q, 1] and of its first and last
        key [1, K].
        """
        Q, K = self.shape
        rows = np.arange(Q)[:, None] * self.block_q
        columns = np.arange(K)[None] * self.block_k
        last_rows = np.minimum(rows + self.block_q, self.S) - 1
        last_columns = np.minimum(columns + self.block_k, self.T) - 1
        q = self.q_start
        k = self.k_start
        return rows + q, last_rows + q, columns + k, last_columns + k

    def ahead(self) -> tuple[Places, Places]:
        """Return the least and the greatest d of each tile, [Q, K]; every value between them
        occurs.
        """
        first_i, last_i, first_j, last_j = self.spans()
        return first_i - last_j, last_i - first_j


def tile_state(some: Places, every: Places) -> Places:
    """Return the state of tiles of which it is known whether some places are seen, and whether all
    are.

    Args:
      some: bool, whether any place of a tile is seen.
      every: bool of the same shape, whether all places are seen; where it is true, `some` is too.

    Returns:
      `EMPTY`, `PARTIAL` or `FULL`, int8 of the same shape.
    """
    return some.astype(np.int8) + every.astype(np.int8)


def _any_traced(*values: object) -> bool:
    return any(isinstance(value, jax.Array) for value in values)


def numpy_for(*values: object) -> ModuleType:
    """Return the module that computes with these values: jax.numpy if any of them is jax's, else
    numpy.
    """
    return jnp if _any_traced(*values) else np
