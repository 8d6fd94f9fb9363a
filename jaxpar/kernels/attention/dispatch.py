"""Attention behind one function, which takes the fastest implementation that can serve what is
asked.

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.compiled_for import device_of_compilation
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import refusal_without
from jaxpar.base.number_checks import require_number
from jaxpar.kernels.attention import chunked, libraries
from jaxpar.kernels.attention.call import Arrays, Call, Unserved, reference
from jaxpar.kernels.masks import Mask, require_mask, segments_in

Implementation = Literal["pallas_gpu", "pallas_tpu", "cudnn", "splash", "chunked", "reference"]
PAIRS = {"pallas_gpu": "triton", "pallas_tpu": "tpu", "chunked": "chunked"}
"""The modules that have both a forward and a backward, which a ring can use; see `pair`."""
LIBRARIES: dict[str, Callable[..., Array]] = {
    "cudnn": libraries.cudnn,
    "splash": libraries.splash,
}
_KERNELS: dict[str, tuple[str, ...]] = {
    "tpu": ("splash", "pallas_tpu"),
    "gpu": ("cudnn", "pallas_gpu"),
}
"""The kernels of each platform in order of speed; plain XLA by tiles comes after them.

The libraries' kernels come first: of our own `pallas_gpu` was measured on one chip, an H100, where
cuDNN is faster, and `pallas_tpu` was interpreted and compiled for absent ones.
"""
log = logging.getLogger(__name__)


class AttentionRequest(NamedTuple):
    """What the choice of an implementation depends on."""

    q: Arrays
    """The queries, [B, S, H, h], or their shape and dtype."""
    k: Arrays
    """The keys, [B, T, K, h], or their shape and dtype."""
    mask: Mask
    """What a query sees."""
    call: Call
    """The scale, the soft cap and so on."""
    with_lse: bool = True
    """Whether the log-sum-exp is asked for too."""
    dropping: bool = False
    """Whether weights are dropped out."""
    parts: bool = False
    """Whether the answers are parts, to be merged or added up."""
    capability: str = ""
    """The compute capability of the GPU that it is compiled for, `9.0`; empty = that of the one
    here.
    """
    cut: str = ""
    """Why the arrays are not whole heads of one device, so that only plain XLA takes them; empty =
    they are.
    """


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
      implementation: one of `Implementation`; None = the first that serves, in the platform's
        order.
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
    if name == "reference":
        return reference(q_BSHh, k_BTKh, v_BTKh, mask, call, dropout_rate, key)
    if name in LIBRARIES:
        return LIBRARIES[name](q_BSHh, k_BTKh, v_BTKh, mask, call), None
    rate = dropout_rate if dropping else 0.0
    try:
        with libraries.stand_in_scope(name, why):
            both = _of_pair(name, call, rate, q_BSHh, k_BTKh, v_BTKh, mask, key)
        return cast(tuple[Array, Array], both)  # custom_vjp hides the type of what it wraps
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
        if implementation not in get_args(Implementation):
            known = ", ".join(get_args(Implementation))
            raise UserError(
                f"no implementation of attention is called {implementation!r}: try one of {known}"
            )
        if why := refusal(implementation, request, platform):
            serve = ", ".join(
                name for name in get_args(Implementation) if not refusal(name, request, platform)
            )
            raise UserError(
                f"attention by {implementation} was asked for, but: {why}; what serves: {serve}"
            )
        return implementation, ""
    name = "chunked"
    reasons = list[str]()
    for kernel in (
        name for name in _KERNELS.get(platform, ()) if name in PAIRS or not request.parts
    ):
        refused = refusal(kernel, request, platform)
        if not refused:
            name = kernel
            break
        reasons.append(f"{kernel}: {refused}")
    why = "; ".join(reasons)
    say_once(f"attention by {name}" + (f" ({why})" if why else ""))
    return name, why


def pair(name: str) -> ModuleType:
    """A module of `PAIRS`, imported only when it is asked for, as Pallas takes long to import."""
    return importlib.import_module(f"jaxpar.kernels.attention.{PAIRS[name]}")


def refusal(name: str, request: AttentionRequest, platform: str) -> str:
    """Why an implementation cannot serve; empty = it can."""
    if request.parts and name not in PAIRS:
        return "the sequence is split over devices, and it cannot merge parts"
    if name in ("reference", "chunked"):
        return ""
    if request.cut:
        return request.cut
    if request.dropping:
        return "dropout of attention weights"
    if name in _KERNELS["gpu"] and platform == "gpu" and (why := too_old(request.capability)):
        return why
    if name in LIBRARIES and request.with_lse:
        return "no log-sum-exp that has a gradient"
    if name in PAIRS:
        if platform != ("tpu" if name == "pallas_tpu" else "gpu"):
            return f"on {platform}"
        if why := refusal_without(name):
            return why
        return pair(name).refusal(
            request.q.shape, request.k.shape, request.q.dtype, request.mask, request.call
        )
    return libraries.refusal(
        name,
        request.q,
        request.k,
        request.mask,
        request.call,
        platform,
    )


def too_old(capability: str = "") -> str:
    """Why a GPU has no kernels of its own: those of Triton and cuDNN begin with Ampere; empty = it
    may have them.

    Args:
      capability: its compute capability, `9.0`; empty = that of the device that is compiled for.
    """
    capability = capability or device_of_compilation().capability
    old = re.fullmatch(r"[1-7]\.\d", capability)
    if old:
        return f"compute capability {capability} is below 8.0"
    return ""


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
    name: str,
    call: Call,
    rate: float,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    key: jax.Array | None,
) -> tuple[Array, Array]:
    return pair(name).forward(
        q,
        k,
        v,
        mask,
        call,
        *_dropout(rate, key),
    )


def _of_pair_forward(name, call, rate, q, k, v, mask, key):
    out, lse = pair(name).forward(
        q,
        k,
        v,
        mask,
        call,
        *_dropout(rate, key),
    )
    return (out, lse), (q, k, v, mask, key, out, lse)


def _of_pair_backward(name, call, rate, residuals, cotangents):
    q, k, v, mask, key, out, lse = residuals
    dout, dlse = cotangents
    delta_BHS = (
        jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - dlse
    )
    return (
        *pair(name).backward(
            q,
            k,
            v,
            dout,
            lse,
            delta_BHS,
            mask,
            call,
            *_dropout(rate, key),
        ),
        None,
        None,
    )


_of_pair.defvjp(_of_pair_forward, _of_pair_backward)


def _dropout(
    rate: float,
    key: jax.Array | None,
) -> tuple[chunked.Dropout, ...]:
    if key is None or not rate:
        return ()
    return (chunked.Dropout(rate, key),)
