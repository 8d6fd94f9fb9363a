"""How a candidate's mesh splits a model: the devices along each logical axis, and the sizes of what
one device has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.mesh import MESH_AXES, MeshAxis
from jaxpar.base.layout.rules import LOGICAL_AXES, LogicalAxis, named_axes
from jaxpar.plan.candidate import ZERO
from jaxpar.plan.closed_form.shapes import Parameter, StepShapes


class Split(NamedTuple):
    """How logical axes are split over a mesh.

    Attributes:
      sizes: the devices along each mesh axis.
      axes: the mesh axes of more than one device of each logical axis, outermost first.
      pieces: the number of pieces of each logical axis.
    """

    sizes: dict[MeshAxis, int]
    axes: dict[LogicalAxis, tuple[MeshAxis, ...]]
    pieces: dict[LogicalAxis, int]

    def size(self, axis: LogicalAxis | None) -> int:
        """Return the number of pieces of a logical axis; 1 for one that no rule names."""
        return self.pieces.get(axis or "", 1)

    def along(self, axis: LogicalAxis | None) -> tuple[MeshAxis, ...]:
        """Return the mesh axes of a logical axis."""
        return self.axes.get(axis or "", ())

    def devices(self, mesh_axes: tuple[MeshAxis, ...]) -> int:
        """Return the number of devices along some mesh axes together."""
        return math.prod(self.sizes[axis] for axis in mesh_axes)

    def of_tokens(self, seq: LogicalAxis = "seq") -> tuple[MeshAxis, ...]:
        """Return the mesh axes that split the tokens of a batch, whose sequence is `seq`."""
        return self.along("batch") + self.along(seq)


@lru_cache(maxsize=65536)
def split_of(shapes: StepShapes, sizes: tuple[int, ...], zero: bool) -> Split:
    """Find how a mesh of these sizes, in the order of `MESH_AXES`, splits a model.

    Args:
      shapes: the facts of the step, with its rules.
      zero: whether the optimizer's state is split over data as well.
    """
    by_axis: dict[MeshAxis, int] = dict(zip(MESH_AXES, sizes, strict=True))
    rules, _ = fit_rules(shapes.rules, shapes.heads, shapes.kv_heads, by_axis)
    axes: dict[LogicalAxis, tuple[MeshAxis, ...]] = {}
    for axis in (*LOGICAL_AXES, *rules.own_rules):
        named = named_axes(axis, rules)
        if zero and axis == "state_embed":
            named = ZERO
        axes[axis] = tuple(one for one in named if by_axis[one] > 1)
    pieces = {axis: math.prod(by_axis[one] for one in named) for axis, named in axes.items()}
    return Split(by_axis, axes, pieces)


class Weight(NamedTuple):
    """A parameter as a device has it.

    Attributes:
      stored: the entries of a layer that a device stores.
      used: the entries that it multiplies with, gathered where the parameter is split further.
      state: the entries of its gradients' sums and of the optimizer's state.
      gathered_over: the mesh axes over which it is gathered before it is used.
      scattered_over: the mesh axes over which its gradient is summed and scattered.
      summed_over: the mesh axes over which its gradient is summed besides.
      split_over: the mesh axes over which what a device uses is split.
    """

    parameter: Parameter
    stored: float
    used: float
    state: float
    gathered_over: tuple[MeshAxis, ...]
    scattered_over: tuple[MeshAxis, ...]
    summed_over: tuple[MeshAxis, ...]
    split_over: tuple[MeshAxis, ...]


@lru_cache(maxsize=65536)
def weights_of(shapes: StepShapes, sizes: tuple[int, ...], zero: bool) -> tuple[Weight, ...]:
    """List the parameters as one device of a mesh has them."""
    split = split_of(shapes, sizes, zero)
    return tuple(_weight(one, split) for one in shapes.parameters)


def in_mesh_order(axes: Iterable[MeshAxis]) -> tuple[MeshAxis, ...]:
    """Put mesh axes in the order of the mesh."""
    wanted = set(axes)
    return tuple(axis for axis in MESH_AXES if axis in wanted)


def _weight(parameter: Parameter, split: Split) -> Weight:
    others = [axis for axis in parameter.axes if axis != "embed"]
    used = parameter.entries / math.prod(split.size(axis) for axis in others)
    split_over = tuple(mesh for axis in others for mesh in split.along(axis))
    has_embed = "embed" in parameter.axes
    stored_over = split.along("embed") if has_embed else ()
    state_over = split.along("state_embed") if has_embed else ()
    state_over = state_over or stored_over
    tokens = [axis for axis in _tokens_axes(parameter, split) if axis not in split_over]
    return Weight(
        parameter,
        stored=used / split.devices(stored_over),
        used=used,
        state=used / split.devices(state_over),
        gathered_over=in_mesh_order(stored_over),
        scattered_over=in_mesh_order(axis for axis in state_over if axis in tokens),
        summed_over=in_mesh_order(axis for axis in tokens if axis not in state_over),
        split_over=split_over,
    )


_OF_ATTENTION = {"heads", "kv_heads"}


def _tokens_axes(parameter: Parameter, split: Split) -> tuple[MeshAxis, ...]:
    """Return the mesh axes along which devices multiply other tokens, or other heads, with the same
    entries of a parameter.
    """
    if not _OF_ATTENTION & set(parameter.axes):
        return split.of_tokens()
    copied = split.along("heads") if "kv_heads" in parameter.axes else ()
    return split.of_tokens("attention_seq") + copied
