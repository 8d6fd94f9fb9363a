"""Logical axes to mesh axes: the layout that carries the rules, and PartitionSpecs checked before
use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis, describe, largest_divisor
from jaxpar.base.layout.rules import (
    DEFAULT_RULES,
    Axes,
    LogicalAxis,
    RulesLike,
    as_rules,
    fit_to_mesh,
    split_axes,
)
from jaxpar.base.layout.rules import ShardingRules as ShardingRules
from jaxpar.base.layout.rules import drop_axes as drop_axes
from jaxpar.base.layout.rules import first_axes as first_axes
from jaxpar.base.layout.rules import fit_rules as fit_rules
from jaxpar.base.layout.rules import named_axes as named_axes

PyTree: TypeAlias = Any
"""A pytree of arrays or of what describes them. Jax has no type for one, so docstrings say what the
leaves are.
"""
KeyPath = tuple[Any, ...]
"""The place of a leaf in a pytree, from `jax.tree_util`."""


def is_axes(tree: PyTree) -> TypeGuard[Axes]:
    """Whether a tree is the logical axes of one array: a tuple of names and None, or a
    PartitionSpec of such names.
    """
    # a NamedTuple is a tree of several
    plain = isinstance(tree, tuple) and not hasattr(tree, "_fields")
    return isinstance(tree, P) or (
        plain and all(axis is None or isinstance(axis, str) for axis in tree)
    )


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
    return _spec(axes, fit_to_mesh(as_rules(rules), mesh), mesh, shape, name)


def _spec(
    axes: Axes,
    rules: ShardingRules,
    mesh: Mesh | AbstractMesh,
    shape: Sequence[int] | None = None,
    name: str = "array",
) -> P:
    """`spec_for` of rules that were fitted to the mesh."""
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
                    f"dim {first_dim} "
                    f"({first}) and dim {dim} ({axis}): take it out of rules.{first} or "
                    f"rules.{axis}"
                )
            user[mesh_axis] = (dim, axis)
        pieces = math.prod(mesh.shape[mesh_axis] for mesh_axis in split)
        if shape is not None and shape[dim] % pieces:
            sizes: dict[MeshAxis, int] = {mesh_axis: mesh.shape[mesh_axis] for mesh_axis in split}
            raise UserError(
                f"{name}: dim {dim} ({axis}) has size {shape[dim]}, which {describe(sizes)} "
                "does not divide: "
                f"try {_fitting_sizes(shape[dim], sizes)}, or take {split[-1]} out of rules.{axis}"
            )
        entries.append(None if not split else split[0] if len(split) == 1 else split)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def _fitting_sizes(size: int, sizes: dict[MeshAxis, int]) -> str:
    """Smaller sizes of mesh axes that divide a dim; the outermost axes are kept as large as can
    be.
    """
    fits: dict[MeshAxis, int] = {}
    for axis, present in sizes.items():
        fits[axis] = largest_divisor(size, present)
        size //= fits[axis]
    return " ".join(f"mesh.{axis}={fit}" for axis, fit in fits.items() if fit < sizes[axis])


def _kind(value: object) -> str:
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


def require_layout(layout: object, what: str) -> None:
    """Require a layout.

    Args:
      layout: what was given.
      what: what takes it, with which the message begins.

    Raises:
      UserError: it is no layout.
    """
    if not isinstance(layout, Layout):
        raise UserError(
            f"{what} takes a jaxpar.Layout, and was given {_kind(layout)}: make it by "
            "jaxpar.Layout(mesh)"
        )


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
            f"{_kind(axes)}"
        )


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto: under Explicit, which `jax.make_mesh` makes by itself,
    `with_sharding_constraint` raises. Arrays that lie on the one may be used with the other.
    """
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh) or tuple(mesh.axis_types) == automatic:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)


@dataclass(frozen=True, init=False)
class Layout:
    """Where arrays lie: how logical axes are split over a mesh. It is hashable, so it may be a
    static argument.

    The mesh is one of `make_mesh` or any other, whatever its axes are called: `Layout(
    jax.make_mesh((2, 4), ("data", "model")), {"heads": "model", "mlp": "model"})`. Rules have three
    forms (`jaxpar.base.layout.rules`). A logical axis that they do not name has its default, as far
    as the mesh has its axes: here the batch is split over data. A logical axis of one's own is
    split as its rule says, and refused where no rule names it.
    """

    mesh: Mesh
    """The device mesh. Its axes are of type Auto, whatever those of the given one are: the compiler
    lays out what nobody fixed, and `constrain` fixes the rest.
    """
    rules: ShardingRules = DEFAULT_RULES
    """The rules as they are on this mesh: each names axes that it has."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """The dtype of matmuls, activations and their sums over devices. Norms, softmax, the loss and
    the sums of parameters' gradients stay float32."""

    def __init__(
        self,
        mesh: Mesh,
        rules: RulesLike = DEFAULT_RULES,
        compute: Literal["float32", "bfloat16"] = "float32",
    ):
        """Make a layout.

        Args:
          mesh: any `jax.sharding.Mesh`.
          rules: a `ShardingRules`, a dict, or a list of pairs
            (`jaxpar.base.layout.rules.as_rules`).
          compute: the dtype of matmuls.

        Raises:
          UserError: the mesh is none, the rules are of no form or name an axis that the mesh does
            not have, or no op computes in the dtype.
        """
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "compute", compute)
        self.__post_init__()

    def __post_init__(self) -> None:
        # shapes are laid out on a mesh without devices
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise UserError(
                f"a layout's mesh is a jax.sharding.Mesh, and was given {_kind(self.mesh)}"
            )
        if self.compute not in ("float32", "bfloat16"):
            raise UserError(
                f"a layout computes in float32 or bfloat16, and was given compute={self.compute!r}"
            )
        object.__setattr__(self, "rules", fit_to_mesh(as_rules(self.rules), self.mesh))
        object.__setattr__(self, "mesh", _with_auto_axes(self.mesh))

    @property
    def dtype(self) -> jnp.dtype:
        """`compute` as a dtype."""
        return jnp.dtype(self.compute)

    def mesh_axes(self, axis: LogicalAxis | None) -> tuple[MeshAxis, ...]:
        """Find the mesh axes of more than one device that split a logical axis.

        Args:
          axis: the logical axis; None is not split.

        Returns:
          The mesh axes, outermost first.

        Raises:
          UserError: no rule names the logical axis.
        """
        return split_axes(axis, self.rules, self.mesh)

    def size(self, axis: LogicalAxis | None) -> int:
        """Count the pieces that this layout splits a logical axis into.

        Args:
          axis: the logical axis; None is one piece.

        Returns:
          The number.

        Raises:
          UserError: no rule names the logical axis.
        """
        return self.pieces(self.mesh_axes(axis))

    def pieces(self, mesh_axes: Sequence[MeshAxis]) -> int:
        """The number of devices along these mesh axes together."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in mesh_axes)

    def spec(self, axes: Axes) -> P:
        """Make the PartitionSpec of an array, of whatever shape.

        Args:
          axes: for each dim a logical axis, or None where it is replicated.

        Returns:
          The spec; mesh axes of size 1 are left out.

        Raises:
          UserError: `spec_for` says when, or these are no axes.
        """
        require_axes(axes, "spec")
        return _spec(axes, self.rules, self.mesh)

    @overload
    def sharding(
        self, axes: Axes, shape: Sequence[int] | None = None, name: str = "array"
    ) -> NamedSharding: ...

    @overload
    def sharding(
        self,
        axes: PyTree,
        shape: PyTree = None,
        name: str = "array",
    ) -> PyTree: ...

    def sharding(self, axes: PyTree, shape: PyTree = None, name: str = "array") -> PyTree:
        """Place an array with these logical axes, or a pytree of arrays.

        Args:
          axes: for each dim a logical axis, or None where it is replicated, as a tuple or a
            PartitionSpec; or a pytree of those, such as `flax.nnx.get_partition_spec` makes of a
            model's state.
          shape: the global shape, which is then checked to divide. For a pytree, the arrays or
            ShapeDtypeStructs in a tree of the same form.
          name: what a message calls the array.

        Returns:
          The sharding, or those of the pytree in a tree of its form.

        Raises:
          UserError: `spec_for` says when.
        """
        if is_axes(axes) or (isinstance(axes, list) and is_axes(tuple(axes))):
            names = tuple(axes)
            if isinstance(axes, P) and shape is not None:  # a spec may leave out dims at the end
                names += (None,) * (len(shape) - len(names))
            return NamedSharding(self.mesh, _spec(names, self.rules, self.mesh, shape, name))

        def place(
            path: KeyPath, axes: Axes | None, array: jax.Array | None = None
        ) -> NamedSharding:
            if axes is None:  # flax's word for an array that is replicated
                return NamedSharding(self.mesh, P())
            require_axes(axes, path_name(path) or name)
            return self.sharding(
                axes, None if array is None else array.shape, path_name(path) or name
            )

        if shape is None:
            trees = (axes,)
        else:
            trees = (axes, shape)
        return jax.tree_util.tree_map_with_path(
            place, *trees, is_leaf=lambda axes: axes is None or is_axes(axes)
        )

    def constrain(
        self,
        x: jax.Array,
        axes: Axes,
        name: str = "activation",
    ) -> jax.Array:
        """Fix the sharding of `x` at this point of a jitted function.

        Args:
          x: an array of any shape.
          axes: for each dim a logical axis, or None where it is replicated.
          name: what a message calls the array.

        Returns:
          The same array.

        Raises:
          UserError: `spec_for` says when; on one device too, where there is nothing to fix.
        """
        require_axes(axes, name)
        place = self.sharding(axes, x.shape, name)
        if self.mesh.size == 1:
            return x
        # there the mesh has the other axes only
        in_stage = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return jax.lax.with_sharding_constraint(x, place.spec if in_stage else place)


def state_axes(axes: Axes) -> tuple[LogicalAxis | None, ...]:
    """The logical axes of a parameter's gradient and moments."""
    return tuple("state_embed" if axis == "embed" else axis for axis in axes)


def path_name(path: KeyPath) -> str:
    """The name of a leaf by its place in a tree: `blocks.attention.q`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def merge_trees(tree: PyTree, part: PyTree) -> PyTree:
    """Put a part of a tree in place of what the tree has there.

    Args:
      tree: a dict of dicts.
      part: some of its dicts and leaves, by the same keys.

    Returns:
      A new dict of dicts, with the leaves of the part.
    """
    if not isinstance(part, dict):
        return part
    return {
        **tree,
        **{key: merge_trees(tree.get(key, {}), part[key]) for key in part},
    }


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
      layout: mesh and rules.

    Returns:
      A row for each array.

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
        local, whole = (math.prod(sizes) * width for sizes in (sharding.shard_shape(shape), shape))
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


def replicated_sharding(layout: Layout) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(layout.mesh, P())


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


# Where there are more devices than heads, kv heads are copied.


def kv_copy_axes(layout: Layout) -> tuple[MeshAxis, ...]:
    """Find the mesh axes that split heads and not kv heads.

    Along these k and v hold copies of kv heads, so that each device has those of its query heads.

    Args:
      layout: mesh and rules.

    Returns:
      The axes; none where the mesh axes of kv heads are not the first ones of heads.
    """
    heads = layout.mesh_axes("heads")
    kv_heads = layout.mesh_axes("kv_heads")
    if heads[: len(kv_heads)] == kv_heads:
        return heads[len(kv_heads) :]
    return ()


def output_axis(axis: LogicalAxis | None, layout: Layout) -> LogicalAxis | None:
    """The logical axis of a linear's output dim: kv heads that are copied lie as heads do."""
    if axis == "kv_heads" and kv_copy_axes(layout):
        return "heads"
    return axis
