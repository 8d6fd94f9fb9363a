"""Attention by its definition, all scores at once. The other implementations are tested against it.

Shapes: as in `jaxpar.kernels.attention.call`; G query heads per kv head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.kernels.attention.call import BLIND, DEFAULT, MASKED, Call, cap_scores
from jaxpar.kernels.masks import Mask


def reference(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    mask: Mask,
    call: Call = DEFAULT,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B S H h"], Float[Array, "B H S"]]:
    """Return (out, lse), which jax differentiates. Scores and softmax are float32, or float64 for float64 inputs.

    Args:
      dropout_rate, key: the dropout of the weights; there is none when key is None.
    """
    (B, S, H, h), (T, K) = q_BSHh.shape, k_BTKh.shape[1:3]
    exact = jnp.promote_types(q_BSHh.dtype, jnp.float32)
    q_BSKGh = q_BSHh.reshape(B, S, K, H // K, h)
    scores_BKGST = jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BTKh, preferred_element_type=exact)
    scores_BKGST = cap_scores(scores_BKGST * call.scale_of(q_BSHh), call.softcap)
    seen = mask.visible(jnp.arange(S)[:, None] + call.q_start, jnp.arange(T)[None] + call.k_start)
    seen = seen if seen.ndim == 2 else seen[:, None, None]
    scores_BKGST = jnp.where(seen, scores_BKGST, MASKED)
    most_BKGS1 = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores_BKGST, axis=-1, keepdims=True), BLIND))
    weights_BKGST = jnp.exp(scores_BKGST - most_BKGS1)
    total_BKGS1 = jnp.sum(weights_BKGST, axis=-1, keepdims=True)
    total_BKGS1 = jnp.where(total_BKGS1 == 0, 1, total_BKGS1)
    weights_BKGST = drop_weights(weights_BKGST / total_BKGS1, dropout_rate, key).astype(v_BTKh.dtype)
    out_BSKGh = jnp.einsum("BKGST,BTKh->BSKGh", weights_BKGST, v_BTKh, preferred_element_type=exact)
    lse_BHS = (most_BKGS1 + jnp.log(total_BKGS1)).reshape(B, H, S)
    return out_BSKGh.reshape(B, S, H, h).astype(call.out_dtype or q_BSHh.dtype), lse_BHS


def drop_weights(weights: Array, rate: float, key: jax.Array | None) -> Array:
    """The weights [B, K, G, R, C], with a share `rate` of them zeroed and the rest scaled up."""
    if key is None or rate == 0:
        return weights
    B, K, G, R, C = weights.shape
    # A draw over five dims gives the same bits, but takes XLA:CPU three times as long to compile.
    kept = jax.random.bernoulli(key, 1 - rate, (B, K * G, R * C)).reshape(weights.shape)
    return jnp.where(kept, weights / (1 - rate), 0)
