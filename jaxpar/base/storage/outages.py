"""Requests of a bucket that fail for a while, as by a 503 or a timeout: they are tried again, and
one line says so, however many of them wait. A bucket that has not answered yet, as where its name
is wrong or there is no network, is not waited for: there is nothing to lose.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from jaxpar.base.console import PlainConsole
from jaxpar.base.errors import UserError

T = TypeVar("T")

LIMIT_SECONDS = 300.0
"""The time for which a request that fails for a while is tried again."""
FIRST_SECONDS = 20.0
"""The time that a bucket has for its first answer."""
_LONGEST_PAUSE = 30.0
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""The errors that the same request would get again."""
_FOR_A_WHILE = (408, 429)
"""The HTTP codes below 500 after which the same request may succeed: too slow, too many."""
_FINAL_NAMES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "NoSuchBucket",
    "DefaultCredentialsError",
}


class Outage:
    """A time in which a bucket does not answer: one line says that it begins, and one that it has
    ended, however many requests wait for it.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._waiting = 0
        self._began: float | None = None
        self.answered = False
        """Whether the bucket has ever answered this process."""

    def enter(self, line: str) -> None:
        """Begin to wait for the bucket; the first that does prints the line."""
        with self._lock:
            self._waiting += 1
            if self._began is not None:
                return
            self._began = time.monotonic()
        say(line)

    def leave(self, answered: bool) -> None:
        """End the wait; the last that does, and got an answer, prints so."""
        with self._lock:
            self._waiting -= 1
            if self._waiting or self._began is None:
                return
            took = time.monotonic() - self._began
            self._began = None
        if answered:
            say(f"{self._name} answers again, after {took:.0f} s")


_OUTAGES: dict[str, Outage] = {}


def outage_of(name: str) -> Outage:
    """Return the outage of a bucket, which all requests of this process share."""
    return _OUTAGES.setdefault(name, Outage(name))


def keep_trying(
    do: Callable[[], T], what: str, where: str, outage: Outage, seconds: float | None = None
) -> T:
    """Make a request, again while it fails with an error that may pass.

    Args:
      do: makes the request.
      what: what the request does to an object, as a participle: `read`, `written`.
      where: the URL of the object.
      outage: the bucket's outage, which says that the request waits.
      seconds: the time for which the request is tried; None = `LIMIT_SECONDS`, or `FIRST_SECONDS`
        where the bucket has not answered yet.

    Returns:
      The result of `do`.

    Raises:
      UserError: the same request would fail again, or has failed for so long.
    """
    began = time.monotonic()
    pause = 0.5
    waiting = False
    answered = False
    try:
        while True:
            try:
                if outage.answered:
                    result = do()
                else:
                    result = _within(do, began + _limit(outage, seconds))
            # of a network library, or of one above it
            except Exception as error:
                outage.answered = outage.answered or _is_of_server(error)
                limit = _limit(outage, seconds)
                until = began + limit
                look = "the bucket" if outage.answered else "its name, at your credentials"
                why = _require_passing(error, what, where, until, limit, look)
            else:
                answered = outage.answered = True
                return result
            if outage.answered and not waiting:
                waiting = True
                outage.enter(
                    f"warning: {where} cannot be {what} ({why}): it is tried again for up to "
                    f"{limit:.0f} s"
                )
            left = until - time.monotonic()
            time.sleep(min(pause * random.uniform(0.8, 1.2), max(left, 0.01)))
            pause = min(2 * pause, _LONGEST_PAUSE)
    finally:
        if waiting:
            outage.leave(answered)


def _limit(outage: Outage, seconds: float | None) -> float:
    """Return for how many seconds a request of a bucket is tried."""
    if seconds is not None:
        return seconds
    return LIMIT_SECONDS if outage.answered else min(FIRST_SECONDS, LIMIT_SECONDS)


def _is_of_server(error: BaseException | None) -> bool:
    """Return whether a server raised this error, and so is there: gcsfs has the code of HTTP, and
    botocore, in the error that s3fs was given, the response.
    """
    while error is not None:
        if isinstance(getattr(error, "code", None), int) or (
            # requests has a response of None where nobody answered
            getattr(error, "response", None) is not None
        ):
            return True
        error = error.__cause__
    return False


def _within(do: Callable[[], T], until: float) -> T:
    """Call a function in a thread, which is left behind where it takes too long: client libraries
    try by themselves for minutes.

    Raises:
      TimeoutError: the function has not returned by then.
      Exception: whatever the function raises.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(do())
        # which the caller raises
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="first request").start()
    return done.result(max(until - time.monotonic(), 0.01))


def _require_passing(
    error: Exception, what: str, where: str, until: float, limit: float, look: str
) -> str:
    """Return the reason of an error that may pass; raise an error that the same request would get
    again, or that has not passed in time.
    """
    if isinstance(error, UserError):
        raise error
    why = reason(error)
    if what == "written" and isinstance(error, FileNotFoundError):
        why = "there is no such bucket"
    if _is_final(error):
        raise UserError(f"{where} cannot be {what}: {why}") from error
    if time.monotonic() >= until:
        raise UserError(
            f"{where} cannot be {what} ({why}), and was tried for {limit:.0f} s: look at "
            f"{look} and at the network, and give the command again"
        ) from error
    return why


def _is_final(error: Exception) -> bool:
    if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
        return True
    code = getattr(error, "code", None)  # of gcsfs
    if isinstance(code, int) and 400 <= code < 500:
        return code not in _FOR_A_WHILE
    return isinstance(error, OSError) and str(error).startswith("Forbidden")


def reason(error: Exception) -> str:
    """Return the first line of an error's text, or its meaning in plain words."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if isinstance(error, FileNotFoundError):
        return "there is no such object"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return text


_SAYING = threading.Lock()


def say(line: str) -> None:
    """Print a line about a bucket on standard error, from any thread."""
    with _SAYING:
        PlainConsole(stderr=True, soft_wrap=True).print(line)
