"""How Megatron-DeepSpeed of 2022 trains, for the closed forms: what it sends and computes where
this library does otherwise.

It runs eagerly, with attention in matmuls and elementwise kernels, computes each layer whole again,
waits for every collective, and sums gradients once a step. Its activations are whole on every
device of a tensor-parallel group (Shoeybi et al. 2019, arXiv:1909.08053; Narayanan et al. 2021,
arXiv:2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import StepShapes, Trainer
from jaxpar.plan.closed_form.rates import Rates
from jaxpar.plan.closed_form.sends import Send, local_tokens, looked_up
from jaxpar.plan.closed_form.split import split_of, weights_of
from jaxpar.plan.closed_form.work import Matmul, Passes, block_matmuls
from jaxpar.rehearse.targets import Target, load_target

_SCORE_BYTES = (11.5, 17.7)
"""The bytes of passes over a score, forward and backward: scores are written, scaled, masked and
normalized in one kernel, some dropped out in another, and read, in 16 bits."""
_STREAM_BYTES = (13.0, 20.0)
"""The bytes of passes over an entry of the stream: two norms, and two sums with a bias and
dropout."""
_HIDDEN_BYTES = (2.5, 5.0)
"""The bytes of passes over an entry of the MLP's hidden rows."""
_WIDTH = 2


@dataclass(frozen=True)
class Figures:
    """What of this trainer and its cluster is in no data sheet.

    Attributes:
      layer_dispatch: the seconds in which PyTorch launches the kernels of a layer.
      sums_dispatch: those that the sums of a layer over a tensor-parallel group add.
      socket_dispatch: those that they add where the group is on both sockets of its machine.
      table_dispatch: the seconds in which it launches the lookup and the loss.
      gaps: the seconds of a layer between kernels.
      sums_gaps: those that its sums add.
      odd_vocabulary: how much slower the loss's matmuls are on one device, whose vocabulary of
        50,257 no tile divides; over a group it is padded.
      loss_passes: the passes over scores to each of this library's.
      matmul: the share of the peak that large matmuls reach.
      memory: the share of the memory's bandwidth that elementwise kernels reach.
      tile: the rows and columns at which a matmul reaches half of its speed.
      links: the share of NVLink's bandwidth that sums reach.
      network: the share of a NIC a GPU that messages and sums over nodes reach.
    """

    layer_dispatch: float = 3.06e-3
    sums_dispatch: float = 0.20e-3
    socket_dispatch: float = 1.09e-3
    table_dispatch: float = 3.25e-3
    gaps: float = 0.55e-3
    sums_gaps: float = 0.86e-3
    odd_vocabulary: float = 2.24
    loss_passes: float = 1.156
    matmul: float = 0.869
    memory: float = 0.85
    tile: float = 20.0
    links: float = 0.8
    network: float = 0.5


FITTED = Figures()
"""The figures as they were fitted, by the least squared logarithm of predicted over measured, on
half of the groups (`ranking.is_fitted`): dispatches, gaps and the odd vocabulary, and the passes
over scores. `matmul` is the best share that is published of an A100
(github.com/stas00/ml-engineering); the others were set by hand and not fitted."""


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
            _SCORE_BYTES, _STREAM_BYTES, _HIDDEN_BYTES, strict=True
        )
    ]
    forward = arithmetic + moved[0]
    return Passes(forward, forward, 2 * arithmetic + moved[1], 0.0)


def _seconds(one: Matmul, rates: Rates) -> float:
    """Return the seconds of a matmul; one of many matrices fills the device with all of them."""
    if one.groups == 1:
        return one.seconds(rates, _WIDTH)
    moved = one.rows * (one.inner + one.columns) + one.groups * one.inner * one.columns
    tile = rates.tile
    full = one.inner / (one.inner + tile) * one.columns / (one.columns + tile)
    return max(one.flops / (rates.matmul * full), _WIDTH * moved / rates.memory)


_GPUS_A_SOCKET = 4


def megatron(figures: Figures) -> Trainer:
    """Describe Megatron-DeepSpeed with these figures."""

    def dispatch(candidate: Candidate) -> float:
        group = candidate.size("tensor")
        seconds = figures.layer_dispatch
        if group > 1:
            seconds += figures.sums_dispatch
        if group > _GPUS_A_SOCKET:
            seconds += figures.socket_dispatch
        return seconds

    def gaps(candidate: Candidate) -> float:
        if candidate.size("tensor") == 1:
            return figures.gaps
        return figures.gaps + figures.sums_gaps

    def loss_slower(candidate: Candidate) -> float:
        return figures.odd_vocabulary if candidate.size("tensor") == 1 else 1.0

    return Trainer(
        weights=_nothing,
        block=_block,
        lookup=_lookup,
        loss=_loss,
        step=_step,
        stage=_stage,
        passes=_passes,
        gaps=gaps,
        dispatch=dispatch,
        table_dispatch=figures.table_dispatch,
        last_stage_scores=True,
        gradient_passes=2.0,
        loss_passes=figures.loss_passes,
        loss_slower=loss_slower,
        tile=figures.tile,
    )


def cluster(chips: int, figures: Figures) -> Target:
    """Make a cluster of A100s with these figures."""
    target = load_target(f"a100x{chips}")
    hardware = target.hardware
    prices = replace(hardware.prices, matmul=figures.matmul, memory=figures.memory)
    ici = replace(hardware.ici, link_bandwidth=figures.links * hardware.ici.link_bandwidth)
    network = hardware.dcn_bandwidth * figures.network
    return replace(
        target,
        hardware=replace(
            hardware, prices=prices, ici=ici, dcn_bandwidth=network, launch_overhead=0.0
        ),
    )


def _nothing(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    return ()
