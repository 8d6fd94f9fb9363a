"""Masks of packed documents, which compare ids; among them the masks that count from the start of
each document, into which `&` turns masks that count from the start of a sequence.

Shapes: B batch, S queries, T keys, Q and K their tiles.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpar.base.errors import UserError
from jaxpar.kernels.masks.algebra import Mask, conjuncts
from jaxpar.kernels.masks.checks import require_ids
from jaxpar.kernels.masks.patterns import BlockSparse, First
from jaxpar.kernels.masks.tiles import PARTIAL, Places, Tiles, numpy_for, tile_state


@partial(jax.tree_util.register_dataclass, data_fields=["q_ids", "kv_ids"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    """In packed sequences, a query sees the keys of its own document.

    Attributes:
      q_ids, kv_ids: int [B, S] and [B, T], the ids of the queries and keys at hand, wherever their
        places begin. A mask that counts from the start of each document takes the ids of whole
        rows, one array for both.
    """

    q_ids: Int[Array, "B S"]
    kv_ids: Int[Array, "B T"]

    def visible(self, i: Places, j: Places) -> Places:
        """Compare all ids, [B, S, T]; the places `i` [S, 1] and `j` [1, T] do not matter. A kernel
        has a tile's ids.
        """
        return self.q_ids[..., :, None] == self.kv_ids[..., None, :]

    def when_joined(self, whole: Mask) -> Mask:
        """Replace the masks that count from the start of a sequence, `First` and some
        `BlockSparse`, by masks that count from the start of each document.

        Raises:
          UserError: there is such a mask, and the ids do not say where each document begins.
        """
        if not _is_of_documents(self):
            return whole
        leaves = list(whole.leaves())
        if not any(_counts_from_start(leaf) or isinstance(leaf, _COUNTED) for leaf in leaves):
            return whole
        documents = [part for part in conjuncts(whole) if _is_of_documents(part)]
        ids_BT = _ids_of_rows(documents)
        if not any(_counts_from_start(leaf) for leaf in leaves):
            return whole
        # Where a kernel is chosen only shapes are known, and what the ids are does not matter.
        known = not isinstance(ids_BT, jax.ShapeDtypeStruct)
        if known:
            places_BT = places_in_documents(ids_BT)
        else:
            places_BT = jnp.zeros(ids_BT.shape, jnp.int32)
        return in_documents(whole, places_BT, places_BT)

    def check(self, B: int, S: int, T: int) -> None:
        """Refuse ids whose shapes do not fit so many sequences, queries and keys.

        Raises:
          UserError: the ids do not fit, or are no whole numbers.
        """
        require_ids("q_ids", self.q_ids, (B, S))
        require_ids("kv_ids", self.kv_ids, (B, T))

    def states(self, tiles: Tiles) -> Places:
        """Return the states of the tiles, which are exact where the ids of a sequence never
        decrease.
        """
        least_q, greatest_q = _ends(self.q_ids, tiles.block_q)
        least_k, greatest_k = _ends(self.kv_ids, tiles.block_k)
        first = least_q[:, :, None]
        last = greatest_q[:, :, None]
        begin = least_k[:, None]
        end = greatest_k[:, None]
        some = (first <= end) & (begin <= last)
        every = (first == last) & (begin == end) & (first == begin)
        return tile_state(some, every)

    def __repr__(self) -> str:
        return f"Segments({_shape_of(self.q_ids)}, {_shape_of(self.kv_ids)})"


@partial(jax.tree_util.register_dataclass, data_fields=["q_ids", "kv_ids"], meta_fields=["n"])
@dataclasses.dataclass(frozen=True, eq=False)
class FirstOfDocument(Segments):
    """The mask that `First(n)` becomes where it is joined to `Segments`: a query sees the first `n`
    keys of each document.

    To a kernel it is a comparison of ids like any other: all queries have the id 0, and so have
    those first keys.
    """

    n: int = 0

    @classmethod
    def at(cls, q_places: Places, kv_places: Places, n: int) -> FirstOfDocument:
        """Make the mask of tokens at these places of their documents, [B, S] and [B, T]."""
        return cls(0 * q_places, (kv_places >= n).astype(np.int32), n)

    def __repr__(self) -> str:
        return f"First(n={self.n}) of each document"


@partial(jax.tree_util.register_dataclass, data_fields=["q_ids", "kv_ids"], meta_fields=["blocks"])
@dataclasses.dataclass(frozen=True, eq=False)
class BlocksOfDocument(Segments):
    """The mask that a `BlockSparse` that is `per_document` becomes where it is joined to
    `Segments`. Its ids are places in the documents. No kernel takes it, since the blocks of a
    document begin anywhere in a tile.
    """

    blocks: BlockSparse = dataclasses.field(kw_only=True)

    def visible(self, i: Places, j: Places) -> Places:
        return self.blocks.visible(self.q_ids[..., :, None], self.kv_ids[..., None, :])

    def states(self, tiles: Tiles) -> Places:
        return np.full(tiles.shape, PARTIAL, np.int8)

    def __repr__(self) -> str:
        return f"{self.blocks} of each document"


def places_in_documents(
    ids_BT: Int[Array | np.ndarray, "B T"],
) -> Int[Array | np.ndarray, "B T"]:
    """Count the tokens before each token in its document. The tokens of a document lie together, in
    their own order.
    """
    xp = numpy_for(ids_BT)
    place_T = np.arange(ids_BT.shape[1], dtype=np.int32)
    others_BT = ids_BT[:, 1:] != ids_BT[:, :-1]
    begins_BT = xp.pad(others_BT, ((0, 0), (1, 0)), constant_values=True)
    starts_BT: Places = xp.where(begins_BT, place_T, 0)
    if xp is np:
        latest_BT: Places = np.maximum.accumulate(starts_BT, 1)
    else:
        latest_BT = jax.lax.cummax(starts_BT, 1)
    return place_T - latest_BT


def in_documents(mask: Mask, q_places: Places, kv_places: Places) -> Mask:
    """Make the mask of tokens at these places of their documents, [B, S] and [B, T], from a mask to
    which `Segments` is not yet joined.
    """

    def of_document(leaf: Mask) -> Mask:
        if isinstance(leaf, First):
            return FirstOfDocument.at(q_places, kv_places, leaf.n)
        if isinstance(leaf, BlockSparse) and leaf.per_document:
            return BlocksOfDocument(q_places, kv_places, blocks=leaf)
        return leaf

    return mask.replaced(of_document)


_COUNTED = FirstOfDocument, BlocksOfDocument


def _ids_of_rows(
    documents: list[Segments],
) -> Int[Array | np.ndarray, "B T"] | jax.ShapeDtypeStruct:
    """Return the one array of the ids of whole rows, from which places in documents can be counted.

    Raises:
      UserError: there is more than one array of ids, so that a document may begin outside of them
        or within them.
    """
    ids_BT = documents[0].q_ids
    for segments in documents:
        require_ids("q_ids", segments.q_ids)
        require_ids("kv_ids", segments.kv_ids)
        if segments.q_ids is not ids_BT or segments.kv_ids is not ids_BT:
            raise UserError(
                "First and blocks per_document count from the start of each document, and the "
                "ids are not those of one sequence: write Segments(ids, ids), the same array "
                "twice, or give the places of some queries and keys by "
                "And(in_documents(mask, q_places, kv_places), Segments(q_ids, kv_ids))"
            )
    return ids_BT


def _is_of_documents(part: Mask) -> TypeGuard[Segments]:
    """Return whether a mask's ids are ids of documents, and not places that were made of them."""
    return type(part) is Segments


def _counts_from_start(leaf: Mask) -> bool:
    return isinstance(leaf, First) or (isinstance(leaf, BlockSparse) and leaf.per_document)


def _shape_of(ids: object) -> object:
    return getattr(ids, "shape", ids)


def _ends(ids: Places, block: int) -> tuple[Places, Places]:
    """Return the least and the greatest id of each tile, [B, Q]."""
    B, S = ids.shape
    xp = numpy_for(ids)
    whole_tiles = xp.pad(ids, ((0, 0), (0, -S % block)), mode="edge")
    tiled = whole_tiles.reshape(B, -1, block)
    return tiled.min(axis=-1), tiled.max(axis=-1)
