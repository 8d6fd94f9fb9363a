"""The reference of the views of `jaxpar.parallel.linear.weight_view`: the array that a weight
multiplies with, as plain mathematics on one device.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpar.base.errors import UserError
from jaxpar.kernels.weight_forms import CyclicBlocks, NOfM
from jaxpar.parallel.linear.weight_view import Weight, WeightView


def weight_array(weight: Weight, summed: range) -> Array:
    """Compute the array that a weight multiplies with; its gradient is the stored array's.

    Args:
      weight: an array, or a view of one.
      summed: the dims that a matmul sums over, next to each other.

    Raises:
      UserError: the form of a view has no reference here.
    """
    if not isinstance(weight, WeightView):
        return weight
    stored = weight.stored
    form = weight.form
    if form is None:
        return stored
    if not isinstance(form, NOfM | CyclicBlocks):
        raise UserError(
            f"the reference knows no weights of form {form.name}: a form of one's own has none"
        )
    rows = math.prod(stored.shape[dim] for dim in summed)
    outer = stored.shape[: summed.start]
    matrix = stored.reshape(*outer, rows, -1)
    if isinstance(form, CyclicBlocks):
        kept = _where_kept(matrix, _by_place(matrix, form), form.block)
        return kept.reshape(stored.shape)
    kept = _where_kept(matrix, _largest(matrix, form), form.block).reshape(stored.shape)
    # straight through: the value is that of the sparse matrix, the gradient that of the stored one
    return stored + jax.lax.stop_gradient(kept - stored)


def _where_kept(matrix: Array, kept: Array, block: tuple[int, int]) -> Array:
    """Put zeros for the blocks that are not kept; each entry looks its block up."""
    row = jnp.arange(matrix.shape[-2]) // block[0]
    column = jnp.arange(matrix.shape[-1]) // block[1]
    return jnp.where(kept[..., row[:, None], column], matrix, 0)


def _by_place(matrix: Array, form: CyclicBlocks) -> Array:
    """Keep the blocks of a cyclic pattern, built from one period."""
    counts = [size // side for size, side in zip(matrix.shape[-2:], form.block, strict=True)]
    period = np.zeros((form.m, form.m), bool)
    for column in range(form.m):
        for step in range(form.n):
            period[(column + step) % form.m, column] = True
    return jnp.asarray(np.tile(period, (counts[0] // form.m, counts[1] // form.m)))


def _largest(matrix: Array, form: NOfM) -> Array:
    """Keep the n largest blocks of each m neighbours of a column of blocks, found by sorting
    them.
    """
    *outer, rows, columns = matrix.shape
    down, across = form.block
    blocks = matrix.reshape(*outer, rows // down, down, columns // across, across)
    norms = jnp.sqrt(jnp.sum(jnp.square(blocks), axis=(-3, -1)))
    groups = norms.reshape(*outer, rows // (down * form.m), form.m, columns // across)
    order = jnp.argsort(-groups, axis=-2, stable=True)
    rank = jnp.argsort(order, axis=-2)
    return (rank < form.n).reshape(norms.shape)
