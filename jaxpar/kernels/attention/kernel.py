"""What an implementation of attention is to the rest of the library, and how one is registered:
ours (`implementations`), and those of a program.
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


Refusal = Callable[[AttentionRequest, str], str]
"""Says why a request cannot be served on a platform; empty = it can."""


def _serves_all(request: AttentionRequest, platform: str) -> str:
    return ""


@dataclass(frozen=True)
class Kernel:
    """An implementation of attention; the fields are those of `register_kernel`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    refusal: Refusal
    platforms: tuple[str, ...]
    plain: bool

    @property
    def merges(self) -> bool:
        """Whether it serves parts of the keys, whose answers are merged."""
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

    It is called on one device's own arrays, and sees no mesh; `jaxpar.kernels.attention.call` says
    what it is given.

    Args:
      name: a word.
      backward: the backward of an implementation that writes one out. It then also gives the
        log-sum-exp, and so can attend to parts of the keys, as ring attention and Ulysses ask; None
        = JAX differentiates it.
      refusal: what it cannot serve: a function of an `AttentionRequest` and a platform that returns
        the reason, or an empty text.
      platforms: those that it is made for, of `cpu`, `gpu` and `tpu`: elsewhere it is refused, and
        there `auto` tries it, after those that were registered before. Empty = it runs on all, and
        only where it is asked for by name.
      plain: whether it is plain JAX, which XLA may split over devices in any way. It is then given
        a `Dropout` or None, too, and returns a pair of the output and the log-sum-exp.

    Returns:
      The decorator, for a function of (q, k, v, mask, call) that returns the output, or with a
      `backward` a pair of that and the log-sum-exp.

    Raises:
      UserError: the name is no word, or `backward` or `refusal` cannot be called so; and the
        decorator, where the function cannot, or the name is taken. Or there is no such platform.
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
