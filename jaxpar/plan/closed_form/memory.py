"""The bytes of one device in a step under a candidate, by shape alone."""

from __future__ import annotations

from typing import NamedTuple

from jaxpar.base.layout.activation_names import Keep, actions
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.sends import local_tokens
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.split import Weight, split_of, weights_of
from jaxpar.plan.closed_form.ticks import layers_a_tick, ticks_of
from jaxpar.plan.closed_form.work import named_bytes, ring_entries


class StateHeld(NamedTuple):
    """The bytes of a training state on one device, and what the update works with."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    """New parameters that ZeRO-1 gathers beside the old."""


def state_held(shapes: StepShapes, candidate: Candidate) -> StateHeld:
    """Count the bytes of parameters, gradients and the optimizer's state on a device."""
    layers = layers_a_tick(shapes, candidate) * candidate.virtual
    parameters = 0.0
    own = 0.0
    sums = 0.0
    state = 0.0
    gathered = 0.0
    for weight in weights_of(shapes, candidate.sizes, candidate.zero):
        parameter = weight.parameter
        times = layers if parameter.layers else 1
        if not (parameter.layers and candidate.parameters == "offload"):
            parameters += times * weight.stored * parameter.width
        if not parameter.sums_width:
            continue
        own += times * weight.state * parameter.width
        sums += times * weight.state * parameter.sums_width
        if candidate.optimizer == "device" or not parameter.matrix:
            state += times * weight.state * dict(parameter.state_width)[candidate.moments]
        if weight.state < weight.stored:
            gathered += times * (weight.stored + weight.state) * parameter.width
    if candidate.size("stage") > 1:
        gradients = sums
    elif candidate.accumulation > 1:
        gradients = sums + own
    else:
        gradients = own
    return StateHeld(parameters, gradients, state, gathered)


_RING_SUMS = 16.0
"""The bytes of an entry in a sum over the hops of a ring: itself, what a hop adds, and copies."""


class BlockHeld(NamedTuple):
    """The bytes of one block of one microbatch: kept on the device until its backward, kept in host
    memory, and those that it works with.
    """

    kept: float
    offloaded: float
    working: float


def block_held(
    shapes: StepShapes,
    candidate: Candidate,
    layers_gathered: float = 1.0,
    streams: float = 2.0,
    block_copies: float = 0.0,
) -> BlockHeld:
    """Count the bytes of the activations of one block in one microbatch.

    A block's backward works with a gradient of everything that has a name, those named arrays that
    are not kept, its gathered weights and the gathered stream; a lookup with its gathered table. A
    ring works in float32 with sums over its hops: of its result, and of the gradients of keys and
    values.

    Args:
      layers_gathered, streams, block_copies: what a compiler's programs hold (`trainers.Trainer`).
    """
    keep = Keep(**dict(candidate.keep))  # pyright: ignore[reportArgumentType]
    found = actions(candidate.policy, keep)
    sizes = named_bytes(shapes, candidate)
    kept = sum(size for name, size in sizes.items() if found[name] == "save")
    offloaded = sum(size for name, size in sizes.items() if found[name] == "offload")
    again = sum(size for name, size in sizes.items() if found[name] != "save")
    parts = candidate.accumulation * max(candidate.microbatches, 1)
    if set(found.values()) == {"save"} and candidate.parameters != "offload":
        tokens = shapes.tokens / parts
        kept += shapes.unnamed * tokens * candidate.size("stage") / candidate.devices
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    stream = local.tokens * shapes.embed * shapes.dtype_bytes
    weights = weights_of(shapes, candidate.sizes, candidate.zero)
    gathered = 0.0
    for one in weights:
        if one.parameter.layers:
            layers = layers_gathered if one.gathered_over else 1.0
            gathered += layers * one.used * shapes.dtype_bytes
    tables = max((_table_bytes(one, shapes) for one in weights), default=0.0)
    ring = ring_entries(shapes, candidate)
    sums = _RING_SUMS * (ring.queries + 2 * ring.keys)
    block = (1 + block_copies) * sum(sizes.values()) + again + streams * stream + gathered + sums
    return BlockHeld(kept, offloaded, max(block, tables))


def blocks_kept(shapes: StepShapes, candidate: Candidate) -> int:
    """Count the blocks whose activations a device keeps at a time, each for one microbatch."""
    if candidate.size("stage") == 1:
        return shapes.layers
    stash = ticks_of(candidate).stash
    recomputes = candidate.policy != "none" or bool(candidate.keep)
    if recomputes and shapes.stash_of_stage:
        stash = 1
    return stash * layers_a_tick(shapes, candidate)


def _table_bytes(weight: Weight, shapes: StepShapes) -> float:
    """Count the bytes of a looked-up table that is gathered, with its gradient."""
    if weight.parameter.layers or not weight.gathered_over:
        return 0.0
    return weight.used * (shapes.dtype_bytes + 4)
