"""What a signal does to `jaxpar train` while there is nothing to lose: before the first step, and
after the last save. It imports no JAX, so that it stands before JAX is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from threading import Lock, Thread
from types import FrameType
from typing import Any

# Windows has no SIGUSR1 and no SIGHUP
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""What asks a run to stop: Ctrl-C, a scheduler, the notice of a scheduler that a limit is near
(Slurm's `--signal`), and a terminal that is closed."""
INTERRUPTED = 130
"""The exit code of Ctrl-C, and of a run that was told to stop and saved."""
NOTHING_SAVED = 143
"""The exit code of a run that another signal stopped where there was nothing to save."""
_LEAVING = Lock()
"""Held by the one of two threads that ends the process."""


def leave_on_signals() -> None:
    """Have the signals of `SIGNALS` end this process at once, with a line and no traceback.

    Python calls a handler between two of its own instructions only, and a compilation in the main
    thread takes minutes. So a thread is told of the signal too (`signal.set_wakeup_fd`), and ends
    the process where `leave` is still the handler. It must be called in the main thread. A signal
    that is ignored, as Ctrl-C is by what the shell began in the background, stays ignored.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
    Thread(target=_leave_soon, args=(reading,), daemon=True, name="signals").start()


def _leave_soon(reading: int) -> None:
    """Read the numbers of signals as they come, and leave where nothing else handles them."""
    while numbers := os.read(reading, 1):
        number = numbers[0]
        if signal.getsignal(number) is leave:
            leave(number, None)


def end_quietly() -> None:
    """Ignore SIGUSR1 and SIGHUP from now on, at the end of a process: Python itself gives its
    handlers back while it ends, and such a signal would end what has succeeded with a code that
    says otherwise.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is leave and number not in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def leave(number: int, _: FrameType | None) -> None:
    """A handler that ends the process at once: with 130 on Ctrl-C, else with 143."""
    if not _LEAVING.acquire(blocking=False):
        return  # the other thread is about to end the process
    if number == signal.SIGINT:
        said = "interrupted"
        code = INTERRUPTED
    else:
        said = f"stopped by {signal.Signals(number).name}, with nothing to save"
        code = NOTHING_SAVED
    # not by way of print, in whose buffer the main thread may be
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"jaxpar: {said}\n".encode())
    # not by way of Python's end, which waits for threads: one may be compiling for minutes
    os._exit(code)


def handler_of_the_second(before: Any) -> Any:
    """The handler of a second Ctrl-C, where the first was taken.

    Args:
      before: the handler that was there before the first was taken.

    Returns:
      That handler. In place of `leave` it is one that the thread does not know: it may be told of
      the *first* Ctrl-C only now.
    """
    if before is leave:
        return _leave_in_turn
    return before


def _leave_in_turn(number: int, frame: FrameType | None) -> None:
    leave(number, frame)


def pass_on_signals() -> None:
    """Have the process that has joined others give a signal to JAX's preemption service, in place
    of leaving them alone: all then stop together. A second Ctrl-C still ends the process.

    The service itself handles SIGTERM.
    """
    for number in SIGNALS:
        if number != signal.SIGTERM and signal.getsignal(number) is leave:
            signal.signal(number, _pass_on)


def _pass_on(number: int, _: FrameType | None) -> None:
    if number == signal.SIGINT:
        signal.signal(number, _leave_in_turn)
    os.kill(os.getpid(), signal.SIGTERM)
