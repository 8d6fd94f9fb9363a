"""Context parallelism: attention over a sequence that is split over devices.

There are two strategies, each in a room of its own: the ring (`jaxpar.parallel.context.ring`),
which sends keys and values round the devices, and Ulysses (`jaxpar.parallel.context.ulysses`),
which trades the split of the sequence for a split of the heads. Here they get their gradient, and
the layouts inside which they run on local arrays.

Shapes: B batch, S sequence, T whole sequence on every device, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Strategy
from jaxpar.base.layout.sharding import Axes, Layout, output_axis
from jaxpar.base.registry import KERNELS
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import Mask
from jaxpar.parallel.collectives import capability_of, further_split, manual, platform_of
from jaxpar.parallel.context.ring import ring_backward, ring_forward
from jaxpar.parallel.context.task import PARTS, UNROLLED, ContextTask, with_documents_from
from jaxpar.parallel.context.ulysses import devices_sharing, ulysses_backward, ulysses_forward
from jaxpar.parallel.remat import named
from jaxpar.parallel.zigzag import check_chunks, context_sizes

_Shaped = Array | jax.ShapeDtypeStruct
_Q: Axes = ("batch", "attention_seq", "heads", None)
_LSE = _Q
"""Log-sum-exps stay as a device made them, [B, 1, H, S]: under Ulysses with other heads and tokens
than q."""


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

    Args:
      layout: mesh and rules.
      strategy: `ring` or `ulysses`.
      seq_len: the tokens of a whole sequence.
      heads: the number of query heads, on all devices together.
      kv_heads: the number of kv heads, on all devices together.
      dropout: the rate of dropout of attention weights.

    Raises:
      UserError: `check_chunks` refuses the sequence, dropout is on, kv heads are split where heads
        are not, or one mesh axis splits both the sequence and the heads.
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
    layout.sharding(("attention_seq", "heads"), (seq_len, heads), "queries")
    layout.sharding(("attention_seq", "kv_heads"), (seq_len, kv_heads), "keys and values")
    if layout.mesh_axes(output_axis("kv_heads", layout)) != layout.mesh_axes("heads"):
        further_split(("heads",), ("kv_heads",), layout)


class Split(NamedTuple):
    """How attention runs on several devices; the fields are as for `parallel.attention`."""

    layout: Layout
    strategy: Strategy = "ring"
    implementation: str = "auto"
    softcap: float = 0.0
    unrolled: int = UNROLLED
    """As of `ContextTask`."""
    q_start: int = 0
    """The place of the first query among the keys, which no device splits if it is not 0."""

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
    k_BSKh: Float[Array, "B keys K h"],
    v_BSKh: Float[Array, "B keys K h"],
    segments_BS: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S H h"]:
    """Compute attention by a strategy, as `jaxpar.kernels` does except for the order of the tokens.

    Args:
      split: how it runs.
      mask: what a query sees, without documents.
      q_BSHh: queries, tokens in `chunk_order`; H is a multiple of K. If they begin at
        `split.q_start`, there are so many keys more than queries.
      k_BSKh: keys, with kv heads as `parallel.column_linear` leaves them.
      v_BSKh: values, likewise.
      segments_BS: the ids of the documents of the keys' tokens; None = a sequence is one document.

    Returns:
      The output in the dtype of v, laid out as q.

    Raises:
      UserError: the implementation that was asked for cannot serve.
    """
    return _forward(split, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS)[0]


def _forward(split, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS):
    def local(
        q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None
    ) -> tuple[Array, Array]:
        if split.in_ring:
            forward = ring_forward
        else:
            forward = ulysses_forward
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
            backward = ulysses_backward
        work = _work(split, mask, segments_BT, q_BSHh, k_BSKh)
        products_BSHh = dout_BSHh.astype(jnp.float32) * out_BSHh.astype(jnp.float32)
        delta_BSH = jnp.sum(products_BSHh, axis=-1)
        dout_BSHh = dout_BSHh.astype(v_BSKh.dtype)
        lse_BHS = lse[:, 0]
        delta_BHS = delta_BSH.swapaxes(1, 2)
        dq, dk, dv = backward(q_BSHh, k_BSKh, v_BSKh, dout_BSHh, lse_BHS, delta_BHS, work)
        return dq.astype(q_BSHh.dtype), dk.astype(k_BSKh.dtype), dv.astype(v_BSKh.dtype)

    layouts = _layouts(split, segments_BS)
    run = manual(local, split.layout, (*layouts, _Q, _LSE, _Q), layouts[:3])
    return *run(*residuals, dout_BSHh), None


split_attention.defvjp(_forward, _backward)


def kernel_for(
    split: Split, mask: Mask, q_BSHh: _Shaped, k_BSKh: _Shaped, platform: str
) -> tuple[str, str]:
    """The implementation that serves the calls of a strategy, and why no earlier one does.

    Args:
      split: how attention runs.
      mask: what a query sees, documents included.
      q_BSHh: one device's queries [B, S, H, h], or their shape and dtype.
      k_BSKh: its keys [B, S, K, h], or their shape and dtype.
      platform: `cpu`, `gpu` or `tpu`.

    Returns:
      The name of the implementation, and the reasons against those before it.

    Raises:
      UserError: the implementation that was asked for cannot serve.
    """
    B, S, H, h = q_BSHh.shape
    queries = S * split.devices
    keys = k_BSKh.shape[1] * split.devices
    call = Call(softcap=split.softcap, q_start=split.q_start)
    # Of chunks, and of a part of the queries, the places are known only at run time.
    somewhere = PARTS._replace(softcap=split.softcap, q_start=jnp.int32(0))
    if split.in_ring:
        queries = S // 2
        keys = queries
        call = somewhere._replace(k_start=jnp.int32(0), multiple=queries)
    elif (sharing := devices_sharing(H, split.devices)) < split.devices:
        queries = S * sharing
        call = somewhere._replace(multiple=queries)
    q = jax.ShapeDtypeStruct((B, queries, H, h), q_BSHh.dtype)
    k = jax.ShapeDtypeStruct((B, keys, *k_BSKh.shape[2:]), k_BSKh.dtype)
    request = AttentionRequest(
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
    """What a strategy has to do, by the implementation that serves."""
    seen = with_documents_from(split.q_start, mask, segments_BT)
    name, _ = kernel_for(split, seen, q_BSHh, k_BSKh, platform_of(split.layout))
    if split.devices > 1:
        dispatch.say_once(f"attention by {name}, {split.strategy}")
    call = PARTS._replace(softcap=split.softcap, q_start=split.q_start)
    return ContextTask(split.layout, mask, segments_BT, KERNELS[name], call, split.unrolled)


def _layouts(split: Split, segments_BS: Array | None) -> tuple[Axes, Axes, Axes, Axes | None]:
    """The logical axes of q, k, v and the documents."""
    kv: Axes = ("batch", "attention_seq", output_axis("kv_heads", split.layout), None)
    if segments_BS is None:
        return _Q, kv, kv, None
    return _Q, kv, kv, ("batch", None)
