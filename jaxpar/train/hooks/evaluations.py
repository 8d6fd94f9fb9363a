"""The evaluations of a run: when they are due, which one an error has cost, and how they are made
and told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple

import jax
from jax.stages import Compiled

from jaxpar.base.console import duration_text
from jaxpar.base.errors import Say
from jaxpar.base.process.multihost import numbers_from_first, run_on_first, run_together
from jaxpar.base.process.preemption import Stop
from jaxpar.data.corpus import val_batch_count
from jaxpar.models import Params
from jaxpar.train.evaluate import evaluate, final_batches
from jaxpar.train.guard.failures import EVALUATION, STEP, Running
from jaxpar.train.hooks.hook import Hook, HookedRun, is_due
from jaxpar.train.metrics import MetricsLog, read_metrics
from jaxpar.train.opening import OpenRun
from jaxpar.train.run_data import data_errors
from jaxpar.train.runs.folder.val_losses import METRIC
from jaxpar.train.state import TrainState
from jaxpar.train.step import compile_eval_step, evaluation_params

FINAL = "final_"
"""What stands before the metrics of the evaluation after the last step."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at whether a run is to stop, while it waits for a program."""


class _Stopped(Exception):
    """The run was told to stop in the middle of an evaluation."""


def evaluates_after(run: OpenRun, step: int) -> bool:
    """Whether a run has an evaluation after a step."""
    every = run.experiment.config.train.eval_every
    return run.corpus.val is not None and (step == run.last or is_due(step, every))


def _is_final(run: OpenRun, step: int) -> bool:
    """Whether the evaluation after the last step of all takes other batches than the rest."""
    train = run.experiment.config.train
    other = final_batches(train) != train.eval_batches
    return run.corpus.val is not None and step == train.steps and other


def losses_after(run: OpenRun, step: int) -> dict[str, float | None]:
    """Find the losses of the evaluations that are due after a step which was made. All processes
    must call this.

    Returns:
      The loss by its name in `metrics.jsonl`; None = an error or a stop ended the evaluation.
    """
    due = {METRIC: evaluates_after(run, step), FINAL + METRIC: _is_final(run, step)}
    names = [name for name, is_due_now in due.items() if is_due_now and step]
    found = run_on_first(lambda: _written(run, step, names))
    text = bytes(numbers_from_first(json.dumps(found or {}).encode()))
    return json.loads(text)


def _written(run: OpenRun, step: int, names: Sequence[str]) -> dict[str, float | None]:
    rows = [row for row in read_metrics(run.folder) if row["step"] == step]
    known = {key: value for row in rows for key, value in row.items()}
    return {name: known.get(name) for name in names}


def misses_an_evaluation(run: OpenRun) -> bool:
    """Whether an evaluation after the step that a run goes on after is missing. All processes must
    call this.
    """
    return None in losses_after(run, run.after).values()


class Evaluations(Hook):
    """The evaluations of a run, whose program another thread compiles while the first step runs.

    One that the run is told to stop in the middle of is left (`Stop.cut_short`), and the next call
    makes up for it.

    Attributes:
      last_loss: the loss of the last one, in nats a token; None = none was made.
    """

    needs_good = True

    def __init__(
        self,
        run: OpenRun,
        log: MetricsLog,
        running: Running,
        stop: Stop,
        beside: Executor,
        others: Sequence[Hook] = (),
        batch_done: Callable[[], None] = lambda: None,
        patience: float = 20.0,
    ):
        """Take a run.

        Args:
          log: where losses are written.
          running: is told when an evaluation runs.
          stop: says when to leave an evaluation, between two batches.
          beside: the thread that compiles.
          others: hooks that may give other parameters, and are told of each loss.
          batch_done: is called before the first batch, when its program is there, and after each.
          patience: the seconds after which an evaluation says how far it is.
        """
        self.last_loss: float | None = None
        self._opened = run
        self._log = log
        self._running = running
        self._stop = stop
        self._beside = beside
        self._others = others
        self._batch_done = batch_done
        self._patience = patience
        self._program: Future[Compiled] | None = None
        self._before: _Evaluated | None = None

    def is_due(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        return evaluates_after(self._opened, step)

    def on_begin(self, run: HookedRun, state: TrainState[jax.Array]) -> None:
        """Take the run, and make the evaluations that the step before its first has missed. Those
        that were made are told again: a step is saved, with what hooks know, before it is
        evaluated.
        """
        self._run = run
        for name, loss in losses_after(self._opened, run.after).items():
            if loss is not None:
                self._tell(run.after, loss)
            elif not self._stop.cut_short:
                with run.apart("evaluation"):
                    self._evaluate_and_tell(run.after, state, final=name.startswith(FINAL))

    def on_started(self, step: int) -> None:
        """Have the other thread compile the evaluation while the first step runs."""
        if self._opened.corpus.val is not None:
            self._compile_beside()

    def on_step(self, step: int, state: TrainState[jax.Array]) -> None:
        """Evaluate a step, and the last one of all once more where that takes other batches. The
        loss of any but the last evaluation is that of the step's checkpoint.
        """
        with self._run.apart("evaluation"):
            self._evaluate_and_tell(step, state)
            if _is_final(self._opened, step) and not self._stop.cut_short:
                self._evaluate_and_tell(step, state, final=True)

    def _evaluate_and_tell(
        self, step: int, state: TrainState[jax.Array], final: bool = False
    ) -> None:
        """Evaluate a step, and tell its checkpoint and the other hooks, unless the run was told to
        stop before the end.
        """
        loss = self._evaluate(step, state, final)
        if loss is None:
            return
        if not final:
            self._opened.checkpoints.record(step, loss)
        self._tell(step, loss)

    def _tell(self, step: int, loss: float) -> None:
        for hook in self._others:
            hook.on_evaluation(step, loss)

    def _evaluate(self, step: int, state: TrainState[jax.Array], final: bool) -> float | None:
        """Evaluate a step, and print and write its loss.

        Args:
          state: the state after it.
          final: whether it is the evaluation after the last step of all.

        Returns:
          The loss in nats a token; None where the run was told to stop before its end.

        Raises:
          UserError: a process could not read its rows.
        """
        params = evaluation_params(self._opened.experiment, state)
        for hook in self._others:
            params = hook.evaluated(params)
        if final and (known := self._loss_of_final(step)) is not None:
            self._log.write(step, **{FINAL + METRIC: known})
            return known
        self._running.program = EVALUATION
        try:
            loss = self._measure(step, params, final)
        except _Stopped:
            self._stop.cut_short = True
            loss = None
        self._running.program = STEP  # after any other error, it is known which program it is of
        return loss

    def _loss_of_final(self, step: int) -> float | None:
        """The loss of the last evaluation, if it was of this step and read the whole set, and the
        one after the last step of all would read the same; else None.
        """
        before = self._before
        if before is None or before.step != step or not before.whole:
            return None
        limit = final_batches(self._opened.experiment.config.train)
        return before.loss if limit == 0 or limit >= before.batches else None

    def _measure(self, step: int, params: Params, final: bool) -> float:
        """Compute the loss of some parameters, and print and write it."""
        corpus = self._opened.corpus
        experiment = self._opened.experiment
        train = experiment.config.train
        assert corpus.val is not None
        if final:
            limit = final_batches(train)
        else:
            limit = train.eval_batches
        progress = _Progress(self._run.say, limit, final, self._patience)
        with self._run.apart("compiling"):
            program = self._await_program()
        self._batch_done()

        def tick(count: int) -> None:
            self._batch_done()
            progress.tick(count)
            if self._stop.reached():
                raise _Stopped

        with data_errors():
            loss = evaluate(experiment, program, params, corpus, limit, tick)
        data = experiment.config.data
        every = val_batch_count(corpus.val, data, train.batch)
        whole = not limit or progress.done < limit or progress.done == every
        self._before = _Evaluated(step, progress.done, whole, loss)
        prefix = FINAL if final else ""
        self._log.write(step, **{prefix + METRIC: loss})
        over = "the whole set"
        if not whole:
            over = f"{progress.done} batches"
            if final and limit != train.final_eval_batches:
                more = f"`jaxpar eval {self._opened.folder}` takes more"
                over += f", as many as there were steps; {more}"
        self._run.say(
            f"step {step}  validation loss {loss:.4f}  ({over}, {progress.seconds:.1f} s)"
        )
        self.last_loss = loss
        return loss

    def _await_program(self) -> Compiled:
        """Wait for the other thread's program, unless the run is to stop."""
        program = self._compile_beside()
        if self._stop.reached_already:
            raise _Stopped
        while not program.done() and jax.process_count() == 1:
            if self._stop.asked_alone:
                raise _Stopped
            wait_for([program], timeout=_LOOK_EVERY)
        return run_together(program.result)

    def _compile_beside(self) -> Future[Compiled]:
        """Have the other thread compile the evaluation, unless it has."""
        if self._program is None:
            self._program = self._beside.submit(compile_eval_step, self._opened.experiment)
        return self._program


class _Evaluated(NamedTuple):
    """An evaluation that was made."""

    step: int
    batches: int
    whole: bool
    """Whether they are all of the validation set."""
    loss: float


class _Progress:
    """How far an evaluation is, which is said where it takes long."""

    def __init__(
        self,
        say: Say,
        limit: int,
        final: bool,
        patience: float,
    ):
        self.done = 0
        self._say = say
        self._of = f" of {limit}" if limit else ""
        self._key = "train.final_eval_batches" if final else "train.eval_batches"
        self._patience = patience
        self._began = time.perf_counter()
        self._told = self._began

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.perf_counter() - self._began

    def tick(self, count: int) -> None:
        """Note that so many batches are done."""
        self.done = count
        now = time.perf_counter()
        if now - self._told > self._patience:
            self._told = now
            took = duration_text(now - self._began)
            self._say(f"evaluating: {count}{self._of} batches in {took}; {self._key} takes fewer")
