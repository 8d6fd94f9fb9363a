"""Rotary positions (RoPE), which turn queries and keys, and the places of tokens where a batch has
none.

Shapes: B batch, S sequence, H heads, h head_dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig


def rotary_frequencies(config: ModelConfig, local: bool = False) -> Float[Array, " half"]:
    """Compute the angle per position of each pair of features, extended where `rope_factor` > 1.

    RoPE is Su et al. 2021, arXiv:2104.09864. The linear extension divides all angles by the factor.
    The extension of llama3 keeps wavelengths below original/high_freq_factor, divides those above
    original/low_freq_factor, and blends in between (Llama 3.1 release, `apply_scaling`).

    Args:
      local: whether the angles are for layers with a window, which have `rope_local_theta` if there
        is one.

    Returns:
      The angles [h/2], in radians.
    """
    head_dim = config.head_size
    local = local and config.rope_local_theta > 0
    if local:
        theta = config.rope_local_theta
    else:
        theta = config.rope_theta
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if config.rope_factor == 1 or local:
        return frequencies
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    low = config.rope_low_freq_factor
    high = config.rope_high_freq_factor
    turns = config.rope_original_seq_len * frequencies / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_factor)


def rotate(
    x_BSHh: Float[Array, "B S H h"],
    positions_BS: Int[Array, "B S"],
    frequencies: Float[Array, " half"],
    scale: float = 1.0,
) -> Float[Array, "B S H h"]:
    """Apply rotary position embedding, pairing feature i with i + h/2 (the order of Hugging Face
    checkpoints).

    Args:
      x_BSHh: queries or keys.
      positions_BS: the places of the tokens.
      frequencies: the angle per position of each pair, in radians.
      scale: a factor of the result, applied before it is rounded.

    Returns:
      An array of the shape and dtype of `x_BSHh`.
    """
    angles_BSh = positions_BS[..., None].astype(jnp.float32) * frequencies
    angles_BS1h = angles_BSh[:, :, None, :]
    cos = jnp.tile(jnp.cos(angles_BS1h), 2)
    sin = jnp.tile(jnp.sin(angles_BS1h), 2)
    # On a TPU, swapping halves of 128 lanes goes through memory; the matrix unit does it at almost
    # no cost.
    turned = jax.lax.platform_dependent(x_BSHh, tpu=_quarter_turn_by_matmul, default=_quarter_turn)
    rotated = x_BSHh.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin
    return (rotated if scale == 1 else rotated * scale).astype(x_BSHh.dtype)


def _quarter_turn(x: Float[Array, "*rows h"]) -> Float[Array, "*rows h"]:
    """Turn each pair by a quarter: (a, b) becomes (-b, a)."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-b, a], axis=-1)


def _quarter_turn_by_matmul(x_BSHh: Float[Array, "B S H h"]) -> Float[Array, "B S H h"]:
    """Turn each pair by a quarter, as `_quarter_turn` does, by a matmul. Each sum has only one term
    that is not zero, so nothing is rounded.
    """
    turn_hh = _quarter_turn(jnp.eye(x_BSHh.shape[-1], dtype=x_BSHh.dtype))
    return jnp.matmul(x_BSHh, turn_hh, precision="highest")


def count_positions(x_BS: Array) -> Int[Array, "B S"]:
    """Count the places of the tokens in rows [B, S, ...] that are one document each."""
    rows, length = x_BS.shape[:2]
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
