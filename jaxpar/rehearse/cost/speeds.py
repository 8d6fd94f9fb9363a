"""Measured speeds give the seconds of a task, estimated from similar tasks that were timed on the device.

A matmul's rate (FLOP/s) depends on its sizes and on the library that XLA chose for it. The rate of anything else
(bytes/s) depends on how much it reads and writes. The time per FLOP or byte is the mean over the timed tasks, weighted
by how near their sizes are. Averaging times, not rates, makes the sum right over tasks that a table cannot distinguish.
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
    """The measured speed of one task."""

    sort: str
    """The group of tasks it compares with: its kind, its maker and its dtype, as in `matmul dot f32`."""
    sizes: tuple[float, ...]
    """Base-2 logarithms of (batch, m, n, k) for a matmul, else of (bytes, the result's share of the bytes)."""
    rate: float
    """The FLOP/s of a matmul, or the bytes/s of anything else."""


def sample(task: Task, seconds: float) -> Sample | None:
    """Make a timed task an entry of the table; None if it does not state its work or took no time."""
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
    """Name what sets tasks of one kind apart: the library that runs them, the opcode, or costly functions like tanh.

    On CPU, XLA hands groups of instructions to a library and names them after it. It names its own fusions after
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
    """The tasks that were timed on one device."""

    samples: tuple[Sample, ...]
    sharing: int = 1
    """How many devices are simulated on the same cores and share them."""

    @cached_property
    def _alike(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The sizes [samples, dims] and rates [samples] of each sort, of each kind and maker, and of each kind."""
        found: dict[str, list[Sample]] = defaultdict(list)
        for item in self.samples:
            for name in _from_near_to_far(item.sort):
                found[name].append(item)
        return {
            name: (np.array([item.sizes for item in items]), np.array([item.rate for item in items]))
            for name, items in found.items()
        }

    def seconds(self, task: Task) -> float | None:
        """Estimate the seconds of one execution of a task, without its launch; None if none of its kind was timed."""
        asked = sample(task, 1.0)
        name = next((name for name in _from_near_to_far(asked.sort) if name in self._alike), "") if asked else ""
        if not asked or not name:
            return None
        sizes, rates = self._alike[name]
        # Sizes are in powers of two; a difference of a third of one counts as hardly any.
        weights = (np.sum((sizes - np.array(asked.sizes)) ** 2, axis=1) + 0.1) ** -2.0
        rate = weights.sum() / (weights / rates).sum()
        return float(asked.rate / rate) * self.sharing


def _from_near_to_far(sort: str) -> tuple[str, str, str]:
    """Return the sort, then without its dtype, then without its maker: `matmul dot f32`, `matmul dot`, `matmul`."""
    kind, maker, _ = sort.split(" ")
    return sort, f"{kind} {maker}", kind
