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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError, read_json, require_kinds
from jaxpar.base.machine import cache_folder, versions

_FORM = 3
"""The version of the file, which goes up where a figure is measured in another way."""

NARROW = 32
WIDE = 128
"""The narrowest sides of the matmuls that are measured."""
Rates = tuple[tuple[float, float], ...]
"""Rates by size, (size, units a second), the smallest first."""


@dataclass(frozen=True)
class CpuRates:
    """What processors do a second.

    Attributes:
      matmul_float32: FLOP/s of a matmul by its FLOPs, where rows, columns and terms of a sum are
        `WIDE` or more.
      narrow_float32: likewise of matmuls in a batch, whose narrowest side is `NARROW`, as heads'.
      matmul_bfloat16, narrow_bfloat16: likewise.
      memory: bytes/s that are read and written, by the bytes of a task.
      simple: elements that are added, compared or selected.
      costly: elements that an exponential is taken of.
      strided: elements that are transposed, by their number.
      tasks: tasks that begin.
    """

    matmul_float32: Rates
    narrow_float32: Rates
    matmul_bfloat16: Rates
    narrow_bfloat16: Rates
    memory: Rates
    strided: Rates
    simple: float
    costly: float
    tasks: float

    def best(self, name: str) -> float:
        """Return the highest rate of a table, by the name of its field."""
        return max(rate for _, rate in getattr(self, name))

    def matmul(self, dtype: str, flops: float, narrowest: int) -> float:
        """Return the FLOP/s of a matmul.

        Args:
          dtype: as HLO writes it; any but `bf16` counts as float32.
          flops: the FLOPs of one execution.
          narrowest: the least of its rows, columns and terms of a sum.
        """
        half = dtype == "bf16"
        wide = rate_at(self.matmul_bfloat16 if half else self.matmul_float32, flops)
        narrow = rate_at(self.narrow_bfloat16 if half else self.narrow_float32, flops)
        return rate_at(((NARROW, narrow), (WIDE, wide)), narrowest)


@dataclass(frozen=True)
class CpuFigures:
    """What the processors of a machine do.

    Attributes:
      cores: the processors that this process may use.
      alone: the rates of one device that has the machine for itself. It splits its larger tasks
        over all cores; `simple`, `costly` and `strided` are of one thread.
      together: the rates of all devices together, while each does the same.
      call: seconds in which a program of nothing is called.
      argument: seconds that each further array of a call takes on each device.
      devices: the devices that `together` and the collectives were measured with.
      collective_start: seconds of a collective of nothing between them; 0 for one device.
      collective_bandwidth: bytes/s of a device in a collective.
    """

    cores: int
    alone: CpuRates
    together: CpuRates
    call: float
    argument: float
    devices: int = 1
    collective_start: float = 0.0
    collective_bandwidth: float = 0.0


_TABLES = (
    "matmul_float32",
    "narrow_float32",
    "matmul_bfloat16",
    "narrow_bfloat16",
    "memory",
    "strided",
)
_NUMBERS = ("simple", "costly", "tasks")


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
        found = read_json(file, {"alone": dict[str, Any], "together": dict[str, Any]})
        for name in ("alone", "together"):
            found[name] = _read_rates(found.get(name), f"{file}: {name}")
        own = [one.name for one in fields(CpuFigures) if one.name not in ("alone", "together")]
        require_kinds(found, dict.fromkeys(own, float), str(file))
        return CpuFigures(**found)
    except (UserError, KeyError, TypeError, ValueError):
        return None  # they are measured anew


def _read_rates(value: Any, origin: str) -> CpuRates:
    kinds: dict[str, Any] = dict.fromkeys(_NUMBERS, float)
    kinds |= dict.fromkeys(_TABLES, list[list[float]])
    rates = require_kinds(value, kinds, origin)
    tables: dict[str, Any] = {name: _rates(rates[name]) for name in _TABLES}
    return CpuRates(**{**rates, **tables})


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
