"""The steps of a call of `run`, and what is due after each: a row of metrics, a judgement, a save,
an evaluation; and the way back to a checkpoint after a bad step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

from jaxpar.base.console import ProgressLine
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.process.stopping import Stop
from jaxpar.base.process.together import raised_together
from jaxpar.models import Params
from jaxpar.train.evaluations import Evaluations, is_due
from jaxpar.train.experiment import Experiment
from jaxpar.train.goodput import Account
from jaxpar.train.guard import Guard
from jaxpar.train.guard.failures import CopiesDiffer, Diverged, divergence_message
from jaxpar.train.guard.judge import BadStep, Judge
from jaxpar.train.guard.replicas import ReplicaCheck, replicas_note, require_alike
from jaxpar.train.guard.run_again import look_again
from jaxpar.train.guard.time_limit import TimeLimit
from jaxpar.train.loop.batches import StepBatches
from jaxpar.train.loop.rows import StepRows
from jaxpar.train.loop.saves import Saves
from jaxpar.train.loop.timing import Timing
from jaxpar.train.metrics import MetricsLog, Profile
from jaxpar.train.open_run import FirstStep, OpenRun, first_step
from jaxpar.train.run_data import keep_data
from jaxpar.train.stateful import Stateful
from jaxpar.train.step import evaluation_params, put_batch

Watch = Callable[[Experiment, Compiled], None]
"""A function that runs beside the first steps and gets the experiment and the compiled step."""
Metrics = dict[str, jax.Array]
"""What a step returns beside its state (see `make_train_step`)."""


class Parts(NamedTuple):
    """What the steps work with.

    Attributes:
      run: the run folder and what is trained in it.
      evaluations: those of the run.
      log: where rows are written.
      show: the progress line.
      beside: the other thread.
      profile: the trace of some steps.
      watch: the caller's function.
      limit: the time that the call may take.
      stateful: the caller's objects whose state is saved.
      account: counts the time by what it went on.
    """

    run: OpenRun
    evaluations: Evaluations
    log: MetricsLog
    show: ProgressLine
    beside: ThreadPoolExecutor
    profile: Profile
    watch: Watch
    limit: TimeLimit
    stateful: Mapping[str, Stateful]
    account: Account


class Steps:
    """The steps of one call of `run`.

    Attributes:
      timing: what of the call's time is that of its steps.
      rows: the rows that were written of them.
    """

    def __init__(self, parts: Parts, start: FirstStep, program: Compiled):
        """Take what the steps work with, what the first of them begins with, and the compiled
        step. All processes must call this.
        """
        run = parts.run
        train = run.experiment.config.train
        say = parts.show.say
        self._account = parts.account
        self.timing = Timing(run, parts.limit, parts.account)
        self.rows = StepRows(run, parts.log, parts.show, self.timing.meter, parts.account)
        self._parts = parts
        self._run = run
        self._experiment = run.experiment
        self._program = program
        self._state = start.state
        self._saves = Saves(run, start, parts.stateful, parts.limit, parts.account, say)
        self._batches = StepBatches(run, start.data)
        guard = Guard(train, start.guard)
        self._judge = Judge(guard, train, self._batches.require, say)
        self._replicas = self._replica_check()
        self._went_back = False
        self._watching: Future[None] | None = None
        self._lines: Future[None] | None = None

    def run(self, missed: set[str], asked: Stop) -> int:
        """Run the steps, and return the last one that finished. What is good is saved before an
        error leaves, where all processes leave by it.

        Args:
          missed: the evaluations of the step before the first that are to be made up for.
          asked: says when to stop.

        Raises:
          Diverged: a step was bad, and the policy is to stop.
          CopiesDiffer: a device fails.
          UserError: the data cannot be read, or a file cannot be written.
        """
        evaluations = self._parts.evaluations
        try:
            evaluations.make_up(
                missed, self._evaluation_params, self._parts.log, self._parts.beside
            )
            if evaluations.cut_short:
                return self._run.first
            return self._steps_and_back(asked)
        except Exception as error:
            if raised_together(error) and not isinstance(error, Diverged | CopiesDiffer):
                self._save_good(error)
            broken = self._batches.broken
            if broken and jax.process_index() == 0:
                keep_data(self._run.folder, self._run.compared.pieces, broken)
            raise

    def finish(self) -> None:
        """Wait for what runs beside the steps."""
        if self._watching is not None:
            self._watching.result()
        if self._lines is not None:
            self._lines.result()
            folder = self._run.folder
            where = self._parts.profile.file.parent
            self._parts.show.say(f"wrote {where}: `jaxpar watch {folder} --profile` shows it")

    def _steps_and_back(self, asked: Stop) -> int:
        """Run the steps, from an earlier one again where the guard says so."""
        first = self._run.first
        with self.timing.steps():
            while True:
                try:
                    return self._steps(first, asked)
                except BadStep as found:
                    bad = found
                first = self._go_back(bad)

    def _steps(self, first: int, asked: Stop) -> int:
        """Run the steps after `first`; return the last one."""
        evaluations = self._parts.evaluations
        every = self._run.experiment.config.checkpoint.every
        last = self._run.last
        step = first
        metrics: Metrics = {}
        for step in range(first + 1, last + 1):
            before = metrics
            metrics = self._begin(step, before)
            if step == self._run.first + 1 and not self._went_back:
                self._start_beside()
            # The host stays one step ahead: it awaits the step before, and fetches its metrics,
            # while this one runs.
            self._complete(step - 1, before)
            stop = asked.reached() or step == last
            if is_due(step, self._replicas_every):
                with self.timing.apart("guard", after=metrics):
                    self._require_alike(step)
            saving = stop or is_due(step, every)
            evaluating = evaluations.is_due(step)
            if saving or evaluating:
                self._require_all_good(step, metrics, logging=stop)
            if saving:
                self._save(step)
            if evaluating:
                self._evaluate(step)
            if evaluations.cut_short and not saving:
                self._save(step)
            if stop or evaluations.cut_short:
                break
        if evaluations.is_final(step) and not evaluations.cut_short:
            self._evaluate(step, final=True)
        return step

    def _begin(self, step: int, before: Metrics) -> Metrics:
        """Start a step, and return its metrics; `before` are those of the one before it."""
        profile = self._parts.profile
        traces = not self._went_back  # a step that is run again is not traced again
        if traces and step == profile.first:
            with self.timing.apart("other", after=before):
                profile.start()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with self.timing.waiting():
                batch = put_batch(self._batches.next_rows(step), self._experiment.plan)
            batch |= self._answers(batch, before)
            self._state, metrics = self._program(self._state, batch)
            self.timing.step_began(metrics)
        if traces and step == profile.last:
            with self.timing.apart("other", after=metrics):
                profile.close()
            devices = self._experiment.devices
            self._lines = self._parts.beside.submit(profile.write_lines, self._program, devices)
        self._judge.begin(step, metrics)
        return metrics

    def _answers(self, batch: Mapping[str, jax.Array], before: Metrics) -> dict[str, jax.Array]:
        """What a teacher that runs beside says of a batch; nothing where there is none."""
        teacher = self._run.teacher
        if teacher is None or teacher.live is None:
            return {}
        if self._experiment.platform == "cpu":  # see `LiveTeacher.answer`
            jax.block_until_ready(before)
        return teacher.live.answer(batch)

    def _start_beside(self) -> None:
        """Have the other thread do what it does while the first step runs: compile the evaluation,
        and, on the first process, call the caller's function.
        """
        self._parts.evaluations.compile_beside(self._parts.beside)
        if jax.process_index() == 0:
            watch = self._parts.watch
            self._watching = self._parts.beside.submit(watch, self._experiment, self._program)

    def _complete(self, step: int, metrics: Metrics) -> None:
        """Wait for a step while the next one runs, and do what is due after each."""
        jax.block_until_ready(metrics)
        if metrics:
            self._account.step_ended(step)
        self.timing.watchdog.beat()
        if is_due(step, self._experiment.config.metrics.log_every) and step > self.rows.last:
            self._log(step, metrics)
        if self._judge.guard.reads_each_step:
            self._require_good(step)
        if jax.process_count() == 1:
            self._run.require_lock()

    def _require_all_good(self, step: int, metrics: Metrics, logging: bool) -> None:
        """Wait for a step that nothing runs beside, and require that all until it were good, before
        it is saved or evaluated. It has a row where one is due, or with `logging`.
        """
        jax.block_until_ready(metrics)  # a step that is still running counts as training time
        self._account.step_ended(step)
        self._batches.require()
        if logging or is_due(step, self._experiment.config.metrics.log_every):
            self._log(step, metrics)
        self._require_good(step)

    def _log(self, step: int, metrics: Metrics) -> None:
        """Fetch a step's metrics, print and write them, and judge the steps until it."""
        numbers = {key: float(value) for key, value in jax.device_get(metrics).items()}
        if not np.isfinite(numbers["loss"]):
            self._batches.require()  # which is why, where a process had no rows
        self.rows.write(step, numbers, self._judge.guard.bad_steps)
        self._require_good(step)

    def _require_good(self, last: int) -> None:
        """Judge the steps up to `last`, which have run (see `Judge.require_good`)."""
        for skipped in self._judge.require_good(last):
            self._account.skip(skipped)
        self._batches.forget_before(last)

    def _save(self, step: int) -> None:
        """Save a step, unless devices hold other copies of it."""
        with self.timing.apart("saving"):
            self._require_alike(step)
            self._saves.save(step, self._state, self._batches.place_after(step), self._judge.guard)

    def _save_good(self, ended_by: Exception) -> None:
        """Save what was trained until now, and say so, unless the last step failed or diverged."""
        say = self._parts.show.say
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            return  # the step that failed had taken the state
        try:
            step = int(jax.device_get(self._state.step))
            place = self._batches.place_after(step)
            if step == self._run.first or place is None or not self._judge.finite_until(step):
                return
            with self._account.clock.during("saving"):
                self._saves.save(step, self._state, place, self._judge.guard)
                self._run.checkpoints.wait()
        except Exception as error:  # the first error is the one to tell
            if str(error) != str(ended_by):
                say(f"warning: the steps since the last checkpoint are lost: {error}")
            return
        say(
            f"an error ends this run after step {step}, which is saved: the same command goes "
            "on from there"
        )

    def _evaluate(self, step: int, final: bool = False) -> None:
        """Evaluate a step, unless the run is told to stop before the end of it; the loss of any but
        the last evaluation is that of the step's checkpoint.
        """
        evaluations = self._parts.evaluations
        with self.timing.apart("evaluation"):
            with self._batches.reading():
                params = self._evaluation_params()
                loss = evaluations.evaluate(step, params, self._parts.log, final)
            if loss is not None and not final:
                self._run.checkpoints.record(step, loss)

    def _evaluation_params(self) -> Params:
        """The parameters as they are evaluated: the average of an optimizer that has one."""
        experiment = self._experiment
        return evaluation_params(experiment.model, self._state, experiment.optimizer)

    def _replica_check(self) -> ReplicaCheck | None:
        """What compares the copies of the state, where the config asks for it."""
        if not self._replicas_every:
            return None
        check = ReplicaCheck(self._experiment.state, self._experiment.plan.mesh)
        self._parts.show.say(replicas_note(check))
        return check

    @property
    def _replicas_every(self) -> int:
        return self._experiment.config.train.check_replicas

    def _require_alike(self, step: int) -> None:
        """Stop if devices hold other copies of the state than their peers, which is then not saved.

        Raises:
          CopiesDiffer: they do.
        """
        if self._replicas is not None:
            saved = self._run.checkpoints.latest()
            with self._account.clock.during("guard"):
                require_alike(self._replicas, self._state, self._replicas_every, step, saved)

    def _go_back(self, bad: BadStep) -> int:
        """Say what was found of a bad step, and go on from the last checkpoint; return its step.

        Raises:
          Diverged: the policy is to stop.
        """
        said = "; ".join(filter(None, (self._look_again(bad), bad.judged.why)))
        if bad.judged.decision == "rollback":
            return self._roll_back(bad.numbers.step, said)
        trained = self._experiment.model.trained(self._state.params)
        saved = self._run.checkpoints.latest()
        raise Diverged(divergence_message(bad.numbers, trained, saved, self._run.folder, said))

    def _look_again(self, bad: BadStep) -> str:
        """What to say of a step that was not finite, after another look at it; what becomes of the
        state is not the run's any more. Nothing of a step that has changed its state.
        """
        row = bad.numbers
        if not row.kept_state or self._batches.place_before(row.step) is None:
            return ""
        self._parts.show.say(f"step {row.step} was not finite: it is looked at once more")
        try:
            with self.timing.apart("guard"):
                return look_again(
                    self._experiment,
                    self._program,
                    self._state,
                    self._batches_again(row.step),
                    row,
                    bad.finite_since,
                )
        except (jax.errors.JaxRuntimeError, UserError) as error:
            return f"it could not be looked at again ({compiler_message(str(error))})"

    def _batches_again(self, step: int) -> Iterator[dict[str, jax.Array]]:
        """Give the batch of a step, and the one after it, once more."""
        for rows in self._batches.read_again(step, 2):
            batch = put_batch(rows, self._experiment.plan)
            yield batch | self._answers(batch, {})

    def _roll_back(self, bad_step: int, said: str) -> int:
        """Take the last checkpoint, and go on from it with the batches after those that were read;
        return its step.
        """
        say = self._parts.show.say
        run = self._run
        guard = self._judge.guard
        with self.timing.apart("guard"):
            run.checkpoints.wait()
            saved = run.checkpoints.latest()
            step = saved or 0
            where = "the beginning" if saved is None else f"the checkpoint of step {step}"
            say(f"warning: step {bad_step} was bad: {said or 'its update was not finite'}")
            say(
                f"the run goes on from {where}, with the batches after those that were read "
                f"({guard.bad_steps} of "
                f"train.max_bad_steps={self._experiment.config.train.max_bad_steps})"
            )
            self._judge.forget()
            self._batches.forget_all()
            start = first_step(run._replace(first=step, is_new=saved is None), say)
            self._state = start.state
            self._saves.give_back(start.stateful)
        self._went_back = True
        self._batches.go_on_after(step)
        guard.roll_back(step)
        self._account.roll_back(step)
        self.rows.go_back(step)
        return step
