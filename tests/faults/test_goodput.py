"""The goodput of a run with two restarts: what the processes have counted is held against a clock
outside of them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar.train.goodput import add_up, read_lives
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.folder.run_folder import finished_steps

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
    "--train.eval-every=200",
    "--train.eval-batches=1",
    "--train.final-eval-batches=1",
    "--metrics.log-every=1",
]
AWAY = 8.0
"""Seconds between two processes, as in a queue."""


def start(run: Path, steps: int, every: int) -> subprocess.Popen[bytes]:
    """Begin a training, or go on with it, saving every so many steps."""
    command = [sys.executable, "-m", "jaxpar.cli.main", "train", "tiny", f"--run={run}", *FLAGS]
    return subprocess.Popen(
        [*command, f"--train.steps={steps}", f"--checkpoint.every={every}"],
        stdout=subprocess.DEVNULL,
    )


def await_step(run: Path, process: subprocess.Popen[bytes], step: int) -> None:
    """Wait until a run has a row of a step."""
    until = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until:
        if any(row["step"] >= step for row in read_metrics(run)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: exit code {process.poll()}")


def kill_between_saves(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill a run when its account tells of a step that is not saved, so that steps are lost that
    are known of. The account is written every five seconds and at each save.

    The run is stopped while it is looked at, as a fast one would be at its next save by then.
    """
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        lives = read_lives(run).lives
        saved = finished_steps(run)
        if lives and saved and lives[-1].step > saved[-1]:
            process.kill()
            process.wait()
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError(f"the run has ended: exit code {process.poll()}")


def test_the_causes_of_a_run_with_two_restarts_add_up_to_its_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    began = time.time()
    killed = start(run, 100_000, every=50)
    await_step(run, killed, 70)
    kill_between_saves(run, killed)
    time.sleep(AWAY)
    told = start(run, 100_000, every=50)
    await_step(run, told, 120)
    told.send_signal(signal.SIGTERM)
    assert told.wait(120) == 130
    # A step was saved and told by the second process, and the third makes 30 more.
    stopped_at = max(row["step"] for row in read_metrics(run))
    time.sleep(AWAY)
    assert start(run, stopped_at + 30, every=50).wait(300) == 0
    wall = time.time() - began

    lives = read_lives(run).lives
    assert len(lives) == 3
    assert [life.lowest % 50 for life in lives[:2]] == [0, 0]
    assert lives[2].lowest == stopped_at
    total = add_up(lives)
    seconds = total.seconds
    # Outside are the start of the first interpreter, and Python's end after the last writing.
    assert total.wall == pytest.approx(wall, rel=0.01)
    # within a second: what a process that was killed had not written yet is `down` too
    assert 2 * AWAY < seconds["down"] < 2 * AWAY + 0.05 * wall + 6
    for cause in ("productive", "wasted", "startup", "compiling", "restoring", "saving"):
        assert seconds[cause] > 0, cause
    assert seconds["wasted"] < seconds["productive"]
    assert seconds["guard"] == 0
    assert seconds["other"] < 0.15 * wall
    rows = read_metrics(run)
    last = [row for row in rows if "wall_seconds" in row][-1]
    causes = [value for key, value in last.items() if key.endswith("_seconds")]
    # `wall_seconds` and `step_seconds` are two of them
    assert sum(causes) - last["step_seconds"] == pytest.approx(2 * last["wall_seconds"], rel=1e-6)
    assert last["goodput"] == pytest.approx(last["productive_seconds"] / last["wall_seconds"])
