"""Measured speeds: the seconds of a task from those of tasks like it that were timed on the device.

A matmul's rate (FLOP/s) depends on its sizes and on the library that XLA gave it to, that of all else (bytes/s) on how
much it reads and writes. A task takes, for each FLOP or byte, the mean of what those that were timed take, weighted by
how near their sizes are. Times and not rates are averaged: what a table cannot tell apart then comes out right in sum.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxpar.hlo.tasks import Task


class Sample(NamedTuple):
    """One task as it was timed."""

    sort: str
    """What it is comparable to: `matmul dot f32`."""
    sizes: tuple[float, ...]
    """Base-2 logarithms: of a matmul (batch, m, n, k), else (bytes, result as a part of them)."""
    rate: float
    """FLOP/s of a matmul, bytes/s of anything else."""


class TimedWork(NamedTuple):
    """A task as the table sees it."""

    sort: str
    sizes: tuple[float, ...]
    amount: float
    """FLOPs of a matmul, bytes of anything else."""


def work_of(task: Task) -> TimedWork | None:
    """How a task is looked up; None for one that says nothing of its work."""
    dims = [int(side) for side in re.findall(r"\d+", task.shape.partition("[")[2].partition("]")[0])]
    if task.flops:
        *batch, m, n = dims if len(dims) > 1 else [1, *dims, 1][-2:]
        k = task.flops / (2 * max(math.prod(dims), 1))
        return TimedWork(f"matmul {maker(task)} {task.dtype}", _logs(math.prod(batch), m, n, k), task.flops)
    if not task.bytes:
        return None
    share = math.prod(dims) * _width(task.dtype) / task.bytes
    return TimedWork(f"{task.kind} {maker(task)} {task.dtype}", _logs(task.bytes, share), task.bytes)


def maker(task: Task) -> str:
    """What makes tasks of one kind differ: the library that runs them, the opcode, or exponentials and such.

    On CPU XLA hands groups of instructions to a library and names them after it; its own fusions it names after
    their last instructions (`multiply_tanh_fusion`).
    """
    library = re.match(r"(ynn|xnn|onednn)_", task.name)
    if library:
        return library[1]
    if task.flops or task.opcode != "fusion":
        return task.opcode
    return "costly" if re.search(r"exponential|tanh|log|power|logistic|sine|erf", task.name) else "plain"


def sample(task: Task, seconds: float) -> Sample | None:
    """A timed task as an entry of the table; None where nothing can be learned from it."""
    work = work_of(task)
    return Sample(work.sort, work.sizes, work.amount / seconds) if work and seconds > 0 else None


WAITED = 20
"""How many times slower than its like a task is taken to have waited for something, not worked."""


def without_waits(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples, less those `WAITED` times slower than the median of five or more of about their size.

    What XLA:CPU hands to other threads may stand behind a matmul in their queue, in every step alike; the time of one
    such copy, 10 ms for a megabyte, would count for all that are like it.
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for item in samples:
        groups[item.sort].append(item)
    kept = set[Sample]()
    for items in groups.values():
        sizes, rates = np.array([item.sizes for item in items]), np.array([item.rate for item in items])
        for item in items:
            alike = rates[np.sum((sizes - np.array(item.sizes)) ** 2, axis=1) < 1]
            if len(alike) <= 5 or item.rate * WAITED > np.median(alike):
                kept.add(item)
    return tuple(item for item in samples if item in kept)


@dataclass(frozen=True)
class SpeedTable:
    """What was timed on one device."""

    samples: tuple[Sample, ...]
    sharing: int = 1
    """Devices simulated on the same cores: each gets its part of them."""

    @cached_property
    def _by_sort(self) -> dict[str, tuple[Any, Any]]:
        """Sizes [samples, dims] and rates [samples] of each sort."""
        found: dict[str, list[Sample]] = defaultdict(list)
        for item in self.samples:
            found[item.sort].append(item)
        return {
            sort: (np.array([item.sizes for item in items]), np.array([item.rate for item in items]))
            for sort, items in found.items()
        }

    def rate(self, work: TimedWork) -> float | None:
        """FLOP/s or bytes/s; None where nothing of this kind was timed, by any maker in any dtype."""
        found = self._by_sort.get(work.sort)
        if found is None:
            kind, made, _ = work.sort.split(" ")
            alike = [rows for sort, rows in self._by_sort.items() if sort.split(" ")[:2] == [kind, made]]
            alike = alike or [rows for sort, rows in self._by_sort.items() if sort.split(" ")[0] == kind]
            if not alike:
                return None
            found = max(alike, key=lambda rows: len(rows[1]))
        sizes, rates = found
        # Sizes differ by powers of two: a third of one is as good as the same.
        weights = (np.sum((sizes - np.array(work.sizes)) ** 2, axis=1) + 0.1) ** -2.0
        return float(weights.sum() / (weights / rates).sum())

    def seconds(self, task: Task) -> float | None:
        """One execution of a task, once launched; None where nothing like it was timed."""
        work = work_of(task)
        rate = self.rate(work) if work else None
        return None if work is None or rate is None else work.amount / rate * self.sharing


def _logs(*values: float) -> tuple[float, ...]:
    return tuple(math.log2(max(value, 2.0**-20)) for value in values)


def _width(dtype: str) -> int:
    """Bytes of one element of an HLO dtype."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
