"""Decides what becomes of a run whose step was not finite, or whose loss or gradient norm leapt.

A step that is not finite leaves parameters and optimizer as they were, so that to skip it is to go
on. To roll back is to take the last checkpoint and to go on with the batches that follow the bad
one, as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpar.base.config import TrainConfig
from jaxpar.train.guard.failures import StepNumbers

Decision = Literal["go on", "skip", "rollback", "stop"]

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
      reads_each_step: whether the numbers of each step are to be read as soon as it has run.
    """

    def __init__(self, train: TrainConfig, saved: Mapping[str, Any] | None = None):
        """Take the settings, and what `saved` returned when the checkpoint was made."""
        self._train = train
        self.reads_each_step = train.on_nonfinite != "stop" or train.on_spike != "off"
        known = saved or {}
        self._bad = int(known.get("bad", 0))
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
            "bad": self._bad,
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
        train = self._train
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

    @property
    def bad_steps(self) -> int:
        """How many steps of the run were bad until now."""
        return self._bad

    def _bounded(self, step: int, decision: Decision, setting: str) -> Judgement:
        """Count a bad step, and stop where there are too many."""
        train = self._train
        self._bad += 1
        self._in_a_row += 1
        self._last_bad = max(self._last_bad, step)
        if decision == "stop":
            return Judgement("stop")
        if self._in_a_row > train.max_bad_in_a_row:
            why = f"{setting}={decision}, and train.max_bad_in_a_row={train.max_bad_in_a_row}"
            return Judgement("stop", f"{why} has been reached")
        if self._bad > train.max_bad_steps:
            why = f"{setting}={decision}, and train.max_bad_steps={train.max_bad_steps}"
            return Judgement("stop", f"{why} has been reached")
        return Judgement(decision)

    def _spike(self, row: StepNumbers) -> str:
        """Say by how much a step's loss or gradient norm is above those before it; the empty
        string where neither is a spike, or too few steps are known."""
        train = self._train
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
