"""The ticks of a pipeline's schedule, and the inputs that a stage keeps meanwhile."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from jaxpar.base.layout.plan import Pipeline
from jaxpar.parallel.pipeline.layers import layers_of
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.shapes import StepShapes


class Ticks(NamedTuple):
    """The ticks of one pass through a pipeline.

    Attributes:
      forward: the ticks in which stages run forwards; 1 without stages.
      backward: those in which they run backwards.
      stash: the microbatches' inputs that a stage keeps at a time.
    """

    forward: int
    backward: int
    stash: int


ONE_STAGE = Ticks(1, 1, 1)


def ticks_of(candidate: Candidate) -> Ticks:
    """Count the ticks of a candidate's schedule.

    Raises:
      UserError: there is no such schedule, or it cannot have these sizes.
    """
    stages = candidate.size("stage")
    if stages == 1:
        return ONE_STAGE
    return _ticks(candidate.schedule, stages, candidate.microbatches, candidate.virtual)


@lru_cache(maxsize=4096)
def _ticks(name: str, stages: int, microbatches: int, virtual: int) -> Ticks:
    """Count the ticks of a schedule.

    A table of many microbatches takes seconds to make, and every further group of as many
    microbatches as stages adds the same ticks: so the count goes on as it does between two tables.
    """
    known = 6 * stages
    if microbatches <= known:
        return _count(name, stages, microbatches, virtual)
    groups, rest = divmod(microbatches - known, stages)
    small = known - (stages - rest if rest else 0)
    groups += 1 if rest else 0
    before = _count(name, stages, small - stages, virtual)
    after = _count(name, stages, small, virtual)
    return Ticks(
        *(later + groups * (later - earlier) for earlier, later in zip(before, after, strict=True))
    )


@lru_cache(maxsize=4096)
def _count(name: str, stages: int, microbatches: int, virtual: int) -> Ticks:
    table = schedule(name, stages, microbatches, virtual)
    kinds = [{action.kind for action in tick if action is not None} for tick in table.ticks]
    return Ticks(
        sum("forward" in kind for kind in kinds),
        sum("backward" in kind for kind in kinds),
        program(table).stash,
    )


def layers_a_tick(shapes: StepShapes, candidate: Candidate) -> int:
    """Count the layers that a device runs in a tick; without stages all layers.

    Raises:
      UserError: the stages cannot have the layers.
    """
    stages = candidate.size("stage")
    if stages == 1:
        return shapes.layers
    return _places(shapes.layers, stages, candidate.virtual)


@lru_cache(maxsize=4096)
def _places(layers: int, stages: int, virtual: int) -> int:
    return layers_of(layers, stages, Pipeline(virtual=virtual)).places
