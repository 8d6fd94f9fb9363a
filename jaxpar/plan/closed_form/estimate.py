"""The seconds and bytes of a training step under a candidate, put together from its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxpar.hlo.program.tasks import CollectiveKind
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.links import send_seconds
from jaxpar.plan.closed_form.memory import bytes_of
from jaxpar.plan.closed_form.parts import Estimate
from jaxpar.plan.closed_form.rates import Rates, rates_of
from jaxpar.plan.closed_form.sends import (
    Send,
    What,
    block_sends,
    lookup_sends,
    loss_sends,
    stage_sends,
    step_sends,
)
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.ticks import layers_a_tick, ticks_of
from jaxpar.plan.closed_form.work import (
    Passes,
    block_passes,
    gradient_bytes_added,
    loss_work,
    update_bytes,
)
from jaxpar.rehearse.targets import Target

SendsOf = Callable[[StepShapes, Candidate], tuple[Send, ...]]
Exposed = Mapping[tuple[What, CollectiveKind], float]


@dataclass(frozen=True, eq=False)
class Trainer:
    """How a trainer sends and overlaps: what differs between this library and another of which
    steps were measured.

    Attributes:
      block, lookup, loss, step, stage: what it sends in each of these.
      exposed: the share of each kind of collective that compute waits for; 1 where it is not there.
      dispatch: the seconds in which the host launches a kernel, below which a block cannot take
        less; 0 = a compiled program launches them.
      last_stage_scores: whether the last stage has the loss alone.
      passes: prices a block, where it is not as this library's.
    """

    block: SendsOf = block_sends
    lookup: SendsOf = lookup_sends
    loss: SendsOf = loss_sends
    step: SendsOf = step_sends
    stage: SendsOf = stage_sends
    exposed: Exposed = field(default_factory=dict[tuple[What, CollectiveKind], float])
    dispatch: float = 0.0
    last_stage_scores: bool = False
    passes: Callable[[StepShapes, Candidate, Rates], Passes] = block_passes


ON_TPU = Trainer(
    exposed={
        ("weights", "all-gather"): 0.1,
        ("gradients", "all-reduce"): 0.5,
        ("stream", "all-gather"): 0.5,
        ("keys", "ppermute"): 0.1,
        ("stages", "ppermute"): 0.3,
    }
)
ON_GPU = Trainer(
    exposed={
        ("weights", "all-gather"): 0.2,
        ("gradients", "reduce-scatter"): 0.3,
        ("gradients", "all-reduce"): 0.3,
        ("keys", "ppermute"): 0.2,
        ("stages", "ppermute"): 0.3,
    }
)


def estimate(
    shapes: StepShapes, candidate: Candidate, target: Target, trainer: Trainer | None = None
) -> Estimate:
    """Estimate what a step costs.

    Args:
      shapes: the facts of the step (`step_shapes`).
      candidate: the plan, whose mesh has the target's devices.
      target: the hardware.
      trainer: how it is trained; None = by this library.

    Raises:
      UserError: the candidate's schedule, or its stages, cannot have these sizes.
    """
    if trainer is None:
        trainer = ON_TPU if target.platform == "tpu" else ON_GPU
    rates = rates_of(target, shapes.compute, shapes.head_dim, shapes.keys)
    links = _Links(candidate, target, trainer.exposed)
    passes = trainer.passes(shapes, candidate, rates)
    sends = trainer.block(shapes, candidate)
    forward = _with_sends(passes.forward, sends, "forward", links)
    backward = _with_sends(passes.again + passes.backward, sends, "backward", links)
    launched = rates.launch * passes.kernels
    floor = trainer.dispatch * passes.kernels
    if floor > forward.total + backward.total:
        launched += floor - forward.total - backward.total
    layers = layers_a_tick(shapes, candidate)
    ticks = ticks_of(candidate)
    parts = candidate.accumulation
    microbatches = max(candidate.microbatches, 1) * candidate.virtual
    compute = parts * microbatches * layers * (forward.compute + backward.compute)
    exposed = parts * microbatches * layers * (forward.exposed + backward.exposed)
    launches = parts * microbatches * layers * launched
    idle_forward = (ticks.forward - microbatches) * layers
    idle_backward = (ticks.backward - microbatches) * layers
    share = forward.total / max(forward.total + backward.total, 1e-30)
    bubble = parts * (
        idle_forward * (forward.total + share * launched)
        + idle_backward * (backward.total + (1 - share) * launched)
    )
    once = _of_tables(shapes, candidate, rates, links, trainer)
    between = links.exposed_seconds(trainer.stage(shapes, candidate), "forward", "backward")
    exposed += parts * max(ticks.forward, ticks.backward) * between
    times = parts * max(candidate.microbatches, 1)
    compute += times * once.compute
    exposed += times * (
        once.exposed + links.exposed_seconds(trainer.stage(shapes, candidate), "once")
    )
    exposed += links.exposed_seconds(trainer.step(shapes, candidate), "once")
    added = gradient_bytes_added(shapes, candidate) / rates.memory
    update = update_bytes(shapes, candidate) / rates.memory
    held = bytes_of(shapes, candidate)
    return Estimate(
        compute=compute + times * added,
        exposed=exposed,
        bubble=bubble,
        launches=launches,
        update=update,
        host=_host_seconds(held.host, shapes, candidate, rates),
        bytes=held,
    )


class _Pass(NamedTuple):
    """The seconds of one pass of a block: of compute, and of what it waits for."""

    compute: float
    exposed: float

    @property
    def total(self) -> float:
        """Both."""
        return self.compute + self.exposed


class _Links(NamedTuple):
    """The links of a candidate on a target."""

    candidate: Candidate
    target: Target
    shares: Exposed

    def seconds(self, one: Send) -> float:
        """Return the seconds of a collective, all its times together."""
        candidate = self.candidate
        return one.count * send_seconds(
            one.kind, one.axes, one.bytes, candidate.mesh, candidate.dcn, self.target
        )

    def share(self, one: Send) -> float:
        """Return the share that compute waits for."""
        return self.shares.get((one.what, one.kind), 1.0)

    def exposed_seconds(self, sends: tuple[Send, ...], *during: str) -> float:
        """Add up what compute waits for."""
        return sum(self.share(one) * self.seconds(one) for one in sends if one.during in during)


def _with_sends(compute: float, sends: tuple[Send, ...], during: str, links: _Links) -> _Pass:
    """Add to the compute of a pass what it waits for: of each collective its share, and what
    remains of the others when compute is over.
    """
    waited = 0.0
    hidden = 0.0
    for one in sends:
        if one.during != during:
            continue
        seconds = links.seconds(one)
        share = links.share(one)
        waited += share * seconds
        hidden += (1 - share) * seconds
    return _Pass(compute, waited + max(hidden - compute, 0.0))


def _of_tables(
    shapes: StepShapes, candidate: Candidate, rates: Rates, links: _Links, trainer: Trainer
) -> _Pass:
    """Price the lookup and the loss of one microbatch."""
    loss = loss_work(shapes, candidate)
    arithmetic = loss.times * loss.matmul.seconds(rates, shapes.dtype_bytes)
    compute = arithmetic + loss.moved / rates.memory
    if trainer.last_stage_scores:
        compute *= candidate.size("stage")
    sends = (*trainer.lookup(shapes, candidate), *trainer.loss(shapes, candidate))
    return _Pass(compute, links.exposed_seconds(sends, "forward", "backward"))


def _host_seconds(
    offloaded: float, shapes: StepShapes, candidate: Candidate, rates: Rates
) -> float:
    """Return the seconds of transfers to host memory and back that nothing hides."""
    moved = 2.0 * offloaded * candidate.accumulation * _HOST_EXPOSED
    stages = candidate.size("stage")
    return (moved + _state_moved(shapes, candidate, stages)) / rates.host


_HOST_EXPOSED = 0.3
"""The share of the transfers of activations that compute waits for (`plan.choose_remat`)."""


def _state_moved(shapes: StepShapes, candidate: Candidate, stages: int) -> float:
    """Count the bytes of parameters and of the optimizer's state that go to host memory or come
    from there in a step.
    """
    from jaxpar.plan.closed_form.split import weights_of

    moved = 0.0
    for weight in weights_of(shapes, candidate.sizes, candidate.zero):
        parameter = weight.parameter
        layers = -(-parameter.layers // stages) if parameter.layers else 1
        if candidate.optimizer != "device" and parameter.matrix and parameter.sums_width:
            state = dict(parameter.state_width)[candidate.moments]
            moved += 2 * layers * weight.state * state
        if candidate.parameters == "offload" and parameter.layers:
            moved += layers * weight.stored * parameter.width * (2 * candidate.accumulation + 2)
    return moved
