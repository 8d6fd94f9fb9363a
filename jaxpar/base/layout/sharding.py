"""The layout, which says where arrays lie: a mesh, and the rules that split logical axes over
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis
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
from jaxpar.base.layout.rules import named_axes as named_axes
from jaxpar.base.layout.specs import PyTree as PyTree
from jaxpar.base.layout.specs import is_axes, kind_of, make_spec, require_axes

KeyPath = tuple[Any, ...]
"""The place of a leaf in a pytree, from `jax.tree_util`."""


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
            f"{what} takes a jaxpar.Layout, and was given {kind_of(layout)}: make it by "
            "jaxpar.Layout(mesh)"
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
                f"a layout's mesh is a jax.sharding.Mesh, and was given {kind_of(self.mesh)}"
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
        return make_spec(axes, self.rules, self.mesh)

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
            return NamedSharding(self.mesh, make_spec(names, self.rules, self.mesh, shape, name))

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


def replicated_sharding(layout: Layout) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(layout.mesh, P())


# Where there are more devices than heads, kv heads are copied.


def kv_copy_axes(layout: Layout) -> tuple[MeshAxis, ...]:
    """Find the mesh axes that split heads and not kv heads.

    Along these k and v hold copies of kv heads, so that each device has those of its query heads.

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
