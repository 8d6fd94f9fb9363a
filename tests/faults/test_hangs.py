"""A step that hangs, and a peer that is gone: each ends the process by a documented exit code, with
one line and, of a hang, the stack of every thread.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar.train.metrics import read_metrics

pytestmark = pytest.mark.slow

FLAGS = [
    "--mesh.platform=cpu",
    "--mesh.fsdp=1",
    "--mesh.tensor=1",
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.seq-len=32",
    "--data.max-bytes=200000",
    "--train.batch=8",
    "--train.steps=1000000",
    "--train.eval-every=0",
    "--checkpoint.every=0",
    "--metrics.log-every=1",
]
HANGING = """
import time
import jaxpar.train.loop.steps as steps
from jaxpar.cli.main import main
real, calls = steps.put_batch, []
def sleep_for_ever(*args):
    calls.append(1)
    if len(calls) > 3:
        time.sleep(1e6)
    return real(*args)
steps.put_batch = sleep_for_ever
main()
"""
"""`jaxpar` whose fourth step never begins."""


def test_a_step_that_hangs_ends_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    words = ["train", "tiny", "--run", str(tmp_path / "run"), *FLAGS, "--mesh.data=1"]
    ended = subprocess.run(
        [sys.executable, "-c", HANGING, *words, "--train.hang-seconds=3"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 76, ended.stderr
    said, *stacks = ended.stderr.splitlines()
    assert said.startswith("jaxpar: error: no step has finished for ")
    assert "(train.hang_seconds=3)" in said
    text = "\n".join(stacks)
    assert "in sleep_for_ever" in text and text.count("hread 0x") >= 2
    assert len(read_metrics(tmp_path / "run")) >= 1


def test_a_process_that_the_others_do_not_join_ends_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    who = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "0",
    }
    words = ["train", "tiny", "--run", str(tmp_path / "run"), *FLAGS, "--mesh.data=2"]
    words += ["--mesh.distributed=True", "--mesh.join-seconds=4"]
    ended = subprocess.run(
        [sys.executable, "-m", "jaxpar.cli.main", *words],
        env=os.environ | who,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 75, ended.stderr
    (said,) = ended.stderr.splitlines()
    assert "after mesh.join_seconds=4 not all of the 2 processes of this run have met" in said
    assert address in said and not (tmp_path / "run").exists()


def launch_pair(folder: Path, *flags: str) -> list[subprocess.Popen[str]]:
    """Two processes of one run; what each says on standard error is in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [sys.executable, "-m", "jaxpar.cli.main", "train", "tiny", "--run", str(folder / "run")]
    words += [*FLAGS, "--mesh.data=2", "--mesh.distributed=True", *flags]
    pair = []
    for index in range(2):
        who = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
        }
        with (folder / f"errors_{index}").open("w") as errors:
            pair.append(
                subprocess.Popen(
                    words,
                    env=os.environ | who,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                )
            )
    return pair


@pytest.mark.parametrize(
    ("told", "flags", "code", "line", "most"),
    [
        (signal.SIGKILL, [], 75, "another process of this run does not answer any more", 2),
        pytest.param(
            signal.SIGSTOP,
            ["--train.hang-seconds=10"],
            76,
            "no step has finished for ",
            1000,
            marks=pytest.mark.long,
        ),
    ],
    ids=["killed", "stopped"],
)
def test_a_peer_that_is_gone_ends_the_other_by_a_documented_code(
    tmp_path: Path, told: signal.Signals, flags: list[str], code: int, line: str, most: int
) -> None:
    pair = launch_pair(tmp_path, *flags)
    try:
        until = time.monotonic() + 240
        while len(read_metrics(tmp_path / "run")) < 3 and time.monotonic() < until:
            time.sleep(0.2)
        pair[1].send_signal(told)
        began = time.monotonic()
        ended = pair[0].wait(timeout=120)
        took = time.monotonic() - began
    finally:
        for process in pair:
            process.kill()
            process.wait()
    said = (tmp_path / "errors_0").read_text().splitlines()
    assert ended == code, said
    assert took < 60 and len(said) <= most
    assert said[0].startswith("jaxpar: error: ") and line in said[0]
