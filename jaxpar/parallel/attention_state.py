"""Attention that is given a state and leaves one: the keys of the first half of a sequence
(`sequence_halves`), or the cache of keys and values in generation (`cache`).

A block knows nothing of the state: it calls `ops.attention`, which returns an array. This module
turns such a block into a function of states that returns states, as Flax does with a module whose
variables change (`module.apply(..., mutable=["cache"])`).
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
        """Compute a block's attention from its call and a state.

        Args:
          call: the call that the block makes.
          state: what an earlier call left for this one; None where there was none.
          ops: the ops without states, whose attention may be used.

        Returns:
          The output of attention, which the block gets, and the state for a later call.
        """
        ...


def run_with_states(
    block: Callable[[Ops], T],
    ops: Ops,
    attend: StatefulAttention,
    states: Sequence[Any] | None = None,
) -> tuple[T, tuple[Any, ...]]:
    """Run a block with an attention that takes and leaves a state.

    Args:
      block: calls the block with the ops that it is given.
      ops: the ops without states.
      attend: the attention that the block uses in place of the one of `ops`.
      states: the state for each call of attention in the block, in the order of the calls; None =
        every call is given None.

    Returns:
      The block's result, and the states that its calls of attention left, in their order.
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
