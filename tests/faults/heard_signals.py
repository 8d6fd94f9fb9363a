"""Signals that reach a child of the tests also where these were started in the background, or by
`nohup`: such a shell's jobs, and what they start, ignore them.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def children_hear() -> Iterator[None]:
    """Have the processes that are started inside begin with the usual handlers."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGHUP, hang_up)
