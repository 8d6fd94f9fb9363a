"""What each task of a program costs: seconds, and the lanes of the device that it holds meanwhile.

The compiler's own cycles where it gives them; else the longer of arithmetic and memory traffic (the roofline of
Williams, Waterman and Patterson, CACM 52(4), 2009). Collectives are priced by a function, since only a target knows
its links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxpar.hardware import Hardware, PeakFlops
from jaxpar.hlo.tasks import Collective, Loop, Node, Program, Task

COMPUTE, DMA, HOST = "compute", "dma", "host"
"""Lanes of every device; the links have theirs from the network model: `ici:x`, `nvlink`, `dcn`."""

Path = tuple[int, ...]
"""Where a node stands: its position in the program, then in the loop's body, and so on."""

Basis = Literal["cycles", "flops", "bytes", "link", "host link", "overhead", "none"]
"""What a duration rests on; `none` = the task says nothing of its work, and was taken to cost nothing."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One execution of a task."""

    seconds: float
    lanes: tuple[str, ...]
    """Held from start to finish. A synchronous collective holds compute as well as its links."""
    basis: Basis


@dataclass(frozen=True)
class Costs:
    """The price of every task of one program."""

    of: dict[Path, Cost]
    notes: tuple[str, ...] = ()
    """What was assumed on the way, each once: `no peak for f64: bytes only`."""


class OnLinks(Protocol):
    """What a network model answers."""

    @property
    def seconds(self) -> float: ...
    @property
    def resources(self) -> tuple[str, ...]: ...


class Speeds(Protocol):
    """Measured speeds of a device, in place of the flat peaks (`jaxpar.calibrate`)."""

    def seconds(self, task: Task) -> float | None:
        """One execution of a task, everything included, or None where nothing like it was measured."""
        ...


def price(
    program: Program,
    hardware: Hardware,
    collective_time: Callable[[Collective], OnLinks],
    speeds: Speeds | None = None,
) -> Costs:
    """Seconds and lanes of every task, by its path.

    Args:
      program: what runs on one device.
      hardware: its figures.
      collective_time: the network model, bound to a target.
      speeds: measured speeds, asked before the roofline and after the compiler's cycles.
    """
    notes: Counter[str] = Counter()
    of = {path: _cost(task, hardware, collective_time, speeds, notes) for path, task, _ in tasks(program.nodes)}
    return Costs(of, tuple(f"{note} ({count} x)" if count > 1 else note for note, count in notes.items()))


def tasks(nodes: tuple[Node, ...], times: int = 1, path: Path = ()) -> Iterator[tuple[Path, Task, int]]:
    """Every task with its path and how often it runs in one step."""
    for i, node in enumerate(nodes):
        if isinstance(node, Loop):
            yield from tasks(node.body, times * node.trips, (*path, i))
        elif isinstance(node, Task):
            yield (*path, i), node, times


def seconds_by_basis(program: Program, costs: Costs) -> dict[str, float]:
    """Seconds of all tasks of one step by what they rest on: how much is the compiler's and how much an estimate."""
    total: Counter[str] = Counter()
    for path, _, count in tasks(program.nodes):
        total[costs.of[path].basis] += count * costs.of[path].seconds
    return dict(total)
