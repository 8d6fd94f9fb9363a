"""The bytes of one device in a step under a candidate, by shape alone."""

from __future__ import annotations

import math

from jaxpar.base.layout.activation_names import Keep, actions
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.parts import Bytes
from jaxpar.plan.closed_form.sends import local_tokens
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.split import Weight, split_of, weights_of
from jaxpar.plan.closed_form.ticks import layers_a_tick, ticks_of
from jaxpar.plan.closed_form.work import loss_work, named_bytes


def bytes_of(shapes: StepShapes, candidate: Candidate) -> Bytes:
    """Predict the bytes of one device by what they are for.

    What a block works with, the loss and the update do not exist at once, so that the largest
    counts.
    """
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
    activations, offloaded = kept_bytes(shapes, candidate)
    working = max(
        block_working_bytes(shapes, candidate), loss_work(shapes, candidate).held, gathered
    )
    return Bytes(
        parameters=parameters,
        gradients=_gradients(own, sums, candidate),
        optimizer=state,
        activations=activations,
        working=working,
        host=offloaded,
    )


def _gradients(own: float, sums: float, candidate: Candidate) -> float:
    """Return the bytes of gradients: those of a microbatch, and their sums over microbatches."""
    stages = candidate.size("stage")
    if stages > 1:
        return sums
    if candidate.accumulation > 1:
        return sums + own
    return own


def kept_bytes(shapes: StepShapes, candidate: Candidate) -> tuple[float, float]:
    """Count the bytes of activations that a device keeps between forward and backward, and those
    that it keeps in host memory.
    """
    keep = Keep(**dict(candidate.keep))  # pyright: ignore[reportArgumentType]
    found = actions(candidate.policy, keep)
    blocks = blocks_kept(shapes, candidate)
    sizes = named_bytes(shapes, candidate)
    device = sum(blocks * size for name, size in sizes.items() if found[name] == "save")
    host = sum(blocks * size for name, size in sizes.items() if found[name] == "offload")
    if set(found.values()) == {"save"} and candidate.parameters != "offload":
        stages = candidate.size("stage")
        parts = candidate.accumulation * max(candidate.microbatches, 1)
        tokens = shapes.tokens / parts
        device += blocks * shapes.unnamed * tokens * stages / candidate.devices
    return device, host


def blocks_kept(shapes: StepShapes, candidate: Candidate) -> int:
    """Count the blocks whose activations a device keeps at a time, each for one microbatch."""
    if candidate.size("stage") == 1:
        return shapes.layers
    stash = ticks_of(candidate).stash
    recomputes = candidate.policy != "none" or bool(candidate.keep)
    if recomputes and shapes.stash_of_stage:
        stash = 1
    return stash * layers_a_tick(shapes, candidate)


def block_working_bytes(shapes: StepShapes, candidate: Candidate) -> float:
    """Guess the bytes that a block's backward works with: a gradient of everything that has a
    name, those named arrays that are not kept, its gathered weights, and the gathered stream.
    """
    keep = Keep(**dict(candidate.keep))  # pyright: ignore[reportArgumentType]
    found = actions(candidate.policy, keep)
    sizes = named_bytes(shapes, candidate)
    named = sum(size * (1 if found[name] == "save" else 2) for name, size in sizes.items())
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    stream = local.tokens * shapes.embed * shapes.dtype_bytes
    weights = weights_of(shapes, candidate.sizes, candidate.zero)
    gathered = sum(one.used * shapes.dtype_bytes for one in weights if one.parameter.layers)
    tables = max((_table_bytes(one, shapes) for one in weights), default=0.0)
    return max(named + 2 * stream + gathered, tables)


def _table_bytes(weight: Weight, shapes: StepShapes) -> float:
    """Count the bytes of a looked-up table that is gathered, with its gradient."""
    parameter = weight.parameter
    if parameter.layers or not weight.gathered_over:
        return 0.0
    return math.prod((weight.used, shapes.dtype_bytes + 4))
