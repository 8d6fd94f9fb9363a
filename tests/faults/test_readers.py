"""Readers beside a training that keeps one checkpoint and saves all the time: each gets the step
that it says, and the training goes on.

`python tests/faults/test_readers.py --trials 50` is the long form.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from trainings import SMALL, TEXT, start

from jaxpar.cli.main import main
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.folder.steps import steps_in

pytestmark = pytest.mark.slow

FLAGS = [
    *SMALL,
    *TEXT,
    "--train.steps=1000000",
    "--train.eval-every=10",
    "--train.eval-batches=2",
    "--train.final-eval-batches=2",
    "--checkpoint.every=10",
    "--checkpoint.keep=1",
    "--checkpoint.keep-best=False",
]
SAME = 1e-5
"""Of two losses in float32 that two programs of the same sums compute: some ulps."""


def start_and_save(run: Path) -> subprocess.Popen[str]:
    """Begin a training that would not end, and wait for its first checkpoint."""
    (process,) = start(run, FLAGS, stderr=subprocess.STDOUT)
    until = time.monotonic() + 180
    while not steps_in(run / "checkpoints"):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return process


def read(run: Path) -> tuple[int, float]:
    """Evaluate a run as the command does; return the step and the loss."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["eval", str(run), "--json"])
    assert code == 0, err.getvalue()
    found = json.loads(out.getvalue().splitlines()[-1])
    return found["step"], found["val_loss"]


def trials(folder: Path, count: int) -> list[str]:
    """Read so often beside a training; return what went wrong."""
    run = folder / "run"
    process = start_and_save(run)
    found = []
    wrong = list[str]()
    try:
        for number in range(count):
            try:
                found.append(read(run))
            except Exception as error:
                wrong.append(f"reader {number}: {type(error).__name__}: {error}")
        time.sleep(2.0)  # the loss of the last step that was read may not be written yet
    finally:
        if process.poll() is not None:
            wrong.append("the training has ended")
        process.terminate()
        said = process.communicate(timeout=180)[0]
    wrong += [line for line in said.splitlines() if "warning" in line or "error" in line]
    known = {row["step"]: row["val_loss"] for row in read_metrics(run) if "val_loss" in row}
    for step, loss in found:
        if abs(loss - known.get(step, float("inf"))) > SAME * abs(loss):
            wrong.append(f"step {step}: {loss} where the training found {known.get(step)}")
    retired = {step for step, _ in found} - set(steps_in(run / "checkpoints"))
    if count > 1 and not retired:
        wrong.append("no step that was read was removed later: nothing was tried")
    print(
        f"{len(found)} read, {len({step for step, _ in found})} steps, {len(retired)} removed later"
    )
    return wrong


# A reader whose step is removed meanwhile takes another. What TensorStore's threads say about the
# reading that failed is a warning to pytest, and a command keeps it quiet.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.usefixtures("keeps_programs")
def test_readers_beside_a_training_are_right_and_do_not_disturb_it(tmp_path: Path) -> None:
    assert not trials(tmp_path, 4)


def run_long() -> int:
    """The long form; returns the number of readers that something went wrong with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = trials(Path(folder), args.trials)
    print(f"{args.trials} readers, {len(wrong)} of them ended badly", *wrong, sep="\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(run_long() > 0)
