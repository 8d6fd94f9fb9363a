"""Two processes under Ray Train: one is killed, both start again, and the run ends as one that
nobody disturbed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.train.trained import open_trained

pytestmark = pytest.mark.slow
pytest.importorskip("ray")

FLAGS = [
    "--model.layers",
    "1",
    "--model.embed",
    "32",
    "--model.mlp",
    "64",
    "--data.max-bytes",
    "200000",
    "--data.seq-len",
    "32",
    "--train.batch",
    "8",
    "--train.steps",
    "24",
    "--train.warmup-steps",
    "1",
    "--train.eval-every",
    "0",
    "--train.final-eval-batches",
    "2",
    "--checkpoint.every",
    "4",
    "--metrics.log-every",
    "1",
]
KILLS = [int(step) for step in os.environ.get("JAXPAR_KILLS", "6").split(",")]
"""After which steps a process is killed; JAXPAR_KILLS=6,12,19 kills three times."""


def start(
    folder: Path,
    *flags: str,
    mark: str = "",
) -> subprocess.Popen[str]:
    """`jaxpar launch ray` with two processes; `mark` is in the environment of all that it
    starts.
    """
    command = [
        sys.executable,
        "-m",
        "jaxpar.cli.main",
        "launch",
        "ray",
        "tiny",
        "--workers",
        "2",
        "--run",
        str(folder),
    ]
    return subprocess.Popen(
        [*command, *FLAGS, *flags],
        env=os.environ | {"JAXPAR_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(mark: str) -> list[int]:
    """The processes that train, by the environment that they were started with."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if name.startswith(
            b"ray::RayTrainWorker"
        ) and f"JAXPAR_TEST={mark}".encode() in environment.split(b"\0"):
            found.append(int(process.name))
    return found


def test_a_killed_process_restarts_both_and_the_end_is_the_undisturbed_run_s(
    tmp_path: Path, capsys
) -> None:
    mark = str(tmp_path)
    kills = list(KILLS)
    seconds = []
    said = []
    killed = 0.0
    with start(tmp_path / "killed", "--max-failures", str(len(KILLS)), mark=mark) as process:
        assert process.stdout and process.stderr
        for line in process.stdout:
            said.append(line)
            step = re.match(r"step (\d+)/", line)
            if step and len(seconds) < len(KILLS) - len(kills):  # the first step after a kill
                seconds.append(time.monotonic() - killed)
            if step and kills and int(step[1]) >= kills[0]:
                killed = time.monotonic()
                os.kill(max(workers(mark)), signal.SIGKILL)
                del kills[0]
        assert process.wait(timeout=60) == 0, process.stderr.read()
    assert sum("resumed after step" in line for line in said) == len(KILLS)
    assert any(line.startswith("process ") and " failed: " in line for line in said)
    with start(tmp_path / "undisturbed") as process:
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    ends = [
        open_trained(tmp_path / name, step=24).generator.params
        for name in ("killed", "undisturbed")
    ]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    with capsys.disabled():
        print("\n  seconds from a kill to the next step:", ", ".join(f"{s:.1f}" for s in seconds))
