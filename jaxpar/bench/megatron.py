"""How Megatron-DeepSpeed of 2022 trains, for the closed forms: what it sends and computes where this
library does otherwise.

It runs eagerly, with attention in matmuls and elementwise kernels, computes each layer whole again,
waits for every collective, and sums gradients once a step. Its activations are whole on every device
of a tensor-parallel group (Shoeybi et al. 2019, arXiv:1909.08053; Narayanan et al. 2021,
arXiv:2104.04473).
"""

from __future__ import annotations

from functools import lru_cache

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import StepShapes, Trainer
from jaxpar.plan.closed_form.rates import Rates
from jaxpar.plan.closed_form.sends import Send, local_tokens, looked_up
from jaxpar.plan.closed_form.split import split_of, weights_of
from jaxpar.plan.closed_form.work import Matmul, Passes, block_matmuls

_KERNELS = 110
"""The kernels of a layer: of its forward, twice, and of its backward."""
_DISPATCH = 3.1e-5
"""The seconds in which PyTorch launches one."""
_SCORE_BYTES = (13.0, 20.0)
"""The bytes of passes over a score, forward and backward: the scores are scaled, masked and
normalized, and some dropped out, in 16 bits, each in a kernel that reads and writes them."""
_STREAM_BYTES = (22.0, 34.0)
"""The bytes of passes over an entry of the stream: two norms, and two sums with a bias and
dropout."""
_WIDTH = 2


def _stream(shapes: StepShapes, candidate: Candidate) -> float:
    """Return the bytes of the residual stream of one microbatch."""
    split = split_of(shapes, candidate.sizes, candidate.zero)
    return local_tokens(shapes, candidate, split).tokens * shapes.embed * _WIDTH


@lru_cache(maxsize=4096)
def _block(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List the sums of a layer over its tensor-parallel group: two forward, two when it is computed
    again, two backward.
    """
    if candidate.size("tensor") == 1:
        return ()
    size = _stream(shapes, candidate)
    return (
        Send("stream", "forward", "all-reduce", ("tensor",), size, 2.0),
        Send("stream", "backward", "all-reduce", ("tensor",), size, 4.0),
    )


def _lookup(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    if candidate.size("tensor") == 1:
        return ()
    size = _stream(shapes, candidate)
    return (Send("stream", "forward", "all-reduce", ("tensor",), size),)


def _loss(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    if candidate.size("tensor") == 1:
        return ()
    size = _stream(shapes, candidate)
    return (Send("stream", "backward", "all-reduce", ("tensor",), size),)


@lru_cache(maxsize=4096)
def _step(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what is sent once a step: gradients, and those of the tied table between the first and
    the last stage.
    """
    stages = candidate.size("stage")
    entries = 0.0
    table = 0.0
    weights = weights_of(shapes, candidate.sizes, candidate.zero)
    for weight in weights:
        layers = weight.parameter.layers / stages if weight.parameter.layers else 1.0
        entries += layers * weight.state
    for weight in looked_up(weights):
        table += weight.state
    found: list[Send] = []
    if candidate.size("data") > 1:
        found.append(Send("gradients", "once", "all-reduce", ("data",), _WIDTH * entries))
    if stages > 1:
        found.append(Send("gradients", "once", "ppermute", ("stage",), 2 * _WIDTH * table))
    return tuple(found)


def _stage(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what stages hand on: whole activations, and their gradients."""
    if candidate.size("stage") == 1:
        return ()
    size = _stream(shapes, candidate)
    return (
        Send("stages", "forward", "ppermute", ("stage",), size),
        Send("stages", "backward", "ppermute", ("stage",), size),
    )


@lru_cache(maxsize=4096)
def _passes(shapes: StepShapes, candidate: Candidate, rates: Rates) -> Passes:
    """Price a layer: q, k and v are one matmul, and attention is two of all keys, a matrix for each
    head.
    """
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    heads = shapes.heads / split.size("heads")
    matmuls = {one.name: one for one in block_matmuls(shapes, candidate)}
    of_heads = [matmuls.pop(name) for name in ("q", "k", "v")]
    columns = sum(one.columns for one in of_heads)
    matmuls["qkv"] = of_heads[0]._replace(columns=columns)
    S = shapes.seq_len
    pairs = local.rows * heads
    matmuls["scores"] = Matmul("scores", pairs * S, shapes.head_dim, S, groups=pairs)
    matmuls["mixed"] = Matmul("mixed", pairs * S, S, shapes.head_dim, groups=pairs)
    arithmetic = sum(_seconds(one, rates) for one in matmuls.values())
    scores = pairs * S * S
    stream = local.tokens * shapes.embed
    hidden = local.tokens * matmuls["up"].columns
    moved = [
        (of_score * scores + of_stream * stream + of_hidden * hidden) / rates.memory
        for of_score, of_stream, of_hidden in zip(
            _SCORE_BYTES, _STREAM_BYTES, (4.0, 8.0), strict=True
        )
    ]
    forward = arithmetic + moved[0]
    return Passes(forward, forward, 2 * arithmetic + moved[1], _KERNELS)


def _seconds(one: Matmul, rates: Rates) -> float:
    """Return the seconds of a matmul; one of many matrices fills the device with all of them."""
    if one.groups == 1:
        return one.seconds(rates, _WIDTH)
    moved = one.rows * (one.inner + one.columns) + one.groups * one.inner * one.columns
    tile = rates.tile
    full = one.inner / (one.inner + tile) * one.columns / (one.columns + tile)
    return max(one.flops / (rates.matmul * full), _WIDTH * moved / rates.memory)


MEGATRON = Trainer(
    weights=lambda shapes, candidate: (),
    block=_block,
    lookup=_lookup,
    loss=_loss,
    step=_step,
    stage=_stage,
    dispatch=_DISPATCH,
    last_stage_scores=True,
    passes=_passes,
)
