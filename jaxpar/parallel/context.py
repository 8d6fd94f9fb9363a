"""Context parallelism: causal attention over a sequence that is split over devices.

There are two strategies. `ring` sends keys and values round the devices and merges what each block contributes (Liu et
al. 2023, arXiv:2310.01889); it keeps tokens in zigzag order, so that every device has the same work: see
`jaxpar.parallel.token_order`. `ulysses` trades the split of the sequence for a split of the heads (Jacobs et al. 2023,
arXiv:2309.14509). Each strategy runs inside `manual`, on local arrays.

Shapes: B batch, S sequence of one device, C chunk of it, T whole sequence, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError
from jaxpar.base.mesh import largest_divisor
from jaxpar.base.plan import Strategy
from jaxpar.base.sharding import Axes, Layout, output_axis
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.masks import Mask
from jaxpar.parallel import ring_attention
from jaxpar.parallel.collectives import further_split, manual, platform_of
from jaxpar.parallel.remat import named
from jaxpar.parallel.token_order import PARTS, ContextTask, check_chunks, context_sizes, with_documents

_Shaped = Array | jax.ShapeDtypeStruct
_Q: Axes = ("batch", "attention_seq", "heads", None)
# Log-sum-exps stay as a device made them, [B, 1, H, S]: under Ulysses their heads and tokens are not those of q.
_LSE: Axes = ("batch", "attention_seq", "heads", None)
_SEGMENTS: Axes = ("batch", None)


def check_split(
    layout: Layout, strategy: Strategy, seq_len: int, heads: int, kv_heads: int, dropout: float = 0.0
) -> None:
    """Refuse a sequence or heads that a strategy cannot split.

    Dropout of attention weights is refused too: its random bits follow a token's place in the array, and here that
    place depends on the layout.

    Raises:
      UserError: `check_chunks` refuses the sequence, dropout is on, there are too few heads for Ulysses, kv heads are
        split where heads are not, or one mesh axis splits both the sequence and the heads.
    """
    n, sizes = layout.size("attention_seq"), context_sizes(layout)
    if n == 1:
        return
    check_chunks(layout, strategy, seq_len)
    if dropout > 0:
        raise UserError(
            f"model.dropout={dropout} with the sequence split over {sizes}: what is dropped would depend on "
            "the mesh: try model.dropout=0, or leave the sequence whole"
        )
    layout.sharding((*_Q[1:3], None), (seq_len, heads, 1), "queries")
    layout.sharding(("attention_seq", "kv_heads"), (seq_len, kv_heads), "keys and values")
    if layout.mesh_axes(output_axis("kv_heads", layout)) != layout.mesh_axes("heads"):
        further_split(("heads",), ("kv_heads",), layout)
    here, axis = heads // layout.size("heads"), layout.mesh_axes("attention_seq")[-1]
    if strategy == "ulysses" and here % n:
        fits = largest_divisor(here, layout.mesh.shape[axis])
        raise UserError(
            f"Ulysses with too few heads: {sizes} cannot share out {here} heads (model.heads={heads} over "
            f"{layout.size('heads')} devices): try context.strategy=ring, or mesh.{axis}={fits}"
        )


class Split(NamedTuple):
    """How attention runs on several devices; `implementation` is one of `kernels.Implementation`, or `auto`, and
    `softcap` that of the scores."""

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

    Tokens, and the ids of their documents if there are several, are in `chunk_order`. H is a multiple of K, and kv
    heads are as `parallel.column_linear` leaves them. The mask ignores documents and hides all later keys.
    """
    return _forward(split, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS)[0]


def _forward(split, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS):
    def local(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None) -> tuple[Array, Array]:
        forward = ring_attention.forward if split.in_ring else _ulysses_forward
        work = _work(split, mask, segments_BT, q_BSHh, k_BSKh)
        out_BSHh, lse_BHS = forward(q_BSHh, k_BSKh, v_BSKh, work)
        return out_BSHh.astype(v_BSKh.dtype), lse_BHS[:, None]

    kv = _kv_axes(split.layout)
    layouts, outs = (_Q, kv, kv, _segment_axes(segments_BS)), (_Q, _LSE)
    out_BSHh, lse = manual(local, split.layout, layouts, outs)(q_BSHh, k_BSKh, v_BSKh, segments_BS)
    out_BSHh, lse = named(out_BSHh, "attention_out"), named(lse, "attention_lse")
    return out_BSHh, (q_BSHh, k_BSKh, v_BSKh, segments_BS, out_BSHh, lse)


def _backward(split, mask, residuals, dout_BSHh):
    q_BSHh, k_BSKh, v_BSKh, segments_BS, out_BSHh, lse = residuals

    def local(
        q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None, out_BSHh: Array, lse: Array,
        dout_BSHh: Array,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        if split.devices > 1:
            # They are sent again, because the keys of all devices should not be kept from the forward pass.
            q_BSHh, k_BSKh, v_BSKh = jax.lax.optimization_barrier((q_BSHh, k_BSKh, v_BSKh))
        backward = ring_attention.backward if split.in_ring else _ulysses_backward
        work = _work(split, mask, segments_BT, q_BSHh, k_BSKh)
        delta_BSH = jnp.sum(dout_BSHh.astype(jnp.float32) * out_BSHh.astype(jnp.float32), axis=-1)
        dout_BSHh = dout_BSHh.astype(v_BSKh.dtype)
        dq, dk, dv = backward(q_BSHh, k_BSKh, v_BSKh, dout_BSHh, lse[:, 0], delta_BSH.swapaxes(1, 2), work)
        return dq.astype(q_BSHh.dtype), dk.astype(k_BSKh.dtype), dv.astype(v_BSKh.dtype)

    kv = _kv_axes(split.layout)
    layouts = (_Q, kv, kv, _segment_axes(segments_BS), _Q, _LSE, _Q)
    gradients = manual(local, split.layout, layouts, (_Q, kv, kv))(
        q_BSHh, k_BSKh, v_BSKh, segments_BS, out_BSHh, lse, dout_BSHh
    )
    return *gradients, None


split_attention.defvjp(_forward, _backward)


def kernel_for(split: Split, mask: Mask, q_BSHh: _Shaped, k_BSKh: _Shaped, platform: str) -> tuple[str, str]:
    """The implementation that serves the calls of a strategy, and why no earlier one does.

    The arrays are those of one device, and the mask includes documents.

    Raises:
      UserError: the implementation that was asked for cannot serve.
    """
    length, call = q_BSHh.shape[1] * split.devices, Call(softcap=split.softcap)
    if split.in_ring:  # it pairs chunks, whose places are known only at run time
        length = q_BSHh.shape[1] // 2
        call = PARTS._replace(softcap=split.softcap, q_start=jnp.int32(0), k_start=jnp.int32(0), multiple=length)
    q, k = (jax.ShapeDtypeStruct((len(x), length, *x.shape[2:]), x.dtype) for x in (q_BSHh, k_BSKh))
    return dispatch.choose(dispatch.Asked(q, k, mask, call, parts=True), platform, split.implementation)


def _work(split: Split, mask: Mask, segments_BT: Array | None, q_BSHh: Array, k_BSKh: Array) -> ContextTask:
    seen, platform = with_documents(mask, segments_BT, segments_BT), platform_of(split.layout)
    name, _ = kernel_for(split, seen, q_BSHh, k_BSKh, platform)
    if split.devices > 1:
        dispatch.say_once(f"attention by {name}, {split.strategy}")
    return ContextTask(split.layout, mask, segments_BT, dispatch.pair(name), PARTS._replace(softcap=split.softcap))


def _segment_axes(segments_BS: Array | None) -> Axes | None:
    return None if segments_BS is None else _SEGMENTS


def _kv_axes(layout: Layout) -> Axes:
    return ("batch", "attention_seq", output_axis("kv_heads", layout), None)


# Ulysses: a share of the heads over the whole sequence. If the sequence is whole, it is all heads; nothing is sent.


def _ulysses_forward(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, work: ContextTask) -> tuple[Array, Array]:
    k, v = _kv_to_heads(k_BSKh, work), _kv_to_heads(v_BSKh, work)
    seen = with_documents(work.mask, work.segments_BT, work.segments_BT)
    call = work.call._replace(out_dtype=v_BSKh.dtype)
    out, lse = work.kernel.forward(_trade(q_BSHh, 2, 1, work), k, v, seen, call)
    return _trade(out, 1, 2, work), lse


def _ulysses_backward(
    q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, dout_BSHh: Array, lse_BHT: Array, delta_BHS: Array, work: ContextTask
) -> tuple[Array, Array, Array]:
    q, k, v = _trade(q_BSHh, 2, 1, work), _kv_to_heads(k_BSKh, work), _kv_to_heads(v_BSKh, work)
    dout, delta_BHT = _trade(dout_BSHh, 2, 1, work), _trade(delta_BHS, 1, 2, work)
    seen = with_documents(work.mask, work.segments_BT, work.segments_BT)
    dq, dk, dv = work.kernel.backward(q, k, v, dout, lse_BHT, delta_BHT, seen, work.call._replace(out_dtype=None))
    return _trade(dq, 1, 2, work), _kv_to_sequence(dk, k_BSKh, work), _kv_to_sequence(dv, v_BSKh, work)


def _trade(x: Array, split_dim: int, whole_dim: int, work: ContextTask) -> Array:
    """Split an array over the devices by another of its dims, which is whole now."""
    if work.size == 1:
        return x
    return jax.lax.all_to_all(x, work.axes, split_axis=split_dim, concat_axis=whole_dim, tiled=True)


def _kv_to_heads(x_BSKh: Array, work: ContextTask) -> Array:
    """Return a share of the kv heads, each copied as often as needed to share them out evenly."""
    copies = math.lcm(x_BSKh.shape[2], work.size) // x_BSKh.shape[2]
    return _trade(jnp.repeat(x_BSKh, copies, axis=2) if copies > 1 else x_BSKh, 2, 1, work)


def _kv_to_sequence(dx_BTKh: Array, x_BSKh: Array, work: ContextTask) -> Array:
    """The transpose of `_kv_to_heads`: it sums the gradients of copies in float32."""
    B, S, K, h = x_BSKh.shape
    dx_BSKh = _trade(dx_BTKh, 1, 2, work)
    return dx_BSKh if dx_BSKh.shape[2] == K else jnp.sum(dx_BSKh.reshape(B, S, K, -1, h), axis=3, dtype=jnp.float32)
