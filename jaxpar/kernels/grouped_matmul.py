"""Matmuls of rows that belong to different experts, on one device: each row is multiplied by its
expert's matrix.

Rows lie in the order of the experts, and `counts_ME` says how many each buffer has for each expert.

Shapes: E experts, R rows, I and O the dims of a matrix, M the buffers that the rows came in.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def grouped_matmul(x_RI: Array, weight_EIO: Array, counts_ME: Array) -> Array:
    """Multiply each row by the matrix of its expert."""
    sizes_E = jnp.sum(counts_ME, axis=0)
    return jax.lax.ragged_dot(x_RI, weight_EIO, sizes_E, preferred_element_type=weight_EIO.dtype)


def grouped_weight_gradient(x_RI: Array, dy_RO: Array, counts_ME: Array) -> Array:
    """Compute the gradients of the experts' matrices [E, I, O], summed in float32."""
    sizes_E = jnp.sum(counts_ME, axis=0)
    float32 = jnp.dtype(jnp.float32)
    return jax.lax.ragged_dot_general(
        x_RI, dy_RO, sizes_E, _OVER_ROWS, preferred_element_type=float32
    )


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
