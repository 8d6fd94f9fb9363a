"""What goes wrong in one process of a run, or asks one to stop, reaches all of them.

Otherwise the others would wait in the next collective for a process that has left.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.errors import UserError

T = TypeVar("T")


def run_together(run: Callable[[], T]) -> T:
    """Call `run`, and return its result once it has returned on every process. All processes must call this.

    Args:
      run: may fail on one process and not on the others, so there may be no collective in it.

    Raises:
      UserError: `run` failed on another process. Where it failed, its own error is raised.
    """
    if jax.process_count() == 1:
        return run()
    result, error = None, None
    try:
        result = run()
    except Exception as caught:  # whatever it is, the others wait
        error = caught
    said = "" if error is None else str(error) or repr(error)
    rows = multihost_utils.process_allgather(np.frombuffer(said.encode()[:500].ljust(500), np.uint8))
    failed = [(index, text) for index, row in enumerate(rows) if (text := bytes(row).decode(errors="ignore").strip())]
    if error is not None:
        raise error
    if failed:
        raise UserError(f"process {failed[0][0]} cannot go on, so none can: {failed[0][1]}")
    return result  # pyright: ignore[reportReturnType]


class Batches(Generic[T]):
    """This process's batches, which end together with the other processes' where one cannot be read.

    A single process raises the error at once. Of several, the one that fails keeps its error for `require` and goes on
    with empty batches until all stop. The steps until then count for nothing, so call `require` before saving.

    Args:
      source: the batches.
      empty: a batch whose labels do not count.
      failing: is called when the first batch cannot be read.
    """

    def __init__(self, source: Iterator[T], empty: T, failing: Callable[[], object] = lambda: None):
        self._source, self._empty, self._failing = source, empty, failing
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._error is None:
            try:
                return next(self._source)
            except StopIteration:
                raise
            except Exception as error:
                if jax.process_count() == 1:
                    raise
                self._error = error
                self._failing()
        return self._empty

    def require(self) -> None:
        """Raise on every process the error that kept one from reading."""
        run_together(self._raise)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def ask_to_stop() -> None:
    """Have all processes stop at a step that JAX's preemption service chooses, a few seconds later."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[Callable[[int], bool]]:
    """Give a function `stop(step)`: whether to save and stop after this step, because of Ctrl-C or SIGTERM.

    A second Ctrl-C kills. Each process calls the function once a step, with the steps in order. Of several
    processes the signal may reach one only: JAX's preemption service has all of them stop after the same step.
    """
    asked, several = threading.Event(), jax.process_count() > 1
    stop = multihost_utils.reached_preemption_sync_point if several else lambda step: asked.is_set()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, _: FrameType | None) -> None:
        signal.signal(number, previous[signal.Signals(number)])
        if several:
            ask_to_stop()
        asked.set()

    for number in previous:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
