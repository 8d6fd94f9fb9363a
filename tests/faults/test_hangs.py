"""A step that hangs, and a peer that is gone: each ends the process by a documented exit code, with
one line and, of a hang, the stack of every thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainings import PROGRAM, SMALL, TEXT, identities, start

from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.checkpoints import Checkpoints

pytestmark = pytest.mark.slow

FLAGS = [
    *SMALL,
    *TEXT,
    "--train.steps=1000000",
    "--train.eval-every=0",
    "--checkpoint.every=0",
    "--metrics.log-every=1",
]
HANGING = """
import time
import {module} as module
from jaxpar.cli.main import main
real, calls = module.put_batch, []
def sleep_for_ever(*args):
    calls.append(1)
    if len(calls) > 3:
        time.sleep(1e6)
    return real(*args)
module.put_batch = sleep_for_ever
main()
"""
"""`jaxpar` of which the fourth step, or batch of an evaluation, never begins."""


def hung(program: str, words: list[str]) -> tuple[str, str]:
    """Run a program that hangs, until the watchdog ends it; return its line and the stacks."""
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 76, ended.stderr
    said, _, stacks = ended.stderr.partition("\n")
    return said, stacks


def test_a_step_that_hangs_ends_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    words = ["train", "tiny", "--run", str(tmp_path / "run"), *FLAGS, "--mesh.data=1"]
    program = HANGING.format(module="jaxpar.train.loop.run_step")
    said, stacks = hung(program, [*words, "--train.hang-seconds=3"])
    assert said.startswith("jaxpar: error: no step has finished for ")
    assert "(train.hang_seconds=3)" in said
    assert "in sleep_for_ever" in stacks and stacks.count("hread 0x") >= 2
    assert len(read_metrics(tmp_path / "run")) >= 1


def test_an_evaluation_that_hangs_ends_likewise(tmp_path: Path) -> None:
    words = ["train", "tiny", "--run", str(tmp_path / "run"), *FLAGS, "--mesh.data=1"]
    words += ["--train.eval-every=5", "--train.eval-batches=8", "--train.hang-seconds=5"]
    said, stacks = hung(HANGING.format(module="jaxpar.train.evaluate"), words)
    assert said.startswith("jaxpar: error: no batch of the evaluation has finished for ")
    assert "in sleep_for_ever" in stacks


@pytest.mark.parametrize("steps", [6, 1_000_000], ids=["at the end", "before the next"])
def test_a_save_that_hangs_ends_likewise(steps: int, tmp_path: Path) -> None:
    words = ["train", "tiny", "--run", str(tmp_path / "run"), *FLAGS, "--mesh.data=1"]
    words += [f"--train.steps={steps}", "--checkpoint.every=3", "--train.hang-seconds=5"]
    program = """
import time
from jaxpar.cli.main import main
from jaxpar.train.runs import training_checkpoints as module
real = module.write_manifest
def sleep_for_ever(folder, step, identity):
    if step == 6:
        time.sleep(1e6)
    return real(folder, step, identity)
module.write_manifest = sleep_for_ever
main()
"""
    said, stacks = hung(program, words)
    assert said.startswith("jaxpar: error: no save has finished for ")
    assert "(train.hang_seconds=5)" in said
    assert "in sleep_for_ever" in stacks
    # the step that was not written to its end is none, and the one before is whole
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [3]


def test_a_process_that_the_others_do_not_join_ends_in_one_line(tmp_path: Path) -> None:
    first = identities(2)[0]
    words = ["train", "tiny", "--run", str(tmp_path / "run"), *FLAGS, "--mesh.data=2"]
    words += ["--mesh.distributed=True", "--mesh.join-seconds=4"]
    ended = subprocess.run(
        [sys.executable, *PROGRAM, *words],
        env=os.environ | first,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 75, ended.stderr
    (said,) = ended.stderr.splitlines()
    assert "after mesh.join_seconds=4 not all of the 2 processes" in said
    assert first["JAX_COORDINATOR_ADDRESS"] in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("told", "flags", "code", "line", "most"),
    [
        (signal.SIGKILL, [], 75, "another process of this", 2),
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
    pair = start(tmp_path / "run", [*FLAGS, *flags], processes=2, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 240
        while len(read_metrics(tmp_path / "run")) < 3 and time.monotonic() < until:
            time.sleep(0.2)
        pair[1].send_signal(told)
        began = time.monotonic()
        # read while it is waited for, as stacks may fill a pipe
        said = pair[0].communicate(timeout=120)[1].splitlines()
        took = time.monotonic() - began
    finally:
        for process in pair:
            process.kill()
            process.communicate()
    assert pair[0].returncode == code, said
    assert took < 60 and len(said) <= most
    assert said[0].startswith("jaxpar: error: ") and line in said[0]


GONE_WHERE = {
    "while the run is opened": "jaxpar.train.opening.SharedLock",
    "before a save": "jaxpar.train.loop.saves.Saves.save",
}


@pytest.mark.parametrize("where", GONE_WHERE)
def test_a_peer_that_is_gone_between_two_steps_is_noticed_at_once_too(
    where: str, tmp_path: Path
) -> None:
    """There processes tell each other what they know, and no step runs."""
    module, _, name = GONE_WHERE[where].rpartition(".")
    program = f"""
import os, pkgutil
from jaxpar.cli.main import main
if os.environ["JAX_PROCESS_ID"] == "1":
    setattr(pkgutil.resolve_name({module!r}), {name!r}, lambda *_, **__: os._exit(9))
main()
"""
    flags = [*FLAGS, "--checkpoint.every=2"]
    run = tmp_path / "run"
    pair = start(run, flags, 2, program=("-c", program), stdout=subprocess.DEVNULL)
    try:
        said = [process.communicate(timeout=90)[1] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [75, 9], said
    (line,) = said[0].splitlines()
    assert "another process of this" in line
