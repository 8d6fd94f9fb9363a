"""SIGKILL at random times of a training that saves in the background, keeps few checkpoints and
writes manifests: the run that goes on ends as the undisturbed one, to the bit, and no checkpoint is
taken for damaged.

`python tests/faults/test_kills.py --trials 100` is the long form.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow

FLAGS = [
    "--mesh.platform=cpu",
    "--mesh.data=1",
    "--mesh.fsdp=1",
    "--mesh.tensor=1",
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.seq-len=32",
    "--data.max-bytes=200000",
    "--train.batch=8",
    "--train.warmup-steps=1",
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


def start(run: Path, steps: int) -> subprocess.Popen[str]:
    """Begin a training, or go on with it."""
    command = [sys.executable, "-m", "jaxpar.cli.main", "train", "tiny", f"--run={run}"]
    return subprocess.Popen(
        [*command, *FLAGS, f"--train.steps={steps}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"},
    )


def train_with_kills(run: Path, steps: int, kills: int, draw: random.Random) -> Killed:
    """Train a run to its end, and kill it so often before: half of the times while it trains, and
    the others at any moment from its start on.
    """
    done = 0
    said = list[str]()
    while True:
        process = start(run, steps)
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


def final(run: Path) -> tuple[int, list[np.ndarray]]:
    """The last step of a run, and all parameters of it."""
    from jaxpar.train.plans import make_experiment
    from jaxpar.train.restore import load_run
    from jaxpar.train.runs.run_folder import finished_steps, read_run_config

    experiment = make_experiment(read_run_config(run), jax.devices()[:1])
    step, params = load_run(run, finished_steps(run)[-1], experiment)
    return step, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def differences(found: Path, wanted: Path) -> list[str]:
    """Say how the end of a run differs from that of another."""
    step, arrays = final(found)
    wanted_step, wanted_arrays = final(wanted)
    if step != wanted_step:
        return [f"it ended at step {step}"]
    equal = [np.array_equal(*pair) for pair in zip(arrays, wanted_arrays, strict=True)]
    return [] if all(equal) else [f"{equal.count(False)} of {len(equal)} parameters differ"]


def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    assert train_with_kills(tmp_path / "whole", 20, 0, random.Random(0)) == Killed(0, [])
    killed = train_with_kills(tmp_path / "run", 20, 2, random.Random(1))
    assert not killed.said
    assert not differences(tmp_path / "run", tmp_path / "whole")


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
        number = 0
        while total < args.trials:
            run = Path(folder) / f"run{number}"
            killed = train_with_kills(run, args.steps, min(args.kills, args.trials - total), draw)
            found = killed.said + differences(run, whole)
            bad += bool(found)
            total += max(killed.kills, 1)
            number += 1
            print(f"run {number}: {killed.kills} kills: {found or 'equal to the bit'}", flush=True)
    print(f"{total} kills in {number} runs, {bad} of them ended badly")
    return bad


if __name__ == "__main__":
    sys.exit(run_long() > 0)
