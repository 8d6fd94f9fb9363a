"""Which machine this is, and whether a process of it still runs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_NOT_RUNNING = ("Z", "X")
"""States of a process that has ended and that nobody has asked about yet."""


def machine() -> str:
    """What tells this machine, since it was last started, from others: process numbers mean
    something on it alone. A container that counts its own processes is a machine of its own.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id")
        parts.append(boot.read_text(encoding="ascii").strip()[:8])
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def process_start(pid: int) -> str | None:
    """When a process of this machine was started, in a form that only compares.

    Returns:
      The time; empty where the system does not say; None = no such process runs.
    """
    if pid <= 0:  # to `kill`, a group of processes
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number so large
        return None
    except PermissionError:
        pass  # another user's
    try:
        # the name, in parentheses, may hold anything
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in _NOT_RUNNING else fields[19]
