"""Kills and stops under `jaxpar launch ray`: whatever is killed or told to stop, and when, the run
ends as the one that nobody disturbed, to the bit.

`python tests/faults/test_ray_faults.py --trials 10` is the long form: so many kills of a random
process, and as many stops of the launcher or of a process, with the time to recover.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from heard_signals import children_hear

from jaxpar.train.metrics import read_metrics

pytestmark = pytest.mark.slow

FLAGS = [
    "--mesh.fsdp=1",
    "--mesh.tensor=1",
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.max-bytes=200000",
    "--data.seq-len=32",
    "--train.batch=8",
    "--train.warmup-steps=1",
    "--train.eval-every=0",
    "--train.final-eval-batches=2",
    "--checkpoint.every=10",
    "--metrics.log-every=1",
]
TWO = ["--workers=2", "--mesh.data=2"]
STOPPED = 130
"""The exit code of a run that was told to stop, and saved."""


class Recovery(NamedTuple):
    """What was done to a run, and the seconds until its next step."""

    what: str
    seconds: float


class Launched:
    """`jaxpar launch ray` in a process of its own; `mark` is in the environment of all that it
    starts.
    """

    def __init__(self, folder: Path, *flags: str, mark: str = ""):
        self.mark = mark or f"{folder}:{time.monotonic()}"
        command = [sys.executable, "-m", "jaxpar.cli.main", "launch", "ray", "tiny"]
        self.said: list[str] = []
        # compiled programs are kept, as a user's are
        environment = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAXPAR_TEST": self.mark}
        with children_hear():
            self.process = subprocess.Popen(
                [*command, f"--run={folder}", *FLAGS, *flags],
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def steps(self) -> Iterator[int]:
        """The steps that it logs, as it logs them."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.match(r"step (\d+)/", line):
                yield int(found[1])

    def end(self) -> int:
        """Read the rest of what it says, and wait for it; return its exit code."""
        for _ in self.steps():
            pass
        assert self.process.stdout
        self.process.stdout.close()
        return self.process.wait()

    def workers(self) -> list[int]:
        """The processes that train, by the environment that they were started with."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name = (process / "cmdline").read_bytes()
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if name.startswith(b"ray::RayTrainWorker") and (
                f"JAXPAR_TEST={self.mark}".encode() in environment
            ):
                found.append(int(process.name))
        return sorted(found)


Fault = Callable[[Launched, random.Random], None]


def final(folder: Path, step: int) -> list[np.ndarray]:
    """The parameters at the end of a run."""
    from jaxpar.train.generation.trained import open_trained

    params = open_trained(folder, step=step).generator.params
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def require_equal(folder: Path, wanted: Path, steps: int) -> None:
    """Every bit of the parameters, and the loss of every step."""
    for one, other in zip(final(folder, steps), final(wanted, steps), strict=True):
        np.testing.assert_array_equal(one, other)
    losses = [
        {row["step"]: row["loss"] for row in read_metrics(place) if "loss" in row}
        for place in (folder, wanted)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == steps


def kill(run: Launched, draw: random.Random) -> None:
    """SIGKILL to one of the processes; returns when its end has been told."""
    os.kill(draw.choice(run.workers()), signal.SIGKILL)
    assert run.process.stdout
    for line in run.process.stdout:  # steps that are still told are those of before
        run.said.append(line)
        if line.startswith("process ") and " failed: " in line:
            return


def stop_launcher(run: Launched, draw: random.Random) -> None:
    """SIGTERM or Ctrl-C to the launcher; returns when it has ended."""
    run.process.send_signal(draw.choice((signal.SIGTERM, signal.SIGINT)))
    require_saved(run)


def stop_process(run: Launched, draw: random.Random) -> None:
    """SIGTERM to one of the processes, as of a machine that is about to be taken away."""
    os.kill(draw.choice(run.workers()), signal.SIGTERM)
    require_saved(run)


def require_saved(run: Launched) -> None:
    """It ends by itself, with what it trained saved."""
    reached = max(run.steps(), default=0)
    assert run.process.wait() == STOPPED, "".join(run.said[-20:])
    ended = [line for line in run.said if "saved; the same command goes on" in line]
    assert (ended and f"after step {reached}" in ended[0]) or not reached, run.said[-5:]
    assert "Traceback" not in "".join(run.said)


def disturb(
    folder: Path, steps: int, faults: Sequence[Fault], draw: random.Random
) -> list[Recovery]:
    """Train a run to its end, and do these things to it, spread over its steps. Where it has ended,
    the same command goes on.

    Returns:
      The time that each took until the next step.
    """
    # a stop takes a few steps, and the last must come before the end
    due = sorted(draw.sample(range(2, steps // 2), len(faults)))
    left = list(faults)
    done = list[Recovery]()
    what = ""
    since = 0.0
    while True:
        restarts = f"--max-failures={faults.count(kill)}"
        run = Launched(folder, *TWO, f"--train.steps={steps}", restarts)
        for step in run.steps():
            if what:
                done.append(Recovery(what, time.monotonic() - since))
                print(f"{what}: {done[-1].seconds:.1f} s to step {step}", flush=True)
                what = ""
            if left and step >= due[0]:
                fault = left.pop(0)
                what = fault.__name__
                del due[0]
                since = time.monotonic()
                fault(run, draw)
        code = run.end()
        if code == STOPPED:
            continue
        assert code == 0, "".join(run.said[-20:])
        return done


def test_a_process_that_is_killed_and_a_launcher_that_is_told_to_stop(tmp_path: Path) -> None:
    assert not disturb(tmp_path / "whole", 50, [], random.Random(0))
    done = disturb(tmp_path / "run", 50, [kill, stop_launcher], random.Random(0))
    assert [recovery.what for recovery in done] == ["kill", "stop_launcher"]
    require_equal(tmp_path / "run", tmp_path / "whole", 50)


def outcome(folder: Path, *flags: str, number: int = 0) -> tuple[int, int, str]:
    """Launch a run, and send a signal to one process at its first steps; return its exit code, how
    often the processes began, and what it said."""
    run = Launched(folder, *TWO, "--train.steps=40", *flags)
    for step in run.steps():
        if number and step >= 3:
            os.kill(run.workers()[-1], number)
            number = 0
    code = run.end()
    said = "".join(run.said)
    return code, said.count("versions  "), said


# the nodes are started from here, where JAX has threads
@pytest.mark.filterwarnings("ignore:Exception ignored in.*_at_fork")
@pytest.mark.long
def test_a_run_goes_on_with_the_nodes_that_are_left_and_takes_one_that_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("JAXPAR_TEST", str(tmp_path))  # of what the nodes start
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        cluster.add_node(num_cpus=1)
        goes = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        flags = ["--elastic=1:2", "--max-failures=3", "--mesh.data=-1", "--train.steps=400"]
        address = f"--address={cluster.address}"
        run = Launched(tmp_path / "run", *flags, address, mark=str(tmp_path))
        steps = run.steps()
        while next(steps) < 12:
            pass
        cluster.remove_node(goes, allow_graceful=False)
        while not any("1 process in place of 2" in line for line in run.said):
            next(steps)
        while next(steps) < 40:
            pass
        cluster.add_node(num_cpus=1)
        os.kill(run.workers()[0], signal.SIGKILL)
        while not any("2 processes in place of 1" in line for line in run.said):
            next(steps)
        assert run.end() == 0, "".join(run.said[-20:])
    finally:
        cluster.shutdown()
    said = "".join(run.said)
    assert "waiting for" not in said and "Traceback" not in said
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 401))
    devices = [row["devices"] for row in rows]
    assert devices[0] == 2 and 1 in devices and devices[-1] == 2


GONE = {
    "killed": signal.SIGKILL,
    "aborted": signal.SIGABRT,
    "silent": signal.SIGSTOP,  # the watchdog of its peer ends that one
}


@pytest.mark.long
@pytest.mark.parametrize("how", GONE)
def test_all_start_again_where_a_process_is_gone(how: str, tmp_path: Path) -> None:
    flags = ["--max-failures=1", "--train.hang-seconds=10"]
    code, starts, said = outcome(tmp_path / "run", *flags, number=GONE[how])
    assert (code, starts) == (0, 2), said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.parametrize("how", GONE)
def test_where_none_may_start_again_the_exit_code_is_that_of_a_lost_peer(
    how: str, tmp_path: Path
) -> None:
    code, starts, said = outcome(tmp_path / "run", "--train.hang-seconds=10", number=GONE[how])
    assert (code, starts) == (75, 1), said
    assert "the same command goes on from the last checkpoint" in said
    assert "Traceback" not in said


def run_long() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10, help="kills, and stops")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    stops = [(stop_launcher, stop_process)[turn % 2] for turn in range(given.trials)]
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        disturb(whole, given.steps, [], draw)
        for name, faults in {"kills": [kill] * given.trials, "stops": stops}.items():
            folder = Path(place) / name
            done = disturb(folder, given.steps, faults, draw)
            require_equal(folder, whole, given.steps)
            seconds = [recovery.seconds for recovery in done]
            print(
                f"{len(done)} {name}, equal to the bit; median {statistics.median(seconds):.1f} s, "
                f"worst {max(seconds):.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    run_long()
