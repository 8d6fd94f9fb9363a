"""How a trainer sends and overlaps: what differs between this library on TPUs and on GPUs, and
another trainer whose steps were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxpar.hlo.program.tasks import CollectiveKind
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.rates import Rates
from jaxpar.plan.closed_form.sends import (
    Send,
    What,
    block_sends,
    lookup_sends,
    loss_sends,
    stage_sends,
    step_sends,
    weight_sends,
)
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.work import Passes, block_passes

SendsOf = Callable[[StepShapes, Candidate], tuple[Send, ...]]
"""A function that lists what is sent."""
Exposed = Mapping[tuple[What, CollectiveKind], float]
"""The share of each kind of collective that compute waits for."""


@dataclass(frozen=True, eq=False)
class Trainer:
    """How a trainer sends and overlaps.

    Attributes:
      weights, block, lookup, loss, step, stage: what it sends in each of these.
      passes: prices a block.
      exposed: the share of each kind of collective that compute waits for; 1 where it is not there.
      exposed_across: that share of collectives that leave a slice or a node; `exposed` where it is
        not there.
      stack_passes: the passes over what a scanned block keeps, forward and backward: to make the
        array of all layers, to write a layer's part into it, and to read it.
      layers_gathered: the layers whose gathered weights are there at a time.
      streams: the arrays of the whole residual stream that a block works with.
      block_copies: what a block's backward holds beside what is counted one by one, as a share of
        all that has a name.
      gradient_passes: the passes over gradients in an update: for their norm, and both ways as they
        are clipped and as they are handed on.
      gaps: the seconds of a block, forward and backward, in which the device is between kernels;
        None = the target's launch of each.
      dispatch: the seconds in which a host launches the kernels of a block one by one, forward and
        backward, and below which a block cannot take less; None = a compiled program launches them.
      table_dispatch: likewise of the lookup and the loss of a microbatch.
      last_stage_scores: whether the last stage has the loss alone.
      loss_passes: the passes over scores to each of this library's.
      loss_slower: the seconds that the loss's matmuls take to each second of others of their size.
      tile: the size of a matmul's dim at which it reaches half of its speed; 0 = the chip's.
    """

    weights: SendsOf = weight_sends
    block: SendsOf = block_sends
    lookup: SendsOf = lookup_sends
    loss: SendsOf = loss_sends
    step: SendsOf = step_sends
    stage: SendsOf = stage_sends
    passes: Callable[[StepShapes, Candidate, Rates], Passes] = block_passes
    exposed: Exposed = field(default_factory=dict[tuple[What, CollectiveKind], float])
    exposed_across: Exposed = field(default_factory=dict[tuple[What, CollectiveKind], float])
    stack_passes: tuple[float, float] = (0.0, 0.0)
    layers_gathered: float = 1.0
    streams: float = 2.0
    block_copies: float = 0.0
    gradient_passes: float = 5.0
    gaps: Callable[[Candidate], float] | None = None
    dispatch: Callable[[Candidate], float] | None = None
    table_dispatch: float = 0.0
    last_stage_scores: bool = False
    loss_passes: float = 1.0
    loss_slower: Callable[[Candidate], float] | None = None
    tile: float = 0.0

    def share(self, one: Send, across: bool) -> float:
        """Return the share of a collective that compute waits for.

        Args:
          across: whether it leaves a slice or a node.
        """
        key = (one.what, one.kind)
        inside = self.exposed.get(key, 1.0)
        return self.exposed_across.get(key, inside) if across else inside


TRAINERS = {
    "tpu": Trainer(
        exposed={
            ("weights", "all-gather"): 0.1,
            ("gradients", "all-reduce"): 0.5,
            ("stream", "all-gather"): 0.5,
            ("keys", "ppermute"): 0.1,
            ("stages", "ppermute"): 0.3,
        }
    ),
    "cuda": Trainer(
        exposed={
            ("weights", "all-gather"): 0.2,
            ("gradients", "reduce-scatter"): 0.2,
            ("gradients", "all-reduce"): 0.2,
            ("keys", "ppermute"): 0.2,
            ("stages", "ppermute"): 0.3,
        },
        exposed_across={
            ("weights", "all-gather"): 0.6,
            ("gradients", "reduce-scatter"): 0.6,
            ("gradients", "all-reduce"): 0.6,
        },
        stack_passes=(3.0, 0.5),
        layers_gathered=4.0,
        streams=4.0,
        block_copies=0.25,
    ),
    "cpu": Trainer(),
}
"""How this library trains on each platform. The shares of TPUs are those that rehearsals of LLaMA-3
8B on v5p show (docs/benchmarks_log.md): gathers of weights run beside compute, scatters alone.
Those of GPUs are the means of the published steps on H100s whose programs the library has
(`jaxpar.bench.foresight`): in a node a collective beside compute costs what it slows that by, and
over the network more than half of it is waited for. The passes over what is kept are those of the
rehearsed plans of docs/plan_board.md: the array of all layers is zeroed, a layer's part read and
written, and half of what is read again is copied first; TPU programs write a layer's part where it
was made. A GPU's loop has two sets of buffers and its gathers in other turns, so that weights of
four layers and twice the stream are there, and elementwise functions leave copies in float32: these
three were fitted to the bytes of 50 of these plans. No collective of a CPU runs beside compute.
"""
