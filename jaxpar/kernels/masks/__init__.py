"""Masks, which say which keys a query may see: small frozen values, combined with `&` and `|`.

    Causal() & Window(left=1023)
    Causal() & Segments(documents_BS, documents_BS)
    Causal() | First(64)
    bigbird(length=4096, window=3, globals=2, random=3, seed=0)

One algebra serves three users. The reference asks `visible` of all places. The kernels ask `states`
which tiles can be left out and which need no mask, and `visible` inside the others. Context
parallelism has places that begin anywhere. A mask without ids is hashable. All masks are pytrees,
and their only arrays are the ids of `Segments`.

Places count from the start of the sequence. In packed documents, which is what joining `Segments`
by `&` says, `First` counts from the start of each document, so that a document sees what it would
see alone. The map of a `BlockSparse` is laid on the whole sequence, unless it says `per_document`.
Where a document begins is read off the ids of whole rows: write `Segments(ids, ids)`, the same
array twice. Some queries of a row, or some keys, are told their places by `And(in_documents(mask,
q_places, kv_places), Segments(q_ids, kv_ids))`.

In the order in which to read: `tiles` has places, and the states of a tile; `algebra` has the base
of all masks, and the masks that `&` and `|` make; `patterns` has the masks of numbers alone;
`documents` has the masks that compare ids; `questions` has the functions that kernels and
strategies ask of any mask. `checks` refuses values that are no masks or no ids.
"""

from jaxpar.kernels.masks.algebra import (
    And,
    Full,
    Mask,
    OfDistance,
    Or,
    of_distance,
    require_mask,
    static_mask,
)
from jaxpar.kernels.masks.documents import (
    BlocksOfDocument,
    FirstOfDocument,
    Segments,
    in_documents,
    places_in_documents,
)
from jaxpar.kernels.masks.patterns import BlockSparse, Causal, Dilated, First, Window, bigbird
from jaxpar.kernels.masks.questions import (
    apart_from_segments,
    dense,
    follows_documents,
    looks_back,
    segments_in,
    tile_states,
    without_segments,
)
from jaxpar.kernels.masks.tiles import EMPTY, FULL, PARTIAL, Places, Start, Tiles, numpy_for

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "And",
    "BlockSparse",
    "BlocksOfDocument",
    "Causal",
    "Dilated",
    "First",
    "FirstOfDocument",
    "Full",
    "Mask",
    "OfDistance",
    "Or",
    "Places",
    "Segments",
    "Start",
    "Tiles",
    "Window",
    "apart_from_segments",
    "bigbird",
    "dense",
    "follows_documents",
    "in_documents",
    "looks_back",
    "numpy_for",
    "of_distance",
    "places_in_documents",
    "require_mask",
    "segments_in",
    "static_mask",
    "tile_states",
    "without_segments",
]
