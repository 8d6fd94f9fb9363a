"""Dropout that is the same on every mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.number_checks import require_number


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """Zero a share of the entries of an array, and scale up the rest.

    The bits depend on the key and the position in the global array only, so they are the same on
    every mesh.

    Args:
      x: an array of any shape.
      rate: the share that is zeroed, from 0 to below 1.
      key: the random key of the bits; None = nothing is dropped.

    Returns:
      An array of the shape and dtype of x; x itself where nothing is dropped.

    Raises:
      UserError: the rate is out of its range.
    """
    require_number("dropout", "rate", rate, least=0, below=1)
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, jnp.float32(1 - rate), x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
