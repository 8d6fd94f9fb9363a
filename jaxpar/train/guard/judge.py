"""Reads what steps say of themselves once they have run, and has the guard judge them in their
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from jaxpar.base.config import TrainConfig
from jaxpar.base.errors import Say
from jaxpar.train.guard.failures import StepNumbers
from jaxpar.train.guard.policy import Guard, Judgement


class BadStep(Exception):
    """A step after which the run does not simply go on.

    Attributes:
      numbers: what it said of itself, read.
      judged: what the guard makes of it: to roll back, or to stop.
      finite_since: how many steps after it have run and were finite.
    """

    def __init__(self, numbers: StepNumbers, judged: Judgement, finite_since: int):
        super().__init__(f"step {numbers.step}: {judged.decision}")
        self.numbers = numbers
        self.judged = judged
        self.finite_since = finite_since


class Judge:
    """The steps that have begun and were not judged yet, and what judges them.

    Between two log lines their numbers stay on the devices and are read all at once, so that no
    step waits for them to arrive, unless the guard reads each.
    """

    def __init__(
        self,
        guard: Guard,
        train: TrainConfig,
        require_rows: Callable[[], None],
        say: Say,
    ):
        """Take what judges.

        Args:
          guard: decides what becomes of a step.
          train: its settings, which a message names.
          require_rows: raises where a process could not read its rows, which makes a step void.
          say: prints a line.
        """
        self.guard = guard
        self._train = train
        self._require_rows = require_rows
        self._say = say
        self._unread: list[StepNumbers] = []

    def begin(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Take note of a step that has begun, by its metrics."""
        numbers = StepNumbers.of(step, metrics)
        if self.guard.reads_each_step:
            for number in (numbers.loss, numbers.norm, numbers.overflows):
                number.copy_to_host_async()
        self._unread.append(numbers)

    def require_good(self, last: int) -> list[int]:
        """Judge the steps up to `last`, which have run, and return those that are skipped.

        Raises:
          BadStep: one was bad, and is not to be skipped. One that was not finite left its state as
            it was.
          UserError: a process could not read its rows of one.
        """
        unread = self._until(last)
        del self._unread[: len(unread)]
        rows = jax.device_get(unread)
        skipped = list[int]()
        for number, row in enumerate(rows):
            judged = self.guard.judge(row)
            if judged.decision == "go on":
                continue
            self._require_rows()
            if judged.decision == "skip":
                self._say(self._skipped(row))
                skipped.append(row.step)
                continue
            after = [*rows[number + 1 :], *jax.device_get(self._unread)]
            raise BadStep(row, judged, sum(later.finite for later in after))
        return skipped

    def finite_until(self, step: int) -> bool:
        """Whether those of the steps up to this one that were not judged yet were finite."""
        return all(row.finite for row in jax.device_get(self._until(step)))

    def forget(self) -> None:
        """Judge none of the steps that have begun."""
        self._unread.clear()

    def _until(self, last: int) -> list[StepNumbers]:
        return [row for row in self._unread if row.step <= last]

    def _skipped(self, row: StepNumbers) -> str:
        """What to say of a step that is skipped."""
        return (
            f"warning: step {row.step} is skipped: loss {row.loss} and gradient norm "
            f"{row.norm} ({self.guard.bad_steps} of train.max_bad_steps="
            f"{self._train.max_bad_steps})"
        )
