"""How context parallelism cuts a sequence: the order of its chunks, and which chunks a device has.

Device i of n has chunks i and 2n - 1 - i of 2n (zigzag), so that a causal mask leaves every device the same work
(LLaMA 3, arXiv:2407.21783, section 3.3.2); Ulysses keeps tokens as they are.

Shapes: B batch, C chunk, T whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxpar.base.mesh import MeshAxis
from jaxpar.base.plan import Strategy
from jaxpar.base.sharding import Layout
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.masks import Causal, Full, Mask, Segments, of_distance


def chunk_order(layout: Layout, strategy: Strategy) -> list[int]:
    """Which chunk of the sequence stands at each place: [0, 3, 1, 2] for a ring of two devices, [0] as it was."""
    n = layout.size("attention_seq")
    if n == 1 or strategy == "ulysses":
        return [0]
    return [chunk for i in range(n) for chunk in (i, 2 * n - 1 - i)]


def inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes an order of chunks."""
    return sorted(range(len(order)), key=order.__getitem__)


def reordered(x: Array, order: Sequence[int], dim: int) -> Array:
    """`x` with the chunks of a dim in another order."""
    front, back = x.shape[:dim], x.shape[dim + 1 :]
    return jnp.take(x.reshape(*front, len(order), -1, *back), jnp.asarray(order), axis=dim).reshape(x.shape)


class ContextTask(NamedTuple):
    """What a strategy is to do, inside `manual`.

    Attributes:
      layout: mesh and rules.
      mask: what a query sees, documents aside: at most the keys at or before it.
      segments_BT: documents of all tokens, in `chunk_order`.
      kernel: the implementation of attention, with a forward and a backward: see `jaxpar.kernels.attention.call`.
    """

    layout: Layout
    mask: Mask
    segments_BT: Int[Array, "B T"] | None
    kernel: Any

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        return self.layout.mesh_axes("attention_seq")

    @property
    def size(self) -> int:
        return self.layout.size("attention_seq")

    def hop(self, tree: Any) -> Any:
        """What the device before this one has, of every array."""
        there = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, there), tree)

    def segments_of(self, chunk: Any, C: int) -> Array | None:
        """The documents [B, C] of a chunk in zigzag order."""
        if self.segments_BT is None:
            return None
        place = jnp.where(chunk < self.size, 2 * chunk, 2 * (2 * self.size - 1 - chunk) + 1)
        return jax.lax.dynamic_slice_in_dim(self.segments_BT, place * C, C, axis=1)

    def pair(self, q_chunk: Any, k_chunk: Any, C: int) -> tuple[Mask, Call]:
        """What the queries of one chunk see of the keys of an earlier one."""
        ids = self.segments_of(q_chunk, C), self.segments_of(k_chunk, C)
        if self.mask == Causal():
            return packed(Full(), *ids), PARTS
        return packed(self.mask, *ids), PARTS._replace(q_start=q_chunk * C, k_start=k_chunk * C, multiple=C)

    def diagonal(self, chunk: Any, C: int) -> tuple[Mask, Call]:
        """What one chunk's queries see of its own keys."""
        ids = [self.segments_of(chunk, C)] * 2
        start = 0 if of_distance(self.mask) else chunk * C
        return packed(self.mask, *ids), PARTS._replace(q_start=start, k_start=start, multiple=C)


PARTS = Call(out_dtype=jnp.float32)
"""Answers that are merged or added up."""


def packed(mask: Mask, q_ids: Array | None, kv_ids: Array | None) -> Mask:
    """The mask, of one's own document only where there are ids."""
    return mask if q_ids is None or kv_ids is None else mask & Segments(q_ids, kv_ids)


def own_chunks(work: ContextTask) -> tuple[Array, Array]:
    """The numbers of this device's early and late chunk."""
    place = jax.lax.axis_index(work.axes)
    return place, 2 * work.size - 1 - place


def stacked(x: Array, dim: int) -> Array:
    """The chunks of a device, stacked."""
    return jnp.stack(jnp.split(x, 2, axis=dim))


def joined(x: Array, dim: int) -> Array:
    """The inverse of `stacked`."""
    return jnp.concatenate([x[0], x[1]], axis=dim)
