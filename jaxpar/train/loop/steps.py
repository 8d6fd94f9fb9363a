"""The steps of an open run, one after another: a batch, the step, the wait for the step before, and
what is due. What is due besides saving is done by hooks, the library's and a program's alike.

The host stays one step ahead: it awaits a step, and fetches its metrics, while the next one runs.
What is good is saved before an error leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxpar.base.errors import Say, UserError
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.process.multihost import raised_together
from jaxpar.base.process.preemption import Stop
from jaxpar.train.guard.failures import CopiesDiffer, Diverged, divergence_message
from jaxpar.train.guard.judge import BadStep, Judge
from jaxpar.train.guard.nonfinite import look_again
from jaxpar.train.hooks.hook import Hook, HookedRun, is_due
from jaxpar.train.loop.rows import StepRows
from jaxpar.train.loop.run_step import Metrics, StepRunner
from jaxpar.train.loop.saves import Saves
from jaxpar.train.loop.timing import Timing, save_watchdog
from jaxpar.train.opening import OpenRun, first_step
from jaxpar.train.run_data import is_data_error, keep_data


@dataclass
class Steps:
    """The steps of a call, and what they work with. All processes make one, and call it alike.

    Attributes:
      run: the run folder and what is trained in it.
      hooks: what is done at steps, in the order in which it is called.
      stop: says when to stop.
      timing: tells the time of steps from other time.
      rows: writes what steps have measured.
      judge: judges the steps that have run.
      runner: runs a step, and has the state and the batches.
      saves: saves a step.
      beside: the thread in which hooks look at the compiled step.
      say: prints a line, on the first process.
    """

    run: OpenRun
    hooks: Sequence[Hook]
    stop: Stop
    timing: Timing
    rows: StepRows
    judge: Judge
    runner: StepRunner
    saves: Saves
    beside: Executor
    say: Say
    _shown: Future[None] | None = field(default=None, init=False)
    """Is done once hooks have looked at the compiled step."""

    def take(self) -> int:
        """Run the steps that are left. What is good is saved before an error leaves, where all
        processes leave by it.

        Returns:
          The last step that finished.

        Raises:
          Diverged: a step was bad, and the policy is to stop.
          CopiesDiffer: a device fails.
          UserError: the data cannot be read, or a file cannot be written.
        """
        self._begin_hooks(self.run.after)
        if self.stop.cut_short:
            return self.run.after
        try:
            step = self._steps_and_back()
        except Exception as error:
            if raised_together(error) and not isinstance(error, Diverged | CopiesDiffer):
                self.saves.save_good(self.runner, self.judge, error)
            if is_data_error(error) and jax.process_index() == 0:
                keep_data(self.run.folder, self.run.compared.pieces, str(error))
            raise
        if self._shown is not None:
            self._shown.result()
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
        every = run.experiment.config.checkpoint.every
        step = after
        metrics: Metrics = {}
        for step in range(after + 1, run.last + 1):
            before = metrics
            metrics = self._start(step, before)
            self._complete(step - 1, before)
            self._call_hooks(step, metrics, good=False)
            stop = self.stop.reached() or step == run.last
            saving = stop or is_due(step, every)
            saving_here = not saving and self.saves.is_local(step)
            if saving or saving_here or self._needs_good(step):
                self._require_all_good(step, metrics, logging=stop)
            if saving or saving_here:
                self._save(step, local=saving_here)
            self._call_hooks(step, metrics, good=True)
            if self.stop.cut_short and not saving:
                self._save(step)
            if stop or self.stop.cut_short:
                break
        return step

    def _start(self, step: int, before: Metrics) -> Metrics:
        """Give a step to the devices; return its metrics, which arrive when it has run."""
        for hook in self.hooks:
            hook.before_step(step)
        metrics = self.runner.begin(step, before)
        self.judge.begin(step, metrics)
        for hook in self.hooks:
            hook.on_started(step)
        if self._shown is None and jax.process_index() == 0:
            self._shown = self.beside.submit(self._show_program)
        return metrics

    def _show_program(self) -> None:
        for hook in self.hooks:
            hook.on_compiled(self.runner.program)

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

    def _call_hooks(self, step: int, metrics: Metrics, good: bool) -> None:
        """Call the hooks that are due after a step: those that take one that may still be running,
        or those that need a good one.

        What they do is time of the step, unless they set it apart: its speed, its watchdog and
        `train.max_time` know of it.
        """
        for hook in self.hooks:
            if hook.needs_good == good and hook.is_due(step):
                if hook.needs_end:
                    jax.block_until_ready(metrics)
                hook.on_step(step, self.runner.state)

    def _needs_good(self, step: int) -> bool:
        """Whether a hook is due that takes a good step alone."""
        return any(hook.needs_good and hook.is_due(step) for hook in self.hooks)

    def _require_all_good(self, step: int, metrics: Metrics, logging: bool) -> None:
        """Wait for a step that nothing runs beside, and require that all until it were good, before
        it is saved or evaluated. It has a row where one is due, or with `logging`.
        """
        jax.block_until_ready(metrics)  # a step that is still running counts as training time
        self.timing.account.step_ended(step)
        self.runner.batches.require()
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
            self.runner.batches.require()  # which is why, where a process had no rows
        self.rows.write(step, numbers, self.judge.guard.bad_steps)
        self._require_good(step)

    def _require_good(self, last: int) -> None:
        """Judge the steps up to `last`, which have run (see `Judge.require_good`)."""
        for skipped in self.judge.require_good(last):
            self.timing.account.skip(skipped)
        self.runner.batches.forget_before(last)

    def _save(self, step: int, local: bool = False) -> None:
        with self.timing.apart("saving"):
            place = self.runner.batches.place_after(step)
            self.rows.sync()
            self.saves.save(step, self.runner.state, place, self.judge.guard, local)

    def _begin_hooks(self, after: int) -> None:
        """Tell hooks with which state the run goes on: the one after this step."""
        run = self.run
        seen = HookedRun(
            run.experiment, run.folder, after, self.say, self.stop.ask, self.timing.apart
        )
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
        """Say what another look at a step that was not finite has found, which spends the state;
        nothing of a step that has changed its state.
        """
        row = bad.numbers
        runner = self.runner
        if not row.kept_state or self.runner.batches.place_after(row.step - 1) is None:
            return ""
        self.say(f"step {row.step} was not finite: it is looked at once more")
        try:
            with self.timing.apart("guard", waits=False):
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
        with self.timing.apart("guard", waits=False):
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
            self.runner.batches.forget_all()
            back = run.back_to(saved)
            start = first_step(back, say)
            self.runner.state = start.state
            self.saves.give_back(back, start.hooks)
            self._begin_hooks(step)
        self.runner.batches.go_on_after(step)
        guard.roll_back(step)
        self.timing.account.roll_back(step)
        self.rows.go_back(step)
        return step
