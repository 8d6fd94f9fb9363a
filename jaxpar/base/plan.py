"""How a model runs on devices: a layout, the forms of its collectives, its schedule, what is kept, in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import jax.numpy as jnp

from jaxpar.base.activation_names import Action, Keep, Policy, actions, keeps_all
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MeshAxis
from jaxpar.base.sharding import Axes, Layout, LogicalAxis, first_axes, without

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

    def forms(self, site: LogicalAxis | None) -> tuple[Form, Form]:
        """Of the gather and of the scatter; see `form`."""
        return self.form("gather", site), self.form("scatter", site)

    @property
    def parts(self) -> int:
        """Into how many parts a block's batch is cut.

        Raises:
          UserError: it is still `auto`.
        """
        if self.domino == "auto":
            raise UserError("overlap.domino is auto, which train and rehearse choose: here, try --overlap.domino off")
        return 2 if self.domino == "on" else 1


Strategy = Literal["ring", "all_gather", "ulysses"]


@dataclass(frozen=True)
class Context:
    """How attention sees a sequence that is split over devices (`attention_seq`): `ring` sends keys and values round,
    `all_gather` gathers them, `ulysses` splits the heads instead. See `jaxpar.parallel.context`.
    """

    strategy: Strategy = "ring"


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
class Plan(Layout):
    """How a model runs on devices, and nothing about what it computes: a layout, and how its ops are done. Hashable.

    Attributes:
      remat: what a block keeps for its backward: one of `activation_names.PRESETS`.
      overlap: how the linears gather and scatter the sequence.
      context: how attention sees a sequence that is split.
      loss_mib: MiB of a device that the loss may hold: see `jaxpar.parallel.linear_cross_entropy`.
      attention: one of `kernels.Implementation`, or `auto`.
      pipeline: how microbatches go through stages.
      keep: what becomes of named activations, otherwise than `remat` says.
      parameters: `offload` = the stacked layers' lie in host memory.
      optimizer: `offload` = the moments of matrices lie in host memory.
      params, gradients, moments: dtypes of matrices, of gradients that are added up, of the optimizer's state.
    """

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
        """What becomes of an activation: one of `activation_names.NAMES`."""
        return actions(self.remat, self.keep)[name]

    def again(self, *names: str) -> bool:
        """Whether any of these activations is made again in the backward."""
        return self.recomputes and any(self.action(name) == "recompute" for name in names)

    @property
    def offloads(self) -> tuple[str, ...]:
        """The activations that are kept in host memory."""
        return tuple(name for name, action in actions(self.remat, self.keep).items() if action == "offload")


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
    return next(first for first in first_axes(plan.mesh_axes("batch")) if not others.intersection(first))


def one_along(plan: Plan, mesh_axes: Sequence[MeshAxis]) -> Plan:
    """The plan of the devices at one place along mesh axes that split the batch alone."""
    return replace(plan, rules=replace(plan.rules, batch=without(plan.rules.batch, tuple(mesh_axes))))
