"""What a disk, an operator or a second command does to a training: it ends in one line with exit
code 2, and every checkpoint that it had is whole.

`python tests/faults/test_disks.py [--only NAME]` is the long form. A disk that is full or read-only
is a file system in memory, which only root may mount.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from trainings import SMALL, start

pytestmark = pytest.mark.slow

FLAGS = [
    *SMALL,
    # large enough for a disk of some MiB to be too small for its checkpoints
    "--model.embed=64",
    "--model.mlp=256",
    "--data.source=tokens",
    "--data.val-fraction=0.1",
    "--train.steps=100000",
    "--train.eval-every=0",
    "--checkpoint.every=20",
    "--checkpoint.keep=2",
    "--metrics.log-every=5",
]
PATIENCE = 180.0


class Ended(NamedTuple):
    """How a training ended: its exit code, and what it said on standard error."""

    code: int
    said: str


@contextmanager
def disk(folder: Path, kib: int) -> Iterator[Path]:
    """A file system of so many KiB."""
    place = folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def start_on(run: Path, tokens: Path) -> subprocess.Popen[str]:
    """Begin a training that would not end."""
    flags = [*FLAGS, f"--data.path={tokens}"]
    (process,) = start(run, flags, stdout=subprocess.DEVNULL)
    return process


def end(process: subprocess.Popen[str]) -> Ended:
    """Wait until a training has ended by itself."""
    try:
        said = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
    return Ended(process.returncode, said)


def wait_for_step(run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a training has a checkpoint."""
    from jaxpar.train.runs.folder.steps import steps_in

    until = time.monotonic() + PATIENCE
    while not steps_in(run / "checkpoints"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def problems(ended: Ended, run: Path, least: int = 1) -> list[str]:
    """Say what is wrong with how a training ended, and with the checkpoints that it left."""
    from jaxpar.train.runs.list_checkpoints import list_checkpoints

    found = []
    if ended.code != 2:
        found.append(f"exit code {ended.code}")
    lines = ended.said.strip().splitlines()
    if len(lines) != 1 or not lines[0].startswith("jaxpar: error: "):
        found.append(f"{len(lines)} lines: {ended.said[-1500:]}")
    rows = list_checkpoints(run, "whole").rows
    if len(rows) < least:
        found.append(f"{len(rows)} checkpoints")
    return found + [f"step {row.step}: {row.problem}" for row in rows if row.problem]


def full(folder: Path, tokens: Path, kib: int) -> list[str]:
    """A disk that has room for so many KiB."""
    with disk(folder, kib) as place:
        ended = end(start_on(place / "run", tokens))
        if not (place / "run" / "config.toml").exists():
            return [] if ended.code == 2 and "Traceback" not in ended.said else [ended.said]
        return problems(ended, place / "run", least=0)


def filled(folder: Path, tokens: Path) -> list[str]:
    """A disk that something else fills while the run trains."""
    with disk(folder, 20_000) as place:
        process = start_on(place / "run", tokens)
        wait_for_step(place / "run", process)
        file = os.open(place / "other", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(file, bytes(4096))
        os.close(file)
        return problems(end(process), place / "run")


def read_only(folder: Path, tokens: Path) -> list[str]:
    """A disk that is mounted anew, to be read alone."""
    with disk(folder, 40_000) as place:
        process = start_on(place / "run", tokens)
        wait_for_step(place / "run", process)
        # refused while a file is open for writing, unless by force
        options = ["-o", "remount,ro,size=1k"]
        done = subprocess.run(["mount", *options, place], check=False, capture_output=True)
        if done.returncode:
            process.kill()
            process.communicate()
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
            process = start_on(place / "run", tokens)
        return problems(end(process), place / "run")


def moved(folder: Path, tokens: Path) -> list[str]:
    """A run folder that is moved."""
    process = start_on(folder / "run", tokens)
    wait_for_step(folder / "run", process)
    (folder / "run").rename(folder / "elsewhere")
    found = problems(end(process), folder / "elsewhere")
    # what was being saved may make its folder anew, which is no run
    return found + [f"a new {path}" for path in folder.glob("run/config.toml")]


def deleted(folder: Path, tokens: Path) -> list[str]:
    """A run folder that is deleted."""
    process = start_on(folder / "run", tokens)
    wait_for_step(folder / "run", process)
    # at once, as nothing else is while a run writes
    (folder / "run").rename(folder / "trash")
    subprocess.run(["rm", "-rf", folder / "trash"], check=True)
    ended = end(process)
    lines = ended.said.strip().splitlines()
    found = [] if ended.code == 2 and len(lines) == 1 else [f"{ended}"]
    return found + [f"a new {path}" for path in folder.glob("run/config.toml")]


def second_training(folder: Path, tokens: Path) -> list[str]:
    """A second training in the folder, which is refused; the first goes on."""
    first = start_on(folder / "run", tokens)
    wait_for_step(folder / "run", first)
    found = problems(end(start_on(folder / "run", tokens)), folder / "run")
    if first.poll() is not None:
        found.append("the first has ended")
    first.kill()
    first.communicate()
    return found


def cut_tokens(folder: Path, tokens: Path) -> list[str]:
    """A token file that is cut."""
    process = start_on(folder / "run", tokens)
    wait_for_step(folder / "run", process)
    os.truncate(tokens, 4096)
    return problems(end(process), folder / "run")


FAULTS: dict[str, Callable[[Path, Path], list[str]]] = {
    **{
        f"full at {kib} KiB": lambda folder, tokens, kib=kib: full(folder, tokens, kib)
        for kib in (40, 1_500, 2_500, 3_000, 3_500)
    },
    "filled by another": filled,
    "read-only": read_only,
    "moved": moved,
    "deleted": deleted,
    "second training": second_training,
    "token file cut": cut_tokens,
}
MOUNTS = ("full", "filled", "read-only")


def trial(name: str, folder: Path) -> list[str]:
    """Try one fault; return what was wrong with what came of it."""
    tokens = folder / "tokens.bin"
    # enough for every batch to be another place of the file
    draw = np.random.default_rng(0)
    draw.integers(0, 256, 4_000_000).astype("<u2").tofile(tokens)
    return FAULTS[name](folder, tokens)


@pytest.mark.parametrize("name", ["moved", "second training", "token file cut", "full at 2500 KiB"])
def test_a_fault_ends_a_training_in_one_line(name: str, tmp_path: Path) -> None:
    if name.startswith(MOUNTS) and os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    assert not trial(name, tmp_path)


def run_long() -> int:
    """The long form; returns the number of faults that ended badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the name of a fault")
    only = parser.parse_args().only
    bad = 0
    for name in FAULTS:
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = trial(name, Path(folder))
        bad += bool(found)
        print(f"{name}: {'; '.join(found) or 'one line, nothing lost'}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(run_long() > 0)
