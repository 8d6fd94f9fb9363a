"""Signals at random times over the whole life of a training: each ends it by a documented exit
code, with no traceback, and the run that goes on from there is the undisturbed one to the bit.

`python tests/faults/test_signals.py --trials 30 [--processes 2]` is the long form.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

import pytest
from heard_signals import children_hear
from trainings import SMALL, differences, end_of, start, token_file

pytestmark = pytest.mark.slow

SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BEFORE_PYTHON = 0.15
"""Seconds in which Python itself starts and has not begun to run jaxpar."""
FLAGS = [
    *SMALL,
    "--train.eval-every=20",
    "--train.eval-batches=4",
    "--train.final-eval-batches=20",
    "--checkpoint.every=20",
    "--metrics.log-every=1",
]
PAUSE = 0.2
"""Seconds between two looks at the processes."""
IDLE_LOOKS = 200
"""After so many looks at which next to none of their threads had anything to do they hang, or wait
for one that has left: on a busy machine a process may take minutes, but its threads are ready."""
IDLE = 0.05
"""The share of these looks at which a heartbeat may be seen."""
PATIENCE = 1800.0


class Outcome(NamedTuple):
    """How a training ended that a signal reached.

    Attributes:
      codes: the exit code of each process, as a shell would say it.
      errors: what all said on standard error.
    """

    codes: tuple[int, ...]
    errors: str


def start_listening(
    run: Path, processes: int, steps: int, data: list[str]
) -> list[subprocess.Popen[str]]:
    """Begin a training, or go on with it."""
    # SIGABRT then shows the stack of every thread
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    flags = [*FLAGS, *data, f"--train.steps={steps}"]
    with children_hear():
        return start(run, flags, processes, environment=environment, stdout=subprocess.DEVNULL)


def is_busy(process: subprocess.Popen[str]) -> bool:
    """Whether a thread of a process runs, would run if a processor were free, or waits for a
    disk.
    """
    for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # the name, in parentheses, may hold anything
            if stat.read_text().rpartition(")")[2].split()[0] in ("R", "D"):
                return True
    return False


def end(running: list[subprocess.Popen[str]]) -> Outcome:
    """Wait for the processes; none outlives this. Where one has left before they met, the other
    waits for it for minutes: whatever started them ends it. What waits or hangs shows its stacks.
    """
    looks = deque[bool](maxlen=IDLE_LOOKS)
    until = time.monotonic() + PATIENCE
    while left := [process for process in running if process.poll() is None]:
        looks.append(any(is_busy(process) for process in left))
        are_idle = len(looks) == IDLE_LOOKS and sum(looks) < IDLE * IDLE_LOOKS
        if are_idle or time.monotonic() > until:
            break
        time.sleep(PAUSE)
    for process in left:
        process.send_signal(signal.SIGABRT)
    errors = [process.communicate(timeout=60)[1] for process in running]
    codes = [process.returncode for process in running]
    return Outcome(tuple(code if code >= 0 else 128 - code for code in codes), "".join(errors))


def disturb(
    folder: Path, processes: int, steps: int, trials: int, seed: int = 0
) -> Counter[tuple[int, ...]]:
    """Send one signal to a training at a random time of its life, `trials` times over, and compare
    what comes of it with the run that nobody disturbed.

    Returns:
      How often it ended with which exit codes.
    """
    data = token_file(folder / "tokens.bin")
    whole = folder / "whole"
    began = time.monotonic()
    assert set(end(start_listening(whole, processes, steps, data)).codes) == {0}
    life = time.monotonic() - began
    wanted = end_of(whole)
    draw = random.Random(seed)
    seen: Counter[tuple[int, ...]] = Counter()
    runs = 0
    disturbed = folder / "disturbed0"
    for trial in range(trials):
        number = SIGNALS[trial % len(SIGNALS)]
        # a training that is told before its first step goes on from the same place
        logged_before = last_row(disturbed)
        wait = draw.uniform(BEFORE_PYTHON, life)
        running = start_listening(disturbed, processes, steps, data)
        time.sleep(wait)
        told = running if draw.random() < 0.5 else [draw.choice(running)]
        for process in told:
            process.send_signal(number)
        outcome = end(running)
        names = [running.index(process) for process in told]
        where = f"trial {trial}, {number.name} to {names} after {wait:.2f} of {life:.2f} s"
        assert "Traceback" not in outcome.errors, f"{where}: {outcome.errors}"
        assert_documented(outcome, number, processes, where)
        if outcome.codes[0] == 130:
            assert_saved(disturbed, logged_before, where)
        seen[outcome.codes] += 1
        print(f"{where}: {outcome.codes}", flush=True)
        if set(outcome.codes) == {0}:
            assert not differences(end_of(disturbed), wanted), where
            runs += 1
            disturbed = folder / f"disturbed{runs}"
    last = end(start_listening(disturbed, processes, steps, data))
    assert set(last.codes) == {0}, last.errors
    assert not differences(end_of(disturbed), wanted)
    return seen


def assert_documented(outcome: Outcome, number: int, processes: int, where: str) -> None:
    """One process ends by itself, saved, or at once; of several all end together, unless one was
    told before they had met, for which the other waits; but never does one that trains.
    """
    at_once = 130 if number == signal.SIGINT else 143
    if processes == 1:
        assert outcome.codes[0] in (0, 130, at_once), f"{where}: {outcome}"
    else:
        together = len({*outcome.codes}) == 1 and outcome.codes[0] in (0, 130)
        assert together or at_once in outcome.codes, f"{where}: {outcome}"
        assert f"jaxpar{os.sep}train{os.sep}loop" not in outcome.errors, f"{where}: {outcome}"


def last_row(folder: Path) -> int:
    """The last step that a run has logged."""
    from jaxpar.train.metrics import read_metrics

    return max((row["step"] for row in read_metrics(folder)), default=0)


def assert_saved(folder: Path, before: int, where: str) -> None:
    """What was trained and logged until it was told to stop is in a checkpoint."""
    step = last_row(folder)
    saved = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]
    assert step <= max(before, *saved, 0), f"{where}: step {step} was trained, and {saved} saved"


def test_a_signal_at_any_time_loses_nothing(tmp_path: Path) -> None:
    disturb(tmp_path, processes=1, steps=60, trials=2, seed=int(time.time()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        codes = disturb(Path(place), given.processes, given.steps, given.trials, given.seed)
    print(dict(codes))
