"""The evaluations of a run: when they are due, which one an error has cost, and how they are made
and told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple

import jax
from jax.stages import Compiled

from jaxpar.base.console import duration_text
from jaxpar.base.errors import Say
from jaxpar.base.process.multihost import run_together, told_by_first
from jaxpar.base.process.preemption import Stop
from jaxpar.data.corpus import val_batch_count
from jaxpar.models import Params
from jaxpar.train.evaluate import evaluate, final_batches
from jaxpar.train.goodput import Clock
from jaxpar.train.guard.failures import EVALUATION, STEP, Running
from jaxpar.train.metrics import MetricsLog, read_metrics
from jaxpar.train.opening import OpenRun
from jaxpar.train.runs.folder.val_losses import METRIC
from jaxpar.train.step import compile_eval_step

FINAL = "final_"
"""What stands before the metrics of the evaluation after the last step."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at whether a run is to stop, while it waits for a program."""


class _Stopped(Exception):
    """The run was told to stop in the middle of an evaluation."""


def is_due(step: int, every: int) -> bool:
    """Whether what happens every so many steps (0 = never) happens after this one."""
    return every > 0 and step % every == 0


class Evaluations:
    """The evaluations of a run, whose program another thread compiles.

    Attributes:
      last_loss: that of the last one, in nats a token; None = none was made.
      cut_short: whether the run was told to stop before the end of one that was due. The next call
        makes up for it (`missed`).
    """

    def __init__(
        self,
        run: OpenRun,
        say: Say,
        running: Running,
        stop: Stop,
        patience: float = 20.0,
        clock: Clock | None = None,
    ):
        """Take a run.

        Args:
          run: the run.
          say: prints a line.
          running: is told when an evaluation runs.
          stop: says when to leave an evaluation, between two batches.
          patience: the seconds after which an evaluation says how far it is.
          clock: counts the time of evaluations; None = nobody asks for it.
        """
        self.last_loss: float | None = None
        self.cut_short = False
        self._run = run
        self._stop = stop
        self._say = say
        self._running = running
        self._patience = patience
        self._clock = Clock() if clock is None else clock
        self._program: Future[Compiled] | None = None
        self._before: _Evaluated | None = None

    def is_due(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        every = self._run.experiment.config.train.eval_every
        at_end = step == self._run.last
        return self._run.corpus.val is not None and (at_end or is_due(step, every))

    def is_final(self, step: int) -> bool:
        """Whether the evaluation after the last step of all takes other batches than the rest."""
        train = self._run.experiment.config.train
        other = final_batches(train) != train.eval_batches
        return self._run.corpus.val is not None and step == train.steps and other

    def missed(self) -> set[str]:
        """The metrics that the step to go on after should have and has not, because an error ended
        its evaluation.
        """
        step = self._run.after
        if not step:
            return set()
        due = {METRIC: self.is_due(step), FINAL + METRIC: self.is_final(step)}
        if jax.process_index() == 0:
            rows = read_metrics(self._run.folder)
        else:
            rows = []
        known = {key for row in rows if row["step"] == step for key in row}
        return {key for key, due_now in due.items() if told_by_first(due_now and key not in known)}

    def compile_beside(self, beside: Executor) -> None:
        """Have another thread compile the evaluation, unless it has."""
        experiment = self._run.experiment
        if self._program is None and self._run.corpus.val is not None:
            self._program = beside.submit(compile_eval_step, experiment)

    def make_up(
        self,
        missed: set[str],
        params: Callable[[], Params],
        log: MetricsLog,
        beside: Executor,
    ) -> None:
        """Make the evaluations that the step to go on after should have and has not.

        Args:
          missed: what `missed` returned.
          params: returns the parameters of that step.
          log: where the losses are written.
          beside: the thread that compiles.

        Raises:
          UserError: a process could not read its rows.
        """
        if not missed:
            return
        step = self._run.after
        self.compile_beside(beside)
        if METRIC in missed:
            loss = self.evaluate(step, params(), log)
            if loss is not None:
                self._run.checkpoints.record(step, loss)
        if FINAL + METRIC in missed and not self.cut_short:
            self.evaluate(step, params(), log, final=True)

    def evaluate(
        self,
        step: int,
        params: Params,
        log: MetricsLog,
        final: bool = False,
        batch_done: Callable[[], None] = lambda: None,
    ) -> float | None:
        """Evaluate a step, and print and write its loss.

        Args:
          step: the step.
          params: its parameters.
          log: where the loss is written.
          final: whether it is the evaluation after the last step of all.
          batch_done: is called before the first batch, when its program is there, and after each.

        Returns:
          The loss in nats a token; None where the run was told to stop before its end.

        Raises:
          UserError: a process could not read its rows.
        """
        if final and (known := self._loss_of_final(step)) is not None:
            log.write(step, **{FINAL + METRIC: known})
            return known
        self._running.program = EVALUATION
        try:
            with self._clock.during("evaluation"):
                loss = self._evaluate(step, params, log, final, batch_done)
        except _Stopped:
            self.cut_short = True
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
        limit = final_batches(self._run.experiment.config.train)
        return before.loss if limit == 0 or limit >= before.batches else None

    def _evaluate(
        self,
        step: int,
        params: Params,
        log: MetricsLog,
        final: bool,
        batch_done: Callable[[], None],
    ) -> float:
        corpus = self._run.corpus
        experiment = self._run.experiment
        train = experiment.config.train
        assert corpus.val is not None
        if final:
            limit = final_batches(train)
        else:
            limit = train.eval_batches
        progress = _Progress(self._say, limit, final, self._patience)
        with self._clock.during("compiling"):
            program = self._await_program()
        batch_done()

        def tick(count: int) -> None:
            batch_done()
            progress.tick(count)
            if self._stop.reached():
                raise _Stopped

        loss = evaluate(experiment, program, params, corpus, limit, tick)
        data = experiment.config.data
        every = val_batch_count(corpus.val, data, train.batch)
        whole = not limit or progress.done < limit or progress.done == every
        self._before = _Evaluated(step, progress.done, whole, loss)
        prefix = FINAL if final else ""
        log.write(step, **{prefix + METRIC: loss})
        over = "the whole set"
        if not whole:
            over = f"{progress.done} batches"
            if final and limit != train.final_eval_batches:
                more = f"`jaxpar eval {self._run.folder}` takes more"
                over += f", as many as there were steps; {more}"
        self._say(f"step {step}  validation loss {loss:.4f}  ({over}, {progress.seconds:.1f} s)")
        self.last_loss = loss
        return loss

    def _await_program(self) -> Compiled:
        """Wait for the other thread's program, unless the run is to stop."""
        assert self._program is not None
        if self._stop.reached_already:
            raise _Stopped
        while not self._program.done() and jax.process_count() == 1:
            if self._stop.asked_alone:
                raise _Stopped
            wait_for([self._program], timeout=_LOOK_EVERY)
        return run_together(self._program.result)


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
