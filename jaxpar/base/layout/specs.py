"""PartitionSpecs of arrays by their logical axes, checked before use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis, describe, largest_divisor
from jaxpar.base.layout.rules import (
    Axes,
    LogicalAxis,
    RulesLike,
    ShardingRules,
    as_rules,
    fit_to_mesh,
    split_axes,
)

PyTree: TypeAlias = Any
"""A pytree of arrays or of what describes them. Jax has no type for one, so docstrings say what the
leaves are.
"""


def is_axes(tree: PyTree) -> TypeGuard[Axes]:
    """Whether a tree is the logical axes of one array: a tuple of names and None, or a
    PartitionSpec of such names.
    """
    # a NamedTuple is a tree of several
    if isinstance(tree, P):
        return True
    plain = isinstance(tree, tuple) and not hasattr(tree, "_fields")
    return plain and all(axis is None or isinstance(axis, str) for axis in tree)


def spec_for(
    axes: Axes,
    rules: RulesLike,
    mesh: Mesh | AbstractMesh,
    shape: Sequence[int] | None = None,
    name: str = "array",
) -> P:
    """Make the PartitionSpec of an array with these logical axes.

    Args:
      axes: a logical axis, or None for a dim that is replicated, for each dim.
      rules: the sharding rules, in any form that a `Layout` takes.
      mesh: any mesh, whose axis sizes decide what is split.
      shape: the global shape. When it is given, every dim is checked to divide.
      name: what a message calls the array.

    Returns:
      The spec; mesh axes of size 1 are left out.

    Raises:
      UserError: two dims use one mesh axis, the mesh axes of a dim do not divide it, no rule names
        a logical axis, or the rules do not fit the mesh.
    """
    return make_spec(axes, fit_to_mesh(as_rules(rules), mesh), mesh, shape, name)


def make_spec(
    axes: Axes,
    rules: ShardingRules,
    mesh: Mesh | AbstractMesh,
    shape: Sequence[int] | None = None,
    name: str = "array",
) -> P:
    """Make a PartitionSpec by rules that were fitted to the mesh; otherwise as `spec_for`."""
    if shape is not None and len(shape) != len(axes):
        words = ", ".join(map(str, axes))
        raise UserError(
            f"{name}: {len(axes)} logical axes ({words}) of an array of shape {tuple(shape)}"
        )
    entries: list[MeshAxis | tuple[MeshAxis, ...] | None] = []
    user: dict[MeshAxis, tuple[int, LogicalAxis | None]] = {}
    for dim, axis in enumerate(axes):
        try:
            split = split_axes(axis, rules, mesh)
        except UserError as error:  # it does not know of which array
            raise UserError(f"{name}: dim {dim}: {error}") from error
        for mesh_axis in split:
            if mesh_axis in user:
                first_dim, first = user[mesh_axis]
                raise UserError(
                    f"{name}: mesh axis {mesh_axis}={mesh.shape[mesh_axis]} is used twice, by "
                    f"dim {first_dim} ({first}) and dim {dim} ({axis}): take it out of "
                    f"rules.{first} or rules.{axis}"
                )
            user[mesh_axis] = (dim, axis)
        pieces = math.prod(mesh.shape[mesh_axis] for mesh_axis in split)
        if shape is not None and shape[dim] % pieces:
            sizes: dict[MeshAxis, int] = {mesh_axis: mesh.shape[mesh_axis] for mesh_axis in split}
            raise DoesNotDivide(
                f"{name}: dim {dim} ({axis}) has size {shape[dim]}, which {describe(sizes)} "
                "does not divide",
                _fitting_sizes(shape[dim], sizes),
                f"take {split[-1]} out of rules.{axis}",
            )
        if not split:
            entries.append(None)
        elif len(split) == 1:
            entries.append(split[0])
        else:
            entries.append(split)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


class DoesNotDivide(UserError):
    """Mesh axes do not divide a dim of an array."""

    def __init__(self, what: str, fits: Mapping[MeshAxis, int], otherwise: str):
        """Say it, and what to try.

        Args:
          what: which axes do not divide what.
          fits: smaller sizes that divide this dim.
          otherwise: what else may be done.
        """
        tried = " ".join(f"mesh.{axis}={size}" for axis, size in fits.items())
        super().__init__(f"{what}: try {tried}, or {otherwise}")
        self.what = what
        self.fits = fits
        self.otherwise = otherwise


def _fitting_sizes(size: int, sizes: dict[MeshAxis, int]) -> dict[MeshAxis, int]:
    """Smaller sizes of mesh axes that divide a dim; the outermost axes are kept as large as can
    be.
    """
    fits: dict[MeshAxis, int] = {}
    for axis, present in sizes.items():
        fits[axis] = largest_divisor(size, present)
        size //= fits[axis]
    return {axis: fit for axis, fit in fits.items() if fit < sizes[axis]}


def require_axes(axes: object, what: str) -> None:
    """Require the logical axes of one array.

    Args:
      axes: what was given; a list counts as a tuple.
      what: what takes them, with which the message begins.

    Raises:
      UserError: it is a string, or no tuple of logical axes.
    """
    if isinstance(axes, str):
        raise UserError(
            f"{what} takes a tuple of logical axes, and was given the string {axes!r}: write "
            f"({axes!r},)"
        )
    if not is_axes(tuple(axes) if isinstance(axes, list) else axes):
        raise UserError(
            f'{what} takes a tuple of logical axes, such as ("embed", "mlp"), and was given '
            f"{kind_of(axes)}"
        )


def kind_of(value: object) -> str:
    """What a message calls a value of the wrong type: `a value of type dict`, `the string
    'mlp'`.
    """
    if isinstance(value, str):
        return f"the string {value!r}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"an array of shape {shape}"
    if value is None:
        return "None"
    return f"a value of type {type(value).__name__}"
