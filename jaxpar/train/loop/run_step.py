"""Runs a step: its batch goes to the devices, a teacher that runs beside answers it, and the
program makes the next state. Another thread does meanwhile what need not keep a step waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

import jax
from jax.stages import Compiled

from jaxpar.models import Params
from jaxpar.train.batch import put_batch
from jaxpar.train.hooks import Hook
from jaxpar.train.loop.batches import StepBatches
from jaxpar.train.loop.timing import Timing
from jaxpar.train.metrics import Profile
from jaxpar.train.opening import OpenRun
from jaxpar.train.state import TrainState
from jaxpar.train.step import evaluation_params

Metrics = dict[str, jax.Array]
"""What a step returns beside its state (see `make_train_step`)."""


class StepRunner:
    """Runs the steps of a call, one after another.

    Attributes:
      program: the compiled step.
      state: the state after the last step that has begun.
      went_back: whether the state is that of an earlier step than was begun.
    """

    def __init__(
        self,
        run: OpenRun,
        program: Compiled,
        state: TrainState[jax.Array],
        batches: StepBatches,
        timing: Timing,
        profile: Profile,
        beside: Executor,
    ):
        """Take a run, its compiled step, the state and the batches that it begins with, what is
        told of each step's time, the trace of some steps, and the other thread.
        """
        self.program = program
        self.state = state
        self.went_back = False
        self._run = run
        self._experiment = run.experiment
        self._profile = profile
        self._beside = beside
        self._batches = batches
        self._timing = timing
        self._watching: Future[None] | None = None
        self._lines: Future[None] | None = None

    def begin(self, step: int, before: Metrics) -> Metrics:
        """Start a step. All processes must call this.

        Args:
          step: its number.
          before: the metrics of the one before it.

        Returns:
          Its metrics, which arrive when it has run.
        """
        traces = not self.went_back  # a step that is run again is not traced again
        if traces and step == self._profile.first:
            with self._timing.apart("other", after=before):
                self._profile.start()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with self._timing.waiting():
                batch = put_batch(self._batches.next_rows(step), self._experiment.plan)
            batch |= self._answers(batch, before)
            self.state, metrics = self.program(self.state, batch)
            self._timing.step_began(metrics)
        if traces and step == self._profile.last:
            with self._timing.apart("other", after=metrics):
                self._profile.close()
            write = self._profile.write_lines
            devices = self._experiment.devices
            self._lines = self._beside.submit(write, self.program, devices)
        return metrics

    def go_on_with(self, state: TrainState[jax.Array]) -> None:
        """Take the state of an earlier step, from which the run goes on."""
        self.state = state
        self.went_back = True

    def batches_again(self, step: int) -> Iterator[dict[str, jax.Array]]:
        """Give the batch of a step, and the one after it, once more.

        Args:
          step: the step, which was not judged yet.

        Raises:
          UserError: they cannot be read, here or by another process.
        """
        for rows in self._batches.read_again(step, 2):
            batch = put_batch(rows, self._experiment.plan)
            yield batch | self._answers(batch, {})

    def evaluation_params(self) -> Params:
        """Return the parameters as they are evaluated: the average of an optimizer that has one."""
        return evaluation_params(self._experiment, self.state)

    def finish(self) -> Path | None:
        """Wait for what runs beside the steps; return the folder of a trace that it has written."""
        if self._watching is not None:
            self._watching.result()
        if self._lines is None:
            return None
        self._lines.result()
        return self._profile.file.parent

    def show_program(self, hooks: Sequence[Hook]) -> None:
        """Have the other thread show the compiled step to hooks."""

        def show() -> None:
            for hook in hooks:
                hook.on_compiled(self.program)

        self._watching = self._beside.submit(show)

    def _answers(self, batch: Mapping[str, jax.Array], before: Metrics) -> dict[str, jax.Array]:
        """What a teacher that runs beside says of a batch; nothing where there is none."""
        teacher = self._run.teacher
        if teacher is None or teacher.live is None:
            return {}
        if self._experiment.platform == "cpu":  # see `LiveTeacher.answer`
            jax.block_until_ready(before)
        return teacher.live.answer(batch)
