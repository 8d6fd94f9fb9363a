"""Signals at random times over the whole life of a training: each ends it by a documented exit
code, with no traceback, and the run that goes on from there is the undisturbed one to the bit.

`python tests/faults/test_signals.py --trials 30 [--processes 2]` is the long form.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.slow

SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
BEFORE_PYTHON = 0.15
"""Seconds in which Python itself starts and has not begun to run jaxpar."""
FLAGS = [
    "--mesh.platform=cpu",
    "--mesh.fsdp=1",
    "--mesh.tensor=1",
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.seq-len=32",
    "--data.val-fraction=0.1",
    "--train.batch=8",
    "--train.warmup-steps=1",
    "--train.eval-every=20",
    "--train.eval-batches=4",
    "--train.final-eval-batches=20",
    "--checkpoint.every=20",
    "--metrics.log-every=1",
]


class Outcome(NamedTuple):
    """How a training ended that a signal reached.

    Attributes:
      codes: the exit code of each process, as a shell would say it.
      errors: what all said on standard error.
    """

    codes: tuple[int, ...]
    errors: str


def start(folder: Path, processes: int, steps: int, tokens: Path) -> list[subprocess.Popen[str]]:
    """Begin a training, or go on with it."""
    command = [sys.executable, "-m", "jaxpar.cli.main", "train", "tiny", f"--run={folder}", *FLAGS]
    command += ["--data.source=tokens", f"--data.path={tokens}", f"--train.steps={steps}"]
    command += [f"--mesh.data={processes}", f"--mesh.distributed={processes > 1}"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # Ctrl-C reaches them also where the tests were started in the background, deaf to it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = []
    for index in range(processes):
        environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
        if processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(index),
            }
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
    signal.signal(signal.SIGINT, before)
    return begun


def end(running: list[subprocess.Popen[str]]) -> Outcome:
    """Wait for the processes; neither outlives this. Where one has left before they met, the other
    waits for it for minutes: whatever started them ends it."""
    until = time.monotonic() + 240
    left = False
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        if not left and any(process.poll() not in (None, 0) for process in running):
            left = True
            until = min(until, time.monotonic() + 40)
        time.sleep(0.05)
    for process in running:
        process.kill()
    errors = [process.communicate()[1] for process in running]
    codes = [process.returncode for process in running]
    return Outcome(tuple(code if code >= 0 else 128 - code for code in codes), "".join(errors))


def final(folder: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of a run by step, and the parameters at its end."""
    import jax

    from jaxpar.base.layout.sharding import path_name
    from jaxpar.train.metrics import read_metrics
    from jaxpar.train.trained import open_trained

    rows = read_metrics(folder)
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert any("final_val_loss" in row for row in rows)
    params = open_trained(folder, step=max(losses)).generator.params
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays = {path_name(path): np.asarray(leaf) for path, leaf in leaves}
    return [losses[step] for step in sorted(losses)], arrays


def disturb(
    folder: Path, processes: int, steps: int, trials: int, seed: int = 0
) -> Counter[tuple[int, ...]]:
    """Send one signal to a training at a random time of its life, `trials` times over, and compare
    what comes of it with the run that nobody disturbed.

    Returns:
      How often it ended with which exit codes.
    """
    tokens = folder / "tokens.bin"
    ids = np.random.default_rng(0).integers(0, 200, 40_000).astype(np.uint16)
    ids.tofile(tokens)
    whole = folder / "whole"
    began = time.monotonic()
    assert set(end(start(whole, processes, steps, tokens)).codes) == {0}
    life = time.monotonic() - began
    wanted = final(whole)
    draw = random.Random(seed)
    seen: Counter[tuple[int, ...]] = Counter()
    runs = 0
    disturbed = folder / "disturbed0"
    for trial in range(trials):
        number = SIGNALS[trial % len(SIGNALS)]
        # a training that is told before its first step goes on from the same place
        logged_before = last_row(disturbed)
        wait = draw.uniform(BEFORE_PYTHON, life)
        running = start(disturbed, processes, steps, tokens)
        time.sleep(wait)
        told = running if draw.random() < 0.5 else running[-1:]
        for process in told:
            process.send_signal(number)
        outcome = end(running)
        where = f"trial {trial}, {number.name} after {wait:.2f} of {life:.2f} s"
        assert "Traceback" not in outcome.errors, f"{where}: {outcome.errors}"
        assert_documented(outcome, number, processes, where)
        if outcome.codes[0] == 130:
            assert_saved(disturbed, logged_before, where)
        seen[outcome.codes] += 1
        print(f"{where}: {outcome.codes}", flush=True)
        if set(outcome.codes) == {0}:
            assert_equal(final(disturbed), wanted)
            runs += 1
            disturbed = folder / f"disturbed{runs}"
    last = end(start(disturbed, processes, steps, tokens))
    assert set(last.codes) == {0}, last.errors
    assert_equal(final(disturbed), wanted)
    return seen


def assert_documented(outcome: Outcome, number: int, processes: int, where: str) -> None:
    """One process ends by itself, saved, or at once; of several all end together, unless one was
    told before they had met.
    """
    at_once = 130 if number == signal.SIGINT else 143
    if processes == 1:
        assert outcome.codes[0] in (0, 130, at_once), f"{where}: {outcome}"
    else:
        together = len({*outcome.codes}) == 1 and outcome.codes[0] in (0, 130)
        assert together or at_once in outcome.codes, f"{where}: {outcome}"


def last_row(folder: Path) -> int:
    """The last step that a run has logged."""
    from jaxpar.train.metrics import read_metrics

    return max((row["step"] for row in read_metrics(folder)), default=0)


def assert_saved(folder: Path, before: int, where: str) -> None:
    """What was trained and logged until it was told to stop is in a checkpoint."""
    step = last_row(folder)
    saved = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]
    assert step <= max(before, *saved, 0), f"{where}: step {step} was trained, and {saved} saved"


def assert_equal(
    one: tuple[list[float], dict[str, np.ndarray]],
    other: tuple[list[float], dict[str, np.ndarray]],
) -> None:
    """Every loss and every bit of the parameters."""
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, array in one[1].items():
        np.testing.assert_array_equal(array, other[1][name], err_msg=name)


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
