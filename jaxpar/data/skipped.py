"""Counts the records of a data set that are no text, and are left out while a run goes on."""

from __future__ import annotations

import threading

from jaxpar.base.errors import UserError

_MOST = 1000
"""So many records in a row that are no text are no accident."""


class Skipped:
    """How many records were left out, and why the last one was; threads that read ahead share
    it.
    """

    def __init__(self, origin: str):
        self._origin, self._lock = origin, threading.Lock()
        self.count = 0
        self.reason = ""
        self._in_a_row = 0

    def add(self, reason: str) -> None:
        """Count a record.

        Raises:
          UserError: too many follow one another: the source is gone, or is another.
        """
        with self._lock:
            self.count = self.count + 1
            self.reason = reason
            self._in_a_row += 1
            if self._in_a_row >= _MOST:
                raise UserError(
                    f"{self._origin}: {_MOST:,} records in a row are no text, of which the "
                    f"last: {reason}"
                )

    def read_one(self) -> None:
        """Note a record that is text."""
        self._in_a_row = 0

    def forget(self) -> None:
        """Begin anew."""
        self.count = 0
        self.reason = ""
        self._in_a_row = 0

    @property
    def text(self) -> str:
        """What is said of them."""
        return f"records left out until now: {self.count:,}, of which the last: {self.reason}"
