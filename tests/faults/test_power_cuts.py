"""A machine that loses its power: what has reached the disk by then is a run that goes on, with no
more lost than the steps since its last save.

`python tests/faults/test_power_cuts.py --trials 40` is the long form: trainings on a file system of
their own, whose disk is copied as it is at a random moment and mounted elsewhere. Only root may
mount it, and where a machine has no loop device the test is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainings import PROGRAM, SMALL, TEXT, start

pytestmark = pytest.mark.slow

FLAGS = [
    *SMALL,
    *TEXT,
    "--train.steps=100000",
    "--train.eval-every=0",
    "--checkpoint.every=20",
    "--metrics.log-every=1",
]
FORMS = (
    ["--checkpoint.keep=1"],
    ["--checkpoint.keep=2"],
    ["--checkpoint.keep=1", "--checkpoint.local-every=10"],
)
"""What is kept, and where; of a local tier the folder is added."""
PATIENCE = 180.0


class NoLoopDevice(Exception):
    """The machine cannot mount a file as a disk."""


@contextlib.contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    """Mount the image of a disk."""
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-o", "loop", image, place], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NoLoopDevice(done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def new_disk(image: Path) -> None:
    """Make a disk of 96 MiB with ext4."""
    with image.open("wb") as file:
        file.truncate(96 * 2**20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", image], check=True)
    except FileNotFoundError as error:
        raise NoLoopDevice("no mkfs.ext4") from error


def saved_steps(run: Path) -> list[int]:
    """The steps that a run has, as a running program sees them."""
    folder = run / "checkpoints"
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def cut(folder: Path, form: list[str], draw: random.Random) -> str:
    """Train on a disk, cut the power at a random moment after the second save, and go on with what
    was left; return what is wrong, or nothing.
    """
    image = folder / "disk.img"
    new_disk(image)
    with mounted(image, folder / "disk") as disk:
        flags = [*FLAGS, *form]
        if len(form) > 1:
            flags.append(f"--checkpoint.local={disk / 'local'}")
        (process,) = start(disk / "run", flags, stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + PATIENCE
            while len(seen := saved_steps(disk / "run")) < 1 or seen[-1] < 40:
                if process.poll() is not None or time.monotonic() > until:
                    return f"the training did not begin: {process.stderr and process.stderr.read()}"
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 3))
            # a save under way counts from when its step has its name and the call has gone on
            seen = saved_steps(disk / "run")
            process.send_signal(signal.SIGSTOP)
            subprocess.run(["cp", "--sparse=always", image, folder / "cut.img"], check=True)
        finally:
            process.kill()
            process.communicate()
    with mounted(folder / "cut.img", folder / "after") as after:
        left = saved_steps(after / "run")
        flags = [*FLAGS, *form, f"--train.stop-at={max(seen) + 100}"]
        if len(form) > 1:
            flags.append(f"--checkpoint.local={after / 'local'}")
        (again,) = start(after / "run", flags)
        said, errors = again.communicate(timeout=PATIENCE)
        if again.returncode:
            return f"steps {seen}, after the cut {left}: {errors.strip()[-300:]}"
        found = re.search(r"resumed after step (\d+)", said)
        went_on = int(found[1]) if found else 0
    # the newest may have had its name and not yet been on the disk
    if went_on < seen[-1] - 20:
        return f"steps {seen}, after the cut {left}, and it went on from {went_on}"
    return ""


def cut_export(folder: Path, draw: random.Random) -> str:
    """Export a run to a disk, cut the power while or just after, and look at what was left; return
    what is wrong, or nothing.
    """
    run = folder / "run"
    if not run.exists():
        (process,) = start(run, [*FLAGS, "--train.steps=2"])
        process.communicate(timeout=PATIENCE)
    image = folder / "disk.img"
    new_disk(image)
    with mounted(image, folder / "disk") as disk, tempfile.TemporaryDirectory() as whole:
        command = [sys.executable, *PROGRAM, "convert", str(run)]
        subprocess.run([*command, f"{whole}/hf"], check=True, capture_output=True)
        want = contents(Path(whole) / "hf")
        process = subprocess.Popen([*command, str(disk / "hf")], stdout=subprocess.DEVNULL)
        try:
            if draw.random() < 0.5:
                process.wait(PATIENCE)
            else:
                while process.poll() is None and not list(disk.glob("*hf*")):
                    time.sleep(0.001)
                time.sleep(draw.uniform(0, 0.1))
                process.send_signal(signal.SIGSTOP)
            done = process.poll() == 0
            subprocess.run(["cp", "--sparse=always", image, folder / "cut.img"], check=True)
        finally:
            process.kill()
            process.wait()
    with mounted(folder / "cut.img", folder / "after") as after:
        left = contents(after / "hf")
    if left == want or (not left and not done):
        return ""
    return f"the command had ended: {done}; left is {sorted(left)} of {sorted(want)}"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name; none where there is no folder."""
    return {file.name: file.read_bytes() for file in folder.glob("*")}


def test_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    draw = random.Random(1)
    try:
        assert [cut_export(tmp_path, draw) for _ in range(4)] == [""] * 4
    except NoLoopDevice as error:
        pytest.skip(f"no disk of its own: {error}")


@pytest.mark.parametrize("form", FORMS, ids=["keep one", "keep two", "local tier"])
def test_what_has_reached_the_disk_is_a_run(tmp_path: Path, form: list[str]) -> None:
    try:
        assert cut(tmp_path, form, random.Random(0)) == ""
    except NoLoopDevice as error:
        pytest.skip(f"no disk of its own: {error}")


def run_long() -> int:
    """Cut the power many times; return how many of the runs were lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    args = parser.parse_args()
    draw = random.Random(os.urandom(8))
    bad = 0
    for trial in range(args.trials):
        with tempfile.TemporaryDirectory() as folder:
            form = FORMS[trial % len(FORMS)]
            found = cut(Path(folder), form, draw)
        bad += bool(found)
        print(f"cut {trial}, {' '.join(form)}: {found or 'goes on'}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for trial in range(args.trials // 2):
            found = cut_export(Path(folder), draw)
            bad += bool(found)
            print(f"cut {trial} of an export: {found or 'whole, or not there'}", flush=True)
    print(f"{args.trials} cuts of trainings and {args.trials // 2} of exports, {bad} lost")
    return bad


if __name__ == "__main__":
    sys.exit(run_long() > 0)
