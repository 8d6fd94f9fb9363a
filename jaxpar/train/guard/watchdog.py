"""Ends a process whose steps no longer finish, with the stack of every thread.

A device that does not answer, a peer that has stopped or a file system that hangs leaves a run
waiting for ever, in a call that no exception reaches. A thread of its own looks at the clock.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

EXIT_CODE = 76
"""What a process exits with whose steps no longer finish."""
_TIMES = 64
"""How many of the last steps the median is of."""
_FACTOR = 20
"""How many times the median a step may take."""


class Watchdog:
    """A limit of the time that a step takes, or a batch of an evaluation: `least` seconds, or 20
    times the median of the last steps where that is more. It is a context manager, and watches
    inside.
    """

    def __init__(
        self,
        least: float,
        end: Callable[[str], None] | None = None,
        what: str = "step",
        setting: float | None = None,
    ):
        """Take a limit in seconds.

        Args:
          least: the shortest limit; 0 = nothing is watched.
          end: what is called, in the thread of the watchdog, with the line to say; None =
            `end_process`.
          what: what is to finish in this time.
          setting: `train.hang_seconds`, where the limit is longer; None = it is the limit.
        """
        self._least = least
        self._what = what
        self._setting = least if setting is None else setting
        self._end = end_process if end is None else end
        self._times = deque[float](maxlen=_TIMES)
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._pauses = 0
        self._batches = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Note that a step has finished."""
        now = time.monotonic()
        with self._lock:
            self._times.append(now - self._since)
            self._since = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing inside, as in an evaluation or a save, which no step is to be compared
        with; but batches from the first `batch_done` on.
        """
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._batches = False
                self._since = time.monotonic()

    def batch_done(self) -> None:
        """Note, inside `paused`, that a batch of an evaluation has finished, or that the first may
        begin: the next is to finish in the time that a step may take.
        """
        with self._lock:
            self._batches = self._pauses > 0
            self._since = time.monotonic()

    @property
    def limit(self) -> float:
        """The seconds that the next step may take."""
        with self._lock:
            times = list(self._times)
        if not times:
            return self._least
        return max(self._least, _FACTOR * statistics.median(times))

    def __enter__(self) -> Watchdog:
        if self._least > 0:
            self._since = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        """Look at the clock until the steps are done."""
        while not self._done.wait(min(self._least / 4, 1.0)):
            limit = self.limit
            what = self._what
            with self._lock:
                if self._batches:
                    what = "batch of the evaluation"
                waited = time.monotonic() - self._since
                overdue = waited > limit and (self._batches or not self._pauses)
            if overdue:
                self._end(
                    f"no {what} has finished for {waited:.0f} s, and the limit is {limit:.0f} s "
                    f"(train.hang_seconds={self._setting:g}): a device, another process, the data "
                    "or a disk do not answer; the stacks of all threads follow, the newest call "
                    "first"
                )
                return


def end_process(message: str) -> None:
    """Print a line and the stack of every thread on standard error, and end the process at once
    with `EXIT_CODE`: what hangs would keep Python from ending.
    """
    sys.stderr.write(f"jaxpar: error: {message}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(EXIT_CODE)
