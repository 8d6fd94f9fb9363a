"""Makes of a weight what multiplies, as plain mathematics on one device: the reference of the views
of `jaxpar.parallel.weight_view`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.base.errors import UserError
from jaxpar.kernels.weight_forms import NOfM
from jaxpar.parallel.weight_view import Weight, WeightView


def weight_array(weight: Weight, summed: range) -> Array:
    """Return what multiplies.

    Args:
      weight: an array, or a view of one.
      summed: the dims that a matmul sums over, next to each other.

    Returns:
      The array; its gradient is that of the stored one.

    Raises:
      UserError: the form of a view has no reference here.
    """
    if not isinstance(weight, WeightView):
        return weight
    stored = weight.stored
    form = weight.form
    if not isinstance(form, NOfM):
        raise UserError(
            f"the reference knows no weights of form {form.name}: a form of one's own has none"
        )
    rows = math.prod(stored.shape[dim] for dim in summed)
    outer = stored.shape[: summed.start]
    matrix = stored.reshape(*outer, rows, -1)
    kept = _largest(matrix, form.n, form.m).reshape(stored.shape)
    # straight through: the value is that of the sparse matrix, the gradient that of the stored one
    return stored + jax.lax.stop_gradient(kept - stored)


def _largest(matrix: Array, n: int, m: int) -> Array:
    """Zeros for all but the n largest of each m neighbours of a column, found by sorting them."""
    *outer, rows, columns = matrix.shape
    groups = matrix.reshape(*outer, rows // m, m, columns)
    order = jnp.argsort(-jnp.abs(groups), axis=-2, stable=True)
    rank = jnp.argsort(order, axis=-2)
    return jnp.where(rank < n, groups, 0).reshape(matrix.shape)
