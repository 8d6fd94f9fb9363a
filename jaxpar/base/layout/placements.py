"""Where the arrays of a tree lie: the rows of the sharding table, and what one device or one
process holds of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.layout.rules import LogicalAxis
from jaxpar.base.layout.sharding import Layout, path_name
from jaxpar.base.layout.specs import PyTree


class Placement(NamedTuple):
    """One row of the sharding table."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[LogicalAxis | None, ...]
    spec: P
    bytes_per_device: int
    bytes: int
    """The size of the whole array."""


def placements(shapes: PyTree, axes: PyTree, layout: Layout) -> list[Placement]:
    """Tell where the arrays of a tree lie.

    Args:
      shapes: a tree of arrays or ShapeDtypeStructs.
      axes: their logical axes, in a tree of the same form.

    Raises:
      UserError: `spec_for` says when.
    """
    rows = []
    shardings = jax.tree.leaves(layout.sharding(axes, shapes))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    leaf_axes = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    for (path, leaf), names, sharding in zip(leaves, leaf_axes, shardings, strict=True):
        shape = leaf.shape
        width = jnp.dtype(leaf.dtype).itemsize
        local = math.prod(sharding.shard_shape(shape)) * width
        whole = math.prod(shape) * width
        rows.append(Placement(path_name(path), shape, names, sharding.spec, local, whole))
    return rows


def local_bytes(tree: PyTree) -> int:
    """Count the bytes of one device's part of some arrays.

    Args:
      tree: a pytree of ShapeDtypeStructs or arrays that have shardings.

    Returns:
      The bytes.
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def local_rows(sharding: NamedSharding, rows: int) -> list[int]:
    """Find the rows of a global batch that this process's devices hold: its data loader reads
    these.

    Args:
      sharding: the sharding of the batch, whose dim 0 are the rows.
      rows: the number of rows of the global batch.

    Returns:
      Their numbers, sorted.
    """
    shards = sharding.addressable_devices_indices_map((rows,)).values()
    return sorted({row for index in shards if index is not None for row in range(rows)[index[0]]})
