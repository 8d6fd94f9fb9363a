"""Runs a step: its batch is read and goes to the devices, a teacher that runs beside answers it,
and the program makes the next state.

A checkpoint keeps the place in the data after its step, so that the run goes on with the next
batch; a step that is looked at once more is read again from the place before it. The places of
steps that have been judged are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from grain import DatasetIterator
from jax.stages import Compiled

from jaxpar.base.process.multihost import Batches
from jaxpar.base.process.preemption import ask_to_stop
from jaxpar.data.streams.tokens import HostBatch
from jaxpar.train.batch import empty_batch, put_batch
from jaxpar.train.loop.timing import Timing
from jaxpar.train.opening import FirstStep, OpenRun, rows_at
from jaxpar.train.run_data import data_errors

Metrics = dict[str, jax.Array]
"""What a step returns beside its state (see `make_train_step`)."""


class StepBatches:
    """This process's rows of the batch of each step, in the order of the data. A run that rolls
    back goes on in the data where it was.
    """

    def __init__(self, run: OpenRun, data: DatasetIterator[HostBatch]):
        """Take the run, and the data at their place after its first step."""
        absent = empty_batch(run.experiment.config, run.experiment.plan, absent=True)
        self._run = run
        self._data = data
        self._rows = Batches(data, absent, ask_to_stop)
        self._place = data.get_state()
        self._after: dict[int, Any] = {run.after: self._place}
        """The place after a step's batch, by step."""

    def next_rows(self, step: int) -> HostBatch:
        """Read the rows of a step's batch.

        Where one of several processes cannot, it says so later (`require`), and its rows are void.
        """
        with data_errors():
            rows = next(self._rows)
        if not self._rows.failed:
            self._place = self._data.get_state()
            self._after[step] = self._place
        return rows

    def read_again(self, step: int, count: int) -> list[HostBatch]:
        """Read the rows of a step's batch once more, and of those after it.

        Args:
          step: the step, which was not judged yet (`forget_before`).

        Raises:
          UserError: they cannot be read, here or by another process.
        """
        return rows_at(self._run, self._after[step - 1], count)

    def require(self) -> None:
        """Raise on every process the error that kept one from reading; all call this together.

        Raises:
          UserError: the data cannot be read.
        """
        with data_errors():
            self._rows.require()

    def place_after(self, step: int) -> Any | None:
        """The state of the data's iterator after a step's batch; None = it is not known."""
        return self._after.get(step)

    def forget_before(self, step: int) -> None:
        """Forget the places before a step, which is the last one that was judged."""
        self._after = {known: place for known, place in self._after.items() if known >= step}

    def forget_all(self) -> None:
        """Forget all places: the steps that they belong to count for nothing."""
        self._after.clear()

    def go_on_after(self, step: int) -> None:
        """Take the batches that come now for those of the steps after this one."""
        self._after = {step: self._place}


class StepRunner:
    """Runs the steps of a call, one after another.

    Attributes:
      program: the compiled step.
      state: the state after the last step that has begun.
      batches: reads the rows of each batch, and knows their place in the data.
    """

    def __init__(self, run: OpenRun, program: Compiled, start: FirstStep, timing: Timing):
        """Take a run, its compiled step, what it begins with, and what is told of each step's
        time.
        """
        self.program = program
        self.state = start.state
        self.batches = StepBatches(run, start.data)
        self._run = run
        self._timing = timing

    def begin(self, step: int, before: Metrics) -> Metrics:
        """Start a step. All processes must call this.

        Args:
          before: the metrics of the one before it.

        Returns:
          Its metrics, which arrive when it has run.
        """
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with self._timing.waiting():
                batch = put_batch(self.batches.next_rows(step), self._run.experiment.plan)
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
        for rows in self.batches.read_again(step, 2):
            batch = put_batch(rows, self._run.experiment.plan)
            yield batch | self._answers(batch, {})

    def _answers(self, batch: Mapping[str, jax.Array], before: Metrics) -> dict[str, jax.Array]:
        """What a teacher that runs beside says of a batch; nothing where there is none."""
        teacher = self._run.teacher
        if teacher is None or teacher.live is None:
            return {}
        if self._run.experiment.platform == "cpu":  # see `LiveTeacher.answer`
            jax.block_until_ready(before)
        return teacher.live.answer(batch)
