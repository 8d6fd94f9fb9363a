"""What asks a run to save and stop: a signal, the end of its time, or the notice of a machine that
is about to be taken away. Of several processes all stop after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxpar.base.process.early_signals import SIGNALS, handler_of_the_second


def ask_to_stop() -> None:
    """Have all processes stop at a step that JAX's preemption service chooses, a few seconds
    later.
    """
    os.kill(os.getpid(), signal.SIGTERM)


class Stop:
    """Whether a run is to save and stop now.

    Of several processes one may be asked alone. JAX's preemption service has all of them stop at
    the same call of `reached`, so all must call it equally often, in the same places.

    Attributes:
      why: what asked this process, such as `SIGTERM`; empty = nothing did.
      reached_already: whether `reached` has said so.
      cut_short: whether an evaluation was left before its end, which the next call makes up for.
    """

    def __init__(self, asks: Callable[[], str] = lambda: "") -> None:
        """Begin with nothing asked.

        Args:
          asks: is called at each `reached`, and returns what asks for a stop now, or nothing.
        """
        self.why = ""
        self._asks = asks
        self.reached_already = False
        self.cut_short = False
        self._asked = threading.Event()
        # in a thread that takes no signals JAX's service does, also for one process that has met it
        in_thread = threading.current_thread() is not threading.main_thread()
        joined = in_thread and jax.distributed.is_initialized()
        self._several = jax.process_count() > 1 or joined
        self._calls = 0
        self._previous: dict[int, Any] = {}

    def ask(self, why: str) -> None:
        """Ask for a stop, from any thread.

        Args:
          why: what asks, for the line at the end. The first that asks is named.
        """
        if self._asked.is_set():
            return
        self.why = why
        self._asked.set()
        if self._several:
            ask_to_stop()

    @property
    def asked_alone(self) -> bool:
        """Whether a run of one process, which need not wait for others, was asked."""
        return self._asked.is_set() and not self._several

    def reached(self) -> bool:
        """Whether to stop here."""
        if not self.reached_already:
            self._calls += 1
            if why := self._asks():
                self.ask(why)
            if self._several:
                self.reached_already = multihost_utils.reached_preemption_sync_point(self._calls)
            else:
                self.reached_already = self._asked.is_set()
        return self.reached_already

    def listen(self) -> None:
        """Take the signals that ask for a stop, until `close`; only the main thread can.

        A second Ctrl-C does what the first would have done before. Other signals may come again,
        as some schedulers send them, and change nothing. SIGHUP stays ignored under `nohup`.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            if number == getattr(signal, "SIGHUP", None) and before is signal.SIG_IGN:
                continue
            # of several processes SIGTERM goes to JAX's preemption service
            if not (self._several and number == signal.SIGTERM):
                self._previous[number] = before
                signal.signal(number, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, handler_of_the_second(self._previous[number]))
        self.ask(signal.Signals(number).name)

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
