"""Dropout that is the same on every mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.arguments import require_number


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """Zero a share `rate` of the entries of `x`, from 0 to below 1, and scale up the rest; `x`
    itself when key is None.

    The bits depend on the key and the position in the global array only, so they are the same on
    every mesh.

    Raises:
      UserError: the rate is out of its range.
    """
    require_number("dropout", "rate", rate, least=0, below=1)
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
