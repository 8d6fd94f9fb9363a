"""Ctrl-C or a signal to `jaxpar launch ray`, handed on to one of the processes that train: all of
them then save and stop after the same step."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.base.console import console
from jaxpar.base.process.early_signals import NOTHING_SAVED, SIGNALS

if TYPE_CHECKING:
    from ray.util.queue import Queue  # pyright: ignore[reportMissingImports]


class Place(NamedTuple):
    """The node and process in which the first process of a start trains.

    Attributes:
      node: Ray's name of its node.
      pid: its id there; 0 = there is none.
      host: the node's own name.
    """

    node: str
    pid: int
    host: str = ""


NOWHERE = Place("", 0)
"""The place that is told when the processes have failed."""


class Stops:
    """The stop that this process was asked for, and the process that is to be told of it.

    Attributes:
      number: the signal that asked for a stop; 0 = none has.
      place: the place of the processes that train now; None = they have not met yet.
    """

    def __init__(self) -> None:
        """Begin without a stop."""
        self.number = 0
        self.place: Place | None = None

    def take(self, number: int, _: FrameType | None) -> None:
        """Handle a signal: a second Ctrl-C, or any before there is something to save, ends at
        once.
        """
        again = self.number and number == signal.SIGINT
        self.number = self.number or number
        if again or self.place is None:
            self.leave()

    def leave(self) -> None:
        """End this process by an exception, as a run does that has nothing to save.

        Raises:
          KeyboardInterrupt: it was Ctrl-C.
          SystemExit: it was another signal.
        """
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(self.number).name
        print(f"jaxpar: stopped by {name}, with nothing to save", file=sys.stderr)
        raise SystemExit(NOTHING_SAVED)


@contextmanager
def listening(stops: Stops) -> Iterator[None]:
    """Take the signals that ask for a stop; only the main thread can.

    Args:
      stops: is told of the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stops.take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fit(ray: Any, train: Callable[[], Any], stops: Stops) -> Any:
    """Call what trains, and hand a stop on to the processes, also after they were started again.

    Args:
      train: waits until all processes have ended; it runs in a thread, or Ray would take Ctrl-C.
      stops: what this process is told.

    Raises:
      KeyboardInterrupt, SystemExit: `Stops.take` ends this process.
      Exception: whatever `train` raised.
    """
    results = list[Any]()
    errors = list[BaseException]()

    def call() -> None:
        try:
            results.append(train())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True, name="Ray Train")
    told = None
    with listening(stops):
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if stops.number and stops.place not in (None, told):
                if told is None:
                    name = signal.Signals(stops.number).name
                    console().print(
                        f"{name}: the processes save and stop; Ctrl-C again ends them at once"
                    )
                told = stops.place
                _terminate(ray, told)
    if errors:
        raise errors[0]
    return results[0]


def _terminate(ray: Any, place: Place) -> None:
    """Send SIGTERM to a process of the cluster: from here if it is on this machine, as a task on
    its node takes seconds to begin.
    """
    # both names: Ray's client is told the name of the node that it talks to
    if (place.node, place.host) == (_node(ray), socket.gethostname()):
        with suppress(PermissionError):  # Ray was started by another user
            _kill(place.pid)
            return
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        NodeAffinitySchedulingStrategy,
    )

    on_its_node = NodeAffinitySchedulingStrategy(place.node, soft=False)
    task = ray.remote(_kill).options(num_cpus=0, scheduling_strategy=on_its_node)
    task.remote(place.pid)


def _node(ray: Any) -> str:
    """Return Ray's name of the node that this process is on."""
    return ray.get_runtime_context().get_node_id()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended, and the next start says where it is
        os.kill(pid, signal.SIGTERM)


def say_where(lines: Queue) -> None:
    """Tell the process that launched this one, through the cluster's queue, where it trains."""
    import ray  # pyright: ignore[reportMissingImports]

    lines.put(Place(_node(ray), os.getpid(), socket.gethostname()))
