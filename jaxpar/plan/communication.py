"""The collectives that a plan sends in a training step, traced, each with its place in the model.

Nothing is compiled and no array is made. The collectives are those that the ops of this library
write down (`jaxpar.rehearse.requested_collectives`). What XLA adds by itself for norms, biases and
the gradient's norm is not among them; a rehearsal shows that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.origin import decode
from jaxpar.hlo.program.tasks import CollectiveKind, Phase, sent_bytes
from jaxpar.rehearse.requested_collectives import Requested, requested_collectives
from jaxpar.train.experiment import Experiment
from jaxpar.train.step import make_train_step


@dataclass(frozen=True)
class StepCollective:
    """A collective of a training step, with how often the step runs it.

    Attributes:
      scope: the place in the model, as `jax.named_scope` has it: `block/attention`.
      phase: `forward`, `recomputed`, `backward` or `update`. What the recomputed forward and the
        backward both need is sent once, and counts for the first of them.
      axes: its mesh axes of more than one device, in the order of the mesh.
      devices: the number of devices along these axes.
      bytes: the bytes of one group's whole array, as in `hlo.program.tasks.Collective.bytes`, or of
        one message of a ppermute.
      count: how often it runs in a step.
    """

    scope: str
    phase: Phase
    kind: CollectiveKind
    axes: tuple[str, ...]
    devices: int
    bytes: int
    count: int

    @property
    def sent_bytes(self) -> float:
        """The bytes that one device sends each time, by a bandwidth-optimal algorithm."""
        return sent_bytes(self.kind, self.bytes, self.devices)

    @property
    def step_bytes(self) -> float:
        """The bytes that one device sends in a step."""
        return self.count * self.sent_bytes


@lru_cache(maxsize=64)
def step_collectives(experiment: Experiment) -> tuple[StepCollective, ...]:
    """List every collective of one training step in the order of the step; none on one device.

    In a pipeline all stages run all ticks, so what is sent for a layer is sent in the bubble as
    well. The lookup and the loss run in some ticks only; where they stand in a branch, every round
    of the loop counts it, which makes their bytes an upper bound.

    Args:
      experiment: an experiment whose overlap is settled. Its devices need not be here.
    """
    plan = experiment.plan
    if plan.mesh.size == 1:
        return ()
    step = make_train_step(experiment)
    traced = step.trace(experiment.state, experiment.batch)
    return tuple(
        _step_collective(found, plan) for found in requested_collectives(traced.jaxpr, plan.mesh)
    )


def bytes_by_collective(
    collectives: Iterable[StepCollective],
) -> dict[tuple[CollectiveKind, tuple[str, ...]], float]:
    """Add up the bytes that one device sends in a step, by kind of collective and mesh axes."""
    total = defaultdict[tuple[CollectiveKind, tuple[str, ...]], float](float)
    for one in collectives:
        total[one.kind, one.axes] += one.step_bytes
    return dict(total)


def _step_collective(found: Requested, plan: Plan) -> StepCollective:
    axes = tuple(axis for axis in plan.mesh.axis_names if axis in found.axes)
    scope, phase = decode(f"{found.scope}/{found.kind}")
    devices = math.prod(plan.mesh.shape[axis] for axis in axes)
    return StepCollective(scope, phase, found.kind, axes, devices, found.bytes, found.count)
