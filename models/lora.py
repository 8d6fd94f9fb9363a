"""LoRA's pairs of matrices A and B merged into the matrices that they are beside.

Shapes: L layers, r rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.models.layers import lora_scale
from jaxpar.models.model import Params


def base_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model without LoRA."""
    return replace(config, lora=Lora())


def merge_lora(params: Params, config: ModelConfig) -> Params:
    """Return the parameters of `base_config`: W + (alpha / rank) A B in place of W, A and B (arXiv:2106.09685, section
    4.1), computed in float32. The arrays of W are donated."""
    blocks = dict(params["blocks"])
    for name in config.lora.targets if config.lora.rank else ():
        pair = (blocks.pop(f"{name}_lora_{x}", None) for x in "ab")
        if (a := next(pair)) is not None:  # a target may be named twice
            blocks[name] = _add_product(blocks[name], a, next(pair), lora_scale(config))
    return params | {"blocks": blocks}


@partial(jax.jit, donate_argnums=0, static_argnames="scale")
def _add_product(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Add the products of pairs [L, *in, r] and [L, r, *out] to a stacked weight [L, *in, *out]."""
    product = jax.vmap(partial(jnp.tensordot, axes=1, precision="highest"))(a, b)
    return (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)
