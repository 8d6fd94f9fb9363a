"""What the steps of a call work with, one thing for each idea."""

from __future__ import annotations

from typing import NamedTuple

from jax.stages import Compiled

from jaxpar.train.guard import Guard
from jaxpar.train.guard.judge import Judge
from jaxpar.train.guard.replicas import StateCopies
from jaxpar.train.loop.batches import StepBatches
from jaxpar.train.loop.parts import Parts
from jaxpar.train.loop.rows import StepRows
from jaxpar.train.loop.run_step import StepRunner
from jaxpar.train.loop.saves import Saves
from jaxpar.train.loop.timing import Timing
from jaxpar.train.open_run import FirstStep


class Tools(NamedTuple):
    """What the steps of a call work with.

    Attributes:
      parts: what the call has handed down.
      timing: what of its time is that of its steps.
      batches: those of the steps.
      runner: runs a step, and has the state.
      judge: judges the steps that have run.
      copies: compares the copies of the state.
      rows: writes what steps have measured.
      saves: saves a step.
    """

    parts: Parts
    timing: Timing
    batches: StepBatches
    runner: StepRunner
    judge: Judge
    copies: StateCopies
    rows: StepRows
    saves: Saves


def make_tools(parts: Parts, start: FirstStep, program: Compiled) -> Tools:
    """Make what the steps work with. All processes must call this.

    Args:
      parts: what the call hands down.
      start: what the first step begins with.
      program: the compiled step.

    Raises:
      UserError: the state of one of the caller's objects cannot be saved.
    """
    run = parts.run
    say = parts.show.say
    train = run.experiment.config.train
    timing = Timing(run, parts.limit, parts.account)
    batches = StepBatches(run, start.data)
    return Tools(
        parts=parts,
        timing=timing,
        batches=batches,
        runner=StepRunner(parts, program, start.state, batches, timing),
        judge=Judge(Guard(train, start.guard), train, batches.require, say),
        copies=StateCopies(run.experiment, say),
        rows=StepRows(run, parts.log, parts.show, timing.meter, parts.account),
        saves=Saves(run, start, parts.stateful, parts.limit, parts.account, say),
    )
