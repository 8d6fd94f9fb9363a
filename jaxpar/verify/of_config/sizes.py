"""The number of devices that split an array, on the mesh that was asked for and on the one that is
verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxpar.base.layout.mesh import MeshAxis, MeshSpec, axis_sizes, total_sizes
from jaxpar.base.layout.sharding import LogicalAxis, ShardingRules, named_axes

AxisSizes = Mapping[MeshAxis, int]
"""The number of devices along each mesh axis."""


def asked_sizes(asked: MeshSpec, used: MeshSpec) -> dict[MeshAxis, int]:
    """Return the devices along each axis of the mesh that was asked for.

    Args:
      asked: the mesh of the config, in which -1 leaves an axis open.
      used: the mesh that is verified; an open axis takes its size.

    Returns:
      The number of devices along each axis, over all slices.
    """
    filled = {axis: getattr(used, axis) for axis, size in axis_sizes(asked).items() if size == -1}
    return total_sizes(replace(asked, **filled))


def pieces(axis: LogicalAxis, rules: ShardingRules, sizes: AxisSizes) -> int:
    """Return how many pieces the rules split a logical axis into on a mesh of these sizes.

    Args:
      axis: the logical axis.
      rules: the mesh axes of each logical axis.
      sizes: the devices along each mesh axis.

    Returns:
      The product of the sizes of its mesh axes; 1 where no rule splits it.
    """
    return math.prod(sizes[mesh_axis] for mesh_axis in named_axes(axis, rules))


def multiple_of(least: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of


def odd_multiple(least: int, of: int) -> int:
    """Return the smallest odd multiple of `of` that is at least `least`."""
    times = -(-least // of)
    return (times + 1 - times % 2) * of
