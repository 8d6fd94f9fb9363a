"""A count of the records of a data set that are no text, and are left out while a run goes on."""

from __future__ import annotations

import threading

from jaxpar.base.errors import UserError

_MOST = 1000
"""The number of records in a row without text that is no accident."""


class Skipped:
    """The number of records left out, and why the last one was; threads that read ahead share
    it.
    """

    def __init__(self, origin: str):
        self._origin, self._lock = origin, threading.Lock()
        self.count = 0
        self.reason = ""
        self._in_a_row = 0

    def add(self, reason: str) -> None:
        """Count a record that is left out.

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
        """Begin to count anew."""
        self.count = 0
        self.reason = ""
        self._in_a_row = 0

    @property
    def text(self) -> str:
        """The sentence that tells how many records were left out."""
        return f"records left out until now: {self.count:,}, of which the last: {self.reason}"
