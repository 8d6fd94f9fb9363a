"""A run that goes on with other numbers of devices, 8 -> 4 -> 2 -> 8: it reads the batches of the
undisturbed run, each of them once and in its order, and its losses are that run's.

`python tests/faults/test_resized.py` is the long form: every plan, with the time to recover.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.train import loop
from jaxpar.train.experiments import make_experiment
from jaxpar.train.hooks import OnRow
from jaxpar.train.loop import run_step

pytestmark = pytest.mark.slow

SIZES = (8, 4, 2, 8)
STEPS = 6
"""Steps on each number of devices."""
TOLERANCE = 1e-5
"""Sums over other devices are taken in another order: float32 losses of 4 to 5 nats differ by some
1e-6 after 24 steps."""
SMALL = {
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "model.layers": 2,
    "model.embed": 32,
    "model.mlp": 64,
    "data.seq_len": 32,
    "data.max_bytes": 200_000,
    "train.batch": 16,
    "train.steps": STEPS * len(SIZES),
    "train.warmup_steps": 1,
    "train.eval_every": 0,
    "train.final_eval_batches": 1,
    "checkpoint.every": 1000,
    "metrics.log_every": 1,
}


class Plan(NamedTuple):
    """A layout of any number of devices.

    Attributes:
      preset: the config that it begins from.
      fixed: the settings that stay.
      free: the mesh axis that takes what is left.
      whole: the sequences of a step are not cut into more microbatches where there are fewer
        devices, as what experts balance is over a microbatch.
    """

    preset: str
    fixed: dict[str, Any]
    free: str
    whole: bool = False


PLANS = {
    "data": Plan("tiny", {}, "data"),
    "fsdp": Plan("tiny", {}, "fsdp"),
    "data x tensor": Plan("tiny", {"mesh.tensor": 2}, "data"),
    "data x stage": Plan("tiny", {"mesh.stage": 2, "pipeline.microbatches": 2}, "data"),
    "fsdp x context": Plan("tiny", {"mesh.context": 2}, "fsdp"),
    "data x expert": Plan("tiny_moe", {"mesh.expert": 2}, "data", whole=True),
}


class Part(NamedTuple):
    """What a call trained: the loss and a digest of the batch of each step, and the seconds until
    its first step was done."""

    losses: dict[int, float]
    batches: dict[int, str]
    seconds: float


def config_of(plan: Plan, devices: int) -> Config:
    """The config of a plan on so many devices."""
    config = override(load_config(plan.preset), SMALL | plan.fixed)
    others = int(np.prod([size for key, size in plan.fixed.items() if key.startswith("mesh.")]))
    changes = {f"mesh.{plan.free}": devices // others}
    if not plan.whole:
        changes["train.accumulation"] = 8 // devices
    return override(config, changes)


def train(plan: Plan, devices: int, folder: Path, until: int) -> Part:
    """Train a run, or go on with it, on so many devices, up to a step."""
    config = override(config_of(plan, devices), {"train.stop_at": until})
    began = time.monotonic()
    losses = dict[int, float]()
    digests = list[str]()
    first = list[float]()
    put = run_step.put_batch

    def put_and_note(rows: Any, plan: Any) -> Any:
        digests.append(digest(rows))
        return put(rows, plan)

    def note(step: int, row: dict[str, Any]) -> None:
        if "loss" in row:
            losses[step] = row["loss"]
            first.append(time.monotonic() - began)

    run_step.put_batch = put_and_note
    try:
        loop.run(make_experiment(config, jax.devices()[:devices]), folder, [OnRow(note)])
    finally:
        run_step.put_batch = put
    steps = sorted(losses)
    return Part(losses, dict(zip(steps, digests, strict=True)), first[0])


def digest(rows: Any) -> str:
    """The hash of every array of a batch."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(rows)]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def resize(plan: Plan, sizes: tuple[int, ...], folder: Path) -> tuple[float, list[float]]:
    """Train a run on these numbers of devices in turn, and hold it against one that stays on 8.

    Returns:
      The largest difference of two losses, and the seconds until the first step on each number.
    """
    last = STEPS * len(sizes)
    undisturbed = train(plan, 8, folder / "undisturbed", last)
    parts = [
        train(plan, size, folder / "resized", STEPS * (turn + 1)) for turn, size in enumerate(sizes)
    ]
    losses = {step: loss for part in parts for step, loss in part.losses.items()}
    batches = {step: text for part in parts for step, text in part.batches.items()}
    assert sum(len(part.batches) for part in parts) == last, "each batch is read once"
    assert batches == undisturbed.batches
    assert losses.keys() == undisturbed.losses.keys() and len(set(batches.values())) == last
    largest = max(abs(losses[step] - undisturbed.losses[step]) for step in losses)
    assert largest <= TOLERANCE, largest
    return largest, [part.seconds for part in parts[1:]]


def test_a_run_on_fewer_devices_and_on_more_again_is_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALL, "train.steps", 2 * STEPS)
    resize(PLANS["data x tensor"], (2, 8), tmp_path)


def run_long() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    seconds = list[float]()
    for name in given.plans:
        with tempfile.TemporaryDirectory() as folder:
            largest, waited = resize(PLANS[name], SIZES, Path(folder))
        seconds += waited
        print(f"{name}: batches equal, losses within {largest:.1e}", flush=True)
    print(
        f"{len(seconds)} changes; seconds to the first step: median "
        f"{statistics.median(seconds):.1f}, worst {max(seconds):.1f}"
    )


if __name__ == "__main__":
    sys.exit(run_long())
