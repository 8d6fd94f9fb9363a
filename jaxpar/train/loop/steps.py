"""The steps of a call of `run`, and what is due after each: a row of metrics, a judgement, a save,
an evaluation. What is good is saved before an error leaves.
"""

from __future__ import annotations

from contextlib import suppress

import jax
import numpy as np

from jaxpar.base.process.multihost import raised_together
from jaxpar.base.process.preemption import Stop
from jaxpar.train.evaluations import is_due
from jaxpar.train.guard.failures import CopiesDiffer, Diverged
from jaxpar.train.guard.judge import BadStep
from jaxpar.train.loop.bad_steps import go_back
from jaxpar.train.loop.run_step import Metrics
from jaxpar.train.loop.timing import save_watchdog
from jaxpar.train.loop.tools import Tools
from jaxpar.train.run_data import keep_data
from jaxpar.train.runs.checkpoints import warn


def run_steps(tools: Tools, missed: set[str], asked: Stop) -> int:
    """Run the steps that are left. All processes must call this. What is good is saved before an
    error leaves, where all processes leave by it.

    Args:
      tools: what they work with.
      missed: the evaluations of the step before the first that are to be made up for.
      asked: says when to stop.

    Returns:
      The last step that finished.

    Raises:
      Diverged: a step was bad, and the policy is to stop.
      CopiesDiffer: a device fails.
      UserError: the data cannot be read, or a file cannot be written.
    """
    parts = tools.parts
    evaluations = parts.evaluations
    try:
        evaluations.make_up(missed, tools.runner.evaluation_params, parts.log, parts.beside)
        if evaluations.cut_short:
            return parts.run.after
        return _steps_and_back(tools, asked)
    except Exception as error:
        if raised_together(error) and not isinstance(error, Diverged | CopiesDiffer):
            _save_good(tools, error)
        broken = tools.batches.broken
        if broken and jax.process_index() == 0:
            keep_data(parts.run.folder, parts.run.compared.pieces, broken)
        raise


def _steps_and_back(tools: Tools, asked: Stop) -> int:
    """Run the steps, from an earlier one again where the guard says so."""
    after = tools.parts.run.after
    with tools.timing.steps():
        while True:
            try:
                return _steps(tools, after, asked)
            except BadStep as found:
                bad = found
            after = go_back(tools, bad)


def _steps(tools: Tools, after: int, asked: Stop) -> int:
    """Run the steps that come after step `after`; return the last one."""
    run = tools.parts.run
    evaluations = tools.parts.evaluations
    every = run.experiment.config.checkpoint.every
    step = after
    metrics: Metrics = {}
    for step in range(after + 1, run.last + 1):
        before = metrics
        metrics = tools.runner.begin(step, before)
        tools.judge.begin(step, metrics)
        # The host stays one step ahead: it awaits the step before, and fetches its metrics, while
        # this one runs.
        _complete(tools, step - 1, before)
        stop = asked.reached() or step == run.last
        if tools.copies.is_due(step):
            with tools.timing.apart("guard", after=metrics):
                _require_alike(tools, step)
        saving = stop or is_due(step, every)
        saving_here = not saving and tools.saves.is_local(step)
        evaluating = evaluations.is_due(step)
        if saving or saving_here or evaluating:
            _require_all_good(tools, step, metrics, logging=stop)
        if saving or saving_here:
            _save(tools, step, local=saving_here)
        if evaluating:
            _evaluate(tools, step)
        if evaluations.cut_short and not saving:
            _save(tools, step)
        if stop or evaluations.cut_short:
            break
    if evaluations.is_final(step) and not evaluations.cut_short:
        _evaluate(tools, step, final=True)
    return step


def _complete(tools: Tools, step: int, metrics: Metrics) -> None:
    """Wait for a step while the next one runs, and do what is due after each."""
    run = tools.parts.run
    jax.block_until_ready(metrics)
    if metrics:
        tools.parts.account.step_ended(step)
    tools.timing.watchdog.beat()
    if is_due(step, run.experiment.config.metrics.log_every) and step > tools.rows.last:
        _log(tools, step, metrics)
    if tools.judge.guard.reads_each_step:
        _require_good(tools, step)
    if jax.process_count() == 1:
        run.require_lock()


def _require_all_good(tools: Tools, step: int, metrics: Metrics, logging: bool) -> None:
    """Wait for a step that nothing runs beside, and require that all until it were good, before it
    is saved or evaluated. It has a row where one is due, or with `logging`.
    """
    jax.block_until_ready(metrics)  # a step that is still running counts as training time
    tools.parts.account.step_ended(step)
    tools.batches.require()
    if logging or is_due(step, tools.parts.run.experiment.config.metrics.log_every):
        _log(tools, step, metrics)
    _require_good(tools, step)


def _log(tools: Tools, step: int, metrics: Metrics) -> None:
    """Fetch a step's metrics, print and write them, and judge the steps until it."""
    numbers = {key: float(value) for key, value in jax.device_get(metrics).items()}
    if not np.isfinite(numbers["loss"]):
        tools.batches.require()  # which is why, where a process had no rows
    tools.rows.write(step, numbers, tools.judge.guard.bad_steps)
    _require_good(tools, step)


def _require_good(tools: Tools, last: int) -> None:
    """Judge the steps up to `last`, which have run (see `Judge.require_good`)."""
    for skipped in tools.judge.require_good(last):
        tools.parts.account.skip(skipped)
    tools.batches.forget_before(last)


def _require_alike(tools: Tools, step: int) -> None:
    """Stop if devices hold other copies of the state than their peers, which is then not saved."""
    if not tools.copies.compares:
        return
    with tools.parts.account.clock.during("guard"):
        tools.copies.require_alike(tools.runner.state, step, tools.parts.run.newest)


def _save(tools: Tools, step: int, local: bool = False) -> None:
    """Save a step, unless devices hold other copies of it."""
    with tools.timing.apart("saving"):
        _require_alike(tools, step)
        place = tools.batches.place_after(step)
        tools.parts.log.sync()
        tools.saves.save(step, tools.runner.state, place, tools.judge.guard, local)


def _save_good(tools: Tools, ended_by: Exception) -> None:
    """Save what was trained until now, and say so, unless the last step failed or diverged."""
    run = tools.parts.run
    say = tools.parts.show.say
    if isinstance(ended_by, OSError):  # the reader of the output has gone, or its disk is full
        say = say_elsewhere
    state = tools.runner.state
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return  # the step that failed had taken the state
    try:
        step = int(jax.device_get(state.step))
        place = tools.batches.place_after(step)
        if step == run.after or place is None or not tools.judge.finite_until(step):
            return
        with tools.parts.account.clock.during("saving"), save_watchdog(run):
            tools.saves.save(step, state, place, tools.judge.guard)
            run.checkpoints.wait()
    except Exception as error:  # the first error is the one to tell
        if str(error) != str(ended_by):
            say(f"warning: the steps since the last checkpoint are lost: {error}")
        return
    what = "an error"
    if isinstance(ended_by, BrokenPipeError):
        what = "the end of what reads its output"
    say(
        f"{what} ends this run after step {step}, which is saved: the same command goes on from "
        "there"
    )


def say_elsewhere(line: str) -> None:
    """Say a line on standard error, where standard output takes none, or nowhere."""
    with suppress(OSError):
        warn(line)


def _evaluate(tools: Tools, step: int, final: bool = False) -> None:
    """Evaluate a step, unless the run is told to stop before the end of it; the loss of any but the
    last evaluation is that of the step's checkpoint.
    """
    parts = tools.parts
    with tools.timing.apart("evaluation"):
        with tools.batches.reading():
            params = tools.runner.evaluation_params()
            batch_done = tools.timing.watchdog.batch_done
            loss = parts.evaluations.evaluate(step, params, parts.log, final, batch_done)
        if loss is not None and not final:
            parts.run.checkpoints.record(step, loss)
