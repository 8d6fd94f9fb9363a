"""The norms of a transformer, by logical axes.

Shapes: B batch, S sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.base.config import ModelConfig
from jaxpar.models.parameters import ones, param, zeros


class LayerNorm(nnx.Module):
    """Layer normalisation with a scale and, if it `shifts`, a bias, in float32 (Ba et al. 2016,
    arXiv:1607.06450).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, shifts: bool = True):
        self.eps = config.norm_eps
        self.scale = param(rngs, ones, embed=config.embed)
        if shifts:
            self.bias = param(rngs, zeros, embed=config.embed)
        else:
            self.bias = None

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        x = x_BSD.astype(jnp.float32)
        x -= jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        x *= jax.lax.rsqrt(variance + self.eps)
        x *= self.scale[...]
        if self.bias is not None:
            x += self.bias[...]
        return x.astype(x_BSD.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with scale, in float32 (Zhang & Sennrich 2019,
    arXiv:1910.07467).

    It is over `embed`, or over the last dim that is given: `head_dim=64`.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, **dim: int):
        self.eps = config.norm_eps
        self.scale = param(rngs, ones, **(dim or {"embed": config.embed}))

    def __call__(self, x_BSD: Float[Array, "B S *D"]) -> Float[Array, "B S *D"]:
        x = x_BSD.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        x *= jax.lax.rsqrt(variance + self.eps)
        return (x * self.scale[...]).astype(x_BSD.dtype)


NORMS: dict[str, Callable[[ModelConfig, nnx.Rngs], Any]] = {
    "layer": LayerNorm,
    "layer_scale": partial(LayerNorm, shifts=False),
    "rms": RMSNorm,
}
"""The norms of `Family.norm`."""
