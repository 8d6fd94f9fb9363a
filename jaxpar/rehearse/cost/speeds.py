"""Measured speeds: the seconds of a task from those of tasks like it that were timed on the device.

A matmul's rate (FLOP/s) depends on its sizes and on the library that XLA gave it to, that of all else (bytes/s) on how
much it reads and writes. A task takes, for each FLOP or byte, the mean of what those that were timed take, weighted by
how near their sizes are. Times and not rates are averaged: what a table cannot tell apart then comes out right in sum.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxpar.hlo.tasks import Task


class Sample(NamedTuple):
    """One task as it was timed."""

    sort: str
    """What it is comparable to: its kind, what makes it, and its dtype, as in `matmul dot f32`."""
    sizes: tuple[float, ...]
    """Base-2 logarithms: of a matmul (batch, m, n, k), else (bytes, result as a part of them)."""
    rate: float
    """FLOP/s of a matmul, bytes/s of anything else."""


def sample(task: Task, seconds: float) -> Sample | None:
    """A timed task as an entry of the table; None where it says nothing of its work or took no time."""
    amount = task.flops or task.bytes
    if not amount or seconds <= 0:
        return None
    dims = [int(side) for side in re.findall(r"\d+", task.shape.partition("[")[2].partition("]")[0])]
    if task.flops:
        *batch, m, n = dims if len(dims) > 1 else [1, *dims, 1][-2:]
        sizes = math.prod(batch), m, n, task.flops / (2 * max(math.prod(dims), 1))
    else:
        bits = re.search(r"\d+", task.dtype)
        sizes = task.bytes, math.prod(dims) * max(1, int(bits[0]) // 8 if bits else 1) / task.bytes
    logs = tuple(math.log2(max(size, 2.0**-20)) for size in sizes)
    kind = "matmul" if task.flops else task.kind
    return Sample(f"{kind} {_maker(task)} {task.dtype}", logs, amount / seconds)


def _maker(task: Task) -> str:
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


@dataclass(frozen=True)
class SpeedTable:
    """What was timed on one device."""

    samples: tuple[Sample, ...]
    sharing: int = 1
    """Devices simulated on the same cores: each gets its part of them."""

    @cached_property
    def _alike(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Sizes [samples, dims] and rates [samples] of each sort, of each kind and maker, and of each kind."""
        found: dict[str, list[Sample]] = defaultdict(list)
        for item in self.samples:
            for name in _from_near_to_far(item.sort):
                found[name].append(item)
        return {
            name: (np.array([item.sizes for item in items]), np.array([item.rate for item in items]))
            for name, items in found.items()
        }

    def seconds(self, task: Task) -> float | None:
        """One execution of a task, once launched; None where nothing of its kind was timed."""
        asked = sample(task, 1.0)
        name = next((name for name in _from_near_to_far(asked.sort) if name in self._alike), "") if asked else ""
        if not asked or not name:
            return None
        sizes, rates = self._alike[name]
        # Sizes differ by powers of two: a third of one is as good as the same.
        weights = (np.sum((sizes - np.array(asked.sizes)) ** 2, axis=1) + 0.1) ** -2.0
        rate = weights.sum() / (weights / rates).sum()
        return float(asked.rate / rate) * self.sharing


def _from_near_to_far(sort: str) -> tuple[str, str, str]:
    """A sort, whatever its dtype, whatever its maker: `matmul dot f32`, `matmul dot`, `matmul`."""
    kind, maker, _ = sort.split(" ")
    return sort, f"{kind} {maker}", kind
