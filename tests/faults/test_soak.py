"""Thousands of steps in one process, with saves, evaluations and guards: neither memory nor open
files nor threads nor objects nor the time of a step grow.

`python tests/faults/test_soak.py --steps 3000` is the long form, and prints the figures.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from jaxpar.base.config import override
from jaxpar.base.config.loading import load_config

pytestmark = pytest.mark.slow

EVERY = 20
"""Steps between two rows, at each of which is measured."""
SAVE_EVERY = 40
"""Steps between two saves, and two evaluations."""
CHANGES = {
    "mesh.platform": "cpu",
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "model.layers": 1,
    "model.embed": 32,
    "model.mlp": 64,
    "data.seq_len": 32,
    "data.max_bytes": 200_000,
    "train.batch": 8,
    "train.warmup_steps": 1,
    "train.eval_every": SAVE_EVERY,
    "train.eval_batches": 1,
    "train.final_eval_batches": 1,
    "train.on_nonfinite": "skip",
    "train.on_spike": "rollback",
    "train.spike_deviations": 1000.0,
    "checkpoint.every": SAVE_EVERY,
    "checkpoint.keep": 2,
    "metrics.log_every": EVERY,
}
MOST_MEMORY = 8.0
"""MiB by which the memory may differ: the allocator keeps what it was given in pages. A leak of 8 KiB
a step is found by 1,000 steps.
"""
MOST_BLOCKS = 1000
"""Blocks of Python's memory, beside those that a save loses: one lost at each step is found."""
LOST_A_SAVE = 600
"""Blocks that a save of this model's 63 arrays may lose: 480 to 560 were seen. `to_json` of a
specification in TensorStore 0.1.86, which Orbax calls for each array, loses four at each call; that
it is all of them was not shown.
"""
MOST_TIME = 1.25
"""The same of the processor time of a step, saves and evaluations in their turn: where others use
the machine too, it costs a process that shares its caches more.
"""


class Sample(NamedTuple):
    """What a process holds after a step.

    Attributes:
      memory: MiB that are resident.
      files: open descriptors.
      threads: of Python.
      arrays: arrays of JAX that are alive.
      blocks: of memory that Python has given to objects.
      seconds: the processor time that all threads have used since the sample before.
    """

    memory: float
    files: float
    threads: float
    arrays: float
    blocks: float
    seconds: float


def sample(seconds: float) -> Sample:
    """Look at this process, which has used so many seconds since the last look."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    gc.collect()
    return Sample(
        memory=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        arrays=len(jax.live_arrays()),
        # `gc.get_objects` would also give tuples that another thread is making, which breaks them
        blocks=sys.getallocatedblocks(),
        seconds=seconds,
    )


def soak(run_folder: Path, steps: int, devices: int) -> list[Sample]:
    """Train so many steps on simulated devices, and look at the process at every row. What several
    devices hold copies of is compared too.
    """
    from jaxpar.base.process.runtime import start
    from jaxpar.train import OnRow, run

    changes = {**CHANGES, "train.steps": steps, "mesh.data": devices}
    if devices > 1:
        changes["train.check_replicas"] = 10
    config = override(load_config("tiny"), changes)
    start(config.mesh)
    samples = list[Sample]()
    before = time.process_time()

    def report(step: int, row: dict[str, float]) -> None:
        nonlocal before
        if "step_seconds" in row:
            now = time.process_time()
            samples.append(sample((now - before) / EVERY))
            before = time.process_time()

    run(config, run_folder, [OnRow(report)])
    return samples


def thirds(samples: Sequence[Sample]) -> list[Sample]:
    """The least of each figure in each third of a run, in which no save is under way, and the
    median of the time.
    """
    size = len(samples) // 3
    parts = [samples[size * number : size * (number + 1)] for number in range(3)]
    found = []
    for part in parts:
        seconds = statistics.median(one.seconds for one in part)
        least = Sample(*map(min, zip(*part, strict=True)))
        found.append(least._replace(seconds=seconds))
    return found


def growth(samples: Sequence[Sample]) -> list[str]:
    """Say what grows from the second third of a run to the last; the first is its warm-up."""
    _, middle, last = thirds(samples)
    found = []
    if last.memory > middle.memory + MOST_MEMORY:
        found.append(f"memory from {middle.memory:.1f} to {last.memory:.1f} MiB")
    for name in ("files", "threads", "arrays"):
        before, after = getattr(middle, name), getattr(last, name)
        if after > before:
            found.append(f"{name} from {before:.0f} to {after:.0f}")
    saves = len(samples) // 3 * EVERY / SAVE_EVERY
    if last.blocks > middle.blocks + MOST_BLOCKS + LOST_A_SAVE * saves:
        found.append(f"blocks from {middle.blocks:.0f} to {last.blocks:.0f}")
    if last.seconds > MOST_TIME * middle.seconds:
        found.append(f"a step from {middle.seconds:.4f} to {last.seconds:.4f} s of processor time")
    return found


def test_nothing_grows_with_the_steps(tmp_path: Path) -> None:
    samples = soak(tmp_path / "run", 240, devices=2)
    assert len(samples) == 240 // EVERY
    assert not growth(samples)


def test_what_grows_is_named() -> None:
    still = [Sample(100.0, 20, 5, 30, 50_000, 0.01)] * 30
    assert not growth(still)
    for number, per_row in enumerate((1.0, 1, 1, 1, 1000, 0.001)):
        leaking = []
        for row, one in enumerate(still):
            values = list(one)
            values[number] += row * per_row
            leaking.append(Sample(*values))
        (said,) = growth(leaking)
        assert said.startswith("a step" if number == 5 else Sample._fields[number])


def run_long() -> int:
    """The long form; returns how many figures grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(Path(folder) / "run", args.steps, args.devices)
    for name, part in zip(("first", "second", "last"), thirds(samples), strict=True):
        print(
            f"{name} third: {part.memory:.1f} MiB, {part.files:.0f} descriptors, "
            f"{part.threads:.0f} threads, {part.arrays:.0f} arrays, {part.blocks:.0f} blocks, "
            f"{1000 * part.seconds:.1f} ms of processor time a step"
        )
    found = growth(samples)
    print("grew: " + "; ".join(found) if found else f"nothing grew in {args.steps} steps")
    return len(found)


if __name__ == "__main__":
    sys.exit(run_long() > 0)
