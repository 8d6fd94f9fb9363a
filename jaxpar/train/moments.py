"""Stores AdamW's moments of matrices in bfloat16, and takes the moments out of an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
from jax import Array

from jaxpar.models import Params

Precision = Literal["float32", "bfloat16"]


def pack_moments(state: optax.OptState, matrices: Params, precision: Precision) -> optax.OptState:
    """Convert the moments of matrices in a state of `optax.adamw` from float32 to this precision.

    `matrices` says whether each parameter is a matrix; the moments of vectors stay float32.
    """

    def pack(x: Array, matrix: bool) -> Array:
        return x.astype(precision) if matrix else x

    return map_moments(pack, state, matrices)


def moments_of(state: optax.OptState) -> tuple[Params, Params]:
    """Return the first and second moments in an optimizer's state, each as a tree like the parameters'."""
    return optax.tree.get(state, "mu"), optax.tree.get(state, "nu")


def with_moments(state: optax.OptState, mu: Params, nu: Params) -> optax.OptState:
    """Return an optimizer's state with these moments in place of its own."""
    return optax.tree.set(state, mu=mu, nu=nu)


def map_moments(
    change: Callable[..., Any], state: optax.OptState, *trees: Params, others: Callable[[Any], Any] = lambda x: x
) -> optax.OptState:
    """Return an optimizer's state with `change(moment, *leaves)` for each moment, and `others(x)` for every other leaf.

    The leaves are at the moment's place in each of `trees`, which have the structure of the parameters.
    """
    moments = (jax.tree.map(change, moment, *trees) for moment in moments_of(state))
    return with_moments(jax.tree.map(others, with_moments(state, {}, {})), *moments)
