"""What every implementation of attention is given, and what it returns.

An implementation is a pair of functions on local arrays, with no gradient of their own:

    forward(q_BSHh, k_BTKh, v_BTKh, mask, call) -> out_BSHh, lse_BHS
    backward(q_BSHh, k_BTKh, v_BTKh, dout_BSHh, lse_BHS, delta_BHS, mask, call) -> dq_BSHh, dk_BTKh, dv_BTKh

`lse` is the float32 log-sum-exp of a query's scores over the keys that it sees. For a query that sees nothing it is at
most `BLIND`, and the output is zeros. `delta` is the sum over h of the output times its gradient, less the gradient of
lse. The backward computes the weights again from lse, which may cover more keys than these (ring attention).

Shapes: B batch, S queries, T keys, H heads, K kv heads (H a multiple of K; head n has kv head n // (H // K)), h
head_dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.kernels.masks import Start

Arrays: TypeAlias = Array | jax.ShapeDtypeStruct
"""An array, or its shape and dtype."""
Index: TypeAlias = int | np.integer | Array
"""The number of a tile, a head or a program, which may be traced."""
Ref: TypeAlias = Any
"""A ref of a Pallas kernel, or several. Jax has no public type for what a kernel is given."""
MASKED = -1e30  # a finite "minus infinity": exp gives exactly 0, and a row with nothing to see gives no NaN
BLIND = MASKED / 2  # below any score and above what is masked: exp(MASKED - BLIND) is exactly 0


class Unserved(Exception):
    """An implementation cannot serve. The text is the reason: `head_dim 80 is no multiple of 128`."""


class Call(NamedTuple):
    """How attention is to be computed.

    Attributes:
      scale: the factor of the scores; 0 = 1 / sqrt(h).
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = no cap.
      q_start: the place of the first query for the mask.
      k_start: the place of the first key for the mask.
      multiple: a number that traced starts are multiples of.
      out_dtype: the dtype of the output or of the gradients; None = those of the inputs.
      interpret: whether a kernel is interpreted, which tests it on any device.
    """

    scale: float = 0.0
    softcap: float = 0.0
    q_start: Start = 0
    k_start: Start = 0
    multiple: int = 1
    out_dtype: DTypeLike | None = None
    interpret: bool = False

    def scale_of(self, q_BSHh: Arrays) -> float:
        """The factor of the scores of these queries."""
        return self.scale or 1 / math.sqrt(q_BSHh.shape[-1])

    def starts(self) -> Array:
        """The places of the first query and the first key, int32 [2], as kernels read them."""
        return jnp.stack([jnp.int32(self.q_start), jnp.int32(self.k_start)])


DEFAULT = Call()


def cap_scores(scores: Array, softcap: float) -> Array:
    """Apply the soft cap to the scores, as the softmax takes them."""
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def through_cap(dscores: Array, capped_scores: Array, softcap: float) -> Array:
    """The gradient of the scores, from the gradient of the capped scores, some of which may be masked."""
    return dscores * (1 - jnp.maximum(capped_scores / softcap, -1) ** 2) if softcap else dscores


def merge(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """(out, lse) over two sets of keys together, from those over each, weighted by exp(lse - the larger lse)."""
    (first_out, first_lse), (second_out, second_lse) = first, second
    most = jnp.maximum(first_lse, second_lse)
    weight, other = jnp.exp(first_lse - most), jnp.exp(second_lse - most)
    total = weight + other
    shares = [(x / total).swapaxes(1, 2)[..., None] for x in (weight, other)]
    return shares[0] * first_out + shares[1] * second_out, most + jnp.log(total)


def product(subscripts: str, a: Array, b: Array) -> Array:
    """An einsum that sums in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def pad_to(x: Array, dim: int, multiple: int) -> Array:
    """Pad one dim with zeros at its end, up to a multiple."""
    missing = -x.shape[dim] % multiple
    return jnp.pad(x, [(0, missing if n == dim % x.ndim else 0) for n in range(x.ndim)]) if missing else x


def group_heads(x_BSHh: Array, K: int) -> Array:
    """Turn [B, S, H, h] into [B, K, G, S, h]."""
    B, S, H, h = x_BSHh.shape
    return x_BSHh.reshape(B, S, K, H // K, h).transpose(0, 2, 3, 1, 4)


def ungroup_heads(x_BKGSh: Array) -> Array:
    """The inverse of `group_heads`."""
    B, K, G, S, h = x_BKGSh.shape
    return x_BKGSh.transpose(0, 3, 1, 2, 4).reshape(B, S, K * G, h)
