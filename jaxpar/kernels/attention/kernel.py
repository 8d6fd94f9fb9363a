"""The record of an implementation of attention, and the decorator that registers one: ours
(`implementations`), and a program's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from jaxpar.base.errors import UserError, short
from jaxpar.base.registry import KERNELS, registering, require_callable
from jaxpar.kernels.attention.call import Arrays, Call
from jaxpar.kernels.masks import Mask

Function = TypeVar("Function", bound=Callable[..., Any])
_PLATFORMS = ("cpu", "gpu", "tpu")
_FORWARD = ("q", "k", "v", "mask", "call")
_BACKWARD = ("q", "k", "v", "dout", "lse", "delta", "mask", "call")


class AttentionRequest(NamedTuple):
    """The facts that the choice of an implementation depends on."""

    q: Arrays
    """The queries, [B, S, H, h], or their shape and dtype."""
    k: Arrays
    """The keys, [B, T, K, h], or their shape and dtype."""
    mask: Mask
    """Which keys a query sees."""
    call: Call
    with_lse: bool = True
    """Whether the log-sum-exp is asked for too."""
    dropping: bool = False
    """Whether weights are dropped out."""
    parts: bool = False
    """Whether the results are partial, to be merged or added up."""
    capability: str = ""
    """The compute capability of the GPU that the program is compiled for, such as `9.0`; empty =
    the capability of the GPU that is here.
    """
    cut: str = ""
    """Why the arrays are not whole heads of one device, so that only plain XLA takes them; empty =
    they are whole heads.
    """


Refusal = Callable[[AttentionRequest, str], str]
"""A function that says why a request cannot be served on a platform; empty = it can."""


def _serves_all(request: AttentionRequest, platform: str) -> str:
    return ""


@dataclass(frozen=True)
class Kernel:
    """An implementation of attention. `register_kernel` explains the fields, its arguments."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    refusal: Refusal
    platforms: tuple[str, ...]
    plain: bool

    @property
    def merges(self) -> bool:
        """Whether it serves parts of the keys, whose results are merged."""
        return self.backward is not None

    @property
    def gives_lse(self) -> bool:
        """Whether it gives a log-sum-exp that has a gradient."""
        return self.merges or self.plain


def register_kernel(
    name: str,
    *,
    backward: Callable[..., Any] | None = None,
    refusal: Refusal = _serves_all,
    platforms: tuple[str, ...] = (),
    plain: bool = False,
) -> Callable[[Function], Function]:
    """Register an implementation of attention as a value of `kernels.attention`.

        @register_kernel("mine")
        def mine(q_BSHh, k_BTKh, v_BTKh, mask, call):
            ...
            return out_BSHh

    The function is called on one device's own arrays, and sees no mesh;
    `jaxpar.kernels.attention.call` defines its arguments.

    Args:
      name: a word that no other implementation has.
      backward: the backward of an implementation that writes one out. The implementation then also
        returns the log-sum-exp, and so can attend to parts of the keys, as ring attention and
        Ulysses ask; None = JAX differentiates it.
      refusal: a function of an `AttentionRequest` and a platform that returns the reason why the
        implementation cannot serve, or an empty text.
      platforms: the platforms that it is made for, of `cpu`, `gpu` and `tpu`: on these `auto` tries
        it, after the implementations that were registered before, and on others it is refused.
        Empty = it runs on all platforms, and only where it is asked for by name.
      plain: whether it is plain JAX, which XLA may split over devices in any way. It is then given
        a `Dropout` or None, too, and returns a pair of the output and the log-sum-exp.

    Returns:
      The decorator, for a function of (q, k, v, mask, call) that returns the output, or with a
      `backward` a pair of the output and the log-sum-exp.

    Raises:
      UserError: the name is no word, there is no such platform, or `backward` or `refusal` cannot
        be called so. The decorator raises it where the function cannot be called so, or the name is
        taken.
    """
    KERNELS.require_word(name)
    word = f"{KERNELS.what} {name!r}"
    if not isinstance(platforms, tuple) or not set(platforms) <= set(_PLATFORMS):
        raise UserError(
            f"{word}: platforms is a tuple of some of {', '.join(_PLATFORMS)}, found "
            f"{short(platforms)}"
        )
    if backward is not None:
        require_callable(f"the backward of {word}", backward, _BACKWARD)
    require_callable(f"the refusal of {word}", refusal, ("request", "platform"))

    def entry(forward: Callable[..., Any]) -> Kernel:
        return Kernel(forward, backward, refusal, platforms, plain)

    arguments = (*_FORWARD, "dropout") if plain else _FORWARD
    return registering(KERNELS, name, entry, arguments)
