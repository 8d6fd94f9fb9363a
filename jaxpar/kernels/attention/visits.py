"""The lists of the tiles that a kernel visits: a mask's non-empty tiles, for each tile of queries
or of keys.

A kernel walks its row of the list: first the tiles that are seen in full, which need no mask, then
the others. Inside one of those, `in_tile` says which places are seen. Where a mask is known while
tracing, the lists are constants; else (with ids, or with the places of a device in a ring) they are
made on the device.

Shapes: B batch, or 1 where all sequences have the same list; Q and K tiles of queries and of keys;
W the longest row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxpar.kernels import masks
from jaxpar.kernels.attention.call import Call, Unserved
from jaxpar.kernels.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    And,
    BlocksOfDocument,
    BlockSparse,
    Full,
    Mask,
    Or,
    Places,
    Segments,
    Tiles,
)


class Visits(NamedTuple):
    """The tiles that each row visits, numpy or jax int32."""

    # the tiles of keys, by number; past `some`, a row's last one again or zero
    entries: Int[Array, "B Q W"]
    full: Int[Array, "B Q"]  # how many tiles of a row are seen in full; they come first
    some: Int[Array, "B Q"]  # how many tiles of a row are visited


def visits(mask: Mask, tiles: Tiles, of_keys: bool = False) -> Visits:
    """List the tiles of keys to visit for each tile of queries; with `of_keys`, the other way
    round.

    The last tile of keys counts as partial where keys do not fill it; `in_tile` leaves out what
    lies past the end.

    Raises:
      Unserved: the tiles cut the blocks of a BlockSparse mask, or such a mask is joined by `|`.
    """
    if cuts_blocks(mask, tiles):
        raise Unserved(f"tiles of {tiles.block_q} x {tiles.block_k} cut the blocks of {mask}")
    states = masks.tile_states(mask, tiles)
    xp = masks.numpy_for(states)
    if states.ndim != 3:
        states = states[None]
    if tiles.T % tiles.block_k:
        states = xp.where(
            np.arange(tiles.shape[1]) == tiles.shape[1] - 1, xp.minimum(states, PARTIAL), states
        )
    if of_keys:
        states = states.swapaxes(1, 2)
    if xp is np:
        return list_tiles(states)
    return list_tiles(states, int(np.max(_most_visits(mask, tiles, of_keys))))


def list_tiles(states: Places, longest: int | None = None) -> Visits:
    """List the tiles of each row that are not empty, those that are full first.

    Args:
      states: EMPTY, PARTIAL or FULL of each tile [B, Q, K], numpy or jax.
      longest: the most tiles that a row can have, at most K; None = the number of the longest row,
        which must be known while tracing.
    """
    xp = masks.numpy_for(states)
    some = xp.sum(states != EMPTY, axis=2)
    full = xp.sum(states == FULL, axis=2)
    # FULL > PARTIAL > EMPTY, and the sort is stable, so each kind keeps its order.
    order = xp.argsort(-states, axis=2, stable=True)
    if longest is None:
        longest = int(some.max())
    place = xp.minimum(
        np.arange(max(1, longest)),
        xp.maximum(some - 1, 0)[..., None],
    )
    entries = xp.where(
        some[..., None] > 0,
        xp.take_along_axis(order, place, axis=2),
        0,
    )
    return Visits(*(x.astype(np.int32) for x in (entries, full, some)))


class Steps(NamedTuple):
    """The visits of all rows, one after another in a list for each sequence; numpy, or jax where
    the visits are.
    """

    rows_BL: Array | np.ndarray
    """The row of each step."""
    entries_BL: Array | np.ndarray
    """The entry of `Visits` that each step visits."""
    states_BL: Array | np.ndarray
    """Whether the tile of each step is EMPTY, PARTIAL or FULL."""
    length: int | Array
    """The number of steps of the longest sequence."""


LIST_BYTES = 3 * 2**18
"""The share of the lists in a TPU core's scalar memory, which is 1 MiB."""


def check_list(steps: int) -> None:
    """Refuse more steps than a TPU's scalar memory holds, at two int32 each.

    Raises:
      Unserved: there are more steps.
    """
    if 8 * steps > LIST_BYTES:
        raise Unserved(f"{steps} tiles to visit are more than SMEM holds")


def flatten_visits(visited: Visits) -> Steps:
    """Put the rows of `visits` behind one another.

    A row without visits also has a step, which writes its zeros. A sequence with fewer steps than
    another stays at its last one, and visits nothing more.

    Raises:
      Unserved: there are more steps than SMEM holds.
    """
    entries_BRW, full_BR, some_BR = visited
    traced = isinstance(entries_BRW, jax.Array)
    xp = masks.numpy_for(entries_BRW)
    B, R, W = entries_BRW.shape

    lengths_BR = xp.maximum(some_BR, 1)
    ends_BR = xp.cumsum(lengths_BR, axis=1)
    begins_BR = ends_BR - lengths_BR
    totals_B1 = ends_BR[:, -1:]
    longest = xp.max(totals_B1)
    if traced:
        L = R * W  # the most there can be
        length = longest
    else:
        L = int(longest)
        length = L
    check_list(B * L)

    steps_L = np.arange(L)
    steps_BL = xp.minimum(steps_L, totals_B1 - 1)
    rows_BL = xp.sum(
        ends_BR[:, None] <= steps_BL[:, :, None],
        axis=2,
    )

    def of_row(x_BR: Array | np.ndarray) -> Array | np.ndarray:
        return xp.take_along_axis(x_BR, rows_BL, axis=1)

    visits_BL = steps_BL - of_row(begins_BR)  # the number of a step's visit in its row
    is_visit_BL = (visits_BL < of_row(some_BR)) & (steps_L < totals_B1)
    is_full_BL = visits_BL < of_row(full_BR)
    states_BL = xp.where(is_visit_BL, xp.where(is_full_BL, FULL, PARTIAL), EMPTY)
    entries_BL = xp.take_along_axis(
        entries_BRW.reshape(B, R * W),
        rows_BL * W + visits_BL,
        axis=1,
    )
    return Steps(rows_BL, entries_BL, states_BL, length)


def possible_states(mask: Mask, tiles: Tiles) -> Int[np.ndarray, "Q K"]:
    """Find the greatest state that each tile can have, whatever the ids and places: a mask only
    grows with its parts.
    """
    if tiles.traced:
        return np.full(tiles.shape, PARTIAL, np.int8)
    return np.array(masks.tile_states(masks.without_segments(mask), tiles))


def _most_visits(
    mask: Mask,
    tiles: Tiles,
    of_keys: bool,
) -> Int[np.ndarray, " Q"]:
    """Count the tiles that each row visits at most."""
    return np.sum(possible_states(mask, tiles) != EMPTY, axis=0 if of_keys else 1)


def most_steps(mask: Mask, tiles: Tiles, of_keys: bool = False) -> int:
    """Count the entries that all rows have in one list: at least one for each row; with ids as many
    for each row as the longest row has.
    """
    most = np.maximum(_most_visits(mask, tiles, of_keys), 1)
    return int(len(most) * np.max(most) if masks.segments_in(mask) else np.sum(most))


def block_units(mask: Mask, places: Call | Tiles) -> tuple[int, int]:
    """Return the numbers of queries and keys that tiles must divide so as to cut no block of a
    mask; 0 = any tiles will do.

    Raises:
      Unserved: a mask of blocks is joined by `|`, so that a tile which is visited need not be seen
        in it, or it is laid on each document.
    """
    if any(isinstance(leaf, BlocksOfDocument) for leaf in mask.leaves()):
        raise Unserved("blocks are laid on each document, which begins anywhere in a tile")
    if _joins_blocks(mask):
        raise Unserved(f"a mask of blocks is joined by | in {mask}")
    starts = (
        places.multiple if isinstance(x, jax.Array) else x for x in (places.q_start, places.k_start)
    )
    blocks = [
        (leaf.block_q, leaf.block_k) for leaf in mask.leaves() if isinstance(leaf, BlockSparse)
    ]
    if not blocks:
        return 0, 0
    unit_q, unit_k = (math.gcd(*sizes) for sizes in zip(*blocks, starts, strict=True))
    return unit_q, unit_k


def cuts_blocks(mask: Mask, tiles: Tiles) -> bool:
    """Return whether tiles cut a block of a block mask, so that a tile can be neither wholly seen
    nor wholly hidden.
    """
    unit_q, unit_k = block_units(mask, tiles)
    return unit_q % tiles.block_q != 0 or unit_k % tiles.block_k != 0


def in_tile(
    mask: Mask,
    i: Places,
    j: Places,
    ids: Sequence[tuple[Places, Places]] = (),
) -> Places:
    """Find, inside a kernel, which places of a partial tile are seen. Keys past the end are not
    masked here.

    Args:
      mask: the mask that `visits` was given; its arrays are not read.
      i, j: the places of the tile's queries [q, 1] and keys [1, k].
      ids: for each `Segments` of the mask from the left, the ids of the tile's queries [q] and keys
        [k].
    """
    of_tile = iter(ids)

    def of_leaf(leaf: Mask) -> Mask:
        if isinstance(leaf, Segments):
            return Segments(*next(of_tile))
        # of a tile that is visited, the blocks are seen
        if isinstance(leaf, BlockSparse):
            return Full()
        return leaf

    return mask.replaced(of_leaf).visible(i, j)


def _joins_blocks(mask: Mask) -> bool:
    if isinstance(mask, Or):
        return any(isinstance(leaf, BlockSparse) for leaf in mask.leaves())
    return isinstance(mask, And) and (_joins_blocks(mask.left) or _joins_blocks(mask.right))
