"""A weight of which whole blocks are zero, as a device multiplies by it: kernels of TPUs and GPUs
skip those blocks.

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
      blocks_MN: which blocks are not all zeros, of its dims in and its dims out.
      platform: what the product is compiled for.
    """

    array: Array
    blocks_MN: Blocks
    platform: str

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.array.shape

    def multiply(self, x_TI: Array) -> Array:
        """Multiply rows by the weight [I, O], without its blocks of zeros; in the dtype of x."""
        weight_IO = self.array.reshape(x_TI.shape[1], -1)
        return block_sparse.matmul(x_TI, weight_IO, self.blocks_MN, platform=self.platform)


Factor = Array | ZeroBlocks
"""What a device multiplies by."""


def find_zero_blocks(
    weight: Array, form: WeightForm | None, ins: int, layout: Layout, *, swapped: bool, whole: bool
) -> Factor:
    """Tell of a weight that a device is about to multiply by, which of its blocks are zero.

    Args:
      weight: [*in, *out], what a form made of a device's part, gathered.
      form: the form; None = no block is zero.
      ins: how many of its dims are summed over.
      layout: its devices: on a CPU zeros are multiplied.
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
