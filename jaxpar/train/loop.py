"""Trains a config in a run folder with metrics, a picture and checkpoints; the same call again
resumes the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

from jaxpar.base.config import Config
from jaxpar.base.console import ProgressLine, bytes_text, console, duration_text
from jaxpar.base.errors import UserError, with_urls
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.process.machine_notice import MachineNotice
from jaxpar.base.process.runtime import Batches, raised_together, run_together
from jaxpar.base.process.stopping import Stop, ask_to_stop
from jaxpar.data.corpus import Corpus, HostBatch, skipped_records
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Params
from jaxpar.train.evaluations import FINAL, Evaluations, is_due
from jaxpar.train.experiment import Experiment
from jaxpar.train.guard import Guard
from jaxpar.train.guard.failures import (
    STEP,
    CopiesDiffer,
    Diverged,
    OutOfMemory,
    PeerLost,
    Running,
    StepNumbers,
    divergence_message,
    memory_errors,
)
from jaxpar.train.guard.nonfinite import first_nonfinite
from jaxpar.train.guard.replicas import ReplicaCheck, mismatch_message, replicas_note
from jaxpar.train.guard.run_again import verdict
from jaxpar.train.guard.time_limit import TimeLimit, save_seconds
from jaxpar.train.guard.watchdog import Watchdog
from jaxpar.train.metrics import Meter, MetricsLog, Profile, Report
from jaxpar.train.open_run import (
    GUARD,
    FirstStep,
    OpenRun,
    banner_lines,
    first_step,
    keep_run,
    open_run,
    rows_at,
)
from jaxpar.train.restore import beside_state, fingerprint, saved_part
from jaxpar.train.run_data import keep_data
from jaxpar.train.runs.bucket_runs import run_here
from jaxpar.train.runs.manifest import DamagedCheckpoint, UnreadCheckpoint
from jaxpar.train.runs.val_losses import METRIC
from jaxpar.train.sinks import Sink
from jaxpar.train.stateful import STATEFUL, Stateful, load_states, states_of
from jaxpar.train.step import empty_batch, evaluation_params, make_train_step, put_batch

__all__ = ["STEP", "CopiesDiffer", "Diverged", "OutOfMemory", "Result", "Watch", "run"]


class Result(NamedTuple):
    """How a run ended: the step that it reached, its last losses (nats a token), and the text's
    unigram entropy.
    """

    step: int
    loss: float | None
    val_loss: float | None
    unigram_entropy: float
    interrupted: bool


Watch = Callable[[Experiment, Compiled], None]
"""A function that runs beside the first steps and gets the experiment and the compiled step."""


def run(
    experiment: Config | Experiment,
    folder: str | Path,
    corpus: Corpus | None = None,
    watch: Watch = lambda *_: None,
    report: Report | None = None,
    began: float | None = None,
    stateful: Mapping[str, Stateful] | None = None,
) -> Result:
    """Train the run in `folder`, or go on with it.

    Args:
      experiment: the experiment, or the config of one, with nothing left open:
        `jaxpar.plan.resolve` settles a memory budget and `overlap auto`. If the folder already has
        a config, the two may differ only in layout and reporting.
      folder: the run folder, which is made if it is absent; or its URL in a bucket.
      corpus: the data, if they are already loaded and are not the experiment's.
      watch: a function that the first process calls in a thread beside the loop.
      report: a function that every process calls with the step and the numbers of each row of
        metrics.jsonl. The calls are the same in number and order on all of them; speed and
        data_wait are those of the process.
      began: when `train.max_time` began to count, by `time.monotonic`; None = now.
      stateful: objects by name whose state is saved with each checkpoint, on the first process, and
        given back to them, on every process, when the run goes on.

    Raises:
      OutOfMemory: a device has too little memory for a step or an evaluation.
      Diverged: a step was not finite.
      PeerLost: another process does not answer any more.
      CopiesDiffer: `train.check_replicas` found that a device fails.
      UserError: the user can mend it: config, devices or data are bad, or the folder has another
        config.
    """
    folder = run_here(folder)
    say = console().print if jax.process_index() == 0 else lambda line: None
    began = time.monotonic() if began is None else began
    while True:
        opened = open_run(experiment, folder, corpus, say)
        result = _train_and_close(opened, watch, report, began, stateful or {}, say)
        if result is not None:
            return result


def _is_of_first_step(opened: OpenRun, error: BaseException) -> bool:
    """Whether an error is damage of the step that the run goes on from. A step without a manifest
    shows its damage when it is read, and of several processes perhaps to one alone.
    """
    if not isinstance(error, DamagedCheckpoint) or isinstance(error, UnreadCheckpoint):
        return False
    # weights to begin from may be another run's checkpoint
    place = with_urls(str(opened.checkpoints.folder / str(opened.first)))
    return jax.process_count() == 1 and not opened.is_new and place in str(error)


def _train_and_close(
    opened: OpenRun,
    watch: Watch,
    report: Report | None,
    began: float,
    stateful: Mapping[str, Stateful],
    say: Callable[[str], None],
) -> Result | None:
    """Run the steps that are left, and give the folder back. None = the step to go on from is
    damaged, and was moved aside: the run is to be opened again.
    """
    limit = _time_limit(opened, began)
    stop = Stop(limit.asks)
    # what was saved is written to its end before a signal ends the process
    with closing(opened.lock), closing(stop), closing(MachineNotice(stop.ask)):
        try:
            result = _train(opened, watch, report, stop, limit, stateful)
        except PeerLost:
            raise  # nothing is waited for, as that would wait for the other process
        except BaseException as error:
            aside = _is_of_first_step(opened, error)
            if aside:  # while the folder is still this training's
                opened.checkpoints.set_aside(opened.first, str(error))
            try:
                opened.checkpoints.close()
            except Exception as later:  # the first error is the one to tell
                say(f"warning: {later}")
            if aside:
                return None
            raise
        opened.checkpoints.remove_old()
        opened.checkpoints.close()
    return result


def _time_limit(opened: OpenRun, began: float) -> TimeLimit:
    """That of `train.max_time`, which knows from a resumed run how long a save takes."""
    train = opened.experiment.config.train
    limit = TimeLimit(train.most_seconds, began, f"train.max_time={train.max_time}")
    if opened.first:
        limit.note_save(save_seconds(opened.checkpoints.folder / str(opened.first)))
    return limit


def _train(
    opened: OpenRun,
    watch: Watch,
    report: Report | None,
    stop: Stop,
    limit: TimeLimit,
    stateful: Mapping[str, Stateful],
) -> Result:
    """Run the steps that are left. From the first of them on `stop` takes signals."""
    config = opened.experiment.config
    main = jax.process_index() == 0
    show = ProgressLine(config.train.steps, opened.first, main)
    entropy = opened.experiment.unigram_entropy
    running = Running()
    evaluations = Evaluations(opened, show.say, running, stop)
    missed = evaluations.missed()
    if opened.first >= opened.last and not missed:
        show.say(_done_already(opened))
        return Result(opened.first, None, None, entropy, False)
    # Only the first process traces: its devices do what all do.
    if main and opened.first < opened.last:
        steps = config.metrics.profiled
    else:
        steps = range(0)
    advice = _profile_advice(opened, evaluations)
    profile = run_together(lambda: Profile(steps, opened.folder, opened.first, advice))
    # One other thread compiles the step while this one makes or reads the state; while the first
    # steps run, it compiles the evaluation and draws the memory.
    with (
        closing(profile),
        _open_log(opened, report, show.say) as log,
        memory_errors(opened.experiment, running),
        _one_thread() as beside,
    ):
        parts = _Parts(opened, evaluations, log, show, beside, profile, watch, limit, stateful)
        if opened.first >= opened.last:
            _make_up(parts, missed, entropy)
            cut_short = evaluations.cut_short
            if cut_short:
                show.say(_stopped(opened.first, cut_short, stop.why))
            else:
                show.say(_done_already(opened))
            return Result(opened.first, None, evaluations.last_loss, entropy, cut_short)
        compiling = beside.submit(_compile, opened.experiment)
        start = first_step(opened, show.say)
        if start.stateful is not None:
            saved = start.stateful
            run_together(lambda: load_states(stateful, saved, show.say))
        for line in banner_lines(opened, start.state, entropy):
            show.say(line)
        program, said = compiling.result()
        show.say(said)
        keep_run(opened)
        loop = _Loop(parts, start, program)
        stop.listen()
        with show:
            step = loop.run(missed, stop)
        loop.finish()
    interrupted = step < opened.last or evaluations.cut_short
    if main and interrupted:
        show.say(_stopped(step, evaluations.cut_short, stop.why))
    elif main:
        show.say(_ended(step, evaluations.last_loss, loop.meter.trained, entropy))
    return Result(step, loop.loss, evaluations.last_loss, entropy, interrupted)


class _Parts(NamedTuple):
    """What the loop works with.

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


class _BadStep(Exception):
    """A step after which the run goes back to a checkpoint: its number, and what is said of it."""

    def __init__(self, step: int, said: str):
        super().__init__(said)
        self.step = step
        self.said = said


class _Loop:
    """The steps of one call of `run`, and those whose numbers have not been read yet."""

    def __init__(self, parts: _Parts, start: FirstStep, program: Compiled):
        experiment = parts.run.experiment
        config = experiment.config
        devices = experiment.devices
        flops = experiment.model.flops_per_token(config.data.seq_len)
        self.parts = parts
        self.opened = parts.run
        self.experiment = experiment
        self.config = config
        self.program = program
        self.state = start.state
        self.data = start.data
        self.frozen = fingerprint(experiment.model, start.state.params)
        absent = empty_batch(config, experiment.plan, absent=True)
        self.batches = Batches(start.data, absent, ask_to_stop)
        self.positions: dict[int, Any] = {}
        """The state of the data's iterator after a step's batch, by step."""
        self.places: dict[int, Any] = {}
        """Its state before the batch of each step whose numbers have not been read yet."""
        self.place: Any = start.data.get_state()
        """Its state now."""
        self.broken = ""
        """What an error of the data said."""
        self.meter = Meter(parts.run.first, flops, devices, experiment.plan.compute)
        self.loss: float | None = None
        self.first_states = run_together(lambda: states_of(parts.stateful))
        """Those of the caller's objects when the call began to train."""
        self.skipped = _Skipped(parts.run.corpus, parts.show.say)
        self.replicas = self._replica_check()
        self.watchdog = Watchdog(config.train.hang_seconds)
        self.guard = Guard(config.train, start.guard)
        self.turn = parts.run.first
        """How many steps were begun, those before a step that was rolled back to too."""
        self.unread: list[StepNumbers] = []
        self.watching: Future[None] | None = None
        self.lines: Future[None] | None = None

    def run(
        self,
        missed: set[str],
        stop: Stop,
    ) -> int:
        """Run the steps, and return the last one that finished. What is good is saved before an
        error leaves, where all processes leave by it.
        """
        try:
            evaluate_missed(self.parts, missed, self.evaluation_params)
            if self.parts.evaluations.cut_short:
                return self.opened.first
            return self._steps_and_back(stop)
        except Exception as error:
            if raised_together(error) and not isinstance(error, Diverged | CopiesDiffer):
                self._save_good(error)
            if self.broken and jax.process_index() == 0:
                keep_data(self.opened.folder, self.opened.compared.pieces, self.broken)
            raise

    def finish(self) -> None:
        """Wait for what runs beside the steps."""
        if self.watching is not None:
            self.watching.result()
        if self.lines is not None:
            self.lines.result()
            folder = self.opened.folder
            where = self.parts.profile.file.parent
            self.parts.show.say(f"wrote {where}: `jaxpar watch {folder} --profile` shows it")

    def _steps_and_back(self, asked: Stop) -> int:
        """Run the steps, from an earlier one again where the guard says so."""
        first = self.opened.first
        with self.watchdog:
            while True:
                try:
                    return self._steps(first, asked)
                except _BadStep as bad:
                    first = self._roll_back(bad)

    def _steps(self, first: int, asked: Stop) -> int:
        config = self.config
        evaluations = self.parts.evaluations
        last = self.opened.last
        step = logged = first
        metrics: dict[str, jax.Array] = {}
        for step in range(first + 1, last + 1):
            before = metrics
            metrics = self._step(step, before)
            if self.turn == self.opened.first + 1:
                evaluations.compile_beside(self.parts.beside)
                self._watch()
            # The host stays one step ahead: it awaits the step before, and fetches its metrics,
            # while this one runs.
            jax.block_until_ready(before)
            self.watchdog.beat()
            if (step - 1) % config.metrics.log_every == 0 and step - 1 > logged:
                self._log(step - 1, before)
            if self.guard.reads_each_step:
                self._require_finite(step - 1)
            if jax.process_count() == 1:
                self.opened.require_lock()
            stop = asked.reached() or step == last
            if self._compares_replicas(step):
                self._aside(metrics, lambda step=step: self._require_alike(step))
            saving = stop or is_due(step, config.checkpoint.every)
            evaluating = evaluations.is_due(step)
            if not (evaluating or saving):
                continue
            jax.block_until_ready(metrics)  # a step that is still running counts as training time
            self._require_rows()
            self.positions = {step: self.positions[step]}
            if step % config.metrics.log_every == 0 or stop:
                self._log(step, metrics)
                logged = step
            self._require_finite(step)
            with self._apart():
                if saving:
                    self._require_alike(step)
                    self._save(step)
                if evaluating:
                    loss = self._evaluate(step)
                    if loss is not None:
                        self.opened.checkpoints.record(step, loss)
                if evaluations.cut_short and not saving:
                    self._require_alike(step)
                    self._save(step)
            if stop or evaluations.cut_short:
                break
        if evaluations.is_final(step) and not evaluations.cut_short:
            with self._apart():
                self._evaluate(step, final=True)
        return step

    def _step(
        self,
        step: int,
        before: dict[str, jax.Array],
    ) -> dict[str, jax.Array]:
        """Start a step, and return its metrics; `before` are those of the one before it."""
        self.turn += 1
        profile = self.parts.profile
        traces = self.turn == step  # a step that is run again is not traced again
        if traces and step == profile.first:
            self._aside(before, profile.start)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with self.meter.timed("waiting"):
                batch = put_batch(self._next_rows(step), self.experiment.plan)
            batch |= self._answers(batch, before)
            self.state, metrics = self.program(self.state, batch)
        if traces and step == profile.last:
            self._aside(metrics, profile.close)
            devices = self.experiment.devices
            self.lines = self.parts.beside.submit(profile.write_lines, self.program, devices)
        told = (metrics["loss"], metrics["grad_norm"], metrics["overflows"])
        if self.guard.reads_each_step:
            for number in told:
                number.copy_to_host_async()
        self.unread.append(StepNumbers(step, *told))
        return metrics

    def _answers(
        self,
        batch: dict[str, jax.Array],
        before: dict[str, jax.Array],
    ) -> dict[str, jax.Array]:
        """What a teacher that runs beside says of a batch; nothing where there is none."""
        teacher = self.opened.teacher
        if teacher is None or teacher.live is None:
            return {}
        if self.experiment.platform == "cpu":  # see `LiveTeacher.answer`
            jax.block_until_ready(before)
        return teacher.live.answer(batch)

    def _watch(self) -> None:
        """Call the caller's function in the other thread; only the first process does."""
        if jax.process_index() == 0:
            watch = self.parts.watch
            self.watching = self.parts.beside.submit(watch, self.experiment, self.program)

    def _next_rows(self, step: int) -> HostBatch:
        """Read this process's rows of a step's batch, and keep the position after it for a
        checkpoint of that step.
        """
        with self._reading_data():
            rows = next(self.batches)
        if jax.process_count() == 1:
            self.positions.clear()  # of several, which steps are void is known later
        if not self.batches.failed:
            self.places[step] = self.place
            self.place = self.data.get_state()
            self.positions[step] = self.place
        return rows

    def _require_rows(self) -> None:
        with self._reading_data():
            self.batches.require()

    @contextmanager
    def _reading_data(self) -> Iterator[None]:
        """Note an error of the data, after which the run may go on over what is mended."""
        try:
            yield
        except UserError as error:
            self.broken = str(error)
            raise

    def _save(self, step: int) -> None:
        run = self.opened
        position = self.positions[step]
        teacher = None if run.teacher is None else run.teacher.identity
        size = run.corpus.train.size
        beside = beside_state(self.experiment, position, size, self.frozen, teacher, step)
        if guard := self.guard.saved():
            beside[GUARD] = guard
        if states := run_together(lambda: states_of(self.parts.stateful)):
            beside[STATEFUL] = states
        before = run.checkpoints.latest()
        run.checkpoints.save(step, saved_part(self.state, self.experiment.model), beside)
        if before is not None:  # which is written to its end by now
            self.parts.limit.note_save(save_seconds(run.checkpoints.folder / str(before)))

    def _save_good(self, ended_by: Exception) -> None:
        """Save what was trained until now, and say so, unless the last step failed or diverged."""
        say = self.parts.show.say
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            return  # the step that failed had taken the state
        try:
            step = int(jax.device_get(self.state.step))
            trained = jax.device_get([row for row in self.unread if row.step <= step])
            if step == self.opened.first or not all(row.finite for row in trained):
                return
            self._save(step)
            self.opened.checkpoints.wait()
        except Exception as error:  # the first error is the one to tell
            if str(error) != str(ended_by):
                say(f"warning: the steps since the last checkpoint are lost: {error}")
            return
        say(
            f"an error ends this run after step {step}, which is saved: the same command goes "
            "on from there"
        )

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What is done inside is no part of the steps: neither their speed nor a hang."""
        with self.meter.timed("aside"), self.watchdog.paused():
            yield
        self.parts.limit.pause()

    def _aside(
        self,
        metrics: dict[str, jax.Array],
        do: Callable[[], None],
    ) -> None:
        """Wait for the steps until now, and do something that is no part of them."""
        jax.block_until_ready(metrics)
        with self._apart():
            do()

    def _log(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Fetch a step's metrics, and print and write them with the speed since the last time."""
        numbers = {key: float(value) for key, value in jax.device_get(metrics).items()}
        if not np.isfinite(numbers["loss"]):
            self._require_rows()  # which is why, where a process had no rows
        del numbers["overflows"]
        numbers["labels"] = numbers.pop("tokens")
        speed = self.meter.read(step, self.experiment.tokens)
        self.loss = numbers["loss"]
        if skipped := self.skipped.in_training:
            numbers["records_skipped"] = float(skipped)
        if bad := self.guard.bad_steps:
            numbers["bad_steps"] = float(bad)
        self.skipped.say_more()
        left = (self.opened.last - step) * (speed["step_seconds"] or 0.0)
        self.parts.show.step(step, numbers | speed, left)
        self.parts.log.write(step, **numbers, **speed)
        self._require_finite(step)

    def _require_finite(self, last: int) -> None:
        """Judge the steps up to `last`, which have run, in their order.

        Steps between log lines are also read here, all at once, so that no step waits for its
        numbers to arrive, unless the guard reads each.

        Raises:
          Diverged: one was bad, and the policy is to stop; one that was not finite left its state
            as it was, and is not saved.
          _BadStep: one was bad, and the policy is to roll back.
        """
        read = [row for row in self.unread if row.step <= last]
        del self.unread[: len(read)]
        rows = jax.device_get(read)
        for number, row in enumerate(rows):
            judged = self.guard.judge(row)
            if judged.decision == "go on":
                continue
            self._require_rows()
            if judged.decision == "skip":
                self.parts.show.say(
                    f"warning: step {row.step} is skipped: loss {row.loss} and gradient norm "
                    f"{row.norm} ({self.guard.bad_steps} of train.max_bad_steps="
                    f"{self.config.train.max_bad_steps})"
                )
                continue
            after = [*rows[number + 1 :], *jax.device_get(self.unread)]
            said = self._said_of(row, sum(later.finite for later in after), judged.why)
            if judged.decision == "rollback":
                raise _BadStep(row.step, said)
            trained = self.experiment.model.trained(self.state.params)
            saved = self.opened.checkpoints.latest()
            raise Diverged(divergence_message(row, trained, saved, self.opened.folder, said))
        self.places = {step: place for step, place in self.places.items() if step > last}

    def _said_of(self, row: StepNumbers, moved: int, why: str) -> str:
        """What to say of a bad step, after which so many steps were finite."""
        looked = ""
        if row.kept_state and row.step in self.places:
            self.parts.show.say(f"step {row.step} was not finite: it is looked at once more")
            try:
                with self._apart():
                    looked = self._look_again(row, moved)
            except (jax.errors.JaxRuntimeError, UserError) as error:
                looked = f"it could not be looked at again ({compiler_message(str(error))})"
        return "; ".join(filter(None, (looked, why)))

    def _roll_back(self, bad: _BadStep) -> int:
        """Take the last checkpoint, and go on from it with the batches after those that were read;
        return its step.
        """
        say = self.parts.show.say
        run = self.opened
        with self._apart():
            run.checkpoints.wait()
            saved = run.checkpoints.latest()
            step = saved or 0
            where = "the beginning" if saved is None else f"the checkpoint of step {step}"
            say(f"warning: step {bad.step} was bad: {bad.said or 'its update was not finite'}")
            say(
                f"the run goes on from {where}, with the batches after those that were read "
                f"({self.guard.bad_steps} of train.max_bad_steps={self.config.train.max_bad_steps})"
            )
            self.unread.clear()
            self.positions.clear()
            self.places.clear()
            start = first_step(run._replace(first=step, is_new=saved is None), say)
            self.state = start.state
            states = self.first_states if start.stateful is None else start.stateful
            run_together(lambda: load_states(self.parts.stateful, states, say))
        self.guard.roll_back(step)
        self.meter.restart(step)
        self.parts.log.go_back(step)
        return step

    def _look_again(self, row: StepNumbers, moved: int) -> str:
        """Look for what was not finite in a step, and run it again, on its batch and the next. What
        becomes of the state is not the run's any more.
        """
        sharding = self.state.step.sharding
        before = jax.make_array_from_callback((), sharding, lambda _: np.int32(row.step - 1))
        batches = rows_at(self.opened, self.places[row.step], 2)
        first, second = (put_batch(rows, self.experiment.plan) for rows in batches)
        first |= self._answers(first, {})
        self.state = self.state._replace(step=before)
        said = first_nonfinite(self.experiment, self.state, first)
        again = self._run_again(row.step, first)
        another = None
        if not again.finite:
            another = self._run_again(row.step + 1, second | self._answers(second, {}))
        return f"{said}; {verdict(row, again, another, moved)}"

    def _run_again(self, step: int, batch: dict[str, jax.Array]) -> StepNumbers:
        """Run a step, and read its numbers."""
        self.state, metrics = self.program(self.state, batch)
        told = (metrics["loss"], metrics["grad_norm"], metrics["overflows"])
        return jax.device_get(StepNumbers(step, *told))

    def _replica_check(self) -> ReplicaCheck | None:
        """What compares the copies of the state, where the config asks for it."""
        if not self.config.train.check_replicas:
            return None
        check = ReplicaCheck(self.experiment.state, self.experiment.plan.mesh)
        self.parts.show.say(replicas_note(check))
        return check

    def _compares_replicas(self, step: int) -> bool:
        """Whether the copies of the state are compared after a step because of its number."""
        return self.replicas is not None and is_due(step, self.config.train.check_replicas)

    def _require_alike(self, step: int) -> None:
        """Stop if devices hold other copies of the state than their peers, which is then not saved.

        Raises:
          CopiesDiffer: they do.
        """
        if self.replicas is None:
            return
        found = self.replicas.mismatches(self.state)
        if not found:
            return
        said = mismatch_message(found, self.config.train.check_replicas, step)
        saved = self.opened.checkpoints.latest()
        kept = "no checkpoint was saved before"
        if saved is not None:
            kept = f"the checkpoint of step {saved} is kept"
        raise CopiesDiffer(f"{said}; {kept}")

    def _evaluate(self, step: int, final: bool = False) -> float | None:
        """Evaluate a step; None where the run was told to stop before the end of it."""
        with self._reading_data():
            params = self.evaluation_params()
            return self.parts.evaluations.evaluate(step, params, self.parts.log, final)

    def evaluation_params(self) -> Params:
        """The parameters as they are evaluated: the average of an optimizer that has one."""
        return evaluation_params(self.experiment.model, self.state, self.experiment.optimizer)


class _Skipped:
    """The records that were left out, and how many of each kind were told."""

    def __init__(self, corpus: Corpus, say: Callable[[str], None]):
        self._corpus = corpus
        self._say = say
        self._training = skipped_records(corpus.train)
        self._told = dict[int, int]()

    @property
    def in_training(self) -> int:
        """How many records of the training data were left out."""
        return sum(count.count for count in self._training)

    def say_more(self) -> None:
        """Say how many records were left out, whenever there are more; of the validation data,
        which are read again at each evaluation, once.
        """
        validation = []
        if self._corpus.val is not None:
            validation = skipped_records(self._corpus.val)
        for number, count in enumerate([*self._training, *validation]):
            told = self._told.get(number, 0)
            if count.count > told and not (told and count in validation):
                self._told[number] = count.count
                self._say(f"warning: {count.text}")


def evaluate_missed(
    parts: _Parts,
    missed: set[str],
    params: Callable[[], Params],
) -> None:
    """Make up for evaluations of the step to go on after."""
    if not missed:
        return
    evaluations = parts.evaluations
    first = parts.run.first
    evaluations.compile_beside(parts.beside)
    if METRIC in missed:
        loss = evaluations.evaluate(first, params(), parts.log)
        if loss is not None:
            parts.run.checkpoints.record(first, loss)
    if FINAL + METRIC in missed and not evaluations.cut_short:
        evaluations.evaluate(first, params(), parts.log, final=True)


def _make_up(parts: _Parts, missed: set[str], entropy: float) -> None:
    """Make up for the evaluation of the last step, after which there is nothing to train."""
    start = first_step(parts.run, parts.show.say)
    for line in banner_lines(parts.run, start.state, entropy):
        parts.show.say(line)
    experiment = parts.run.experiment
    params = evaluation_params(experiment.model, start.state, experiment.optimizer)
    with parts.show:
        evaluate_missed(parts, missed, lambda: params)


def _compile(experiment: Experiment) -> tuple[Compiled, str]:
    """Compile the step ahead, so that the first is timed like the others; return it and a line to
    say about it.
    """
    began = time.perf_counter()
    model = experiment.model
    step = make_train_step(model, experiment.config, experiment.plan, experiment.optimizer)
    compiled = step.lower(experiment.state, experiment.batch).compile()
    require_order(compiled, experiment.devices)
    used = ""
    if memory := compiled.memory_analysis():
        used = f": {bytes_text(memory.temp_size_in_bytes)} of temporaries per device"
    return compiled, f"compiled the training step in {time.perf_counter() - began:.1f} s{used}"


def _open_log(
    opened: OpenRun,
    report: Report | None,
    say: Callable[[str], None],
) -> MetricsLog:
    """Open the log and the sinks, before anything is compiled: where one is refused, no process
    waits for it.
    """
    main = jax.process_index() == 0
    config = opened.experiment.config
    names = config.metrics.sinks if main else ()
    place = (config, opened.folder, opened.first, say)

    def open_all() -> MetricsLog:
        sinks = [Sink(name, *place) for name in names]
        return MetricsLog(opened.folder, opened.first, main, sinks, report, say)

    return run_together(open_all)


def _profile_advice(opened: OpenRun, evaluations: Evaluations) -> str:
    """Steps of `metrics.profile` that this call could trace, as they are written."""
    # the first step after a start is slower than the others
    first = min(opened.first + 2, opened.last)
    last = min(first + 4, opened.last)
    due = [step for step in range(first, last) if evaluations.is_due(step)]
    return f"{first}:{min([last, *due])}"


def _done_already(opened: OpenRun) -> str:
    """What to say where there is nothing to train."""
    steps = opened.experiment.config.train.steps
    more = "steps extends it"
    if opened.last < steps:
        more = f"stop-at 0 goes on to step {steps}"
    done = f"step {opened.first} of {opened.last} is done already: nothing to train"
    return f"{done} (--train.{more}); see {opened.folder}"


def _ended(step: int, val_loss: float | None, seconds: float, entropy: float) -> str:
    """What to say of a run that reached its last step, or `train.stop_at`."""
    val = ""
    if val_loss is not None:
        val = f", validation loss {val_loss:.4f} nats a token"
    took = duration_text(seconds)
    return f"step {step} done in {took} of training{val} (unigram entropy {entropy:.3f})"


def _stopped(step: int, in_evaluation: bool, why: str) -> str:
    """What to say of a run that was told to stop; `why` is known to the process that was told."""
    by = f" by {why}" if why else ""
    where = "in the evaluation" if in_evaluation else ""
    place = f"stopped{by} {where}".rstrip()
    return f"{place} after step {step}, saved; the same command goes on from there"


@contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """Give a thread that is waited for, except after Ctrl-C: it may be in the compiler, which
    nothing interrupts.
    """
    pool = ThreadPoolExecutor(1)
    wait = True
    try:
        yield pool
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait, cancel_futures=not wait)
