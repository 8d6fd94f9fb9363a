"""The steps of an open run, one after another, and what is due after each: a row of metrics, a
judgement, a save, an evaluation, and what hooks do.

The host stays one step ahead: it awaits a step, and fetches its metrics, while the next one runs.
What is good is saved before an error leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

import jax
import numpy as np

from jaxpar.base.errors import Say, UserError
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.process.multihost import raised_together
from jaxpar.base.process.preemption import Stop
from jaxpar.models import Params
from jaxpar.train.evaluations import Evaluations, is_due
from jaxpar.train.guard.failures import CopiesDiffer, Diverged, divergence_message
from jaxpar.train.guard.judge import BadStep, Judge
from jaxpar.train.guard.replicas import StateCopies
from jaxpar.train.guard.run_again import look_again
from jaxpar.train.hooks import Hook, HookedRun
from jaxpar.train.loop.batches import StepBatches
from jaxpar.train.loop.rows import StepRows
from jaxpar.train.loop.run_step import Metrics, StepRunner
from jaxpar.train.loop.saves import Saves
from jaxpar.train.loop.timing import Timing, save_watchdog
from jaxpar.train.metrics import MetricsLog
from jaxpar.train.opening import OpenRun, first_step
from jaxpar.train.run_data import keep_data
from jaxpar.train.runs.checkpoints import warn


@dataclass
class Steps:
    """The steps of a call, and what they work with. All processes make one, and call it alike.

    Attributes:
      run: the run folder and what is trained in it.
      hooks: what a program does besides.
      stop: says when to stop.
      timing: what of the time is that of steps.
      evaluations: those of the run.
      log: where rows are written.
      rows: writes what steps have measured.
      batches: those of the steps.
      judge: judges the steps that have run.
      copies: compares the copies of the state.
      runner: runs a step, and has the state.
      saves: saves a step.
      beside: the other thread.
      say: prints a line, on the first process.
    """

    run: OpenRun
    hooks: Sequence[Hook]
    stop: Stop
    timing: Timing
    evaluations: Evaluations
    log: MetricsLog
    rows: StepRows
    batches: StepBatches
    judge: Judge
    copies: StateCopies
    runner: StepRunner
    saves: Saves
    beside: Executor
    say: Say

    def take(self, missed: set[str]) -> int:
        """Run the steps that are left. What is good is saved before an error leaves, where all
        processes leave by it.

        Args:
          missed: the evaluations of the step before the first that are to be made up for.

        Returns:
          The last step that finished.

        Raises:
          Diverged: a step was bad, and the policy is to stop.
          CopiesDiffer: a device fails.
          UserError: the data cannot be read, or a file cannot be written.
        """
        evaluations = self.evaluations
        try:
            evaluations.make_up(missed, self._evaluated_params, self.log, self.beside)
            if evaluations.cut_short:
                return self.run.after
            step = self._steps_and_back()
        except Exception as error:
            if raised_together(error) and not isinstance(error, Diverged | CopiesDiffer):
                self._save_good(error)
            broken = self.batches.broken
            if broken and jax.process_index() == 0:
                keep_data(self.run.folder, self.run.compared.pieces, broken)
            raise
        if where := self.runner.finish():
            self.say(f"wrote {where}: `jaxpar watch {self.run.folder} --profile` shows it")
        return step

    def _steps_and_back(self) -> int:
        """Run the steps, from an earlier one again where the guard says so."""
        after = self.run.after
        with self.timing.steps():
            while True:
                try:
                    return self._steps(after)
                except BadStep as found:
                    bad = found
                after = self._go_back(bad)

    def _steps(self, after: int) -> int:
        """Run the steps that come after step `after`; return the last one."""
        run = self.run
        evaluations = self.evaluations
        every = run.experiment.config.checkpoint.every
        step = after
        metrics: Metrics = {}
        for step in range(after + 1, run.last + 1):
            before = metrics
            metrics = self.runner.begin(step, before)
            if step == run.after + 1 and not self.runner.went_back:
                self._start_beside()
            self.judge.begin(step, metrics)
            self._complete(step - 1, before)
            self._call_hooks(step, metrics)
            stop = self.stop.reached() or step == run.last
            if self.copies.is_due(step):
                with self.timing.apart("guard", after=metrics):
                    self._require_alike(step)
            saving = stop or is_due(step, every)
            saving_here = not saving and self.saves.is_local(step)
            evaluating = evaluations.is_due(step)
            if saving or saving_here or evaluating:
                self._require_all_good(step, metrics, logging=stop)
            if saving or saving_here:
                self._save(step, local=saving_here)
            if evaluating:
                self._evaluate(step)
            if evaluations.cut_short and not saving:
                self._save(step)
            if stop or evaluations.cut_short:
                break
        if evaluations.is_final(step) and not evaluations.cut_short:
            self._evaluate(step, final=True)
        return step

    def _start_beside(self) -> None:
        """Have the other thread do what it does while the first step runs: compile the evaluation,
        and, on the first process, let hooks look at the step.
        """
        self.evaluations.compile_beside(self.beside)
        if jax.process_index() == 0:
            self.runner.show_program(self.hooks)

    def _call_hooks(self, step: int, metrics: Metrics) -> None:
        """Call the hooks that are due after a step, which may still be running.

        What they do is time of the step: its speed, its watchdog and `train.max_time` know of it.
        """
        for hook in self.hooks:
            if is_due(step, hook.every):
                if hook.needs_end:
                    jax.block_until_ready(metrics)
                hook.on_step(step, self.runner.state)

    def _complete(self, step: int, metrics: Metrics) -> None:
        """Wait for a step while the next one runs, and do what is due after each."""
        jax.block_until_ready(metrics)
        if metrics:
            self.timing.account.step_ended(step)
        self.timing.watchdog.beat()
        if is_due(step, self._log_every) and step > self.rows.last:
            self._write_row(step, metrics)
        if self.judge.guard.reads_each_step:
            self._require_good(step)
        if jax.process_count() == 1:
            self.run.require_lock()

    def _require_all_good(self, step: int, metrics: Metrics, logging: bool) -> None:
        """Wait for a step that nothing runs beside, and require that all until it were good, before
        it is saved or evaluated. It has a row where one is due, or with `logging`.
        """
        jax.block_until_ready(metrics)  # a step that is still running counts as training time
        self.timing.account.step_ended(step)
        self.batches.require()
        if logging or is_due(step, self._log_every):
            self._write_row(step, metrics)
        self._require_good(step)

    @property
    def _log_every(self) -> int:
        return self.run.experiment.config.metrics.log_every

    def _write_row(self, step: int, metrics: Metrics) -> None:
        """Fetch a step's metrics, print and write them, and judge the steps until it."""
        numbers = {key: float(value) for key, value in jax.device_get(metrics).items()}
        if not np.isfinite(numbers["loss"]):
            self.batches.require()  # which is why, where a process had no rows
        self.rows.write(step, numbers, self.judge.guard.bad_steps)
        self._require_good(step)

    def _require_good(self, last: int) -> None:
        """Judge the steps up to `last`, which have run (see `Judge.require_good`)."""
        for skipped in self.judge.require_good(last):
            self.timing.account.skip(skipped)
        self.batches.forget_before(last)

    def _require_alike(self, step: int) -> None:
        """Stop if devices hold other copies of the state than their peers, which is then not
        saved.
        """
        if not self.copies.compares:
            return
        with self.timing.account.clock.during("guard"):
            self.copies.require_alike(self.runner.state, step, self.run.newest)

    def _save(self, step: int, local: bool = False) -> None:
        """Save a step, unless devices hold other copies of it."""
        with self.timing.apart("saving"):
            self._require_alike(step)
            place = self.batches.place_after(step)
            self.log.sync()
            self.saves.save(step, self.runner.state, place, self.judge.guard, local)

    def _save_good(self, ended_by: Exception) -> None:
        """Save what was trained until now, and say so, unless the last step failed or diverged."""
        run = self.run
        say = self.say
        if isinstance(ended_by, OSError):  # the reader of the output has gone, or its disk is full
            say = say_elsewhere
        state = self.runner.state
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return  # the step that failed had taken the state
        try:
            step = int(jax.device_get(state.step))
            place = self.batches.place_after(step)
            if step == run.after or place is None or not self.judge.finite_until(step):
                return
            with self.timing.account.clock.during("saving"), save_watchdog(run):
                self.saves.save(step, state, place, self.judge.guard)
                run.checkpoints.wait()
        except Exception as error:  # the first error is the one to tell
            if str(error) != str(ended_by):
                say(f"warning: the steps since the last checkpoint are lost: {error}")
            return
        what = "an error"
        if isinstance(ended_by, BrokenPipeError):
            what = "the end of what reads its output"
        say(
            f"{what} ends this run after step {step}, which is saved: the same command goes on "
            "from there"
        )

    def _evaluate(self, step: int, final: bool = False) -> None:
        """Evaluate a step, unless the run is told to stop before the end of it; the loss of any but
        the last evaluation is that of the step's checkpoint.
        """
        with self.timing.apart("evaluation"):
            with self.batches.reading():
                params = self._evaluated_params()
                batch_done = self.timing.watchdog.batch_done
                loss = self.evaluations.evaluate(step, params, self.log, final, batch_done)
            if loss is None:
                return
            if not final:
                self.run.checkpoints.record(step, loss)
            for hook in self.hooks:
                hook.on_evaluation(step, loss)

    def _evaluated_params(self) -> Params:
        """The parameters as they are evaluated: the average of an optimizer or a hook that has
        one.
        """
        params = self.runner.evaluation_params()
        for hook in self.hooks:
            params = hook.evaluated(params)
        return params

    def begin_hooks(self, after: int) -> None:
        """Tell hooks with which state the run goes on: the one after this step."""
        run = self.run
        seen = HookedRun(run.experiment, run.folder, after, self.say, self.stop.ask)
        for hook in self.hooks:
            hook.on_begin(seen, self.runner.state)

    # After a bad step.

    def _go_back(self, bad: BadStep) -> int:
        """Say what was found of a bad step, and go on from the last checkpoint; return its step.

        Raises:
          Diverged: the policy is to stop.
          UserError: the checkpoint cannot be read.
        """
        run = self.run
        said = "; ".join(filter(None, (self._look_again(bad), bad.judged.why)))
        if bad.judged.decision == "rollback":
            return self._roll_back(bad.numbers.step, said)
        trained = run.experiment.model.trained(self.runner.state.params)
        raise Diverged(divergence_message(bad.numbers, trained, run.newest, run.folder, said))

    def _look_again(self, bad: BadStep) -> str:
        """What to say of a step that was not finite, after another look at it; what becomes of the
        state is not the run's any more. Nothing of a step that has changed its state.
        """
        row = bad.numbers
        runner = self.runner
        if not row.kept_state or self.batches.place_before(row.step) is None:
            return ""
        self.say(f"step {row.step} was not finite: it is looked at once more")
        try:
            with self.timing.apart("guard"):
                return look_again(
                    self.run.experiment,
                    runner.program,
                    runner.state,
                    runner.batches_again(row.step),
                    row,
                    bad.finite_since,
                )
        except (jax.errors.JaxRuntimeError, UserError) as error:
            return f"it could not be looked at again ({compiler_message(str(error))})"

    def _roll_back(self, bad_step: int, said: str) -> int:
        """Take the last checkpoint, and go on from it with the batches after those that were read;
        return its step.
        """
        run = self.run
        say = self.say
        guard = self.judge.guard
        most = run.experiment.config.train.max_bad_steps
        with self.timing.apart("guard"):
            for tier in run.tiers:
                with save_watchdog(run):
                    tier.wait()
            saved = run.newest
            step = saved or 0
            where = "the beginning" if saved is None else f"the checkpoint of step {step}"
            say(f"warning: step {bad_step} was bad: {said or 'its update was not finite'}")
            say(
                f"the run goes on from {where}, with the batches after those that were read "
                f"({guard.bad_steps} of train.max_bad_steps={most})"
            )
            self.judge.forget()
            self.batches.forget_all()
            back = run.back_to(saved)
            start = first_step(back, say)
            self.runner.go_on_with(start.state)
            self.saves.give_back(back, start.hooks)
            self.begin_hooks(step)
        self.batches.go_on_after(step)
        guard.roll_back(step)
        self.timing.account.roll_back(step)
        self.rows.go_back(step)
        return step


def say_elsewhere(line: str) -> None:
    """Say a line on standard error, where standard output takes none, or nowhere."""
    with suppress(OSError):
        warn(line)
