"""Several processes of one run: what goes wrong in one, or asks one to stop, all of them learn of.

The others would wait in the next collective for one that has left.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils

from jaxpar.base.errors import UserError

T = TypeVar("T")


def together(run: Callable[[], T]) -> T:
    """What `run` returns, once it has returned on every process; all must call this.

    Args:
      run: what may fail here and not elsewhere: no collective may be in it.

    Raises:
      UserError: it failed on another process. Where it failed, its own error is raised.
    """
    if jax.process_count() == 1:
        return run()
    result, error = None, None
    try:
        result = run()
    except Exception as caught:  # whatever it is, the others wait
        error = caught
    failed = [index for index, value in enumerate(multihost_utils.process_allgather(error is not None)) if value]
    if error is not None:
        raise error
    if failed:
        raise UserError(f"process {failed[0]} cannot go on, so none can: it says why")
    return result  # pyright: ignore[reportReturnType]


class Batches:
    """This process's batches; one that cannot be read is kept for `require`, with empty ones in place of the rest.

    Of several processes, that is: one alone raises at once. The steps until all have stopped count for nothing, so
    `require` comes before whatever lasts.

    Args:
      source: the batches.
      empty: one whose labels do not count.
      failing: called when the first cannot be read.
    """

    def __init__(self, source: Iterator[Any], empty: Any, failing: Callable[[], Any] = lambda: None):
        self._source, self._empty, self._failing = source, empty, failing
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
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
        """Raise, on every process, what kept one from reading."""
        together(self._raise)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def ask_to_stop() -> None:
    """Have all processes stop at a step that JAX's preemption service finds, a few seconds on; see `stop_signals`."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[Callable[[int], bool]]:
    """`stop(step)`: whether to save and stop after this step, as Ctrl-C or SIGTERM asked for; a second Ctrl-C kills.

    Each process calls it once a step, with the steps in order. Of several the signal may reach one only: JAX's
    preemption service, which takes SIGTERM, has all stop after the same step.
    """
    asked, several = threading.Event(), jax.process_count() > 1
    stop = multihost_utils.reached_preemption_sync_point if several else lambda step: asked.is_set()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, _: Any) -> None:
        signal.signal(number, previous[number])
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
