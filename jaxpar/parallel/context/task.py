"""What a strategy of context parallelism is given inside `manual`: the mask of any two chunks, and
the hop to the next device.

Shapes: B batch, T whole sequence, C chunk of it. A device has two chunks, the early one first: see
`jaxpar.parallel.zigzag`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.sharding import Layout
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.kernel import Kernel
from jaxpar.kernels.masks import (
    And,
    Causal,
    Full,
    Mask,
    Segments,
    in_documents,
    looks_back,
    of_distance,
    places_in_documents,
)
from jaxpar.parallel.zigzag import chunk_order, inverse, reorder

PARTS = Call(out_dtype=jnp.float32)
"""Partial answers, which are merged or added up."""
UNROLLED = 8
"""Up to so many devices every step of a ring is written out; beyond, the middle ones are a loop."""
ChunkNumber = Array | int
"""The number of a half, of a chunk, or of hops, known at run time or before."""


class ContextTask(NamedTuple):
    """What a strategy has to do, inside `manual`."""

    layout: Layout
    """The mesh and the rules."""
    mask: Mask
    """What a query sees, apart from documents."""
    segments_BT: Int[Array, "B T"] | None
    """The document of every token, in `chunk_order`."""
    kernel: Kernel
    """The implementation of attention, with a forward and a backward."""
    call: Call = PARTS
    """How it makes a partial answer, apart from the places."""
    unrolled: int = UNROLLED
    """Up to how many devices every step of a ring is written out."""

    @property
    def backward(self) -> Callable[..., tuple[Array, Array, Array]]:
        """The backward of the implementation, which every one has that serves parts."""
        assert self.kernel.backward is not None
        return self.kernel.backward

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """The mesh axes that split the sequence."""
        return self.layout.mesh_axes("attention_seq")

    @property
    def size(self) -> int:
        """The number of devices that split the sequence."""
        return self.layout.size("attention_seq")

    @property
    def looks_back(self) -> bool:
        """Whether a query sees at most the keys at its own place or before."""
        return looks_back(self.mask)

    @property
    def chunks(self) -> tuple[Array, Array]:
        """The numbers of this device's early and late chunk."""
        place = jax.lax.axis_index(self.axes)
        return place, 2 * self.size - 1 - place

    @property
    def seen(self) -> Mask:
        """What a query sees where the sequence is whole."""
        return with_documents_from(int(self.call.q_start), self.mask, self.segments_BT)

    def hop(self, tree: Any) -> Any:
        """Return what the device before this one has of every array."""
        there = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, there), tree)

    def segments_of(self, chunk: ChunkNumber, C: int) -> Int[Array, "B C"] | None:
        """Look up the documents of a chunk.

        Args:
          chunk: its number in natural order, from 0 to twice the devices less one.
          C: the number of tokens of a chunk.

        Returns:
          The document of each of its tokens; None = there are none.
        """
        if self.segments_BT is None:
            return None
        place = jnp.where(
            chunk < self.size,
            2 * chunk,
            2 * (2 * self.size - 1 - chunk) + 1,
        )
        return jax.lax.dynamic_slice_in_dim(self.segments_BT, place * C, C, axis=1)

    def pair(self, q_chunk: ChunkNumber, k_chunk: ChunkNumber, C: int) -> tuple[Mask, Call]:
        """Find what the queries of one chunk see of the keys of another.

        Args:
          q_chunk: the number of the queries' chunk.
          k_chunk: that of the keys' chunk, which is lower where the mask looks back.
          C: the number of tokens of a chunk.

        Returns:
          The mask of the two, and how the kernel is called, with the places of both.
        """
        if self.mask in (Causal(), Full()):
            return self.in_documents(Full(), q_chunk, k_chunk, C), self.call
        places = self.call._replace(q_start=q_chunk * C, k_start=k_chunk * C, multiple=C)
        return self.in_documents(self.mask, q_chunk, k_chunk, C), places

    def diagonal(self, chunk: ChunkNumber, C: int) -> tuple[Mask, Call]:
        """Find what the queries of a chunk see of its own keys.

        Args:
          chunk: its number.
          C: its number of tokens.

        Returns:
          The mask, and how the kernel is called.
        """
        if of_distance(self.mask):
            start = 0
        else:
            start = chunk * C
        places = self.call._replace(q_start=start, k_start=start, multiple=C)
        return self.in_documents(self.mask, chunk, chunk, C), places

    def in_documents(self, mask: Mask, q_chunk: ChunkNumber, k_chunk: ChunkNumber, C: int) -> Mask:
        """Limit a mask of two chunks to a token's own document, where there are documents.

        `&` does not serve here: where a chunk begins, its documents need not begin.

        Args:
          mask: what the queries see apart from documents.
          q_chunk: the number of the queries' chunk.
          k_chunk: that of the keys' chunk.
          C: the number of tokens of a chunk.

        Returns:
          The limited mask; the mask itself where there are no documents.
        """
        q_ids = self.segments_of(q_chunk, C)
        kv_ids = self.segments_of(k_chunk, C)
        if self.segments_BT is None or q_ids is None or kv_ids is None:
            return mask
        natural_BT = reorder(self.segments_BT, inverse(chunk_order(self.layout, "ring")), 1)
        places_BT = places_in_documents(natural_BT)
        q_places, kv_places = (
            jax.lax.dynamic_slice_in_dim(places_BT, chunk * C, C, axis=1)
            for chunk in (q_chunk, k_chunk)
        )
        return And(in_documents(mask, q_places, kv_places), Segments(q_ids, kv_ids))


def with_documents_from(q_start: int, mask: Mask, ids_BT: Array | None) -> Mask:
    """Limit a mask to a token's own document, where there are documents.

    Args:
      q_start: the place of the first query; the last one stands at the end of the rows.
      mask: what the queries see apart from documents.
      ids_BT: the document of each key, all of its row; None = there are none.

    Returns:
      The limited mask, or the mask itself.
    """
    if ids_BT is None:
        return mask
    if q_start == 0:
        return mask & Segments(ids_BT, ids_BT)
    places_BT = places_in_documents(ids_BT)
    of_queries = in_documents(mask, places_BT[:, q_start:], places_BT)
    return And(of_queries, Segments(ids_BT[:, q_start:], ids_BT))
