"""What is known of the processors of a machine: rates that were measured on it, and the file that
keeps them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError, read_json
from jaxpar.base.machine import cache_folder, versions

_FORM = 1
"""The version of the file, which goes up where a figure is measured in another way."""

Rates = tuple[tuple[float, float], ...]
"""Rates by size, (size, units a second), the smallest first."""


@dataclass(frozen=True)
class CpuFigures:
    """What the processors of a machine do, all of them together where nothing else is said.

    Attributes:
      cores: the processors that this process may use.
      matmul_float32: FLOP/s of a matmul by its FLOPs.
      matmul_bfloat16: likewise.
      memory: bytes/s that are read and written, by the bytes of a task.
      simple: elements a second that one core adds, compares or selects.
      costly: elements a second that one core takes an exponential of.
      strided: elements a second that one core transposes.
      task: seconds from one task to the next.
      call: seconds in which a program of nothing is called.
      argument: seconds that each further array of a call takes on each device.
      devices: the devices that the collectives were measured with.
      collective_start: seconds of a collective of nothing between them.
      collective_bandwidth: bytes/s of a device in a collective.
    """

    cores: int
    matmul_float32: Rates
    matmul_bfloat16: Rates
    memory: Rates
    simple: float
    costly: float
    strided: float
    task: float
    call: float
    argument: float
    devices: int = 1
    collective_start: float = 0.0
    collective_bandwidth: float = 0.0

    def best(self, name: str) -> float:
        """Return the highest rate of a table, by the name of its field."""
        return max(rate for _, rate in getattr(self, name))


def rate_at(rates: Rates, size: float) -> float:
    """Return the rate of a size: between two that were measured, by the logarithm of the size, and
    beyond them the nearest.
    """
    sizes = [one for one, _ in rates]
    at = bisect_left(sizes, size)
    if at == 0:
        return rates[0][1]
    if at == len(rates):
        return rates[-1][1]
    below, slow = rates[at - 1]
    above, fast = rates[at]
    share = math.log(size / below) / math.log(above / below)
    return slow + share * (fast - slow)


def cores_here() -> int:
    """Count the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def figures_file(devices: int) -> Path:
    """Return where the figures of this machine are kept: in the user's cache, by the processor,
    the cores, the versions of jaxlib and how many devices are simulated.
    """
    known: list[Any] = [_FORM, _processor(), cores_here(), devices, versions(("jax", "jaxlib"))]
    name = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
    return cache_folder() / "here" / f"{name}.json"


def read_figures(file: Path) -> CpuFigures | None:
    """Read figures that were kept; None where there are none, or where they are damaged."""
    if not file.exists():
        return None
    try:
        found = read_json(file)
        tables = ("matmul_float32", "matmul_bfloat16", "memory")
        read = {name: _rates(value) if name in tables else value for name, value in found.items()}
        return CpuFigures(**read)
    except (UserError, TypeError, ValueError):
        return None  # they are measured anew


def keep_figures(file: Path, figures: CpuFigures) -> None:
    """Keep figures for later processes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(asdict(figures), indent=1) + "\n")


def _rates(rows: Sequence[Sequence[float]]) -> Rates:
    return tuple((float(size), float(rate)) for size, rate in rows)


def _processor() -> str:
    """Name the processor and the machine, as far as the system says."""
    words = [platform.machine(), platform.node(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        words += [line for line in lines if line.startswith("model name")][:1]
    return " ".join(words)
