"""The order of rows by their experts.

Shapes: E experts, R rows, M the buffers that the rows came in.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def expert_order(counts_ME: Array, rows: int) -> Array | None:
    """Find the permutation that takes rows from the order of the buffers to the order of the
    experts, with empty rows last; None = the rows are in that order already."""
    if len(counts_ME) == 1:
        return None
    ends_ME = jnp.cumsum(counts_ME, axis=1)
    expert_MR = jnp.sum(
        jnp.arange(rows // len(counts_ME))[:, None] >= ends_ME[:, None],
        axis=-1,
    )
    return jnp.argsort(expert_MR.reshape(-1), stable=True)


def inverse(order: Array) -> Array:
    """Return the permutation that undoes this one."""
    return (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )
