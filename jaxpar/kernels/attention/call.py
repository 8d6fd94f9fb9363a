"""The arguments and the results that all implementations of attention share, and the definition of
attention that they are tested against.

An implementation is a pair of functions on local arrays, with no gradient of their own:

    forward(q_BSHh, k_BTKh, v_BTKh, mask, call) -> out_BSHh, lse_BHS
    backward(q_BSHh, k_BTKh, v_BTKh, dout_BSHh, lse_BHS, delta_BHS, mask, call)
        -> dq_BSHh, dk_BTKh, dv_BTKh

`lse` is the float32 log-sum-exp of a query's scores over the keys that it sees. For a query that
sees no key it is at most `BLIND`, and the output is zeros. `delta` is the sum over h of the output
times its gradient, less the gradient of lse. The backward computes the weights again from lse,
which may be over more keys than the backward is given (ring attention).

Shapes: B batch, S queries, T keys, H heads, K kv heads (head n has kv head n // (H // K)), G heads
a kv head, h head_dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.kernels.masks import Mask, Start

Arrays: TypeAlias = Array | jax.ShapeDtypeStruct
"""An array, or its shape and dtype."""
Index: TypeAlias = int | np.integer | Array
"""The number of a tile, a head or a program, which may be traced."""
Ref: TypeAlias = Any
"""A ref of a Pallas kernel, or several. Jax has no public type for the arguments of a kernel."""
# a finite "minus infinity": exp gives exactly 0, and a row with nothing to see gives no NaN
MASKED = -1e30
BLIND = MASKED / 2  # below any score and above what is masked: exp(MASKED - BLIND) is exactly 0


class Unserved(Exception):
    """The error of an implementation that cannot serve. Its text is the reason, such as `head_dim
    80 is no multiple of 128`.
    """


class Call(NamedTuple):
    """The options of attention."""

    scale: float = 0.0
    """The factor of the scores; 0 = 1 / sqrt(h)."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = no cap."""
    q_start: Start = 0
    """The place of the first query, as the mask counts places."""
    k_start: Start = 0
    """The place of the first key, as the mask counts places."""
    multiple: int = 1
    """A number that traced starts are multiples of."""
    out_dtype: DTypeLike | None = None
    """The dtype of the output or of the gradients; None = the dtype of each input."""
    interpret: bool = False
    """Whether a kernel is interpreted, which tests it on any device."""

    def scale_of(self, q_BSHh: Arrays) -> float:
        """Return the factor of the scores of these queries."""
        return self.scale or 1 / math.sqrt(q_BSHh.shape[-1])

    def starts(self) -> Array:
        """Return the places of the first query and key, int32 [2], as kernels read them."""
        return jnp.stack(
            [
                jnp.int32(self.q_start),
                jnp.int32(self.k_start),
            ]
        )


DEFAULT = Call()


def cap_scores(scores: Array, softcap: float) -> Array:
    """Apply the soft cap to the scores, as the softmax takes them."""
    if softcap:
        return softcap * jnp.tanh(scores / softcap)
    return scores


def through_cap(dscores: Array, capped_scores: Array, softcap: float) -> Array:
    """Compute the gradient of the scores from the gradient of the capped scores, some of which may
    be masked.
    """
    if softcap:
        return dscores * (1 - jnp.maximum(capped_scores / softcap, -1) ** 2)
    return dscores


def merge(
    first: tuple[Array, Array],
    second: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Merge the pairs (out, lse) over two sets of keys into the pair over both sets, in which each
    out is weighted by exp(lse - the larger lse).
    """
    (first_out, first_lse) = first
    (second_out, second_lse) = second
    most = jnp.maximum(first_lse, second_lse)
    weight = jnp.exp(first_lse - most)
    other = jnp.exp(second_lse - most)
    total = weight + other
    shares = [(x / total).swapaxes(1, 2)[..., None] for x in (weight, other)]
    return shares[0] * first_out + shares[1] * second_out, most + jnp.log(total)


def pad_to(x: Array, dim: int, multiple: int) -> Array:
    """Pad one dim with zeros at its end, up to a multiple."""
    missing = -x.shape[dim] % multiple
    if missing:
        return jnp.pad(
            x,
            [(0, missing if n == dim % x.ndim else 0) for n in range(x.ndim)],
        )
    return x


def reference(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    mask: Mask,
    call: Call = DEFAULT,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B S H h"], Float[Array, "B H S"]]:
    """Compute attention by its definition, all scores at once, and return (out, lse), which jax
    differentiates.

    Scores and softmax are float32, or float64 for float64 inputs. No weights are dropped out when
    `key` is None.
    """
    (B, S, H, h) = q_BSHh.shape
    (T, K) = k_BTKh.shape[1:3]
    exact = jnp.promote_types(q_BSHh.dtype, jnp.float32)
    q_BSKGh = q_BSHh.reshape(B, S, K, H // K, h)
    scores_BKGST = jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BTKh, preferred_element_type=exact)
    scores_BKGST = cap_scores(scores_BKGST * call.scale_of(q_BSHh), call.softcap)
    seen = mask.visible(
        jnp.arange(S)[:, None] + call.q_start,
        jnp.arange(T)[None] + call.k_start,
    )
    if seen.ndim != 2:
        seen = seen[:, None, None]
    scores_BKGST = jnp.where(seen, scores_BKGST, MASKED)
    most_BKGS1 = jax.lax.stop_gradient(
        jnp.maximum(jnp.max(scores_BKGST, axis=-1, keepdims=True), BLIND)
    )
    weights_BKGST = jnp.exp(scores_BKGST - most_BKGS1)
    total_BKGS1 = jnp.sum(weights_BKGST, axis=-1, keepdims=True)
    total_BKGS1 = jnp.where(total_BKGS1 == 0, 1, total_BKGS1)
    weights_BKGST = drop_weights(weights_BKGST / total_BKGS1, dropout_rate, key).astype(
        v_BTKh.dtype
    )
    out_BSKGh = jnp.einsum("BKGST,BTKh->BSKGh", weights_BKGST, v_BTKh, preferred_element_type=exact)
    lse_BHS = (most_BKGS1 + jnp.log(total_BKGS1)).reshape(B, H, S)
    return out_BSKGh.reshape(B, S, H, h).astype(call.out_dtype or q_BSHh.dtype), lse_BHS


def drop_weights(weights: Array, rate: float, key: jax.Array | None) -> Array:
    """Zero a share `rate` of the weights [B, K, G, R, C], and scale up the rest."""
    if key is None or rate == 0:
        return weights
    B, K, G, R, C = weights.shape
    # A draw over five dims gives the same bits, but takes XLA:CPU three times as long to compile.
    kept = jax.random.bernoulli(key, jnp.float32(1 - rate), (B, K * G, R * C)).reshape(
        weights.shape
    )
    return jnp.where(kept, weights / (1 - rate), 0)
