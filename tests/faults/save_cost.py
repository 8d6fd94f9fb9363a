"""What it costs that a save is synced to the disk: whole saves with the syncs and without, in turn.

    python tests/faults/save_cost.py FOLDER [--megabytes 10 100 800] [--rounds 5]

The folder lies on the disk that is asked about. A line for each size has medians: of a whole save,
and of what a step waits for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxpar.base.config import CheckpointConfig
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

ARRAYS = 16
SYNC = os.fsync


class Took(NamedTuple):
    """Milliseconds of a save, and of the call that begins it."""

    whole: float
    call: float


def save(root: Path, state: dict[str, jax.Array], synced: bool) -> Took:
    """Save twice, and time the second save: the first made the folders."""
    os.fsync = SYNC if synced else lambda _: None
    os.sync()
    try:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            checkpoints = TrainingCheckpoints(
                Path(folder) / "checkpoints", CheckpointConfig(keep=1)
            )
            checkpoints.save(1, state, {})
            checkpoints.wait()
            os.sync()
            began = time.perf_counter()
            checkpoints.save(2, state, {})
            called = time.perf_counter()
            checkpoints.wait()
            ended = time.perf_counter()
            checkpoints.close()
    finally:
        os.fsync = SYNC
    return Took(1e3 * (ended - began), 1e3 * (called - began))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 100, 800])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for size in args.megabytes:
        entries = int(size * 1e6 / 4 / ARRAYS)
        keys = jax.random.split(jax.random.key(0), ARRAYS)
        state = {f"w{n}": jax.random.normal(key, (entries,)) for n, key in enumerate(keys)}
        save(args.folder, state, synced=True)
        rounds = [
            (save(args.folder, state, synced=True), save(args.folder, state, synced=False))
            for _ in range(args.rounds)
        ]
        with_syncs, without = (
            Took(*(statistics.median(times) for times in zip(*half, strict=True)))
            for half in zip(*rounds, strict=True)
        )
        print(
            f"{size:g} MB: a save {with_syncs.whole:.0f} ms, and {without.whole:.0f} without the "
            f"syncs; a step waits {with_syncs.call:.0f} and {without.call:.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
