"""Logical axes to mesh axes: the sharding rules, the plan that carries them, and PartitionSpecs checked before use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.activation_names import Action, Keep, Policy, actions, keeps_all
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MESH_AXES, MeshAxis, describe, largest_divisor

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
]
Axes = Sequence[LogicalAxis | None]


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> the mesh axes it is split over, outermost first; empty = replicated.

    `embed` is the embed dim of *parameters* (fsdp shards it, ZeRO-3); activations leave that dim whole. `seq` is the
    sequence where heads or mlp are split, `residual_seq` the sequence of the residual stream between them, which may
    also be split over tensor: Megatron's sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198).
    `attention_seq` is the sequence of q, k and v, empty = as `seq`; where heads cannot be split it becomes as
    `residual_seq` (`fit_heads`).
    `state_embed` is the embed dim of the optimizer's state and of gradients, empty = as `embed`. It may be split over
    more mesh axes than `embed`, after those: over `data`, with parameters whole there, it is ZeRO-1 (Rajbhandari et al.
    2020, arXiv:1910.02054).
    `layers` are those that parameters are stacked over, empty = as `stage`: a pipeline has them on its stages.
    Devices along `expert` split the batch too: each sends its tokens to those that have the experts they choose.
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


def spec_for(
    axes: Axes, rules: ShardingRules, mesh: Mesh, shape: Sequence[int] | None = None, name: str = "array"
) -> P:
    """The PartitionSpec of an array with these logical axes; mesh axes of size 1 are left out.

    Args:
      axes: one logical axis, or None (replicated), per dim.
      rules: the sharding rules.
      mesh: the mesh whose axis sizes count.
      shape: global shape; when given, every dim is checked to divide.
      name: what the array is called, for the message.

    Raises:
      UserError: a mesh axis used by two dims, or a dim that its mesh axes do not divide.
    """
    entries: list[MeshAxis | tuple[MeshAxis, ...] | None] = []
    user: dict[MeshAxis, tuple[int, LogicalAxis | None]] = {}
    for dim, axis in enumerate(axes):
        split = split_axes(axis, rules, mesh)
        for mesh_axis in split:
            if mesh_axis in user:
                first_dim, first = user[mesh_axis]
                raise UserError(
                    f"{name}: mesh axis {mesh_axis}={mesh.shape[mesh_axis]} is used twice, by dim {first_dim} "
                    f"({first}) and dim {dim} ({axis}): take it out of --rules.{first} or --rules.{axis}"
                )
            user[mesh_axis] = (dim, axis)
        pieces = math.prod(mesh.shape[mesh_axis] for mesh_axis in split)
        if shape is not None and shape[dim] % pieces:
            sizes: dict[MeshAxis, int] = {mesh_axis: mesh.shape[mesh_axis] for mesh_axis in split}
            raise UserError(
                f"{name}: dim {dim} ({axis}) has size {shape[dim]}, which {describe(sizes)} does not divide: "
                f"try {_fitting_flags(shape[dim], sizes)}, or take {split[-1]} out of --rules.{axis}"
            )
        entries.append(None if not split else split[0] if len(split) == 1 else split)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


# An empty rule means another's.
_AS: dict[LogicalAxis, LogicalAxis] = {"state_embed": "embed", "attention_seq": "seq", "layers": "stage"}


def split_axes(axis: LogicalAxis | None, rules: ShardingRules, mesh: Mesh) -> tuple[MeshAxis, ...]:
    """The mesh axes of more than one device that the rules split a logical axis over."""
    named = () if axis is None else named_axes(axis, rules)
    return tuple(mesh_axis for mesh_axis in named if mesh.shape[mesh_axis] > 1)


def named_axes(axis: LogicalAxis, rules: ShardingRules) -> tuple[MeshAxis, ...]:
    """The mesh axes that the rules give a logical axis, whatever their sizes."""
    return getattr(rules, axis) or (getattr(rules, _AS[axis]) if axis in _AS else ())


def _fitting_flags(size: int, sizes: dict[MeshAxis, int]) -> str:
    """The flags that lower mesh axes, outermost kept first, until they divide a dim."""
    flags = []
    for axis, present in sizes.items():
        fits = largest_divisor(size, present)
        size //= fits
        if fits < present:
            flags.append(f"--mesh.{axis} {fits}")
    return " ".join(flags)


def fit_heads(
    rules: ShardingRules, heads: int, kv_heads: int, sizes: Mapping[MeshAxis, int]
) -> tuple[ShardingRules, list[str]]:
    """Rules for more devices than heads, and a line for the log on each change; the same rules where all divides.

    Heads that their mesh axes do not divide keep the first of the axes that do, and attention splits the sequence over
    the others, as the residual stream does. Kv heads that theirs do not divide are copied: their weights are whole
    over the axes that are left out, and each device makes those of its query heads
    (`jaxpar.parallel.linear.column_linear`). Where `attention_seq` is set, or kv heads are split otherwise than by the
    first axes of heads, nothing is changed: what does not divide is refused as for any other dim.

    Args:
      rules: as the user gave them.
      heads, kv_heads: of the model.
      sizes: devices along each mesh axis.
    """

    def split(named: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in named if sizes[axis] > 1)

    def pieces(axes: tuple[MeshAxis, ...]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def words(axes: tuple[MeshAxis, ...]) -> str:
        return describe({axis: sizes[axis] for axis in axes})

    notes, wanted, residual = [], split(rules.heads), split(rules.residual_seq)
    # An axis splits heads or the sequence: where the residual stream's has it, the sequence gets all of them.
    kept = next(
        first for first in _firsts(wanted)
        if heads % pieces(first) == 0 and (first == wanted or not set(first) & set(residual))
    )  # fmt: skip
    if dropped := wanted[len(kept) :]:
        if rules.attention_seq:
            return rules, []
        rules = replace(
            rules, attention_seq=rules.residual_seq, heads=_without(rules.heads, dropped),
            kv_heads=_without(rules.kv_heads, dropped),
        )  # fmt: skip
        repeated = " x ".join(axis for axis in dropped if axis not in residual)
        instead = f"attention is repeated along {repeated}, which rules.residual_seq does not name"
        instead = instead if repeated else "attention is split over the sequence"
        notes.append(f"{words(wanted)} does not divide {heads} heads: {instead}")
    queries, wanted = split(rules.heads), split(rules.kv_heads)
    kept = next(first for first in _firsts(wanted) if kv_heads % pieces(first) == 0)
    if kept != wanted and wanted == queries[: len(wanted)]:
        rules = replace(rules, kv_heads=_without(rules.kv_heads, wanted[len(kept) :]))
        made = math.lcm(kv_heads, pieces(queries))
        notes.append(
            f"{words(wanted)} does not divide {kv_heads} kv heads: their weights are whole, "
            f"and k and v have {made} heads, each of them {made // kv_heads} times"
        )
    return rules, notes


def _firsts(axes: tuple[MeshAxis, ...]) -> list[tuple[MeshAxis, ...]]:
    """The first so many of some mesh axes, all of them first and none last."""
    return [axes[:count] for count in range(len(axes), -1, -1)]


def _without(axes: tuple[MeshAxis, ...], dropped: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...]:
    return tuple(axis for axis in axes if axis not in dropped)


Form = Literal["xla", "ring", "bidirectional"]
Move = Literal["gather", "scatter"]


@dataclass(frozen=True)
class Overlap:
    """How the linears gather and scatter the sequence: `xla` = a collective before or after the matmul; `ring` and
    `bidirectional` = hops from neighbour to neighbour between parts of the matmul, one way or half of it either way;
    `auto` = of the three the fastest of each site: see `jaxpar.plan.choose_overlap`.
    """

    gather: Literal[Form, "auto"] = "xla"
    """Of the input, before the matmul (in the backward: of the output's gradient)."""
    scatter: Literal[Form, "auto"] = "xla"
    """Of the output's sums, after the matmul (in the backward: of the input's gradient)."""
    heads_gather: Literal[Form, "same"] = "same"
    """`gather` for q, k, v and the attention's output alone; `same` = as `gather`."""
    heads_scatter: Literal[Form, "same"] = "same"
    mlp_gather: Literal[Form, "same"] = "same"
    """`gather` for the MLP's linears alone."""
    mlp_scatter: Literal[Form, "same"] = "same"
    domino: Literal["off", "on", "auto"] = "off"
    """Run each block on two halves of a device's sequences, so that one half's collectives may hide behind the other's
    matmuls (Domino, Wang et al. 2024, arXiv:2409.15241)."""

    def form(self, move: Move, site: LogicalAxis | None) -> Form:
        """The form of a move at the linears whose hidden dim is `site`.

        Raises:
          UserError: it is still `auto`.
        """
        form: Any = getattr(self, f"{site}_{move}", "same")
        form = getattr(self, move) if form == "same" else form
        if form == "auto":
            raise UserError(f"overlap.{move} is auto, which train and rehearse choose: here, try --overlap.{move} xla")
        return form

    @property
    def parts(self) -> int:
        """Into how many parts a block's batch is cut.

        Raises:
          UserError: it is still `auto`.
        """
        if self.domino == "auto":
            raise UserError("overlap.domino is auto, which train and rehearse choose: here, try --overlap.domino off")
        return 2 if self.domino == "on" else 1


@dataclass(frozen=True)
class Context:
    """How attention sees a sequence that is split over devices (`attention_seq`): `ring` sends keys and values round,
    `all_gather` gathers them, `ulysses` splits the heads instead. See `jaxpar.parallel.context`.
    """

    strategy: Literal["ring", "all_gather", "ulysses"] = "ring"


Schedule = Literal["gpipe", "1f1b", "interleaved", "looped", "zb_h1"]


@dataclass(frozen=True)
class Pipeline:
    """How microbatches go through the stages of a mesh with `stage` above 1: see `jaxpar.parallel.pipeline`."""

    schedule: Schedule = "1f1b"
    """gpipe, 1f1b, interleaved and looped (these two take `virtual`), zb_h1: see `parallel.pipeline.schedules`."""
    microbatches: int = 0
    """In the pipeline together, of each of `train.accumulation` parts of the batch; 0 = as many as the batch allows, at
    most four a stage."""
    virtual: int = 1
    """Chunks of layers a stage has, each behind all stages' chunks before: a bubble so many times smaller."""
    layers: tuple[int, ...] = ()
    """Layers of each virtual stage, first to last; empty = as even as can be, the first and the last with fewest."""
    stash: Literal["blocks", "stage"] = "blocks"
    """Where blocks are recomputed, what is kept meanwhile: what memory.policy keeps of each block, or the input of the
    stage alone, whose forward then runs once more."""


@dataclass(frozen=True)
class Plan:
    """How a model runs on devices, and nothing about what it computes. Hashable, so it may be a static argument.

    Attributes:
      mesh: the device mesh.
      rules: logical axis -> mesh axes.
      compute: dtype of matmuls and activations; norms, softmax, loss and sums over devices stay float32.
      remat: what a block keeps for its backward: one of `activations.PRESETS`.
      overlap: how the linears gather and scatter the sequence.
      context: how attention sees a sequence that is split.
      loss_mib: MiB of a device that the loss may hold: see `jaxpar.parallel.cross_entropy`.
      attention: one of `kernels.Implementation`, or `auto`.
      pipeline: how microbatches go through stages.
      keep: what becomes of named activations, otherwise than `remat` says.
      parameters: `offload` = the stacked layers' lie in host memory.
      optimizer: `offload` = the moments of matrices lie in host memory.
      params, gradients, moments: dtypes of matrices, of gradients that are added up, of the optimizer's state.
    """

    mesh: Mesh
    rules: ShardingRules = ShardingRules()
    compute: Literal["float32", "bfloat16"] = "float32"
    remat: Policy = "none"
    overlap: Overlap = Overlap()
    context: Context = Context()
    loss_mib: int = 4096
    attention: str = "auto"
    pipeline: Pipeline = Pipeline()
    keep: Keep = field(default_factory=Keep)
    parameters: Literal["device", "offload"] = "device"
    optimizer: Literal["device", "offload"] = "device"
    params: Literal["float32", "bfloat16"] = "float32"
    gradients: Literal["float32", "bfloat16"] = "float32"
    moments: Literal["float32", "bfloat16", "int8"] = "float32"

    def __post_init__(self) -> None:
        """Refuse a mesh of other axes.

        Raises:
          UserError: the rules name an axis that the mesh has not, or the other way round.
        """
        if tuple(self.mesh.axis_names) != MESH_AXES:
            found = ", ".join(map(str, self.mesh.axis_names))
            raise UserError(
                f"a plan's mesh has the axes {', '.join(MESH_AXES)}, some of size 1; found {found}: make it with "
                "jaxpar.make_mesh(jaxpar.MeshSpec(data=2, tensor=4))"
            )

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return jnp.dtype(self.compute)

    @property
    def recomputes(self) -> bool:
        """Whether a block makes anything again in its backward, or keeps anything in host memory.

        One whose parameters are fetched does: it fetches them again.
        """
        return self.parameters == "offload" or not keeps_all(self.remat, self.keep)

    @property
    def streams(self) -> bool:
        """Whether the update goes over the layers one by one."""
        return "offload" in (self.parameters, self.optimizer) or self.moments == "int8"

    def action(self, name: str) -> Action:
        """What becomes of an activation: one of `activations.NAMES`."""
        return actions(self.remat, self.keep)[name]

    def again(self, *names: str) -> bool:
        """Whether any of these activations is made again in the backward."""
        return self.recomputes and any(self.action(name) == "recompute" for name in names)

    @property
    def offloads(self) -> tuple[str, ...]:
        """The activations that are kept in host memory."""
        return tuple(name for name, action in actions(self.remat, self.keep).items() if action == "offload")

    def mesh_axes(self, axis: LogicalAxis | None) -> tuple[MeshAxis, ...]:
        """The mesh axes of more than one device that split a logical axis; none for None."""
        return split_axes(axis, self.rules, self.mesh)

    def size(self, axis: LogicalAxis | None) -> int:
        """Into how many pieces this plan splits a logical axis."""
        return self.pieces(self.mesh_axes(axis))

    def pieces(self, mesh_axes: Sequence[MeshAxis]) -> int:
        """Devices along these mesh axes together."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in mesh_axes)

    def spec(self, axes: Axes) -> P:
        """The PartitionSpec of these logical axes."""
        return spec_for(axes, self.rules, self.mesh)

    def sharding(self, axes: Axes, shape: Sequence[int] | None = None, name: str = "array") -> NamedSharding:
        """The sharding of an array with these logical axes; see `spec_for` for what it rejects."""
        return NamedSharding(self.mesh, spec_for(axes, self.rules, self.mesh, shape, name))

    def constrain(self, x: jax.Array, axes: Axes, name: str = "activation") -> jax.Array:
        """`x` with its sharding fixed at this point of a jitted function."""
        if self.mesh.size == 1:
            return x
        place = self.sharding(axes, x.shape, name)
        if jax.sharding.get_abstract_mesh().manual_axes:  # of a pipeline's stage: the mesh is that of its other axes
            return jax.lax.with_sharding_constraint(x, place.spec)
        return jax.lax.with_sharding_constraint(x, place)


def state_axes(axes: Axes) -> tuple[LogicalAxis | None, ...]:
    """The logical axes of a parameter's gradient and moments."""
    return tuple("state_embed" if axis == "embed" else axis for axis in axes)


def is_matrix(axes: Axes) -> bool:
    """Whether a parameter with these logical axes maps from or to the embed dim: no norm, no bias."""
    return "embed" in axes and len([axis for axis in axes if axis != "layers"]) > 1


def param_dtype(axes: Axes, plan: Plan) -> jnp.dtype:
    """Of a parameter as it is stored: that of vectors is float32."""
    return jnp.dtype(plan.params if is_matrix(axes) else "float32")


def gradient_dtype(axes: Axes, plan: Plan) -> jnp.dtype:
    """Of the sums of a parameter's gradients over microbatches: those of vectors are float32."""
    return jnp.dtype(plan.gradients if is_matrix(axes) else "float32")


def summed_last(plan: Plan, accumulation: int, whole: bool) -> tuple[MeshAxis, ...]:
    """The mesh axes over which gradients are summed once, after the last microbatch, and not for each: the outermost
    that split the batch and nothing else, so that each device has room for sums of its own.

    None where the state is split over them too (ZeRO-1): a device would hold all the sums that this is to spare it.

    Args:
      plan: mesh and rules.
      accumulation: microbatches of a step.
      whole: something depends on all sequences of a microbatch: dropout's random numbers, the balance of experts.
    """
    if accumulation == 1 or whole or plan.size("stage") > 1:
        return ()
    rules: list[Any] = [rule.name for rule in fields(plan.rules) if rule.name != "batch"]
    others = {mesh_axis for rule in rules for mesh_axis in plan.mesh_axes(rule)}
    return next(first for first in _firsts(plan.mesh_axes("batch")) if not others.intersection(first))


def one_along(plan: Plan, mesh_axes: Sequence[MeshAxis]) -> Plan:
    """The plan of the devices at one place along mesh axes that split the batch alone."""
    return replace(plan, rules=replace(plan.rules, batch=_without(plan.rules.batch, tuple(mesh_axes))))


def copying(plan: Plan) -> tuple[MeshAxis, ...]:
    """The mesh axes that split heads further than kv heads; none where the two are split otherwise.

    Along these k and v hold copies of kv heads, so that each device has those of its own query heads.
    """
    heads, kv_heads = plan.mesh_axes("heads"), plan.mesh_axes("kv_heads")
    return heads[len(kv_heads) :] if heads[: len(kv_heads)] == kv_heads else ()


def beside(axis: LogicalAxis | None, plan: Plan) -> LogicalAxis | None:
    """The logical axis of a linear's output dim: kv heads that are copied lie as heads do."""
    return "heads" if axis == "kv_heads" and copying(plan) else axis


def tree_shardings(shapes: Any, axes: Any, plan: Plan) -> Any:
    """Shardings of a tree of arrays (or ShapeDtypeStructs) whose logical axes stand in a tree of the same form."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, leaf_axes: plan.sharding(leaf_axes, leaf.shape, path_name(path)), shapes, axes
    )


def path_name(path: tuple[Any, ...]) -> str:
    """`blocks.attention.q` for a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


class Placement(NamedTuple):
    """One row of the sharding table."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[LogicalAxis | None, ...]
    spec: P
    bytes_per_device: int
    bytes: int
    """Of the whole array."""


def placements(shapes: Any, axes: Any, plan: Plan) -> list[Placement]:
    """Where every array of a tree lives: name, global shape, logical axes, spec, bytes on each device."""
    rows = []
    shardings = tree_shardings(shapes, axes, plan)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    leaf_axes = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    for (path, leaf), names, sharding in zip(leaves, leaf_axes, jax.tree.leaves(shardings), strict=True):
        shape, width = leaf.shape, jnp.dtype(leaf.dtype).itemsize
        local, whole = (math.prod(sizes) * width for sizes in (sharding.shard_shape(shape), shape))
        rows.append(Placement(path_name(path), shape, names, sharding.spec, local, whole))
    return rows


def replicated(plan: Plan) -> NamedSharding:
    """The sharding of something every device holds whole."""
    return NamedSharding(plan.mesh, P())


def local_rows(sharding: NamedSharding, rows: int) -> list[int]:
    """Which rows (dim 0) of a global batch this process's devices hold, sorted: what its data loader must read."""
    shards = sharding.addressable_devices_indices_map((rows,)).values()
    return sorted({row for index in shards if index is not None for row in range(rows)[index[0]]})
