"""Questions that can be asked of any mask: its documents, whether it looks back, the states of its
tiles, and whether each place is seen.

Shapes: B batch, S queries, T keys.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import numpy as np
from jaxtyping import Array, Int

from jaxpar.base.errors import UserError
from jaxpar.kernels.masks.algebra import And, Full, Mask, OfDistance, Or, conjuncts
from jaxpar.kernels.masks.documents import BlocksOfDocument, FirstOfDocument, Segments
from jaxpar.kernels.masks.patterns import BlockSparse, Causal, First
from jaxpar.kernels.masks.tiles import Places, Tiles


def segments_in(mask: Mask) -> list[Segments]:
    """List the parts of a mask that compare ids, from the left."""
    return [leaf for leaf in mask.leaves() if isinstance(leaf, Segments)]


def without_segments(mask: Mask) -> Mask:
    """Return the mask as it would be with all ids equal, which shows at least as much."""
    return mask.replaced(lambda leaf: Full() if isinstance(leaf, Segments) else leaf)


def follows_documents(mask: Mask) -> bool:
    """Return whether a mask joined to `Segments` shows a document what it would show it alone.

    A map of the whole sequence does not; for a mask of one's own, whose class says nothing of it,
    the answer is no.
    """
    return all(
        isinstance(leaf, Full | OfDistance | First | Segments)
        or (isinstance(leaf, BlockSparse) and leaf.per_document)
        for leaf in mask.leaves()
    )


def looks_back(mask: Mask) -> bool:
    """Return whether no query sees a key after its own place, as far as the mask's form says."""
    if isinstance(mask, And):
        return looks_back(mask.left) or looks_back(mask.right)
    if isinstance(mask, Or):
        return looks_back(mask.left) and looks_back(mask.right)
    return isinstance(mask, Causal) and mask.offset <= 0


def apart_from_segments(mask: Mask) -> tuple[Mask, Int[Array, "B S"] | None]:
    """Take a mask apart into the mask without its `Segments` and their ids [B, S], or None where it
    has none.

    Masks that `&` made to count from the start of each document are as they were before.

    Raises:
      UserError: segments are combined otherwise than by `&`, or have other ids for keys than for
        queries.
    """
    parts = list(conjuncts(mask))
    ids = [part for part in parts if type(part) is Segments]
    joined = [
        leaf for leaf in mask.leaves() if isinstance(leaf, FirstOfDocument | BlocksOfDocument)
    ]
    inside_another = len(segments_in(mask)) > len(ids) + len(joined)
    if len(ids) > 1 or inside_another or (joined and not ids):
        raise UserError(
            f"over several devices a mask has its Segments once, joined by &, and was given {mask}"
        )
    if ids and ids[0].q_ids is not ids[0].kv_ids:
        raise UserError(
            "over several devices queries and keys are of one sequence: write Segments(ids, ids)"
        )

    def before(leaf: Mask) -> Mask:
        if isinstance(leaf, FirstOfDocument):
            return First(leaf.n)
        if isinstance(leaf, BlocksOfDocument):
            return leaf.blocks
        return leaf

    rest = [part.replaced(before) for part in parts if type(part) is not Segments]
    without = reduce(And, rest) if rest else Full()
    if not ids:
        return without, None
    return without, ids[0].q_ids


def dense(mask: Mask, tiles: Tiles) -> Places:
    """Return whether each place is seen, [S, T] or [B, S, T]: for the reference and for short
    sequences.
    """
    i = np.arange(tiles.S)[:, None] + tiles.q_start
    j = np.arange(tiles.T)[None] + tiles.k_start
    return mask.visible(i, j)


def tile_states(mask: Mask, tiles: Tiles) -> Places:
    """Return `mask.states`; where they are known while tracing they are cached, as a read-only
    array.
    """
    if segments_in(mask) or tiles.traced:
        return mask.states(tiles)
    return _known_states(mask, tiles)


@lru_cache(maxsize=64)
def _known_states(mask: Mask, tiles: Tiles) -> np.ndarray:
    states = np.array(mask.states(tiles))
    states.flags.writeable = False
    return states
