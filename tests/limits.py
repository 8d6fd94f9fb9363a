"""How long something takes, and how much memory it adds to this process. What others use of the
machine meanwhile is not counted: a limit then says the same on a busy machine.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

SECONDS = 30
"""What one trial of a fuzz may take."""
BYTES = 2**30
"""What it may add to the memory of this process."""


class Cost(NamedTuple, Generic[T]):
    """What a call returned, the seconds that it took without those in which it was ready and no
    processor was free, and the bytes that it added at most.
    """

    result: T
    seconds: float
    more: int

    @property
    def fault(self) -> str:
        """Which limit it went past; empty = none."""
        if self.seconds > SECONDS:
            return f"{self.seconds:.0f} s"
        if self.more > BYTES:
            return f"{self.more / 2**30:.1f} GiB more"
        return ""


def cost_of(run: Callable[[], T]) -> Cost[T]:
    """Call a function, and return what it returned with what it took."""
    before = _forget_most()
    watch = Watch()
    result = run()
    return Cost(result, watch.seconds(), max(_memory("VmHWM") - before, 0))


class Watch:
    """Counts seconds from when it is made, without those in which a thread of this process waited
    for a processor. Threads may do so at the same time, where it is their own work that keeps the
    processors busy: so it never counts less than the processors have worked for this process. What
    a thread has waited that has ended meanwhile is counted.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._worked = time.process_time()
        self._queued = _queued()

    def seconds(self) -> float:
        """The seconds until now."""
        passed = time.monotonic() - self._began
        worked = time.process_time() - self._worked
        queued = [now - self._queued.get(thread, 0.0) for thread, now in _queued().items()]
        return max(worked, passed - sum(queued))


def _queued() -> dict[str, float]:
    """The seconds that each thread of this process has been ready and not run; nothing where the
    system does not say.
    """
    found = dict[str, float]()
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, nanoseconds, _ = file.read_text(encoding="ascii").split()
            found[file.parent.name] = int(nanoseconds) / 1e9
    return found


def _memory(key: str) -> int:
    """Bytes that this process has in memory now (`VmRSS`), or had at most (`VmHWM`); 0 where the
    system does not say.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
    return 0


def _forget_most() -> int:
    """Have the most memory counted from now on, and return what there is."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """End what takes longer, by a TimeoutError, as soon as Python runs."""
    watch = Watch()

    def ring(*_: object) -> None:
        left = seconds - watch.seconds()
        if left <= 0:
            raise TimeoutError(f"more than {seconds} s")
        signal.alarm(math.ceil(left))

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
