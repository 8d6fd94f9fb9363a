"""Damages every file that a command reads, in every way of `damage`: does each end in one line that
names the place?

    python tests/fuzz_readers.py [--only NAME ...] [--trials N] [--seed N] [--list]

A command runs in this process, by `main`. It may take the damaged file for a good one, or refuse
it: in one line, which names the file or its folder. Anything else is a fault, and the exit code is
1: another exception, several lines, a line that does not say where, more time or memory than
`limits` allows. The table counts them, with the longest time and the most memory of one
trial. Below it stands each fault, with the seed that shows it again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzzed_files import READERS, READS, Reader, make_files, run_command, seal, wait_for_nobody
from limits import SECONDS, at_most, cost_of

# of this process: what allocates more is ended with a MemoryError, and not the machine
_BYTES = 12 * 2**30


class Outcome(NamedTuple):
    """What became of one damaged file."""

    kind: str
    """`taken`, `refused`, or a fault."""
    said: str = ""
    seconds: float = 0.0
    more: int = 0
    """Bytes that it added to the memory of this process."""


def _read(reader: Reader) -> tuple[int, str]:
    if reader.words:
        return run_command(reader.words)
    from jaxpar.base.errors import UserError, visible

    try:
        READS[reader.name](Path(reader.file))
    except UserError as error:
        # a program's text has no name
        place = f"{reader.file}: " if reader.name == "HLO" else ""
        return 2, f"jaxpar: error: {place}{visible(str(error))}"
    return 0, ""


@contextlib.contextmanager
def _damaged(reader: Reader, content: bytes) -> Iterator[None]:
    """Damage a file, and leave it as it was, with its manifest where that is written anew."""
    before = {
        Path(name): Path(name).read_bytes() for name in (reader.file, reader.manifest) if name
    }
    Path(reader.file).write_bytes(content)
    try:
        if reader.manifest:
            seal(Path(reader.manifest))
        yield
    finally:
        for file, whole in before.items():
            file.write_bytes(whole)
        shutil.rmtree("new", ignore_errors=True)


def attempt(reader: Reader, damaged: bytes) -> Outcome:
    """Run the command of a reader over a damaged file, in the current folder, and leave the file as
    it was.
    """
    with _damaged(reader, damaged):
        cost = cost_of(lambda: _outcome(reader))
    outcome = cost.result
    if cost.fault and outcome.kind in ("taken", "refused"):
        outcome = Outcome("limit", cost.fault)
    return outcome._replace(seconds=cost.seconds, more=cost.more)


def _outcome(reader: Reader) -> Outcome:
    try:
        with at_most(SECONDS):
            code, said = _read(reader)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)
        ours = [
            frame for frame in where if "/jaxpar/" in frame.filename or "/models/" in frame.filename
        ]
        place = ours[-1] if ours else where[-1]
        line = f"{Path(place.filename).name}:{place.lineno} {place.name}"
        return Outcome("traceback", f"{type(error).__name__}: {str(error)[:120]!r} at {line}")
    if code in (0, 1):
        return Outcome("taken")
    return _of_line(reader, said)


def _of_line(reader: Reader, said: str) -> Outcome:
    """Whether a refusal is one line that names the file or its folder."""
    from jaxpar.base.config import Config

    lines = [line for line in said.splitlines() if line.startswith("jaxpar: error: ")]
    if len(lines) != 1 or "Traceback" in said or not lines[0].isprintable():
        return Outcome("lines", said[:300])
    # The file was read, and the next one that the command names is not there.
    if "no file or folder absent" in lines[0]:
        return Outcome("taken")
    # A setting is a place too.
    if reader.file.endswith(".toml"):
        settings = [f"{field}." for field in vars(Config())]
    else:
        settings = []
    *folders, name = Path(reader.file).parts
    # A template of other text is a good one, over which the conversations are at fault.
    names = (
        *folders,
        name.partition(".bin")[0],
        *settings,
        *["chat.jsonl"] * name.endswith(".jinja"),
    )
    named = any(one in lines[0] for one in names)
    return Outcome("refused" if named else "place", lines[0])


def trials(
    reader: Reader,
    count: int,
    seed: int,
) -> Iterator[tuple[int, bytes, Outcome]]:
    """Damage a reader's file `count` times; every trial has a number, from which alone its damage
    comes.
    """
    content = Path(reader.file).read_bytes()
    usual = attempt(reader, content)  # taken, or refused for what the command lacks besides
    for number in range(seed, seed + count):
        draw = random.Random(f"{reader.name} {number}")
        damaged = draw.choice(reader.ways)(content, draw)
        outcome = attempt(reader, damaged)
        if outcome.said == usual.said:
            outcome = outcome._replace(kind="taken")
        yield number, damaged, outcome


def fuzz(
    readers: list[Reader],
    count: int,
    seed: int,
    say: Callable[[str], None],
) -> int:
    """Print a table of the trials of each reader, with its faults below it, and return the number
    of faults.
    """
    faults = 0
    titles = ("reader", "trials", "taken", "refused", "faults", "longest, s", "most, MiB")
    say("{:<26} {:>6} {:>6} {:>7} {:>6} {:>10} {:>9}".format(*titles))
    for reader in readers:
        kinds = Counter[str]()
        found = list[str]()
        longest = 0.0
        most = 0
        for number, damaged, outcome in trials(reader, count, seed):
            kinds[outcome.kind] += 1
            longest = max(longest, outcome.seconds)
            most = max(most, outcome.more)
            if outcome.kind not in ("taken", "refused"):
                found.append(
                    f"    {outcome.kind} at --seed {number}: {outcome.said!a}  <- {damaged[:60]!r}"
                )
        faults += len(found)
        numbers = (count, kinds["taken"], kinds["refused"], len(found), longest, most / 2**20)
        say("{:<26} {:>6} {:>6} {:>7} {:>6} {:>10.1f} {:>9.0f}".format(reader.name, *numbers))
        for line in found:
            say(line)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[], help="readers whose names have one of these words"
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [
        one for one in READERS if not args.only or any(word in one.name for word in args.only)
    ]
    if args.list:
        print("\n".join(f"{one.name:<26} {one.file:<44} jaxpar {one.words}" for one in chosen))
        return 0
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    from jaxpar.cli.main import say_once

    say_once()
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        wait_for_nobody(patch, Path(folder) / "cache")
        make_files(Path(folder))
        return int(fuzz(chosen, args.trials, args.seed, lambda line: print(line, flush=True)) > 0)


if __name__ == "__main__":
    sys.exit(main())
