"""Ulysses: each device attends with a share of the heads over the whole sequence (Jacobs et al.
2023, arXiv:2309.14509).

All-to-alls trade the split of the sequence for a split of the heads, and back. If the sequence is
whole, a device's share is all heads, and nothing is sent.

Shapes: B batch, S sequence of one device, T whole sequence, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.parallel.context_task import ContextTask


def ulysses_forward(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    work: ContextTask,
) -> tuple[Array, Array]:
    """Compute attention inside `manual`.

    Args:
      q_BSHh: one device's queries; the devices of the task share out their heads evenly.
      k_BSKh: its keys.
      v_BSKh: its values.
      work: the task.

    Returns:
      The output [B, S, H, h] in the dtype of v, and the float32 log-sum-exp [B, H / devices, T] of
        the device's share of the heads.
    """
    k_BTKh = _kv_to_heads(k_BSKh, work)
    v_BTKh = _kv_to_heads(v_BSKh, work)
    q_BTHh = _to_heads(q_BSHh, work)
    call = work.call._replace(out_dtype=v_BSKh.dtype)
    out_BTHh, lse_BHT = work.kernel.forward(q_BTHh, k_BTKh, v_BTKh, work.seen, call)
    return _to_sequence(out_BTHh, work), lse_BHT


def ulysses_backward(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    dout_BSHh: Float[Array, "B S H h"],
    lse_BHT: Array,
    delta_BHS: Float[Array, "B H S"],
    work: ContextTask,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of attention inside `manual`.

    Args:
      q_BSHh: as for `ulysses_forward`, and so are the keys and values.
      k_BSKh: see there.
      v_BSKh: see there.
      dout_BSHh: the output's gradient.
      lse_BHT: the log-sum-exp as the forward returned it.
      delta_BHS: as in `jaxpar.kernels.attention.call`.
      work: the task.

    Returns:
      The gradients of q, k and v, in the forward's shapes.
    """
    q_BTHh = _to_heads(q_BSHh, work)
    k_BTKh = _kv_to_heads(k_BSKh, work)
    v_BTKh = _kv_to_heads(v_BSKh, work)
    dout_BTHh = _to_heads(dout_BSHh, work)
    delta_BHT = _trade(delta_BHS, 1, 2, work)
    call = work.call._replace(out_dtype=None)
    dq_BTHh, dk_BTKh, dv_BTKh = work.kernel.backward(
        q_BTHh, k_BTKh, v_BTKh, dout_BTHh, lse_BHT, delta_BHT, work.seen, call
    )
    dq_BSHh = _to_sequence(dq_BTHh, work)
    dk_BSKh = _kv_to_sequence(dk_BTKh, k_BSKh, work)
    dv_BSKh = _kv_to_sequence(dv_BTKh, v_BSKh, work)
    return dq_BSHh, dk_BSKh, dv_BSKh


def _trade(x: Array, split_dim: int, whole_dim: int, work: ContextTask) -> Array:
    """Split an array over the devices by another of its dims, which is whole now."""
    if work.size == 1:
        return x
    return jax.lax.all_to_all(x, work.axes, split_axis=split_dim, concat_axis=whole_dim, tiled=True)


def _to_heads(x_BSHh: Array, work: ContextTask) -> Array:
    """Return a share of the heads for the whole sequence."""
    return _trade(x_BSHh, 2, 1, work)


def _to_sequence(x_BTHh: Array, work: ContextTask) -> Array:
    """The inverse of `_to_heads`."""
    return _trade(x_BTHh, 1, 2, work)


def _kv_to_heads(x_BSKh: Array, work: ContextTask) -> Array:
    """Return a share of the kv heads, each copied as often as needed to share them out evenly."""
    kv_heads = x_BSKh.shape[2]
    copies = math.lcm(kv_heads, work.size) // kv_heads
    if copies > 1:
        x_BSKh = jnp.repeat(x_BSKh, copies, axis=2)
    return _to_heads(x_BSKh, work)


def _kv_to_sequence(dx_BTKh: Array, x_BSKh: Array, work: ContextTask) -> Array:
    """The transpose of `_kv_to_heads`: it sums the gradients of copies in float32."""
    B, S, K, h = x_BSKh.shape
    dx_BSKh = _to_sequence(dx_BTKh, work)
    if dx_BSKh.shape[2] == K:
        return dx_BSKh
    copies_BSKCh = dx_BSKh.reshape(B, S, K, -1, h)
    return jnp.sum(copies_BSKCh, axis=3, dtype=jnp.float32)
