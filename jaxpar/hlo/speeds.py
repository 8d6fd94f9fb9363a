"""Measured speeds: the seconds of a task from those of tasks like it that were timed on the device.

A matmul's rate (FLOP/s) depends on its sizes and on the library that XLA gave it to, that of all else (bytes/s) on how
much it reads and writes. Between the sizes that were timed the rate is a mean of the nearest, weighted by distance;
beyond them it is that of the nearest.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxpar.hlo.tasks import Task

NEAREST = 4
"""Samples that a rate is the mean of."""


class Sample(NamedTuple):
    """One task as it was timed."""

    sort: str
    """What it is comparable to: `matmul dot f32`."""
    sizes: tuple[float, ...]
    """Base-2 logarithms: of a matmul (batch, m, n, k), else (bytes, result as a part of them)."""
    rate: float
    """FLOP/s of a matmul, bytes/s of anything else."""


class Work(NamedTuple):
    """A task as the table sees it."""

    sort: str
    sizes: tuple[float, ...]
    amount: float
    """FLOPs of a matmul, bytes of anything else."""


def work_of(task: Task) -> Work | None:
    """How a task is looked up; None for one that says nothing of its work."""
    dims = [int(side) for side in re.findall(r"\d+", task.shape.partition("[")[2].partition("]")[0])]
    if task.flops:
        *batch, m, n = dims if len(dims) > 1 else [1, *dims, 1][-2:]
        k = task.flops / (2 * max(math.prod(dims), 1))
        return Work(f"matmul {maker(task)} {task.dtype}", _logs(math.prod(batch), m, n, k), task.flops)
    if not task.bytes:
        return None
    share = math.prod(dims) * _width(task.dtype) / task.bytes
    return Work(f"{task.kind} {maker(task)} {task.dtype}", _logs(task.bytes, share), task.bytes)


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


@dataclass(frozen=True)
class SpeedTable:
    """What was timed on one device."""

    samples: tuple[Sample, ...]
    sharing: int = 1
    """Devices simulated on the same cores: each gets its part of them."""

    @cached_property
    def _by_sort(self) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = defaultdict(list)
        for item in self.samples:
            found[item.sort].append(item)
        return found

    def rate(self, work: Work) -> float | None:
        """FLOP/s or bytes/s; None where nothing of this sort was timed, in any dtype."""
        found = self._by_sort.get(work.sort)
        if found is None:
            kind, made, _ = work.sort.split(" ")
            alike = [items for sort, items in self._by_sort.items() if sort.split(" ")[:2] == [kind, made]]
            alike = alike or [items for sort, items in self._by_sort.items() if sort.split(" ")[0] == kind]
            if not alike:
                return None
            found = max(alike, key=len)
        return _mean_rate(found, work.sizes)

    def seconds(self, task: Task) -> float | None:
        """One execution of a task, once launched; None where nothing like it was timed."""
        work = work_of(task)
        rate = self.rate(work) if work else None
        return None if work is None or rate is None else work.amount / rate * self.sharing


def _mean_rate(samples: Sequence[Sample], sizes: tuple[float, ...]) -> float:
    """The geometric mean of the nearest samples' rates, weighted by the inverse square of their distance."""
    near = sorted((math.dist(item.sizes, sizes), item.rate) for item in samples)[:NEAREST]
    weights = [1 / (distance + 0.05) ** 2 for distance, _ in near]
    return math.exp(sum(w * math.log(rate) for w, (_, rate) in zip(weights, near, strict=True)) / sum(weights))


def _logs(*values: float) -> tuple[float, ...]:
    return tuple(math.log2(max(value, 2.0**-20)) for value in values)


def _width(dtype: str) -> int:
    """Bytes of one element of an HLO dtype."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
