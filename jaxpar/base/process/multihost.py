"""What goes wrong in one process of a run, or asks one to stop, reaches all of them: the others
would wait in the next collective for a process that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.errors import UserError

T = TypeVar("T")

_TOGETHER = "raised_on_all_processes"
"""The attribute of an error that every process raises."""


def run_together(run: Callable[[], T]) -> T:
    """Call a function on all processes, and go on once it has returned on every one of them.

    All processes must call this.

    Args:
      run: the function, in which no collective may stand.

    Raises:
      UserError: it failed on another process. Where it fails, its own error is raised.
    """
    if jax.process_count() == 1:
        return run()
    result = error = None
    try:
        result = run()
    except Exception as caught:  # whatever it is, the others wait
        error = caught
    if error is None:
        said = ""
    else:
        said = str(error) or repr(error)
    row_of_bytes = np.frombuffer(said.encode()[:500].ljust(500), np.uint8)
    rows = multihost_utils.process_allgather(row_of_bytes)
    failed = [
        (index, text)
        for index, row in enumerate(rows)
        if (text := bytes(row).decode(errors="ignore").strip())
    ]
    if error is None and failed:
        error = UserError(f"process {failed[0][0]} cannot go on, so none can: {failed[0][1]}")
    if error is not None:
        setattr(error, _TOGETHER, True)
        raise error
    return result  # pyright: ignore[reportReturnType]


def run_on_first(run: Callable[[], T]) -> T | None:
    """Call a function on the first process alone, and go on once it has returned there.

    All processes must call this.

    Args:
      run: the function, in which no collective may stand.

    Returns:
      On the first process what it returned; None elsewhere.

    Raises:
      UserError: it failed. On the first process its own error is raised.
    """
    return run_together(lambda: run() if jax.process_index() == 0 else None)


def told_by_first(value: bool) -> bool:
    """Return on every process what the first one gives; all must call this."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def number_from_first(value: int) -> int:
    """Return on every process the number that the first one gives, of 31 bits; all must call
    this.
    """
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def numbers_from_first(values: Sequence[int]) -> list[int]:
    """Return on every process the numbers that the first one gives, of 31 bits; all must call
    this. What the others give, however many, counts for nothing.
    """
    if jax.process_count() == 1:
        return list(values)
    count = number_from_first(len(values))
    if not count:
        return []
    here = np.zeros(count, np.int32)
    if jax.process_index() == 0:
        here[:] = list(values)  # NumPy takes bytes for a text
    return multihost_utils.broadcast_one_to_all(here).tolist()


def raised_together(error: BaseException) -> bool:
    """Whether every process leaves with an error now, as from `run_together`, so that they can
    still save together.
    """
    return jax.process_count() == 1 or getattr(error, _TOGETHER, False)


class Batches(Generic[T]):
    """This process's batches, which end together with the other processes' where one cannot be
    read.

    A single process raises the error at once. Of several, the one that fails calls `failing`, keeps
    its error for `require` and goes on with `empty` batches until all stop. What is computed of
    those counts for nothing, so call `require` before it is used.
    """

    def __init__(
        self,
        source: Iterator[T],
        empty: T,
        failing: Callable[[], object] = lambda: None,
    ):
        self._source = source
        self._empty = empty
        self._failing = failing
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._error is None:
            try:
                return self._read()
            except Exception as error:
                if jax.process_count() == 1 or isinstance(error, StopIteration):
                    raise
                self._error = error
                self._failing()
        return self._empty

    def _read(self) -> T:
        try:
            return next(self._source)
        except OSError as error:
            raise UserError(f"the data cannot be read: {error}") from error

    @property
    def failed(self) -> bool:
        """Whether this process can read no more."""
        return self._error is not None

    def require(self) -> None:
        """Raise on every process the error that kept one from reading."""

        def check() -> None:
            if self._error is not None:
                raise self._error

        run_together(check)
