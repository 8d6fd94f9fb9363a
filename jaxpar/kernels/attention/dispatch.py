"""Attention behind one function, which takes the fastest implementation that can serve what is
asked.

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.compiled_for import device_of_compilation
from jaxpar.base.errors import UserError, short
from jaxpar.base.number_checks import require_number
from jaxpar.base.registry import KERNELS
from jaxpar.kernels.attention import libraries
from jaxpar.kernels.attention.call import Call, Unserved
from jaxpar.kernels.attention.chunked import Dropout
from jaxpar.kernels.attention.kernel import AttentionRequest, Kernel
from jaxpar.kernels.masks import Mask, require_mask, segments_in

_QKV = tuple[Array, Array, Array]
log = logging.getLogger(__name__)


def attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    with_lse: bool = True,
    capability: str = "",
    q_start: int = 0,
) -> tuple[Float[Array, "B S H h"], Float[Array, "B H S"] | None]:
    """Return (out, lse): softmax attention with grouped query heads (arXiv:2305.13245), and the
    log-sum-exp of each query's scores. Both have gradients. A query that sees nothing has an output
    of zeros and an lse of about -1e30.

    Args:
      q_BSHh: queries, of a floating dtype such as float32 or bfloat16; scores and softmax are
        float32.
      k_BTKh: keys; H is a multiple of K.
      v_BTKh: values.
      mask: a mask of `jaxpar.kernels.masks`.
      scale: the factor of the scores; None = 1 / sqrt(h).
      softcap: scores become `softcap * tanh(score / softcap)`; 0 = as they are.
      implementation: the name of one that is registered; None = the first that serves, in the
        platform's order.
      platform: the platform that it is compiled for; None = that of a rehearsal's target, or else
        jax's default backend, with their capability.
      dropout_rate: the dropout of the weights, from 0 to below 1.
      key: of the dropout; there is none when it is None.
      with_lse: False = lse may be None, so that libraries can serve that give no lse with a
        gradient.
      capability: the compute capability of the GPU that it is compiled for; empty = that of the one
        here.
      q_start: the place of the first query for the mask; the first key stands at 0.

    Raises:
      UserError: the shapes or dtypes do not go together, a number is out of its range, the ids have
        other lengths, or the implementation is unknown or cannot serve; the message has the reason
        and names those that can.
    """
    check_arguments(q_BSHh, k_BTKh, v_BTKh, mask, softcap, dropout_rate)
    if scale is not None:
        require_number("attention", "scale", scale, above=0)
    call = Call(scale=scale or 0.0, softcap=softcap, q_start=q_start)
    dropping = key is not None and dropout_rate > 0
    if not platform:
        platform, capability, _ = device_of_compilation()
    request = AttentionRequest(
        q_BSHh, k_BTKh, mask, call, with_lse, dropping, capability=capability
    )
    name, why = choose(request, platform, implementation)
    kernel: Kernel = KERNELS[name]
    qkv = (q_BSHh, k_BTKh, v_BTKh)
    rate = dropout_rate if dropping else 0.0
    if kernel.backward is None:
        found = kernel.forward(*qkv, mask, call, *_given(name, rate, key))
        both = found if kernel.gives_lse else (found, None)
        _require_output(name, both[0], q_BSHh)
        return both
    try:
        with libraries.stand_in_scope(name, why):
            # custom_vjp hides the type of what it wraps
            both = cast(tuple[Array, Array], _of_pair(name, call, rate, qkv, mask, key))
        _require_output(name, both[0], q_BSHh)
        return both
    except Unserved as unserved:  # some reasons show only when the tiles are laid out
        raise UserError(
            f"attention by {name} cannot serve: {unserved}; chunked and reference do"
        ) from unserved


def choose(
    request: AttentionRequest,
    platform: str,
    implementation: str | None = None,
) -> tuple[str, str]:
    """The implementation that serves, and why those before it do not; the log says so once.

    Args:
      implementation: None or "auto" = the first that serves, which is plain XLA by tiles where no
        kernel does.

    Raises:
      UserError: the implementation asked for is unknown or cannot serve.
    """
    if implementation not in (None, "auto"):
        if implementation not in KERNELS:
            known = ", ".join(KERNELS.names())
            raise UserError(
                f"no implementation of attention is called {implementation!r}: try one of {known}"
            )
        if why := refusal(implementation, request, platform):
            serve = ", ".join(
                name for name in KERNELS.names() if not refusal(name, request, platform)
            )
            raise UserError(
                f"attention by {implementation} was asked for, but: {why}; what serves: {serve}"
            )
        return implementation, ""
    name = "chunked"
    reasons = list[str]()
    for kernel in kernels_for(platform):
        if request.parts and not KERNELS[kernel].merges:
            continue
        refused = refusal(kernel, request, platform)
        if not refused:
            name = kernel
            break
        reasons.append(f"{kernel}: {refused}")
    why = "; ".join(reasons)
    say_once(f"attention by {name}" + (f" ({why})" if why else ""))
    return name, why


def kernels_for(platform: str) -> list[str]:
    """The names of the implementations that are made for a platform, in the order in which they are
    tried.
    """
    return [name for name, kernel in KERNELS.items() if platform in kernel.platforms]


def refusal(name: str, request: AttentionRequest, platform: str) -> str:
    """Why an implementation cannot serve; empty = it can."""
    kernel: Kernel = KERNELS[name]
    if request.parts and not kernel.merges:
        return "the sequence is split over devices, and it cannot merge parts"
    if not kernel.plain:
        if request.cut:
            return request.cut
        if request.dropping:
            return "dropout of attention weights"
    if request.with_lse and not kernel.gives_lse:
        return "no log-sum-exp that has a gradient"
    # One that is interpreted runs anywhere.
    if kernel.platforms and platform not in kernel.platforms and not request.call.interpret:
        return f"on {platform}"
    return kernel.refusal(request, platform)


def _require_output(name: str, out: object, q_BSHh: Array) -> None:
    """Refuse what a kernel of one's own returned in place of an output."""
    shape = getattr(out, "shape", None)
    if shape != q_BSHh.shape:
        found = short(out) if shape is None else f"an array of shape {shape}"
        raise UserError(
            f"kernels.attention {name!r} returned {found} for queries of shape {q_BSHh.shape}: an "
            "output has the queries' shape, and with backward= it is a pair of that and the "
            "log-sum-exp"
        )


@lru_cache(maxsize=64)
def say_once(line: str) -> None:
    """Write a line to the log, the first time only."""
    log.info(line)


def check_arguments(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    softcap: float = 0.0,
    dropout_rate: float = 0.0,
) -> None:
    """Refuse arguments of attention that are not of the right types, do not fit together, or are
    out of their range.
    """
    shapes = f"q {q_BSHh.shape}, k {k_BTKh.shape}, v {v_BTKh.shape}"
    if not q_BSHh.ndim == k_BTKh.ndim == v_BTKh.ndim == 4:
        raise UserError(
            f"attention takes [batch, sequence, heads, head_dim], and was given {shapes}"
        )
    require_mask(mask, "attention")
    (B, S, H, h) = q_BSHh.shape
    (T, K) = k_BTKh.shape[1:3]
    if 0 in (S, H, h, T, K):
        raise UserError(
            f"attention needs at least one token, one head and one number a head: {shapes}"
        )
    if k_BTKh.shape != v_BTKh.shape or k_BTKh.shape != (B, T, K, h):
        raise UserError(
            f"attention needs k and v of one shape, and batch and head_dim as q has them: {shapes}"
        )
    if H % K:
        raise UserError(
            f"attention needs heads ({H}) that are a multiple of kv heads ({K}): {shapes}"
        )
    if not q_BSHh.dtype == k_BTKh.dtype == v_BTKh.dtype:
        raise UserError(
            f"attention needs q, k and v of one dtype: {q_BSHh.dtype}, {k_BTKh.dtype}, "
            f"{v_BTKh.dtype}"
        )
    if not jnp.issubdtype(q_BSHh.dtype, jnp.floating):
        raise UserError(
            "attention takes q, k and v of a floating dtype, such as bfloat16, and was given "
            f"{q_BSHh.dtype}"
        )
    require_number("attention", "softcap", softcap, least=0)
    require_number("attention", "dropout_rate", dropout_rate, least=0, below=1)
    for segments in segments_in(mask):
        segments.check(B, S, T)


# Implementations that have a forward and a backward.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _of_pair(
    name: str, call: Call, rate: float, qkv: _QKV, mask: Mask, key: jax.Array | None
) -> tuple[Array, Array]:
    return KERNELS[name].forward(*qkv, mask, call, *_given(name, rate, key))


def _of_pair_forward(name, call, rate, qkv, mask, key):
    out, lse = KERNELS[name].forward(*qkv, mask, call, *_given(name, rate, key))
    return (out, lse), (qkv, mask, key, out, lse)


def _of_pair_backward(name, call, rate, residuals, cotangents):
    qkv, mask, key, out, lse = residuals
    dout, dlse = cotangents
    delta_BHS = (
        jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - dlse
    )
    dropout = _given(name, rate, key)
    dqkv = KERNELS[name].backward(*qkv, dout, lse, delta_BHS, mask, call, *dropout)
    return tuple(dqkv), None, None


_of_pair.defvjp(_of_pair_forward, _of_pair_backward)


def _given(name: str, rate: float, key: jax.Array | None) -> tuple[Dropout | None, ...]:
    """What a kernel is given after the call: plain ones the dropout."""
    return (_dropout(rate, key),) if KERNELS[name].plain else ()


def _dropout(rate: float, key: jax.Array | None) -> Dropout | None:
    if key is None or not rate:
        return None
    return Dropout(rate, key)
