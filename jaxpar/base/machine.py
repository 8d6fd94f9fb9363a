"""What this machine has: memory, versions of packages, and a folder for what is kept from one
process to the next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

COMPILING = ("jaxpar", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
"""The packages that decide what a program is compiled to."""


def memory_of(device: jax.Device) -> int:
    """Ask a device for the size of its memory.

    Returns:
      Bytes; 0 where it does not say, is a CPU, or is not here.
    """
    if device.platform == "cpu" or device not in jax.local_devices():
        return 0
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def machine_memory() -> int:
    """The bytes of memory that this machine has, or that its container may use; 0 where that is not
    known.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # "max" where a container has no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=0)


def versions(packages: Sequence[str] = COMPILING) -> dict[str, str]:
    """Look up the versions of packages.

    Args:
      packages: their names; by default those that decide what a program is compiled to.

    Returns:
      The versions of those that are installed.
    """
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def cache_folder() -> Path:
    """The folder `jaxpar` under $XDG_CACHE_HOME, or under ~/.cache where that is not an
    absolute path.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "jaxpar"
