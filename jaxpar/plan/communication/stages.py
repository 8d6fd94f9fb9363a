"""The rows of a pipeline, and how often its stages run what they have: see `jaxpar.parallel.pipeline.executor`.

All stages run all ticks, those in which they are idle too, and in each as many layers as the largest virtual stage has:
what is sent for a layer is sent in the bubble as well.

Embedding and loss run in the rounds in which some stage is at the first, or the last, virtual stage. Where these are at
most half of a loop's rounds they stand in a branch, and the rows (as `jaxpar.rehearse.requested_collectives` and a
rehearsal do) count the branch in every round of that loop. So what is sent for the ends is an upper bound with several
virtual stages, and with fewer microbatches than about twice the stages. The compiler may send less of it too: XLA:TPU
sums the gradients of the ends over the data's axes once, after the last tick.

Of a backward in two ticks an op that makes gradients of its input and of its weights stands in both, and gathers what
both need twice: the gradient of a row linear's output, the router, the number of rows for each expert; of a block that
is recomputed the input of a column linear too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxpar.base.config import Config
from jaxpar.base.plan import Plan, Schedule
from jaxpar.base.sharding import state_axes
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.plan.communication.moves import FLOAT32, Array, Move, PartRun, Runs, Site, rows_of


class Turns(NamedTuple):
    """How often a step runs what on one device.

    Attributes:
      layers: of all layers that it has.
      embedding, loss: of the ends.
      looked_up: how often the loss finds a table gathered by the lookup, if they share one.
      parts: of an accumulated batch.
      microbatches: of each in a pipeline.
      activations, cotangents: how often a pipeline sends them on.
    """

    layers: Runs
    embedding: Runs
    loss: Runs
    looked_up: int
    parts: int
    microbatches: int = 1
    activations: int = 0
    cotangents: int = 0


class Ticks(NamedTuple):
    """How many rounds of a pipeline have a tick of a kind, and run the ends of the model.

    Attributes:
      forward, backward, weight: `backward` with the weights' gradients, or followed by a `weight` tick.
      embeds, embedded: the embedding's forward, and its gradient.
      scores: the loss.
      both: embedding and loss, neither in a branch.
    """

    forward: int
    backward: int
    weight: int
    embeds: int
    embedded: int
    scores: int
    both: int


def turns(config: Config, plan: Plan) -> Turns:
    """How often a step of this config runs what: once a layer and microbatch without stages, else once a tick."""
    parts, layers = config.train.accumulation, layers_in(plan, config.model.layers)
    if layers is None:
        ends = Runs(parts, parts)
        return Turns(ends.times(config.model.layers), ends, ends, parts, parts)
    pipeline = plan.pipeline
    ticks = ticks_of(pipeline.schedule, plan.size("stage"), pipeline.microbatches, pipeline.virtual)
    again, places = 0, layers.places
    if plan.recomputes and pipeline.stash == "stage":
        # Of layers one after another the last is not run again: what goes into it is all that is asked for.
        again = ticks.backward * parts * (places if config.model.scan_layers else places - 1)
    runs = Runs(ticks.forward, ticks.backward, 0, ticks.weight or None).times(parts * places)
    return Turns(
        layers=runs._replace(again=again),
        embedding=Runs(ticks.embeds, ticks.embedded).times(parts),
        loss=Runs(ticks.scores, ticks.scores).times(parts),
        looked_up=ticks.both * parts,
        parts=parts,
        microbatches=pipeline.microbatches,
        activations=ticks.forward * parts,
        cotangents=ticks.backward * parts,
    )


@lru_cache(maxsize=1000)
def ticks_of(name: Schedule, stages: int, microbatches: int, virtual: int) -> Ticks:
    """The ticks of a schedule, as the executor runs them; arguments as for `pipeline.schedule`."""
    found = np.zeros(7, int)
    for rounds, ticks in program(schedule(name, stages, microbatches, virtual)).segments:
        ahead, back = ticks.get("forward"), ticks.get("backward") or ticks.get("input")
        first, last = (0.0, 0.0) if ahead is None else (ahead.some_end.mean(), ahead.some_score.mean())
        passed = 0.0 if back is None else back.some_end.mean()
        runs = ahead is not None, back is not None, "weight" in ticks
        found += rounds * np.array([*runs, first > 0, passed > 0, last > 0, min(first, last) > 0.5])
    return Ticks(*map(int, found))


def with_a_stage(stream: tuple[int, int, int], plan: Plan) -> tuple[int, int, int]:
    """Shape of the part of the residual stream that a stage makes the loss of: equally many of every device's tokens,
    those that are filled in counted; all of it without stages."""
    (rows, seq_len, embed), pieces = stream, plan.size("residual_seq")
    return rows, pieces * -(-seq_len // pieces // plan.size("stage")), embed


def stage_rows(ends: Iterable[Array], routed: bool, often: Turns, step: PartRun) -> Iterator[Site]:
    """What stages send each other; none for a plan without.

    Args:
      ends: parameters of embedding and head.
      routed: the model has experts.
      often: from `turns`.
      step: of the layers.
    """
    plan, axes, shared = step.plan, step.plan.mesh_axes("stage"), with_a_stage(step.stream, step.plan)
    if not axes:
        return
    sent = [Move("ppermute", axes, Array(step.stream, STORED).entries(plan) * step.width)]
    yield from rows_of(plan, "send", "activations", "forward", sent, often.activations)
    yield from rows_of(plan, "send", "gradients of activations", "backward", sent, often.cotangents)
    size = Array(shared, STORED).entries(plan) * step.width * plan.pieces(axes)
    given, returned = [Move("reduce-scatter", axes, size)], [Move("all-gather", axes, size)]
    yield from rows_of(plan, "share", "last stage's output", "forward", given, often.loss.forward)
    yield from rows_of(plan, "share", "gradient of the last stage's output", "backward", returned, often.loss.backward)
    sums = [Move("all-reduce", axes, (2 + 3 * routed) * FLOAT32)]  # likelihood, tokens; the routers' three
    yield from rows_of(plan, "sum", "sums of the loss", "forward", sums, often.parts)
    entries = sum(Array(array.shape, state_axes(array.axes)).entries(plan) for array in ends)
    whole = [Move("all-reduce", axes, entries * FLOAT32)]
    yield from rows_of(plan, "sum", "gradients of embedding and head", "backward", whole, often.parts)
