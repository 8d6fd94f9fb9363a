"""Weights of which whole blocks are zero: kernels of TPUs and GPUs skip those blocks.

Shapes: T tokens, I and O a linear's flattened dims, M by N blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxpar.base.layout.sharding import Layout
from jaxpar.kernels import block_sparse
from jaxpar.kernels.block_sparse.blocks import Blocks
from jaxpar.kernels.weight_forms import WeightForm
from jaxpar.parallel.collectives import platform_of


class ZeroBlocks(NamedTuple):
    """A weight [*in, *out] with blocks of zeros.

    Attributes:
      array: the weight.
      blocks_MN: which blocks of its dims in and its dims out are not all zeros.
      platform: the platform that the product is compiled for.
    """

    array: Array
    blocks_MN: Blocks
    platform: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.array.shape

    def multiply(self, x_TI: Array) -> Array:
        """Multiply rows by the weight [I, O], without its blocks of zeros; in the dtype of x."""
        weight_IO = self.array.reshape(x_TI.shape[1], -1)
        return block_sparse.matmul(x_TI, weight_IO, self.blocks_MN, platform=self.platform)


Factor = Array | ZeroBlocks
"""A weight that a device multiplies by, with a map of its blocks of zeros where that is of use."""


def find_zero_blocks(
    weight: Array, form: WeightForm | None, ins: int, layout: Layout, *, swapped: bool, whole: bool
) -> Factor:
    """Find the blocks of zeros of a weight that a device is about to multiply by.

    Args:
      weight: [*in, *out], the result of a form for the device's part, gathered.
      form: the form; None = no block is zero.
      ins: how many of its dims are summed over.
      layout: says which devices multiply; on a CPU zeros are multiplied.
      swapped: whether the weight is transposed, so that its dims in are the form's columns.
      whole: whether it has whole units of the form, in their order.

    Returns:
      The weight, with the map where a kernel may skip blocks.
    """
    platform = platform_of(layout)
    if form is None or form.block == (1, 1) or platform == "cpu":
        return weight
    rows = math.prod(weight.shape[:ins])
    columns = math.prod(weight.shape[ins:])
    down, across = form.block
    if swapped:
        down, across = across, down
    if rows % down or columns % across:
        return weight
    known = None
    if whole and swapped:
        known = form.known_blocks(columns, rows)
    elif whole:
        known = form.known_blocks(rows, columns)
    if known is not None:
        return ZeroBlocks(weight, known.T if swapped else known, platform)
    blocks = weight.reshape(rows // down, down, columns // across, across)
    return ZeroBlocks(weight, jnp.any(blocks != 0, axis=(1, 3)), platform)
