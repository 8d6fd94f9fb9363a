"""The seconds and bytes of a training step under a candidate, put together from its parts.

What concerns a block, the tables, the state and the step is each found once for all candidates that
do not differ in it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.hlo.program.tasks import CollectiveKind
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.links import (
    Sizes,
    Slope,
    seconds_of,
    slopes,
    spans_nodes,
)
from jaxpar.plan.closed_form.memory import (
    BlockHeld,
    StateHeld,
    block_held,
    blocks_kept,
    state_held,
)
from jaxpar.plan.closed_form.parts import Bytes, Estimate
from jaxpar.plan.closed_form.rates import Rates, rates_of
from jaxpar.plan.closed_form.sends import Send
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.split import weights_of
from jaxpar.plan.closed_form.ticks import layers_a_tick, ticks_of
from jaxpar.plan.closed_form.trainers import TRAINERS, Trainer
from jaxpar.plan.closed_form.work import (
    gradient_bytes_added,
    loss_work,
    update_bytes,
)
from jaxpar.rehearse.targets import Target

_REMEMBERED = 2**17


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
    on = _system(target, trainer or TRAINERS[target.platform], shapes)
    block = _block(on, _concerning_block(candidate))
    tables = _tables(on, _concerning_tables(candidate))
    once = _once(on, _concerning_state(candidate))
    layers = layers_a_tick(shapes, candidate)
    ticks = ticks_of(candidate)
    parts = candidate.accumulation
    microbatches = max(candidate.microbatches, 1)
    runs = parts * microbatches * candidate.virtual * layers
    forward = block.forward.total + block.launched_forward
    backward = block.backward.total + block.launched_backward
    idle_forward = ticks.forward - microbatches * candidate.virtual
    idle_backward = ticks.backward - microbatches * candidate.virtual
    times = parts * microbatches
    offloaded = runs * block.held.offloaded
    return Estimate(
        compute=runs * (block.forward.compute + block.backward.compute)
        + times * (tables.compute + once.added),
        exposed=runs * (block.forward.exposed + block.backward.exposed)
        + times * tables.exposed
        + parts * max(ticks.forward, ticks.backward) * tables.between
        + once.exposed,
        bubble=parts * layers * (idle_forward * forward + idle_backward * backward),
        launches=runs * (block.launched_forward + block.launched_backward)
        + times * tables.launched,
        update=once.update,
        host=once.host + waits_for_host(offloaded / on.rates.host, runs * forward, runs * backward),
        bytes=_bytes(shapes, candidate, block.held, tables.held, once.state),
        offloaded=offloaded,
    )


HOST_EXPOSED = 0.3
"""The share of the transfers of activations to host memory and back that compute waits for at the
least: a loop over layers sends what a layer made before the next one starts.
"""


def waits_for_host(
    each: float, forward: float, backward: float, exposed: float = HOST_EXPOSED
) -> float:
    """Return the seconds in which compute waits for activations on their way to host memory, behind
    the forward, and back, behind the backward.

    Args:
      each: the seconds of all transfers of one way.
      forward: the seconds of the forward.
      backward: the seconds of the backward, with what it makes again.
      exposed: the share of the transfers that is waited for in any case.
    """
    too_long = max(each - forward, 0.0) + max(each - backward, 0.0)
    return max(too_long, exposed * 2 * each)


def _bytes(
    shapes: StepShapes, candidate: Candidate, block: BlockHeld, loss: float, state: StateHeld
) -> Bytes:
    """Add up the bytes of a device. What a block works with, the loss and the update do not exist
    at once, so that the largest counts.
    """
    blocks = blocks_kept(shapes, candidate)
    return Bytes(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=blocks * block.kept,
        working=max(block.working, loss, state.gathered),
        host=blocks * block.offloaded,
    )


# What candidates share.


class _System:
    """A step on a target, trained in one way. It is compared by identity, which is quick."""

    def __init__(self, target: Target, trainer: Trainer, shapes: StepShapes) -> None:
        self.target = target
        self.trainer = trainer
        self.shapes = shapes
        rates = rates_of(target, shapes.compute, shapes.head_dim, shapes.keys)
        self.rates: Rates = rates._replace(tile=trainer.tile or rates.tile)


@lru_cache(maxsize=64)
def _system(target: Target, trainer: Trainer, shapes: StepShapes) -> _System:
    return _System(target, trainer, shapes)


_ANY = Candidate()


def _concerning_block(candidate: Candidate) -> Candidate:
    """Return a candidate with only those choices that a block of it depends on."""
    return _ANY._replace(
        mesh=candidate.mesh,
        dcn=candidate.dcn,
        accumulation=candidate.accumulation,
        microbatches=candidate.microbatches,
        policy=candidate.policy,
        keep=candidate.keep,
        parameters=candidate.parameters,
        zero=candidate.zero,
        scan=candidate.scan,
        overlap=candidate.overlap,
    )


def _concerning_weights(candidate: Candidate) -> Candidate:
    """Return a candidate with only those choices that what is sent of weights depends on."""
    recomputes = candidate.policy != "none" or bool(candidate.keep)
    return _ANY._replace(
        mesh=candidate.mesh,
        dcn=candidate.dcn,
        accumulation=min(candidate.accumulation, 2),
        policy="full" if recomputes else "none",
        zero=candidate.zero,
    )


def _concerning_tables(candidate: Candidate) -> Candidate:
    """Return a candidate with only those choices that its lookup and its loss depend on."""
    return _ANY._replace(
        mesh=candidate.mesh,
        dcn=candidate.dcn,
        accumulation=candidate.accumulation,
        microbatches=candidate.microbatches,
        zero=candidate.zero,
        loss_mib=candidate.loss_mib,
    )


def _concerning_state(candidate: Candidate) -> Candidate:
    """Return a candidate with only those choices that its state and update depend on."""
    return _ANY._replace(
        mesh=candidate.mesh,
        dcn=candidate.dcn,
        accumulation=candidate.accumulation,
        virtual=candidate.virtual,
        optimizer=candidate.optimizer,
        parameters=candidate.parameters,
        zero=candidate.zero,
        moments=candidate.moments,
    )


class _Pass(NamedTuple):
    """The seconds of one pass of a block: of compute, and of what it waits for."""

    compute: float
    exposed: float

    @property
    def total(self) -> float:
        """Both."""
        return self.compute + self.exposed


class _Block(NamedTuple):
    """One block in one microbatch."""

    forward: _Pass
    backward: _Pass
    launched_forward: float
    launched_backward: float
    held: BlockHeld


@lru_cache(maxsize=_REMEMBERED)
def _block(on: _System, candidate: Candidate) -> _Block:
    shapes = on.shapes
    trainer = on.trainer
    passes = trainer.passes(shapes, candidate, on.rates)
    weights = _weights(on, _concerning_weights(candidate))
    sends = trainer.block(shapes, candidate)
    held = block_held(
        shapes, candidate, trainer.layers_gathered, trainer.streams, trainer.block_copies
    )
    stacks = trainer.stack_passes if candidate.scan else (0.0, 0.0)
    kept = held.kept / on.rates.memory
    forward = _pass(
        passes.forward + stacks[0] * kept,
        _shared(sends, "forward", on, candidate),
        weights.forward,
    )
    backward = _pass(
        passes.again + passes.backward + stacks[1] * kept,
        _shared(sends, "backward", on, candidate),
        weights.backward,
    )
    busy = forward.total + backward.total
    if trainer.gaps is None:
        launched = on.rates.launch * passes.kernels
    else:
        launched = trainer.gaps(candidate)
    if trainer.dispatch is not None:
        launched += max(trainer.dispatch(candidate) - busy - launched, 0.0)
    share = forward.total / busy if busy else 0.5
    return _Block(
        forward,
        backward,
        share * launched,
        (1 - share) * launched,
        held,
    )


PIECE_KERNELS = 18
"""The kernels of each piece of the loss."""


class _Tables(NamedTuple):
    """The lookup and the loss of one microbatch, and what stages hand on in a tick."""

    compute: float
    exposed: float
    between: float
    launched: float
    held: float


@lru_cache(maxsize=_REMEMBERED)
def _tables(on: _System, candidate: Candidate) -> _Tables:
    shapes = on.shapes
    trainer = on.trainer
    loss = loss_work(shapes, candidate)
    compute = loss.seconds(on.rates, shapes.dtype_bytes)
    if trainer.loss_slower is not None:
        compute *= trainer.loss_slower(candidate)
    compute += trainer.loss_passes * loss.moved / on.rates.memory
    if trainer.last_stage_scores:
        compute *= candidate.size("stage")
    sends = (*trainer.lookup(shapes, candidate), *trainer.loss(shapes, candidate))
    stages = trainer.stage(shapes, candidate)
    pieces = max(loss.tiling)
    launched = 0.0 if trainer.gaps else on.rates.launch * PIECE_KERNELS * pieces
    launched += max(trainer.table_dispatch - compute, 0.0)
    return _Tables(
        compute,
        _waited(sends, ("forward", "backward"), on, candidate)
        + _waited(stages, ("once",), on, candidate),
        _waited(stages, ("forward", "backward"), on, candidate),
        launched,
        loss.held,
    )


class _Once(NamedTuple):
    """What is done once a step, and its state."""

    added: float
    """Seconds of adding up the gradients of a microbatch."""
    update: float
    exposed: float
    host: float
    state: StateHeld


@lru_cache(maxsize=_REMEMBERED)
def _once(on: _System, candidate: Candidate) -> _Once:
    shapes = on.shapes
    rates = on.rates
    sends = on.trainer.step(shapes, candidate)
    return _Once(
        added=gradient_bytes_added(shapes, candidate) / rates.memory,
        update=update_bytes(shapes, candidate, on.trainer.gradient_passes) / rates.memory,
        exposed=_waited(sends, ("once",), on, candidate),
        host=_state_moved(shapes, candidate) / rates.host,
        state=state_held(shapes, candidate),
    )


def _state_moved(shapes: StepShapes, candidate: Candidate) -> float:
    """Count the bytes of parameters and of the optimizer's state that go to host memory or come
    from there in a step.
    """
    stages = candidate.size("stage")
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


# Collectives.


class _Shared(NamedTuple):
    """The seconds of some collectives: those that compute waits for in any case, and the others."""

    waited: float
    hidden: float


def _shared(sends: tuple[Send, ...], during: str, on: _System, candidate: Candidate) -> _Shared:
    """Add up the seconds of the collectives of a pass."""
    waited = 0.0
    hidden = 0.0
    for one in sends:
        if one.during == during:
            seconds = _seconds(one, on, candidate)
            share = _share(one, on, candidate)
            waited += share * seconds
            hidden += (1 - share) * seconds
    return _Shared(waited, hidden)


def _pass(compute: float, first: _Shared, second: _Shared) -> _Pass:
    """Add to the compute of a pass what it waits for: a share of each collective, and what remains
    of the others when compute is over.
    """
    left = max(first.hidden + second.hidden - compute, 0.0)
    return _Pass(compute, first.waited + second.waited + left)


class _Weights(NamedTuple):
    """The collectives of one block's weights and gradients in one microbatch."""

    forward: _Shared
    backward: _Shared


@lru_cache(maxsize=_REMEMBERED)
def _weights(on: _System, candidate: Candidate) -> _Weights:
    sends = on.trainer.weights(on.shapes, candidate)
    return _Weights(
        _shared(sends, "forward", on, candidate), _shared(sends, "backward", on, candidate)
    )


def _waited(
    sends: tuple[Send, ...], during: tuple[str, ...], on: _System, candidate: Candidate
) -> float:
    """Add up what compute waits for of some collectives."""
    return sum(
        _share(one, on, candidate) * _seconds(one, on, candidate)
        for one in sends
        if one.during in during
    )


def _share(one: Send, on: _System, candidate: Candidate) -> float:
    """Return the share of a collective that compute waits for."""
    across = spans_nodes(one.axes, candidate.mesh, candidate.dcn, on.target)
    return on.trainer.share(one, across)


def _seconds(one: Send, on: _System, candidate: Candidate) -> float:
    """Return the seconds of a collective, all its times together."""
    known = _slopes(on, one.kind, one.axes, candidate.mesh, candidate.dcn)
    return one.times * seconds_of(known, one.bytes)


@lru_cache(maxsize=_REMEMBERED)
def _slopes(
    on: _System, kind: CollectiveKind, axes: tuple[MeshAxis, ...], mesh: Sizes, dcn: Sizes
) -> tuple[Slope, ...]:
    return slopes(kind, axes, mesh, dcn, on.target)
