"""The state of movement pruning (Sanh et al. 2020, arXiv:2005.07683): how far each weight has moved
away from zero, and the value that a pruned one had.

The masked forward multiplies zeros, and its gradient is known for them too. So a pruned weight
still gets a score, by the value that it had, and has that value again when it is chosen again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.base.layout.sharding import KeyPath, PyTree, path_name


class MovementState(NamedTuple):
    """The arrays that movement pruning keeps beside the masks: float32, in trees of the masks'
    form.

    Attributes:
      scores: the sums of -w dL/dw over all steps, where w is `held` for an entry that is pruned.
      held: the value that a pruned entry had last; zero for all others.
    """

    scores: PyTree
    held: PyTree


def no_movement(pruned: PyTree) -> MovementState:
    """Make the state before the first step, for masks of this form."""
    zeros = jax.tree.map(lambda mask: jnp.zeros(mask.shape, jnp.float32), pruned)
    return MovementState(zeros, zeros)


def with_step(
    state: MovementState, params: dict[str, Array], grads: dict[str, Array]
) -> MovementState:
    """Add a step to the scores of a state.

    Args:
      state: the state before the step.
      params: the parameters before the step, by their names, zero where they are pruned.
      grads: the gradients of the masked forward, by the same names, for zeros too.
    """

    def add(path: KeyPath, score: Array, held: Array) -> Array:
        name = path_name(path)
        return score - (params[name] + held) * grads[name]

    scores = jax.tree_util.tree_map_with_path(add, state.scores, state.held)
    return state._replace(scores=scores)


def with_held(state: MovementState, value: Callable[[str], Array]) -> MovementState:
    """Give a state the values that pruned entries have now.

    Args:
      value: returns those values, by the name of a parameter, with zeros for all other entries.
    """
    held = jax.tree_util.tree_map_with_path(lambda path, _: value(path_name(path)), state.held)
    return state._replace(held=held)
