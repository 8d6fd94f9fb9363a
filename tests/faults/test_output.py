"""What reads the output of a training goes away, or its disk is full: the steps that are done are
saved, and a line on standard error says why it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from trainings import SMALL, TEXT, start

from jaxpar.train.runs.folder.steps import steps_in

pytestmark = pytest.mark.slow

FLAGS = [
    *SMALL,
    *TEXT,
    "--train.steps=100000",
    "--train.eval-every=0",
    "--checkpoint.every=100000",
    "--metrics.log-every=1",
]
PATIENCE = 180.0


def test_what_reads_the_output_goes_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (process,) = start(run, FLAGS)
    with process:
        assert process.stdout and process.stderr
        for line in process.stdout:
            if line.startswith("step 20/"):
                break
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(PATIENCE) == 141
    (saved,) = steps_in(run / "checkpoints")
    assert said == (
        f"the end of what reads its output ends this run after step {saved}, which is saved: the "
        "same command goes on from there\n"
    )
    rows = (run / "metrics.jsonl").read_text().splitlines()
    assert 20 <= json.loads(rows[-1])["step"] in (saved - 1, saved)


def test_both_outputs_go_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (process,) = start(run, FLAGS, stderr=subprocess.STDOUT)
    with process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("step 20/"):
                break
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
    assert steps_in(run / "checkpoints")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_the_output_goes_to_a_full_disk(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    (process,) = start(tmp_path / "run", FLAGS, stdout=full)
    os.close(full)
    assert process.communicate(timeout=PATIENCE)[1] == (
        "jaxpar: error: what this command says cannot be written (No space left on device): free "
        "some space where its output goes, or send it elsewhere\n"
    )
    assert process.returncode == 2
