"""Context parallelism: causal attention over a sequence that is split over devices.

There are two strategies. `ring` sends keys and values round the devices and merges what each block
contributes (Liu et al. 2023, arXiv:2310.01889); it keeps tokens in zigzag order, so that under a
causal mask every device has two full pairs of chunks in each step: see
`jaxpar.parallel.token_order`. A hop is written before the work that should hide it. `ulysses`
trades the split of the sequence for a split of the heads (Jacobs et al. 2023, arXiv:2309.14509).
Each strategy runs inside `manual`, on local arrays.

Shapes: B batch, S sequence of one device, C chunk of it, T whole sequence, H heads, K kv heads, h
head_dim. In the ring a leading 2 counts a device's chunks, the early one first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MeshAxis, largest_divisor
from jaxpar.base.plan import Strategy
from jaxpar.base.sharding import Axes, Layout, PyTree, output_axis
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call, merge
from jaxpar.kernels.masks import (
    And,
    Causal,
    Full,
    Mask,
    Segments,
    in_documents,
    of_distance,
    places_in_documents,
)
from jaxpar.parallel.collectives import capability_of, further_split, manual, platform_of
from jaxpar.parallel.remat import named
from jaxpar.parallel.token_order import check_chunks, chunk_order, context_sizes, inverse, reorder

_Shaped = Array | jax.ShapeDtypeStruct
_Q: Axes = ("batch", "attention_seq", "heads", None)
# log-sum-exps stay as a device made them, [B, 1, H, S]: under Ulysses with other heads and tokens
# than q
_LSE = _Q
PARTS = Call(out_dtype=jnp.float32)
"""Partial answers, which are merged or added up."""
KeysValues = list[Array]  # keys and values
ChunkNumber = (
    Array | int
)  # the number of a half, of a chunk, or of hops, known at run time or before
State = TypeVar("State")
# up to so many devices every step of the ring is written out; beyond, the middle steps are a loop
UNROLLED = 8


def check_split(
    layout: Layout,
    strategy: Strategy,
    seq_len: int,
    heads: int,
    kv_heads: int,
    dropout: float = 0.0,
) -> None:
    """Refuse a sequence or heads that a strategy cannot split.

    Dropout of attention weights is refused too: its bits follow a token's place, which depends on
    the layout.

    Raises:
      UserError: `check_chunks` refuses the sequence, dropout is on, there are too few heads for
        Ulysses, kv heads are split where heads are not, or one mesh axis splits both the sequence
        and the heads.
    """
    n = layout.size("attention_seq")
    sizes = context_sizes(layout)
    if n == 1:
        return
    check_chunks(layout, strategy, seq_len)
    if dropout > 0:
        raise UserError(
            f"model.dropout={dropout} with the sequence split over {sizes}: what is dropped "
            "would depend on "
            "the mesh: try model.dropout=0, or leave the sequence whole"
        )
    layout.sharding(
        (*_Q[1:3], None),
        (seq_len, heads, 1),
        "queries",
    )
    layout.sharding(("attention_seq", "kv_heads"), (seq_len, kv_heads), "keys and values")
    if layout.mesh_axes(output_axis("kv_heads", layout)) != layout.mesh_axes("heads"):
        further_split(("heads",), ("kv_heads",), layout)
    here = heads // layout.size("heads")
    axis = layout.mesh_axes("attention_seq")[-1]
    if strategy == "ulysses" and here % n:
        fits = largest_divisor(here, layout.mesh.shape[axis])
        raise UserError(
            f"Ulysses with too few heads: {sizes} cannot share out {here} heads "
            f"(model.heads={heads} over "
            f"{layout.size('heads')} devices): try context.strategy=ring, or mesh.{axis}={fits}"
        )


class Split(NamedTuple):
    """How attention runs on several devices; the fields are as for `parallel.attention`."""

    layout: Layout
    strategy: Strategy = "ring"
    implementation: str = "auto"
    softcap: float = 0.0

    @property
    def devices(self) -> int:
        """The number of devices that the sequence is split over."""
        return self.layout.size("attention_seq")

    @property
    def in_ring(self) -> bool:
        """Whether keys and values go round."""
        return self.devices > 1 and self.strategy == "ring"


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def split_attention(
    split: Split,
    mask: Mask,
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    segments_BS: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S H h"]:
    """Compute attention by a strategy, as `jaxpar.kernels` does except for the order of the tokens.

    Tokens, and the ids of their documents if there are several, are in `chunk_order`. H is a
    multiple of K, and kv heads are as `parallel.column_linear` leaves them. The mask ignores
    documents and hides all later keys.
    """
    return _forward(split, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS)[0]


def _forward(split, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS):
    def local(
        q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None
    ) -> tuple[Array, Array]:
        if split.in_ring:
            forward = ring_forward
        else:
            forward = _ulysses_forward
        work = _work(split, mask, segments_BT, q_BSHh, k_BSKh)
        out_BSHh, lse_BHS = forward(q_BSHh, k_BSKh, v_BSKh, work)
        return out_BSHh.astype(v_BSKh.dtype), lse_BHS[:, None]

    run = manual(local, split.layout, _layouts(split, segments_BS), (_Q, _LSE))
    out_BSHh, lse = run(q_BSHh, k_BSKh, v_BSKh, segments_BS)
    out_BSHh = named(out_BSHh, "attention_out")
    lse = named(lse, "attention_lse")
    return out_BSHh, (q_BSHh, k_BSKh, v_BSKh, segments_BS, out_BSHh, lse)


def _backward(split, mask, residuals, dout_BSHh):
    segments_BS = residuals[3]

    def local(
        q_BSHh: Array,
        k_BSKh: Array,
        v_BSKh: Array,
        segments_BT: Array | None,
        out_BSHh: Array,
        lse: Array,
        dout_BSHh: Array,
    ) -> tuple[Array, Array, Array]:
        if split.devices > 1:
            # They are sent again, because the keys of all devices should not be kept from the
            # forward pass.
            q_BSHh, k_BSKh, v_BSKh = jax.lax.optimization_barrier((q_BSHh, k_BSKh, v_BSKh))
        if split.in_ring:
            backward = ring_backward
        else:
            backward = _ulysses_backward
        work = _work(split, mask, segments_BT, q_BSHh, k_BSKh)
        delta_BSH = jnp.sum(
            dout_BSHh.astype(jnp.float32) * out_BSHh.astype(jnp.float32),
            axis=-1,
        )
        dout_BSHh = dout_BSHh.astype(v_BSKh.dtype)
        dq, dk, dv = backward(
            q_BSHh, k_BSKh, v_BSKh, dout_BSHh, lse[:, 0], delta_BSH.swapaxes(1, 2), work
        )
        return (
            dq.astype(q_BSHh.dtype),
            dk.astype(k_BSKh.dtype),
            dv.astype(
                v_BSKh.dtype,
            ),
        )

    layouts = _layouts(split, segments_BS)
    run = manual(
        local,
        split.layout,
        (*layouts, _Q, _LSE, _Q),
        layouts[:3],
    )
    return *run(*residuals, dout_BSHh), None


split_attention.defvjp(_forward, _backward)


def kernel_for(
    split: Split, mask: Mask, q_BSHh: _Shaped, k_BSKh: _Shaped, platform: str
) -> tuple[str, str]:
    """The implementation that serves the calls of a strategy, and why no earlier one does.

    The arrays are those of one device, and the mask includes documents.

    Raises:
      UserError: the implementation that was asked for cannot serve.
    """
    length = q_BSHh.shape[1] * split.devices
    call = Call(softcap=split.softcap)
    if split.in_ring:  # it pairs chunks, whose places are known only at run time
        length = q_BSHh.shape[1] // 2
        call = PARTS._replace(
            softcap=split.softcap, q_start=jnp.int32(0), k_start=jnp.int32(0), multiple=length
        )
    q, k = (jax.ShapeDtypeStruct((len(x), length, *x.shape[2:]), x.dtype) for x in (q_BSHh, k_BSKh))
    request = dispatch.AttentionRequest(
        q,
        k,
        mask,
        call,
        parts=True,
        capability=capability_of(split.layout),
    )
    return dispatch.choose(request, platform, split.implementation)


def _work(
    split: Split, mask: Mask, segments_BT: Array | None, q_BSHh: Array, k_BSKh: Array
) -> ContextTask:
    seen = with_documents(mask, segments_BT, segments_BT)
    name, _ = kernel_for(split, seen, q_BSHh, k_BSKh, platform_of(split.layout))
    if split.devices > 1:
        dispatch.say_once(f"attention by {name}, {split.strategy}")
    return ContextTask(
        split.layout, mask, segments_BT, dispatch.pair(name), PARTS._replace(softcap=split.softcap)
    )


def _layouts(
    split: Split,
    segments_BS: Array | None,
) -> tuple[Axes, Axes, Axes, Axes | None]:
    """The logical axes of q, k, v and the documents."""
    kv: Axes = ("batch", "attention_seq", output_axis("kv_heads", split.layout), None)
    return _Q, kv, kv, None if segments_BS is None else ("batch", None)


class ContextTask(NamedTuple):
    """What a strategy has to do, inside `manual`."""

    layout: Layout  # mesh and rules
    # what a query sees, apart from documents: at most the keys at its own place or before
    mask: Mask
    segments_BT: Int[Array, "B T"] | None  # the document of every token, in `chunk_order`
    # the implementation of attention, with a forward and a backward: see
    # `jaxpar.kernels.attention.call`
    kernel: Any
    call: Call = PARTS  # how it makes a partial answer, apart from the places

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        return self.layout.mesh_axes("attention_seq")

    @property
    def size(self) -> int:
        return self.layout.size("attention_seq")

    @property
    def chunks(self) -> tuple[Array, Array]:
        """The numbers of this device's early and late chunk."""
        place = jax.lax.axis_index(self.axes)
        return place, 2 * self.size - 1 - place

    @property
    def seen(self) -> Mask:
        """What a query sees where the sequence is whole."""
        return with_documents(self.mask, self.segments_BT, self.segments_BT)

    def hop(self, tree: Any) -> Any:
        """Return what the device before this one has of every array."""
        there = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(
            lambda x: jax.lax.ppermute(x, self.axes, there),
            tree,
        )

    def segments_of(self, chunk: Any, C: int) -> Array | None:
        """Return the documents [B, C] of a chunk in zigzag order."""
        if self.segments_BT is None:
            return None
        place = jnp.where(
            chunk < self.size,
            2 * chunk,
            2 * (2 * self.size - 1 - chunk) + 1,
        )
        return jax.lax.dynamic_slice_in_dim(self.segments_BT, place * C, C, axis=1)

    def pair(
        self,
        q_chunk: Any,
        k_chunk: Any,
        C: int,
    ) -> tuple[Mask, Call]:
        """Return what the queries of one chunk see of the keys of an earlier one."""
        if self.mask == Causal():
            return self.in_documents(Full(), q_chunk, k_chunk, C), self.call
        places = self.call._replace(q_start=q_chunk * C, k_start=k_chunk * C, multiple=C)
        return self.in_documents(self.mask, q_chunk, k_chunk, C), places

    def diagonal(self, chunk: Any, C: int) -> tuple[Mask, Call]:
        """Return what the queries of a chunk see of its own keys."""
        if of_distance(self.mask):
            start = 0
        else:
            start = chunk * C
        places = self.call._replace(q_start=start, k_start=start, multiple=C)
        return self.in_documents(self.mask, chunk, chunk, C), places

    def in_documents(self, mask: Mask, q_chunk: Any, k_chunk: Any, C: int) -> Mask:
        """Return the mask of two chunks, limited to a token's own document where there are
        documents.

        `&` does not serve here: where a chunk begins, its documents need not begin.
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


def with_documents(mask: Mask, q_ids: Array | None, kv_ids: Array | None) -> Mask:
    """Return the mask, limited to a token's own document where there are ids."""
    if q_ids is None or kv_ids is None:
        return mask
    return mask & Segments(q_ids, kv_ids)


# Ulysses: a share of the heads over the whole sequence. If the sequence is whole, it is all heads;
# nothing is sent.


def _ulysses_forward(
    q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, work: ContextTask
) -> tuple[Array, Array]:
    k = _kv_to_heads(k_BSKh, work)
    v = _kv_to_heads(v_BSKh, work)
    call = work.call._replace(out_dtype=v_BSKh.dtype)
    out, lse = work.kernel.forward(
        _trade(q_BSHh, 2, 1, work),
        k,
        v,
        work.seen,
        call,
    )
    return _trade(out, 1, 2, work), lse


def _ulysses_backward(
    q_BSHh: Array,
    k_BSKh: Array,
    v_BSKh: Array,
    dout_BSHh: Array,
    lse_BHT: Array,
    delta_BHS: Array,
    work: ContextTask,
) -> tuple[Array, Array, Array]:
    q = _trade(q_BSHh, 2, 1, work)
    k = _kv_to_heads(k_BSKh, work)
    v = _kv_to_heads(v_BSKh, work)
    dout = _trade(dout_BSHh, 2, 1, work)
    delta_BHT = _trade(delta_BHS, 1, 2, work)
    call = work.call._replace(out_dtype=None)
    dq, dk, dv = work.kernel.backward(
        q,
        k,
        v,
        dout,
        lse_BHT,
        delta_BHT,
        work.seen,
        call,
    )
    return (
        _trade(dq, 1, 2, work),
        _kv_to_sequence(dk, k_BSKh, work),
        _kv_to_sequence(dv, v_BSKh, work),
    )


def _trade(x: Array, split_dim: int, whole_dim: int, work: ContextTask) -> Array:
    """Split an array over the devices by another of its dims, which is whole now."""
    if work.size == 1:
        return x
    return jax.lax.all_to_all(
        x,
        work.axes,
        split_axis=split_dim,
        concat_axis=whole_dim,
        tiled=True,
    )


def _kv_to_heads(x_BSKh: Array, work: ContextTask) -> Array:
    """Return a share of the kv heads, each copied as often as needed to share them out evenly."""
    copies = math.lcm(x_BSKh.shape[2], work.size) // x_BSKh.shape[2]
    return _trade(
        jnp.repeat(x_BSKh, copies, axis=2) if copies > 1 else x_BSKh,
        2,
        1,
        work,
    )


def _kv_to_sequence(dx_BTKh: Array, x_BSKh: Array, work: ContextTask) -> Array:
    """The transpose of `_kv_to_heads`: it sums the gradients of copies in float32."""
    B, S, K, h = x_BSKh.shape
    dx_BSKh = _trade(dx_BTKh, 1, 2, work)
    if dx_BSKh.shape[2] == K:
        return dx_BSKh
    return jnp.sum(
        dx_BSKh.reshape(B, S, K, -1, h),
        axis=3,
        dtype=jnp.float32,
    )


# The ring.


def ring_forward(
    q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, work: ContextTask
) -> tuple[Array, Array]:
    """Return the output and the log-sum-exp, both in float32."""
    q, *kv = (_stack(x, 1) for x in (q_BSHh, k_BSKh, v_BSKh))
    (early, late) = work.chunks
    C = q.shape[2]

    def tile(
        q_half: ChunkNumber, kv: KeysValues, kv_half: ChunkNumber, how: tuple[Mask, Call]
    ) -> tuple[Array, Array]:
        return work.kernel.forward(
            q[q_half],
            kv[0][kv_half],
            kv[1][kv_half],
            *how,
        )

    def own() -> tuple[Array, Array]:
        of_late = merge(
            tile(1, kv, 1, work.diagonal(late, C)),
            tile(
                1,
                kv,
                0,
                work.pair(late, early, C),
            ),
        )
        return jax.tree.map(
            lambda *x: jnp.stack(x), tile(0, kv, 0, work.diagonal(early, C)), of_late
        )

    def visit(
        pairs: tuple[Array, Array],
        kv: KeysValues,
        hops: ChunkNumber,
    ) -> tuple[Array, Array]:
        for q_half, kv_half, q_chunk, kv_chunk in _visible(work, hops):
            old = pairs[0][q_half], pairs[1][q_half]
            new = merge(
                old,
                tile(q_half, kv, kv_half, work.pair(q_chunk, kv_chunk, C)),
            )
            pairs = (
                pairs[0].at[q_half].set(new[0]),
                pairs[1]
                .at[q_half]
                .set(
                    new[1],
                ),
            )
        return pairs

    out, lse = _around(work, kv, own, visit)
    return _join(out, 1), _join(lse, 2)


def ring_backward(
    q_BSHh: Array,
    k_BSKh: Array,
    v_BSKh: Array,
    dout_BSHh: Array,
    lse_BHS: Array,
    delta_BHS: Array,
    work: ContextTask,
) -> tuple[Array, Array, Array]:
    """Return the gradients; the sums of dk and dv follow their keys one hop late, and so travel
    beside the work too.

    A device's own pairs are split between the two ends of the loop: the two diagonals are computed
    while the first keys are on their way, the full pair while the sums come home.
    """
    q, *kv, dout = (_stack(x, 1) for x in (q_BSHh, k_BSKh, v_BSKh, dout_BSHh))
    lse = _stack(lse_BHS, 2)
    delta = _stack(delta_BHS, 2)
    (early, late) = work.chunks
    C = q.shape[2]

    def tile(
        sums: tuple[Array, ...],
        q_half: ChunkNumber,
        kv: KeysValues,
        kv_half: ChunkNumber,
        how: tuple[Mask, Call],
    ) -> tuple[Array, ...]:
        """Add what one pair of chunks contributes to the sums (dq, dk, dv), each [2, ...]."""
        mine = q[q_half], kv[0][kv_half], kv[1][kv_half], dout[q_half], lse[q_half], delta[q_half]
        places = q_half, kv_half, kv_half
        return tuple(
            s.at[i].add(x)
            for s, i, x in zip(
                sums,
                places,
                work.kernel.backward(*mine, *how),
                strict=True,
            )
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, *kv))

    def diagonals() -> PyTree:
        sums = tile(zeros, 0, kv, 0, work.diagonal(early, C))
        dq, *own = tile(sums, 1, kv, 1, work.diagonal(late, C))
        return dq, tuple(own), None

    def visit(state: PyTree, kv: KeysValues, hops: ChunkNumber) -> PyTree:
        dq, own, passing = state
        if passing is None:
            passing = zeros[1:]
        else:
            passing = work.hop(passing)
        sums = dq, *passing
        for q_half, kv_half, q_chunk, kv_chunk in _visible(work, hops):
            sums = tile(sums, q_half, kv, kv_half, work.pair(q_chunk, kv_chunk, C))
        return sums[0], own, sums[1:]

    dq, own, passing = _around(work, kv, diagonals, visit)
    home = work.hop(passing)
    dq, *own = tile(
        (dq, *own),
        1,
        kv,
        0,
        work.pair(late, early, C),
    )
    dk, dv = (a + b for a, b in zip(own, home, strict=True))
    return _join(dq, 1), _join(dk, 1), _join(dv, 1)


def _around(
    work: ContextTask,
    kv: KeysValues,
    own: Callable[[], State],
    visit: Callable[[State, KeysValues, ChunkNumber], State],
) -> State:
    """Return the state after the keys and values of every device have been here; the next travel
    meanwhile.

    `own` makes the state from this device's keys and values. `visit` adds the keys and values that
    have made so many hops; the first visit may change the form of the state.
    """

    def turn(
        carry: tuple[KeysValues, State],
        hops: ChunkNumber,
    ) -> tuple[tuple[KeysValues, State], None]:
        kv, state = carry
        coming = work.hop(kv)
        return (coming, visit(state, kv, hops)), None

    last = work.size - 1
    carry = work.hop(kv), own()
    unrolled = range(1, last if work.size <= UNROLLED else 2)
    for hops in unrolled:
        carry, _ = turn(carry, hops)
    if last > unrolled.stop:
        carry, _ = jax.lax.scan(
            turn,
            carry,
            jnp.arange(unrolled.stop, last),
        )
    kv, state = carry
    return visit(state, kv, last)


def _visible(
    work: ContextTask,
    hops: ChunkNumber,
) -> Sequence[tuple[ChunkNumber, ChunkNumber, Array, Array]]:
    """The two pairs of chunks that have something to see in the block of the device so many hops
    behind.

    Returns:
      For each pair: which half of this device's queries, which half of that device's keys, and the
        numbers of the chunks. The late queries see its early keys; besides, early queries see its
        early keys or late its late keys.
    """
    early, late = work.chunks
    behind = (early - hops) % work.size
    half = jnp.where(behind < early, 0, 1)
    q_chunk = jnp.where(half == 0, early, late)
    kv_chunk = jnp.where(half == 0, behind, 2 * work.size - 1 - behind)
    return (1, 0, late, behind), (half, half, q_chunk, kv_chunk)


def _stack(x: Array, dim: int) -> Array:
    """Stack the two chunks of a device."""
    return jnp.stack(jnp.split(x, 2, axis=dim))


def _join(x: Array, dim: int) -> Array:
    """The inverse of `_stack`."""
    return jnp.concatenate([x[0], x[1]], axis=dim)
