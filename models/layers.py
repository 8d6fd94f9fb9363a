"""The building blocks of models: a parameter's declaration, two norms, rotary positions and a vocabulary table.

Shapes: B batch, S sequence, D embed, H heads, h head_dim, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig

Initializer = Callable[..., jax.Array]
zeros, ones, normal = nnx.initializers.zeros, nnx.initializers.ones, nnx.initializers.normal


def uniform(bound: float) -> Initializer:
    """Draw from -bound to bound."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def lora_scale(config: ModelConfig) -> float:
    """The weight of a LoRA product (arXiv:2106.09685, section 4.1)."""
    return config.lora.alpha / max(config.lora.rank, 1)


def param(rngs: nnx.Rngs, init: Initializer, **dims: int) -> nnx.Param:
    """Declare a float32 parameter: `param(rngs, normal(0.02), embed=64, mlp=256)` is [64, 256] over those logical axes.

    A dim whose name starts with `_` has no logical axis and is never split.
    """
    axes = tuple(None if name.startswith("_") else name for name in dims)
    return nnx.Param(init(rngs.params(), tuple(dims.values()), jnp.float32), axes=axes)


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias, in float32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.eps = config.norm_eps
        self.scale = param(rngs, ones, embed=config.embed)
        self.bias = param(rngs, zeros, embed=config.embed)

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        x = x_BSD.astype(jnp.float32)
        x -= jnp.mean(x, axis=-1, keepdims=True)
        x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * self.scale[...] + self.bias[...]).astype(x_BSD.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with scale, in float32 (Zhang & Sennrich 2019, arXiv:1910.07467).

    It is over `embed`, or over the last dim that is given: `head_dim=64`.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, **dim: int):
        self.eps = config.norm_eps
        self.scale = param(rngs, ones, **(dim or {"embed": config.embed}))

    def __call__(self, x_BSD: Float[Array, "B S *D"]) -> Float[Array, "B S *D"]:
        x = x_BSD.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * self.scale[...]).astype(x_BSD.dtype)


def rotary_frequencies(config: ModelConfig, local: bool = False) -> Float[Array, " h/2"]:
    """Return the angle per position of each pair of features, extended where `rope_factor` > 1.

    RoPE is Su et al. 2021, arXiv:2104.09864. The linear extension divides all by the factor. That of llama3 keeps
    wavelengths below original/high_freq_factor, divides those above original/low_freq_factor, and blends in between
    (Llama 3.1 release, `apply_scaling`). Layers with a window (`local`) have `rope_local_theta`, if there is one.
    """
    head_dim, local = config.head_size, local and config.rope_local_theta > 0
    theta = config.rope_local_theta if local else config.rope_theta
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if config.rope_factor == 1 or local:
        return frequencies
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_seq_len * frequencies / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_factor)


def rotate(
    x_BSHh: Float[Array, "B S H h"], positions_BS: Int[Array, "B S"], frequencies: Float[Array, " h/2"],
    scale: float = 1.0,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Apply rotary position embedding, pairing feature i with i + h/2 (the order of Hugging Face checkpoints), and
    multiply by `scale` before rounding."""
    angles_BS1h = (positions_BS[..., None].astype(jnp.float32) * frequencies)[:, :, None, :]
    cos, sin = (jnp.tile(part(angles_BS1h), 2) for part in (jnp.cos, jnp.sin))
    # On a TPU, swapping halves of 128 lanes goes through memory; the matrix unit does it at almost no cost.
    turned = jax.lax.platform_dependent(x_BSHh, tpu=_quarter_turn_by_matmul, default=_quarter_turn)
    rotated = x_BSHh.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin
    return (rotated if scale == 1 else rotated * scale).astype(x_BSHh.dtype)


def _quarter_turn(x_BSHh: Float[Array, "B S H h"]) -> Float[Array, "B S H h"]:
    """Turn each pair by a quarter: (a, b) becomes (-b, a)."""
    a, b = jnp.split(x_BSHh, 2, axis=-1)
    return jnp.concatenate([-b, a], axis=-1)


def _quarter_turn_by_matmul(x_BSHh: Float[Array, "B S H h"]) -> Float[Array, "B S H h"]:
    """Do the same by a matmul; each sum has only one term that is not zero, so nothing is rounded."""
    turn_hh = _quarter_turn(jnp.eye(x_BSHh.shape[-1], dtype=x_BSHh.dtype))
    return jnp.matmul(x_BSHh, turn_hh, precision="highest")


def vocab_table(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Make a vocabulary table [V, D]: the input embedding or the output head.

    The vocabulary is rounded up so that a mesh axis can divide it. Rows past the vocabulary are never read.
    """
    rows = -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple
    return param(rngs, normal(config.init_std), vocab=rows, embed=config.embed)
