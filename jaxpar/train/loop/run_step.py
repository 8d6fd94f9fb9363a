"""Runs a step: its batch goes to the devices, a teacher that runs beside answers it, and the
program makes the next state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
from jax.stages import Compiled

from jaxpar.train.batch import put_batch
from jaxpar.train.loop.batches import StepBatches
from jaxpar.train.loop.timing import Timing
from jaxpar.train.opening import OpenRun
from jaxpar.train.state import TrainState

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
        run: OpenRun,
        program: Compiled,
        state: TrainState[jax.Array],
        batches: StepBatches,
        timing: Timing,
    ):
        """Take a run, its compiled step, the state and the batches that it begins with, and what is
        told of each step's time.
        """
        self.program = program
        self.state = state
        self._run = run
        self._experiment = run.experiment
        self._batches = batches
        self._timing = timing

    def begin(self, step: int, before: Metrics) -> Metrics:
        """Start a step. All processes must call this.

        Args:
          step: its number.
          before: the metrics of the one before it.

        Returns:
          Its metrics, which arrive when it has run.
        """
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with self._timing.waiting():
                batch = put_batch(self._batches.next_rows(step), self._experiment.plan)
            batch |= self._answers(batch, before)
            self.state, metrics = self.program(self.state, batch)
            self._timing.step_began(metrics)
        return metrics

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

    def _answers(self, batch: Mapping[str, jax.Array], before: Metrics) -> dict[str, jax.Array]:
        """What a teacher that runs beside says of a batch; nothing where there is none."""
        teacher = self._run.teacher
        if teacher is None or teacher.live is None:
            return {}
        if self._experiment.platform == "cpu":  # see `LiveTeacher.answer`
            jax.block_until_ready(before)
        return teacher.live.answer(batch)
