"""Attention that is given a state and leaves one: the keys of the first half of a sequence
(`sequence_halves`), or the cache of a text that is written (`cache`).

A block knows nothing of it: it calls `ops.attention`, and is given an array. Here such a block
becomes a function of states that returns states, as Flax makes one of a module whose variables
change (`module.apply(..., mutable=["cache"])`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from jax import Array

from jaxpar.parallel.ops import AttentionCall, Ops, WrappedOps

T = TypeVar("T")


class StatefulAttention(Protocol):
    """Attention that is given a state and leaves one, each an array or a tree of arrays."""

    def __call__(self, call: AttentionCall, state: Any, ops: Ops) -> tuple[Array, Any]:
        """Attend.

        Args:
          call: what the block asks for.
          state: what an earlier call left for this one; None where there was none.
          ops: the ops without states, with whose attention it may attend.

        Returns:
          What the block is given, and the state that is left.
        """
        ...


def run_with_states(
    block: Callable[[Ops], T],
    ops: Ops,
    attend: StatefulAttention,
    states: Sequence[Any] | None = None,
) -> tuple[T, tuple[Any, ...]]:
    """Run a block whose attention has a state.

    Args:
      block: calls the block with the ops that it is given.
      ops: the ops without states.
      attend: its attention.
      states: what each attention of the block is given, in the order of its calls; None = they are
        given none.

    Returns:
      What the block returned, and what its attentions left, in their order.
    """
    scope = _Scope(ops, attend, states)
    found = block(scope)
    return found, tuple(scope.left)


class _Scope(WrappedOps):
    """The ops of one run of a block; they end with it."""

    def __init__(self, ops: Ops, attend: StatefulAttention, states: Sequence[Any] | None):
        super().__init__(ops)
        self._attend = attend
        self._states = states
        self.left: list[Any] = []

    def attention(self, call: AttentionCall) -> Array:
        state = None if self._states is None else self._states[len(self.left)]
        out_BSHh, left = self._attend(call, state, self.ops)
        self.left.append(left)
        return out_BSHh
