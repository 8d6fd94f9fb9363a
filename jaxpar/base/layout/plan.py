"""How a model runs on devices: a layout, the forms of its collectives, its schedule, what it keeps,
its dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

import jax.numpy as jnp

from jaxpar.base.errors import UserError
from jaxpar.base.field_marks import Idle, Rule, WholeConfig
from jaxpar.base.layout.activation_names import Action, Keep, Policy, actions
from jaxpar.base.layout.fit_heads import drop_axes, first_axes, may_split
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.sharding import Axes, Layout, LogicalAxis
from jaxpar.base.ranges import Range
from jaxpar.base.registry import FORMS, SCHEDULES, OneOf

Form: TypeAlias = str
"""The name of a form in which a linear gathers or scatters: one of `registry.FORMS`."""
Move = Literal["gather", "scatter"]
Strategy = Literal["ring", "ulysses"]
_NO_SEQUENCE_GATHERED = Idle(
    lambda c: not may_split(c, "residual_seq", besides="seq"),
    "no linear gathers a sequence on this mesh",
    "add --mesh.tensor 4",
)


def _domino_without_dropout(config: WholeConfig) -> str:
    dropout = config.model.dropout
    if config.overlap.domino not in ("on", "sequence") or dropout <= 0:
        return ""
    return (
        f"overlap.domino with model.dropout={dropout}: halves of a batch would drop other "
        "entries than the whole, leave one of them out"
    )


@dataclass(frozen=True)
class Overlap:
    """How the linears gather and scatter the sequence.

    `xla` is a collective before or after the matmul. `ring` sends parts from neighbour to neighbour
    beside parts of the matmul, and `bidirectional` sends half of them each way; others may be
    registered (`jaxpar.parallel.linear.ring_matmul.register_form`). `auto` takes the fastest of all
    at each site: see `jaxpar.plan.choose_overlap`.
    """

    gather: Annotated[Form, OneOf(FORMS, ("auto",)), _NO_SEQUENCE_GATHERED] = "xla"
    """How the input is gathered before the matmul, and the output's gradient in the backward."""
    scatter: Annotated[Form, OneOf(FORMS, ("auto",)), _NO_SEQUENCE_GATHERED] = "xla"
    """How the output is summed and scattered after the matmul, and the input's gradient in the
    backward.
    """
    heads_gather: Annotated[Form, OneOf(FORMS, ("same",)), _NO_SEQUENCE_GATHERED] = "same"
    """The form of `gather` for q, k, v and the attention's output alone; `same` is that of
    `gather`.
    """
    heads_scatter: Annotated[Form, OneOf(FORMS, ("same",)), _NO_SEQUENCE_GATHERED] = "same"
    mlp_gather: Annotated[Form, OneOf(FORMS, ("same",)), _NO_SEQUENCE_GATHERED] = "same"
    """The form of `gather` for the linears of the MLP alone."""
    mlp_scatter: Annotated[Form, OneOf(FORMS, ("same",)), _NO_SEQUENCE_GATHERED] = "same"
    domino: Annotated[Literal["off", "on", "sequence", "auto"], Rule(_domino_without_dropout)] = (
        "off"
    )
    """Whether each block runs on two halves of a device's tokens, so that one half's collectives
    may hide behind the other's matmuls (Domino, Wang et al. 2024, arXiv:2409.15241).

    `on` takes half of a device's sequences, and where their number is odd the halves of each
    sequence; `sequence` takes those in any case. The second half then attends to the keys and
    values of both."""

    @property
    def is_open(self) -> bool:
        """Whether something is left to choose."""
        return "auto" in vars(self).values()

    def without_auto(self) -> Overlap:
        """Return these forms with `xla` and no Domino for what is left to choose, from which a
        search starts.
        """
        first = {"gather": "xla", "scatter": "xla", "domino": "off"}
        taken = {name: form for name, form in first.items() if getattr(self, name) == "auto"}
        return replace(self, **taken)

    def form(self, move: Move, site: LogicalAxis | None) -> Form:
        """Look up the form of a move at some linears.

        Args:
          move: `gather` or `scatter`.
          site: the logical axis of their hidden dim.

        Raises:
          UserError: it is still `auto`.
        """
        form = getattr(self, f"{site}_{move}", "same")
        if form == "same":
            form = getattr(self, move)
        if form == "auto":
            raise UserError(
                f"overlap.{move} is auto, which train and rehearse choose: here, try "
                f"overlap.{move}=xla"
            )
        return form

    def forms(self, site: LogicalAxis | None) -> tuple[Form, Form]:
        """Look up the forms of both moves at some linears.

        Args:
          site: the logical axis of the linears, which `form` takes.

        Returns:
          The forms of the gather and of the scatter.

        Raises:
          UserError: `form` refuses the site.
        """
        return self.form("gather", site), self.form("scatter", site)

    @property
    def parts(self) -> int:
        """The number of parts that a block's batch is cut into; a UserError where `domino` is still
        `auto`.
        """
        if self.domino == "auto":
            raise UserError(
                "overlap.domino is auto, which train and rehearse choose: here, try "
                "overlap.domino=off"
            )
        return 1 if self.domino == "off" else 2

    @property
    def cuts_sequence(self) -> bool:
        """Whether a block runs on the two halves of each sequence."""
        return self.domino == "sequence"

    def for_rows(self, rows: int) -> Overlap:
        """Return these forms, with `sequence` in place of `on` if a device's sequences have no
        halves.

        Args:
          rows: how many sequences of a microbatch a device has.
        """
        if self.domino == "on" and rows % 2:
            return replace(self, domino="sequence")
        return self


@dataclass(frozen=True)
class Context:
    """How attention sees a sequence that is split over devices (`attention_seq`).

    `ring` sends keys and values round, and `ulysses` splits the heads instead. See
    `jaxpar.parallel.context`.
    """

    strategy: Strategy = "ring"


@dataclass(frozen=True)
class Pipeline:
    """How microbatches go through the stages of a mesh with `stage` above 1: see
    `jaxpar.parallel.pipeline`.
    """

    schedule: Annotated[str, OneOf(SCHEDULES)] = "1f1b"
    """One of gpipe, 1f1b, interleaved and looped, of which the last two take `virtual`, or one that
    was registered: see `parallel.pipeline.schedules`.
    """
    microbatches: Annotated[int, Range(0, 65_536)] = 0
    """How many microbatches are in the pipeline together, in each of the `train.accumulation` parts
    of the batch; 0 = as many as the batch allows, and at most four a stage."""
    virtual: Annotated[int, Range(1, 1_024)] = 1
    """The number of chunks of layers that each stage has. The bubble is so many times smaller."""
    layers: tuple[Annotated[int, Range(0, 10_000)], ...] = ()
    """The number of layers of each virtual stage, first to last; empty = as even as can be, with
    the fewest in the first and the last."""
    stash: Literal["blocks", "stage"] = "blocks"
    """What is kept between forward and backward where blocks are recomputed: `blocks` keeps what
    memory.policy keeps of each block, `stage` keeps the input of the stage alone and runs its
    forward once more."""


@dataclass(frozen=True)
class Plan(Layout):
    """How a model runs on devices, and nothing about what it computes: a layout, and how its ops
    are done.

    It is hashable, so it may be a static argument. Its fields beside the layout's are settings of a
    config, which says more of each (`base.config`): those of `memory` that concern the step, where
    `policy` is called `remat` here, those of `precision`, and `kernels.attention`.
    """

    remat: Policy = "none"
    """What a block keeps for its backward: one of `activation_names.PRESETS`."""
    overlap: Overlap = Overlap()
    """How the linears gather and scatter the sequence."""
    context: Context = Context()
    """How attention sees a sequence that is split."""
    loss_mib: int = 4096
    """MiB of a device that the loss may hold: some tokens' scores, the gathered vocabulary matrix
    and its gradient.
    """
    attention: str = "auto"
    """The name of an implementation (`registry.KERNELS`), or `auto`: the first of them that
    serves.
    """
    pipeline: Pipeline = Pipeline()
    """How microbatches go through stages."""
    keep: Keep = field(default_factory=Keep)
    """What becomes of single named activations, in place of what `remat` says."""
    parameters: Literal["device", "offload"] = "device"
    """`offload` keeps the parameters of the stacked layers in host memory."""
    optimizer: Literal["device", "offload", "host"] = "device"
    """`offload` keeps the moments of matrices in host memory, `host` also updates there."""
    params: Literal["float32", "bfloat16"] = "float32"
    """The dtype of matrices as they are stored."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """The dtype of gradients that are added up over microbatches."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the first moments of matrices; second moments are float32."""

    @property
    def moments_text(self) -> str:
        """The dtypes of the optimizer's moments of matrices, as a table says it."""
        if self.moments == "float32":
            return "float32"
        return f"{self.moments} and float32"

    @property
    def recomputes(self) -> bool:
        """Whether a block computes or fetches anything again in its backward, or keeps anything in
        host memory.
        """
        keeps_all = self.remat == "none" and set(actions(self.remat, self.keep).values()) == {
            "save"
        }
        return self.parameters == "offload" or not keeps_all

    @property
    def streams(self) -> bool:
        """Whether the update takes the layers one by one, from host memory through the device."""
        return self.optimizer != "host" and "offload" in (self.parameters, self.optimizer)

    def action(self, name: str) -> Action:
        """What becomes of an activation, given its name in `activation_names.NAMES`."""
        return actions(self.remat, self.keep)[name]

    @property
    def offloads(self) -> tuple[str, ...]:
        """The activations that are kept in host memory."""
        return tuple(
            name for name, action in actions(self.remat, self.keep).items() if action == "offload"
        )


_OF_HEADS = ("heads", "kv_heads", "head_dim")


def is_matrix(axes: Axes) -> bool:
    """Whether a parameter with these logical axes maps from one space to another: no norm, and no
    bias, such as that of heads [heads, head_dim].
    """
    dims = [axis for axis in axes if axis not in ("layers", "experts")]
    return len(dims) > 1 and any(axis not in _OF_HEADS for axis in dims)


def param_dtype(axes: Axes, plan: Plan) -> jnp.dtype:
    """The dtype that a parameter is stored in; vectors and LoRA's matrices are always float32."""
    return jnp.dtype(plan.params if is_matrix(axes) and "rank" not in axes else "float32")


def gradient_dtype(axes: Axes, plan: Plan) -> jnp.dtype:
    """The dtype of the sums of a parameter's gradients over microbatches; those of vectors are
    always float32.
    """
    return jnp.dtype(plan.gradients if is_matrix(axes) else "float32")


def deferred_sum_axes(plan: Plan, accumulation: int, whole: bool) -> tuple[MeshAxis, ...]:
    """Find the mesh axes over which gradients are summed once a step, after the last microbatch,
    rather than for each one.

    These are the outermost axes that split the batch and nothing else, so that each device can hold
    sums of its own. There are none under ZeRO-1, where the state is split over them too: a device
    would hold the whole gradient.

    Args:
      accumulation: the number of microbatches of a step.
      whole: whether a result depends on the whole microbatch, as with dropout and the balance of
        experts; there are none then.

    Returns:
      The axes, outermost first.
    """
    if accumulation == 1 or whole or plan.size("stage") > 1:
        return ()
    axes = [axis for axis in plan.rules.logical_axes if axis != "batch"]
    others = {mesh_axis for axis in axes for mesh_axis in plan.mesh_axes(axis)}
    return next(
        first for first in first_axes(plan.mesh_axes("batch")) if not others.intersection(first)
    )


def plan_without_batch_axes(plan: Plan, mesh_axes: Sequence[MeshAxis]) -> Plan:
    """Make the plan of the devices that share one place along some mesh axes.

    Args:
      mesh_axes: the axes, which split the batch alone.

    Returns:
      The plan with the same mesh, in which they split nothing.
    """
    return replace(
        plan,
        rules=replace(
            plan.rules,
            batch=drop_axes(plan.rules.batch, tuple(mesh_axes)),
        ),
    )
