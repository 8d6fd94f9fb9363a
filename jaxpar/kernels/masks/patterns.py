"""Masks of numbers alone: which keys a query sees follows from the places of both.

Shapes: Q and K tiles of queries and of keys, M and N blocks of both.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import cast

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from jaxpar.base.errors import UserError
from jaxpar.base.number_checks import require_whole
from jaxpar.kernels.masks.algebra import Mask, OfDistance, static_mask
from jaxpar.kernels.masks.tiles import Places, Tiles, numpy_for, tile_state


@static_mask
class Causal(OfDistance):
    """A query sees the keys at or before its own place plus `offset`."""

    offset: int = 0

    def __post_init__(self) -> None:
        require_whole("Causal", "offset", self.offset)

    def visible(self, i: Places, j: Places) -> Places:
        return i - j >= -self.offset


@static_mask
class Window(OfDistance):
    """A query sees the keys at most `left` places before it and `right` places after it; None =
    however far.

    Under `Causal() & Window(1023)` a query sees 1024 keys, its own among them.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None:
                require_whole("Window", name, reach)

    def visible(self, i: Places, j: Places) -> Places:
        seen = i - j == i - j
        if self.left is not None:
            seen = i - j <= self.left
        if self.right is None:
            return seen
        return seen & (i - j >= -self.right)


@static_mask
class First(Mask):
    """Every query sees the first `n` keys; `Causal() | First(n)` is a prefix LM (arXiv:1910.10683,
    section 3.2.1).

    Joined to `Segments` by `&`, it becomes `FirstOfDocument`: the first `n` keys of each document.
    """

    n: int

    def __post_init__(self) -> None:
        require_whole("First", "n", self.n, least=0)

    def visible(self, i: Places, j: Places) -> Places:
        return (i - j == i - j) & (j < self.n)

    def states(self, tiles: Tiles) -> Places:
        first_i, _, first_j, last_j = tiles.spans()
        any_i = first_i == first_i  # so that both have the shape [Q, K]
        return tile_state(any_i & (first_j < self.n), any_i & (last_j < self.n))


@static_mask
class Dilated(OfDistance):
    """A query sees its own key and every `stride`-th, at most `window - 1` a side
    (arXiv:2004.05150, section 3.1).
    """

    window: int
    stride: int

    def __post_init__(self) -> None:
        require_whole("Dilated", "window", self.window, least=1)
        require_whole("Dilated", "stride", self.stride, least=1)

    def visible(self, i: Places, j: Places) -> Places:
        d = i - j
        reach = (self.window - 1) * self.stride
        return (d % self.stride == 0) & (d <= reach) & (d >= -reach)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class BlockSparse(Mask):
    """A map says which blocks of `block_q` queries by `block_k` keys are seen; nothing outside the
    map is seen.

    Args:
      block_map: bool [M, N], given as an array or as nested lists.
      block_q: how many queries a block has.
      block_k: how many keys a block has.
      per_document: joined to `Segments` by `&`, the map is laid on each document and not on the
        whole sequence.
    """

    block_map: ArrayLike | tuple[tuple[int, ...], bytes]
    block_q: int = 128
    block_k: int = 128
    per_document: bool = False

    def __post_init__(self) -> None:
        blocks = np.asarray(self.block_map, dtype=bool)
        if blocks.ndim != 2 or 0 in blocks.shape:
            raise UserError(
                f"BlockSparse needs a map of blocks [M, N], and was given shape {blocks.shape}"
            )
        require_whole("BlockSparse", "block_q", self.block_q, least=1)
        require_whole("BlockSparse", "block_k", self.block_k, least=1)
        # which can be hashed
        object.__setattr__(self, "block_map", (blocks.shape, blocks.tobytes()))

    @cached_property
    def map(self) -> Bool[np.ndarray, "M N"]:
        shape, blocks = cast(tuple[tuple[int, ...], bytes], self.block_map)
        return np.frombuffer(blocks, bool).reshape(shape)

    @cached_property
    def _area(self) -> Int[np.ndarray, "corners_M corners_N"]:
        """How many of the blocks above and left of each corner are seen."""
        above = np.cumsum(self.map, axis=0, dtype=np.int32)
        above_and_left = np.cumsum(above, axis=1, dtype=np.int32)
        return np.pad(above_and_left, ((1, 0), (1, 0)))

    def visible(self, i: Places, j: Places) -> Places:
        M, N = self.map.shape
        row = i // self.block_q
        column = j // self.block_k
        inside = (row >= 0) & (row < M) & (column >= 0) & (column < N)
        xp = numpy_for(row, column)
        nearest_row = xp.clip(row, 0, M - 1)
        nearest_column = xp.clip(column, 0, N - 1)
        return xp.asarray(self.map)[nearest_row, nearest_column] & inside

    def states(self, tiles: Tiles) -> Places:
        first_i, last_i, first_j, last_j = tiles.spans()
        top = first_i // self.block_q
        bottom = last_i // self.block_q + 1
        left = first_j // self.block_k
        right = last_j // self.block_k + 1
        M, N = self.map.shape
        xp = numpy_for(first_i, first_j)
        area = xp.asarray(self._area)

        def up_to(row: Places, column: Places) -> Places:
            return area[xp.clip(row, 0, M), xp.clip(column, 0, N)]

        seen = up_to(bottom, right) - up_to(top, right) - up_to(bottom, left) + up_to(top, left)
        return tile_state(seen > 0, seen == (bottom - top) * (right - left))

    def __repr__(self) -> str:
        M, N = self.map.shape
        return (
            f"BlockSparse({M} x {N} blocks of {self.block_q} x {self.block_k}, "
            f"{np.mean(self.map):.0%} seen)"
        )


def bigbird(
    length: int,
    window: int = 3,
    globals: int = 2,
    random: int = 3,
    seed: int = 0,
    block: int = 64,
    causal: bool = False,
) -> BlockSparse:
    """Make BigBird's mask: a window of blocks, some global blocks and some random ones
    (arXiv:2007.14062, section 2).

    Args:
      window: how many blocks around a query's own it sees, its own among them; odd.
      globals: how many blocks at the front all queries see; their own queries see every key.
      random: how many random blocks each block of queries sees besides; all that are left, if fewer
        are left.
      block: how many places a block has.
      causal: whether the random blocks of a query lie before its own, for use with `Causal()`. The
        map of a shorter sequence is then the beginning of a longer one's map, and is laid on each
        document where there are any.

    Raises:
      UserError: a number is not whole or too small, or the window has no middle.
    """
    for name, value in (("length", length), ("window", window), ("block", block)):
        require_whole("bigbird", name, value, least=1)
    for name, value in (("globals", globals), ("random", random), ("seed", seed)):
        require_whole("bigbird", name, value, least=0)
    if window % 2 == 0:
        raise UserError(
            f"bigbird has blocks on both sides of a query's own, and was given {window=}: make "
            "it odd"
        )
    n = -(-length // block)
    row = np.arange(n)[:, None]
    column = np.arange(n)
    seen = (abs(row - column) <= window // 2) | (row < globals) | (column < globals)
    rng = np.random.default_rng(seed)
    for number in range(globals, n):
        candidates = n
        if causal:  # each row has a draw of its own, which knows of nothing after it
            candidates = number
            rng = np.random.default_rng((seed, number))
        left = np.flatnonzero(~seen[number, :candidates])
        drawn = rng.choice(left, min(random, len(left)), replace=False)
        seen[number, drawn] = True
    return BlockSparse(seen, block, block, per_document=causal)
