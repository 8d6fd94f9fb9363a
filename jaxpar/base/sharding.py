"""Logical axes to mesh axes: the rules, the layout that carries them, and PartitionSpecs checked
before use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, get_args, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.mesh import MESH_AXES, MeshAxis, describe, largest_divisor, require_mesh_axis

LogicalAxis = Literal[
    "batch",
    "seq",
    "residual_seq",
    "attention_seq",
    "embed",
    "state_embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "vocab",
    "layers",
    "experts",
    "stage",
    "rank",
]
Axes = Sequence[LogicalAxis | None]
_LOGICAL_AXES: tuple[str, ...] = get_args(LogicalAxis)

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


@dataclass(frozen=True)
class ShardingRules:
    """For each logical axis, the mesh axes that it is split over, outermost first. An empty rule
    replicates it.

    `embed` is the embed dim of *parameters*, which fsdp shards (ZeRO-3); activations leave that dim
    whole. `seq` is the sequence where heads or mlp are split. `residual_seq` is the sequence of the
    residual stream between them, which may also be split over tensor: this is Megatron's sequence
    parallelism (Korthikanti et al. 2022, arXiv:2205.05198). `attention_seq` is the sequence of q, k
    and v; an empty rule means that of `seq`, and `fit_rules` makes it that of `residual_seq` where
    heads cannot be split. `state_embed` is the embed dim of gradients and of the optimizer's state;
    an empty rule means that of `embed`. It may be split over further mesh axes: over `data`, with
    parameters whole there, it is ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054). `layers` is
    the dim that the parameters of all blocks are stacked over; an empty rule means that of `stage`,
    so that a pipeline's stages have their own layers. Devices along `expert` split the batch too:
    each sends its tokens to the devices that have the experts they chose. The logical axis `rank`,
    the small dim of a LoRA matrix, has no rule: it is never split.
    """

    batch: tuple[MeshAxis, ...] = ("data", "fsdp", "expert")
    seq: tuple[MeshAxis, ...] = ("context",)
    residual_seq: tuple[MeshAxis, ...] = ("context", "tensor")
    attention_seq: tuple[MeshAxis, ...] = ()
    embed: tuple[MeshAxis, ...] = ("fsdp",)
    state_embed: tuple[MeshAxis, ...] = ()
    heads: tuple[MeshAxis, ...] = ("tensor",)
    kv_heads: tuple[MeshAxis, ...] = ("tensor",)
    head_dim: tuple[MeshAxis, ...] = ()
    mlp: tuple[MeshAxis, ...] = ("tensor",)
    vocab: tuple[MeshAxis, ...] = ("tensor",)
    layers: tuple[MeshAxis, ...] = ()
    experts: tuple[MeshAxis, ...] = ("expert",)
    stage: tuple[MeshAxis, ...] = ("stage",)

    def __post_init__(self) -> None:
        """Accept a bare mesh axis in place of a tuple of one, a list, and None in place of an empty
        tuple.

        Raises:
          UserError: a name is not a mesh axis or stands twice, or a rule is of another type. A set
            has no order, and each process of a run would lay arrays out in an order of its own.
        """
        for rule in fields(self):
            axes = _mesh_axes_of(getattr(self, rule.name), f"rules.{rule.name}")
            object.__setattr__(self, rule.name, axes)


def _mesh_axes_of(given: object, name: str) -> tuple[str, ...]:
    """The mesh axes of one rule, outermost first."""
    if given is None:
        return ()
    axes = (given,) if isinstance(given, str) else given
    if not isinstance(axes, tuple | list | P):
        raise UserError(
            f"{name} is a mesh axis, a tuple of them, or None, and was given {short(given)}: "
            'write ("data", "fsdp"), '
            "the outermost first"
        )
    for place, axis in enumerate(axes):
        require_mesh_axis(axis, f"{name} names no mesh axis:")
        if axis in tuple(axes)[:place]:
            raise UserError(
                f"{name} names the mesh axis {axis!r} twice: an axis splits a dim once, leave "
                "one out"
            )
    return tuple(axes)


def spec_for(
    axes: Axes,
    rules: ShardingRules,
    mesh: Mesh,
    shape: Sequence[int] | None = None,
    name: str = "array",
) -> P:
    """The PartitionSpec of an array with these logical axes; mesh axes of size 1 are left out.

    Args:
      axes: a logical axis, or None for a dim that is replicated, for each dim.
      rules: the sharding rules.
      mesh: the mesh, whose axis sizes decide what is split.
      shape: the global shape. When it is given, every dim is checked to divide.
      name: what a message calls the array.

    Raises:
      UserError: two dims use one mesh axis, or the mesh axes of a dim do not divide it.
    """
    if shape is not None and len(shape) != len(axes):
        words = ", ".join(map(str, axes))
        raise UserError(
            f"{name}: {len(axes)} logical axes ({words}) of an array of shape {tuple(shape)}"
        )
    entries: list[MeshAxis | tuple[MeshAxis, ...] | None] = []
    user: dict[MeshAxis, tuple[int, LogicalAxis | None]] = {}
    for dim, axis in enumerate(axes):
        split = split_axes(axis, rules, mesh)
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


# An empty rule of the first means that of the second.
_AS: dict[LogicalAxis, LogicalAxis] = {
    "state_embed": "embed",
    "attention_seq": "seq",
    "layers": "stage",
}


def split_axes(
    axis: LogicalAxis | None,
    rules: ShardingRules,
    mesh: Mesh,
) -> tuple[MeshAxis, ...]:
    """The mesh axes of more than one device that the rules split a logical axis over."""
    named = () if axis is None else named_axes(axis, rules)
    return tuple(mesh_axis for mesh_axis in named if mesh.shape[mesh_axis] > 1)


def named_axes(axis: LogicalAxis, rules: ShardingRules) -> tuple[MeshAxis, ...]:
    """The mesh axes that the rules give a logical axis, whatever their sizes; a UserError for
    another name.
    """
    if axis not in _LOGICAL_AXES:
        raise UserError(
            f"no logical axis {axis!r}{suggest(axis, _LOGICAL_AXES)}: they are "
            f"{', '.join(_LOGICAL_AXES)}"
        )
    return getattr(rules, axis, ()) or (getattr(rules, _AS[axis]) if axis in _AS else ())


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


def _wrong_rules(rules: Any) -> str:
    """What to say of rules that are a dictionary, or Flax's list of pairs, with what they would be
    here.
    """
    try:
        pairs = list(dict(rules).items())
    except (TypeError, ValueError):
        pairs = []
    words = ", ".join(f"{name}={axes!r}" for name, axes in pairs)
    return (
        "a layout's rules are a jaxpar.ShardingRules, whose other rules have defaults, and "
        f"were given {_kind(rules)}: "
        f"write jaxpar.ShardingRules({words or 'embed=' + repr('fsdp')})"
    )


def require_layout(layout: object, what: str) -> None:
    """Raise a UserError, which begins with what takes it, if this is no layout."""
    if not isinstance(layout, Layout):
        raise UserError(
            f"{what} takes a jaxpar.Layout, and was given {_kind(layout)}: make it by "
            "jaxpar.Layout(mesh)"
        )


def require_axes(axes: object, what: str) -> None:
    """Raise a UserError, which begins with what takes them, if these are no logical axes of one
    array.
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


@dataclass(frozen=True)
class Layout:
    """Where arrays lie: how logical axes are split over a mesh. It is hashable, so it may be a
    static argument.
    """

    mesh: Mesh
    """The device mesh, from `make_mesh`."""
    rules: ShardingRules = ShardingRules()
    compute: Literal["float32", "bfloat16"] = "float32"
    """The dtype of matmuls, activations and their sums over devices. Norms, softmax, the loss and
    the sums of parameters' gradients stay float32."""

    def __post_init__(self) -> None:
        """Raise a UserError for rules of another type, mesh axes other than those of `make_mesh`,
        or a dtype that no op computes in."""
        # shapes are laid out on a mesh without devices
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise UserError(
                f"a layout's mesh is a jax.sharding.Mesh, and was given {_kind(self.mesh)}"
            )
        if not isinstance(self.rules, ShardingRules):
            raise UserError(_wrong_rules(self.rules))
        if self.compute not in ("float32", "bfloat16"):
            raise UserError(
                f"a layout computes in float32 or bfloat16, and was given compute={self.compute!r}"
            )
        if tuple(self.mesh.axis_names) != MESH_AXES:
            found = ", ".join(map(str, self.mesh.axis_names))
            raise UserError(
                f"a layout's mesh has the axes {', '.join(MESH_AXES)}, some of size 1; found "
                f"{found}: make it with "
                "jaxpar.make_mesh(jaxpar.MeshSpec(data=2, tensor=4))"
            )

    @property
    def dtype(self) -> jnp.dtype:
        """`compute` as a dtype."""
        return jnp.dtype(self.compute)

    def mesh_axes(self, axis: LogicalAxis | None) -> tuple[MeshAxis, ...]:
        """The mesh axes of more than one device that split a logical axis; no axis splits None."""
        return split_axes(axis, self.rules, self.mesh)

    def size(self, axis: LogicalAxis | None) -> int:
        """The number of pieces that this layout splits a logical axis into."""
        return self.pieces(self.mesh_axes(axis))

    def pieces(self, mesh_axes: Sequence[MeshAxis]) -> int:
        """The number of devices along these mesh axes together."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in mesh_axes)

    def spec(self, axes: Axes) -> P:
        """The PartitionSpec of these logical axes."""
        require_axes(axes, "spec")
        return spec_for(axes, self.rules, self.mesh)

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
        """The sharding of an array with these logical axes, or those of a pytree of arrays.

        Args:
          axes: for each dim a logical axis, or None where it is replicated, as a tuple or a
            PartitionSpec; or a pytree of those, such as `flax.nnx.get_partition_spec` makes of a
            model's state.
          shape: the global shape, which is then checked to divide. For a pytree, the arrays or
            ShapeDtypeStructs in a tree of the same form.
          name: what a message calls the array.

        Raises:
          UserError: `spec_for` says when.
        """
        if is_axes(axes) or (isinstance(axes, list) and is_axes(tuple(axes))):
            names = tuple(axes)
            if isinstance(axes, P) and shape is not None:  # a spec may leave out dims at the end
                names += (None,) * (len(shape) - len(names))
            return NamedSharding(self.mesh, spec_for(names, self.rules, self.mesh, shape, name))

        def place(
            path: KeyPath, axes: Axes | None, array: jax.Array | None = None
        ) -> NamedSharding:
            if axes is None:  # flax's word for an array that is replicated
                return NamedSharding(self.mesh, P())
            require_axes(axes, path_name(path) or name)
            return self.sharding(
                axes, None if array is None else array.shape, path_name(path) or name
            )

        trees = (axes,) if shape is None else (axes, shape)
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


def first_axes(axes: tuple[MeshAxis, ...]) -> list[tuple[MeshAxis, ...]]:
    """Every prefix of some mesh axes, the longest first."""
    return [axes[:count] for count in range(len(axes), -1, -1)]


def drop_axes(
    axes: tuple[MeshAxis, ...],
    dropped: tuple[MeshAxis, ...],
) -> tuple[MeshAxis, ...]:
    """The mesh axes that are not dropped."""
    return tuple(axis for axis in axes if axis not in dropped)


def state_axes(axes: Axes) -> tuple[LogicalAxis | None, ...]:
    """The logical axes of a parameter's gradient and moments."""
    return tuple("state_embed" if axis == "embed" else axis for axis in axes)


def path_name(path: KeyPath) -> str:
    """The name of a leaf by its place in a tree: `blocks.attention.q`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


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
    """A row for each array or ShapeDtypeStruct of a tree, whose logical axes are in a tree of the
    same form.
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


def replicated_sharding(layout: Layout) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(layout.mesh, P())


def local_rows(sharding: NamedSharding, rows: int) -> list[int]:
    """The rows (dim 0) of a global batch that this process's devices hold, sorted: its data loader
    reads these.
    """
    shards = sharding.addressable_devices_indices_map((rows,)).values()
    return sorted({row for index in shards if index is not None for row in range(rows)[index[0]]})


# Where there are more devices than heads, the rules change, or kv heads are copied.


def fit_rules(
    rules: ShardingRules, heads: int, kv_heads: int, sizes: Mapping[MeshAxis, int]
) -> tuple[ShardingRules, list[str]]:
    """Rules that fit more devices than heads, and a line for the log about each change.

    Heads that their mesh axes do not divide keep the first of the axes that do, and attention
    splits the sequence over the others, as the residual stream does. Kv heads that theirs do not
    divide are copied: their weights are whole over the axes that are left out, and each device
    makes those of its query heads (`jaxpar.parallel.linear.column_linear`). Where `attention_seq`
    is set, or kv heads are split otherwise than by the first axes of heads, nothing is changed:
    what does not divide is refused as for any other dim. `sizes` are the numbers of devices along
    the mesh axes.
    """

    def split(named: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in named if sizes[axis] > 1)

    def pieces(axes: tuple[MeshAxis, ...]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def words(axes: tuple[MeshAxis, ...]) -> str:
        return describe({axis: sizes[axis] for axis in axes})

    notes = []
    wanted = split(rules.heads)
    residual = split(rules.residual_seq)
    # An axis splits heads or the sequence: where the residual stream's has it, the sequence gets
    # all of them.
    kept = next(
        first
        for first in first_axes(wanted)
        if heads % pieces(first) == 0 and (first == wanted or not set(first) & set(residual))
    )
    if dropped := wanted[len(kept) :]:
        if rules.attention_seq:
            return rules, []
        fewer = drop_axes(rules.heads, dropped)
        kv_fewer = drop_axes(rules.kv_heads, dropped)
        rules = replace(rules, attention_seq=rules.residual_seq, heads=fewer, kv_heads=kv_fewer)
        repeated = " x ".join(axis for axis in dropped if axis not in residual)
        instead = f"attention is repeated along {repeated}, which rules.residual_seq does not name"
        if not repeated:
            instead = "attention is split over the sequence"
        notes.append(f"{words(wanted)} does not divide {heads} heads: {instead}")
    queries = split(rules.heads)
    wanted = split(rules.kv_heads)
    kept = next(first for first in first_axes(wanted) if kv_heads % pieces(first) == 0)
    if kept != wanted and wanted == queries[: len(wanted)]:
        rules = replace(rules, kv_heads=drop_axes(rules.kv_heads, wanted[len(kept) :]))
        made = math.lcm(kv_heads, pieces(queries))
        notes.append(
            f"{words(wanted)} does not divide {kv_heads} kv heads: their weights are whole, "
            f"and k and v have {made} heads, each of them {made // kv_heads} times"
        )
    return rules, notes


def kv_copy_axes(layout: Layout) -> tuple[MeshAxis, ...]:
    """The mesh axes that split heads and not kv heads.

    Along these k and v hold copies of kv heads, so that each device has those of its query heads.
    There are none where the mesh axes of kv heads are not the first ones of heads.
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
