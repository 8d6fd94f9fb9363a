"""When a run must begin its last save to be done within `train.max_time`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jaxpar.train.runs.folder.orbax_names import STEP_METADATA

_FIRST_RESERVE = 60.0
"""Seconds that are kept for a save where none was seen yet; no more than a tenth of the limit."""
_SEVERAL = 15.0
"""Seconds in which several processes agree on the step to stop after: JAX's preemption service
takes a few."""
_MARGIN = 2.0
"""How much longer than the last ones a save and a step may take."""


class TimeLimit:
    """The time that a call may take, with the time kept that a step and a save take."""

    def __init__(
        self,
        seconds: int,
        began: float,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
        several: bool | None = None,
    ):
        """Take a limit.

        Args:
          seconds: the limit; 0 = none.
          began: when it began to count, by the clock.
          name: what sets it.
          several: whether other processes are to stop too; None = whether there are any.
        """
        self._seconds = seconds
        self._name = name
        self._ends = began + seconds
        self._clock = clock
        if several is None:
            several = jax.process_count() > 1
        self._agreeing = _SEVERAL if several else 0.0
        self._save = 0.0
        self._step = 0.0
        self._last: float | None = None

    def note_save(self, seconds: float) -> None:
        """Note how long a save took, from its begin until all was written; 0 = it is not known."""
        self._save = seconds or self._save

    def asks(self) -> str:
        """What sets the limit where it is time to stop, else nothing.

        It is called after every step, and after every batch of an evaluation, and measures the
        time between two calls.
        """
        if not self._seconds:
            return ""
        now = self._clock()
        if self._last is not None:
            # a batch of an evaluation says little of the step after it
            self._step = max(now - self._last, 0.9 * self._step)
        self._last = now
        return self._name if now + self.reserve >= self._ends else ""

    def pause(self) -> None:
        """Take what came since the last call of `asks` for no step, as a save."""
        self._last = None

    @property
    def reserve(self) -> float:
        """The seconds that are kept for a step, the save after it, and for others to agree."""
        save = self._save or min(_FIRST_RESERVE, self._seconds / 10) / _MARGIN
        return _MARGIN * (save + self._step) + self._agreeing


def save_seconds(checkpoint: Path) -> float:
    """The seconds that a checkpoint took to be written, as Orbax notes them beside it; 0 where it
    does not say. What is sent to a bucket afterwards is no part of them.

    Args:
      checkpoint: its folder.
    """
    began, ended = save_times(checkpoint)
    return ended - began


def save_times(checkpoint: Path) -> tuple[float, float]:
    """When the save of a checkpoint began and when it was whole, in seconds since 1970, as Orbax
    notes them; twice 0 where it does not say.

    Args:
      checkpoint: its folder.
    """
    try:
        noted = json.loads((checkpoint / STEP_METADATA).read_text(encoding="utf-8"))
        return noted["init_timestamp_nsecs"] / 1e9, noted["commit_timestamp_nsecs"] / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, 0.0
