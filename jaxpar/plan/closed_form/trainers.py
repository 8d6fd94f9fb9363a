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
    gaps: Callable[[Candidate], float] | None = None
    dispatch: Callable[[Candidate], float] | None = None
    table_dispatch: float = 0.0
    last_stage_scores: bool = False
    loss_passes: float = 1.0
    loss_slower: Callable[[Candidate], float] | None = None
    tile: float = 0.0

    def share(self, one: Send) -> float:
        """Return the share of a collective that compute waits for."""
        return self.exposed.get((one.what, one.kind), 1.0)


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
            ("gradients", "reduce-scatter"): 0.3,
            ("gradients", "all-reduce"): 0.3,
            ("keys", "ppermute"): 0.2,
            ("stages", "ppermute"): 0.3,
        }
    ),
}
TRAINERS["cpu"] = Trainer()
