"""What every implementation of attention is given, and what it answers.

An implementation is a pair of functions on local arrays, with no gradient of their own:

    forward(q_BSHh, k_BTKh, v_BTKh, mask, call) -> out_BSHh, lse_BHS
    backward(q_BSHh, k_BTKh, v_BTKh, dout_BSHh, lse_BHS, delta_BHS, mask, call) -> dq_BSHh, dk_BTKh, dv_BTKh

`lse` is the float32 log-sum-exp of a query's scores over the keys that it sees; of one that sees nothing it is at most
`BLIND`, and its output is zeros. `delta` is the sum over h of the output times its gradient, less the gradient of lse.
The backward makes the weights again from lse, which may be that over more keys than these (ring attention).

Shapes: B batch, S queries, T keys, H heads, K kv heads (H a multiple of K; head n has kv head n // (H // K)), h
head_dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

MASKED = -1e30  # a finite "minus infinity": exp gives exactly 0, and a row with nothing to see gives no NaN
BLIND = MASKED / 2  # below any score and above what is masked: exp(MASKED - BLIND) is exactly 0


class Unserved(Exception):
    """What an implementation cannot do; its text is the reason, as in `head_dim 80 is no multiple of 128`."""


class Call(NamedTuple):
    """How attention is to be computed.

    Attributes:
      scale: of the scores; 0 = 1 / sqrt(h).
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = as they are.
      q_start, k_start: places of the first query and key for the mask: int, or a traced scalar.
      multiple: what traced starts are multiples of.
      out_dtype: of the output or of the gradients; None = those of the inputs.
      interpret: run a kernel step by step on any device, to test it.
    """

    scale: float = 0.0
    softcap: float = 0.0
    q_start: Any = 0
    k_start: Any = 0
    multiple: int = 1
    out_dtype: Any = None
    interpret: bool = False

    def scale_of(self, q_BSHh: Array) -> float:
        return self.scale or 1 / math.sqrt(q_BSHh.shape[-1])


DEFAULT = Call()


def capped(scores: Array, softcap: float) -> Array:
    """Scores as the softmax takes them."""
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def through_cap(dscores: Array, capped_scores: Array, softcap: float) -> Array:
    """The gradient by the scores, from that by the capped ones, masked ones among them."""
    return dscores * (1 - jnp.maximum(capped_scores / softcap, -1) ** 2) if softcap else dscores


def merge(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """(out, lse) over the keys of two, from that over each: weighed by exp(lse), the larger taken out."""
    (first_out, first_lse), (second_out, second_lse) = first, second
    most = jnp.maximum(first_lse, second_lse)
    weight, other = jnp.exp(first_lse - most), jnp.exp(second_lse - most)
    total = weight + other
    shares = [(x / total).swapaxes(1, 2)[..., None] for x in (weight, other)]
    return shares[0] * first_out + shares[1] * second_out, most + jnp.log(total)


def product(subscripts: str, a: Array, b: Array) -> Array:
    """An einsum summed in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def grouped(x_BSHh: Array, K: int) -> Array:
    """[B, S, H, h] as [B, K, G, S, h]."""
    B, S, H, h = x_BSHh.shape
    return x_BSHh.reshape(B, S, K, H // K, h).transpose(0, 2, 3, 1, 4)


def ungrouped(x_BKGSh: Array) -> Array:
    """The inverse of `grouped`."""
    B, K, G, S, h = x_BKGSh.shape
    return x_BKGSh.transpose(0, 3, 1, 2, 4).reshape(B, S, K * G, h)
