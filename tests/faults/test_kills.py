"""SIGKILL at random times of a training that saves in the background, keeps few checkpoints and
writes manifests: the run that goes on ends as the undisturbed one, to the bit, and no checkpoint is
taken for damaged.

`python tests/faults/test_kills.py --trials 100` is the long form.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from trainings import SMALL, TEXT, differences, end_of, start

pytestmark = pytest.mark.slow

FLAGS = [
    *SMALL,
    *TEXT,
    "--train.eval-every=20",
    "--train.eval-batches=1",
    "--train.final-eval-batches=1",
    "--checkpoint.every=5",
    "--checkpoint.keep=1",
    "--metrics.log-every=1",
]


class Killed(NamedTuple):
    """What a run went through: how often it was killed, and what it said that it should not."""

    kills: int
    said: list[str]


def train_with_kills(run: Path, steps: int, kills: int, draw: random.Random) -> Killed:
    """Train a run to its end, and kill it so often before: half of the times while it trains, and
    the others at any moment from its start on.
    """
    done = 0
    said = list[str]()
    while True:
        (process,) = start(run, [*FLAGS, f"--train.steps={steps}"], stderr=subprocess.STDOUT)
        kill = done < kills
        if kill:
            log = run / "metrics.jsonl"
            began = log.stat().st_mtime_ns if log.exists() else 0
            trains = draw.random() < 0.5
            until = time.monotonic() + 120
            # `began` changes when the log is opened
            while trains and process.poll() is None and time.monotonic() < until:
                if log.exists() and log.stat().st_mtime_ns != began:
                    break
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 1.0 if trains else 6.0))
            process.kill()
        output = process.communicate(timeout=300)[0]
        said += [line for line in output.splitlines() if is_bad(line)]
        if kill and process.returncode < 0:
            done += 1
        elif process.returncode:
            said.append(f"exit code {process.returncode}: {output[-2000:]}")
            return Killed(done, said)
        elif not kill or "is done already" in output:
            return Killed(done, said)


def is_bad(line: str) -> bool:
    """Whether a line says something of a checkpoint that a kill is no reason for."""
    return any(word in line for word in ("damaged", "Traceback", "unchecked", "no manifest"))


def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    assert train_with_kills(tmp_path / "whole", 20, 0, random.Random(0)) == Killed(0, [])
    killed = train_with_kills(tmp_path / "run", 20, 2, random.Random(1))
    assert not killed.said
    assert not differences(end_of(tmp_path / "run"), end_of(tmp_path / "whole"))


def run_long() -> int:
    """The long form; returns the number of runs that ended badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="kills in all")
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    parser.add_argument("--kills", type=int, default=10, help="kills of each run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    bad = 0
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        assert train_with_kills(whole, args.steps, 0, draw) == Killed(0, [])
        wanted = end_of(whole)
        number = 0
        while total < args.trials:
            run = Path(folder) / f"run{number}"
            killed = train_with_kills(run, args.steps, min(args.kills, args.trials - total), draw)
            found = killed.said + differences(end_of(run), wanted)
            bad += bool(found)
            total += max(killed.kills, 1)
            number += 1
            print(f"run {number}: {killed.kills} kills: {found or 'equal to the bit'}", flush=True)
    print(f"{total} kills in {number} runs, {bad} of them ended badly")
    return bad


if __name__ == "__main__":
    sys.exit(run_long() > 0)
