"""A clock that counts all time of a process, each second under one cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, get_args

Cause = Literal[
    "productive",
    "wasted",
    "startup",
    "restoring",
    "compiling",
    "data",
    "evaluation",
    "saving",
    "guard",
    "down",
    "other",
]
"""What time went on. `productive` is goodput, and each other cause a kind of badput."""


class Meaning(NamedTuple):
    """What a cause is called where it is shown, and what it is."""

    name: str
    text: str


CAUSES: Mapping[Cause, Meaning] = {
    "productive": Meaning("goodput", "steps whose work is kept"),
    "wasted": Meaning("wasted", "steps whose work a fault has cost, and that are made again"),
    "startup": Meaning("start-up", "imports, devices, other processes, data, the first state"),
    "restoring": Meaning("restoring", "reading a checkpoint"),
    "compiling": Meaning("compiling", "waiting for the compiler once the first state is there"),
    "data": Meaning("data", "waiting for data while the device has nothing to do"),
    "evaluation": Meaning("evaluation", "validation losses"),
    "saving": Meaning("saving", "checkpoints, as far as steps wait for them"),
    "guard": Meaning("guard", "bad steps, what is lost by them, and comparisons of copies"),
    "down": Meaning("down", "no process: from the last sign of one to the start of the next"),
    "other": Meaning("other", "anything else"),
}
"""What each cause means, in the order in which they are shown."""
assert tuple(CAUSES) == get_args(Cause)


class Clock:
    """Counts the seconds since a process began, each of them under exactly one cause.

    A phase within a phase is taken out of it. One thread enters phases; any may read.
    """

    def __init__(
        self,
        began: float | None = None,
        time_now: Callable[[], float] = time.monotonic,
    ):
        """Begin to count; all is `startup` until another cause is entered.

        Args:
          began: since when, by `time_now`; None = now.
          time_now: the seconds that only go forward.
        """
        now = time_now()
        self._now = time_now
        self._cause: Cause = "startup"
        self._since = now if began is None else min(began, now)
        self._seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._lock = threading.Lock()

    def enter(self, cause: Cause) -> Cause:
        """Count the time from now on under another cause.

        Returns:
          The one until now.
        """
        with self._lock:
            self._count()
            before = self._cause
            self._cause = cause
        return before

    @contextmanager
    def during(self, cause: Cause) -> Iterator[None]:
        """Count the time inside under a cause, and what follows as before."""
        before = self.enter(cause)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, source: Cause, target: Cause, seconds: float) -> None:
        """Count seconds that are counted already under another cause; no more than there are."""
        with self._lock:
            self._count()
            moved = min(max(seconds, 0.0), self._seconds[source])
            self._seconds[source] -= moved
            self._seconds[target] += moved

    def seconds(self) -> dict[Cause, float]:
        """Return the seconds of each cause until now; their sum is the time since the begin."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def _count(self) -> None:
        now = self._now()
        self._seconds[self._cause] += now - self._since
        self._since = now


class DeviceClock:
    """Notes when each step has finished on the device, in a thread of its own.

    The host is ahead of the device, so that it may wait for data while the device still has a step
    to run. That wait costs nothing.
    """

    def __init__(self, time_now: Callable[[], float] = time.monotonic):
        """Begin with no step; `close` ends the thread.

        Args:
          time_now: the seconds that only go forward.
        """
        self._now = time_now
        self._steps = SimpleQueue[Any]()
        self._last: Any = None
        self._finished: tuple[Any, float] = (None, 0.0)
        # a daemon: it may wait for a device that does not answer
        threading.Thread(target=self._watch, name="device clock", daemon=True).start()

    def step_began(self, output: Any) -> None:
        """Note that a step was given to the device.

        Args:
          output: an array that it computes.
        """
        self._last = output
        self._steps.put(output)

    def busy_seconds(self, began: float, ended: float) -> float:
        """Return for how long of a time the device ran the last step that it was given.

        Args:
          began: the start of that time, by the clock.
          ended: its end, which is now.
        """
        if self._last is None:
            return 0.0
        step, finished = self._finished
        if step is not self._last:  # it runs still, or has ended this moment
            return ended - began
        return min(max(finished - began, 0.0), ended - began)

    def close(self) -> None:
        """End the thread, once the steps that it was told of have finished."""
        self._steps.put(None)

    def _watch(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step.block_until_ready()
            except Exception:  # whoever reads the numbers of the step is told
                return
            self._finished = (step, self._now())
