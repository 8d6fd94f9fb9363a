"""Judges the steps of a run in their order, once they have run: what becomes of one that was not
finite, or whose loss or gradient norm leapt.

A step that is not finite leaves parameters and optimizer as they were, so that to skip it is to go
on. To roll back is to take the last checkpoint and to go on with the batches that follow the bad
one, as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxpar.base.config import TrainConfig
from jaxpar.base.errors import Say
from jaxpar.train.guard.failures import StepNumbers

Decision = Literal["go on", "skip", "rollback", "stop"]
"""A spike is never skipped: its step has changed the weights when it is seen, and only a step that
was not finite left them as they were."""

_MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
_LEAST_DEVIATION = 0.01
"""The least deviation as a share of the median: of numbers that are all alike, none is a spike."""


class Judgement(NamedTuple):
    """What to do after a step, and why where it is not to go on."""

    decision: Decision
    why: str = ""


class _Seen(NamedTuple):
    """What a good step has said of itself."""

    step: int
    loss: float
    norm: float


class Guard:
    """Judges the numbers of steps in their order, and counts those that are bad.

    Attributes:
      train: its settings.
      bad_steps: how many steps of the run were bad until now.
      reads_each_step: whether the numbers of each step are to be read as soon as it has run.
    """

    def __init__(self, train: TrainConfig, saved: Mapping[str, Any] | None = None):
        """Take the settings, and what `saved` returned when the checkpoint was made."""
        self.train = train
        self.reads_each_step = train.on_nonfinite != "stop" or train.on_spike != "off"
        known = saved or {}
        self.bad_steps = int(known.get("bad", 0))
        self._in_a_row = int(known.get("in_a_row", 0))
        self._last_bad = int(known.get("last_bad", 0))
        self._window = [
            _Seen(int(step), float(loss), float(norm))
            for step, loss, norm in known.get("window", ())
        ]
        """The last good steps, the newest last."""

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run judges as this one would."""
        if not self.reads_each_step:
            return {}
        return {
            "bad": self.bad_steps,
            "in_a_row": self._in_a_row,
            "last_bad": self._last_bad,
            "window": list(self._window),  # a save in the background must not see later steps
        }

    def judge(self, row: StepNumbers) -> Judgement:
        """Judge the next step.

        Args:
          row: its numbers, read.

        Returns:
          What to do.
        """
        train = self.train
        if not row.finite:
            decision: Decision = train.on_nonfinite
            if decision == "skip" and not row.kept_state:
                # Its finite entries have been updated, so that nothing is left to skip.
                decision = "stop"
            return self._bounded(row.step, decision, "train.on_nonfinite")
        if train.on_spike != "off" and (why := self._spike(row)):
            judged = self._bounded(row.step, train.on_spike, "train.on_spike")
            return judged._replace(why=", ".join(filter(None, (why, judged.why))))
        if row.step > self._last_bad:
            self._in_a_row = 0
        if train.on_spike != "off":
            self._window.append(_Seen(row.step, float(row.loss), float(row.norm)))
            del self._window[: -train.spike_window]
        return Judgement("go on")

    def roll_back(self, step: int) -> None:
        """Forget the numbers of the steps after one that is gone on from."""
        self._window = [seen for seen in self._window if seen.step <= step]

    def _bounded(self, step: int, decision: Decision, setting: str) -> Judgement:
        """Count a bad step, and stop where there are too many."""
        train = self.train
        self.bad_steps += 1
        self._in_a_row += 1
        self._last_bad = max(self._last_bad, step)
        if decision == "stop":
            return Judgement("stop")
        if self._in_a_row > train.max_bad_in_a_row:
            why = f"{setting}={decision}, and train.max_bad_in_a_row={train.max_bad_in_a_row}"
            return Judgement("stop", f"{why} has been reached")
        if self.bad_steps > train.max_bad_steps:
            why = f"{setting}={decision}, and train.max_bad_steps={train.max_bad_steps}"
            return Judgement("stop", f"{why} has been reached")
        return Judgement(decision)

    def _spike(self, row: StepNumbers) -> str:
        """Say by how much a step's loss or gradient norm is above those before it; the empty
        string where neither is a spike, or too few steps are known."""
        train = self.train
        if len(self._window) < train.spike_window:
            return ""
        losses = [seen.loss for seen in self._window]
        norms = [seen.norm for seen in self._window]
        for name, value, before in (("loss", row.loss, losses), ("gradient norm", row.norm, norms)):
            limit = spike_limit(before, train.spike_deviations)
            if float(value) > limit:
                return (
                    f"{name} {float(value):.4g} at step {row.step} is a spike: the limit of the "
                    f"{len(before)} steps before it is {limit:.4g}"
                )
        return ""


def spike_limit(before: Sequence[float], deviations: float) -> float:
    """Return above which value a number is a spike: so many deviations above the median of those
    before it, where a deviation is estimated from the median absolute deviation.

    Args:
      before: the numbers before it, at least one.
      deviations: how many.

    Returns:
      The limit, of the unit of the numbers.
    """
    numbers = np.asarray(before, np.float64)
    median = float(np.median(numbers))
    deviation = _MAD_TO_DEVIATION * float(np.median(np.abs(numbers - median)))
    return median + deviations * max(deviation, _LEAST_DEVIATION * abs(median))


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

    def __init__(self, guard: Guard, require_rows: Callable[[], None], say: Say):
        """Take what judges.

        Args:
          guard: decides what becomes of a step.
          require_rows: raises where a process could not read its rows, which makes a step void.
        """
        self.guard = guard
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
            f"{self.guard.train.max_bad_steps})"
        )
