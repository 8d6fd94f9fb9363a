"""Runs a step: its batch goes to the devices, a teacher that runs beside answers it, and the
program makes the next state. Another thread does meanwhile what need not keep a step waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import jax
from jax.stages import Compiled

from jaxpar.models import Params
from jaxpar.train.batch import put_batch
from jaxpar.train.loop.batches import StepBatches
from jaxpar.train.loop.parts import Parts
from jaxpar.train.loop.timing import Timing
from jaxpar.train.state import TrainState
from jaxpar.train.step import evaluation_params

Metrics = dict[str, jax.Array]
"""What a step returns beside its state (see `make_train_step`)."""


class StepRunner:
    """Runs the steps of a call, one after another.

    Attributes:
      program: the compiled step.
      state: the state after the last step that has begun.
    """

    def __init__(
        self,
        parts: Parts,
        program: Compiled,
        state: TrainState[jax.Array],
        batches: StepBatches,
        timing: Timing,
    ):
        """Take what the call hands to its steps, the compiled step, the state and the batches that
        it begins with, and what is told of each step's time.
        """
        self.program = program
        self.state = state
        self._run = parts.run
        self._experiment = parts.run.experiment
        self._profile = parts.profile
        self._parts = parts
        self._batches = batches
        self._timing = timing
        self._went_back = False
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
        traces = not self._went_back  # a step that is run again is not traced again
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
            self._lines = self._parts.beside.submit(write, self.program, devices)
        if step == self._run.after + 1 and not self._went_back:
            self._start_beside()
        return metrics

    def go_on_with(self, state: TrainState[jax.Array]) -> None:
        """Take the state of an earlier step, from which the run goes on."""
        self.state = state
        self._went_back = True

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

    def finish(self) -> None:
        """Wait for what runs beside the steps."""
        if self._watching is not None:
            self._watching.result()
        if self._lines is not None:
            self._lines.result()
            folder = self._run.folder
            where = self._profile.file.parent
            self._parts.show.say(f"wrote {where}: `jaxpar watch {folder} --profile` shows it")

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
        beside = self._parts.beside
        self._parts.evaluations.compile_beside(beside)
        if jax.process_index() == 0:
            self._watching = beside.submit(self._parts.watch, self._experiment, self.program)
