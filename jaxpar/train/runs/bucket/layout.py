"""What a run folder is in a bucket: the names of its objects, and which of its steps are whole. The
last object of a step has the size and the hash of every other, and without it there is no step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxpar.base.errors import UserError, is_kind, parse_json, reading
from jaxpar.base.storage import Found
from jaxpar.train.runs.folder.orbax_names import STATE
from jaxpar.train.runs.folder.steps import CHECKPOINTS

UPLOADED = "uploaded.json"
"""The last object of a step: the size and the hash of each file of it."""
LOCK = "lock.json"
"""Says which training has a run folder (`jaxpar.train.runs.locks.run_lock`); it is no part of the
run.
"""
ARRAYS = f"{STATE}/"
PARTS = "parts/"
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}")
"""A file on its way to its name (`whole_files.replacing`)."""

Sizes = dict[str, tuple[int, str]]
"""The size and the hash of files, by name."""
State = tuple[int, int]
"""The size and the time of a file, by which a change is noticed."""


def steps_below(folder: Path) -> set[int]:
    """The steps that are on this machine."""
    names = (path.name for path in (folder / CHECKPOINTS).glob("[0-9]*"))
    return {int(name) for name in names if name.isdecimal()}


def step_of(name: str) -> int | None:
    parts = name.split("/")
    if len(parts) > 2 and parts[0] == CHECKPOINTS and parts[1].isdecimal():
        return int(parts[1])
    return None


def whole_steps(found: Mapping[str, Found]) -> dict[int, Found]:
    """The steps that have their last object, with that."""
    steps = {}
    for name, one in found.items():
        step = step_of(name)
        if step is not None and name == f"{CHECKPOINTS}/{step}/{UPLOADED}":
            steps[step] = one
    return steps


def read_sizes(content: bytes, origin: str) -> Sizes:
    """Read the files of a step, as `write_sizes` has written them."""
    rows = parse_json(content, origin)
    if not is_kind(rows, dict[str, list[Any]]) or any(len(row) != 2 for row in rows.values()):
        raise UserError(f"{origin} is not as it was written")
    return {name: (size, made) for name, (size, made) in rows.items()}


def write_sizes(rows: Sizes) -> bytes:
    return json.dumps(rows, indent=1).encode()


def size_and_hash(file: Path) -> tuple[int, str]:
    with reading(file), file.open("rb") as opened:
        made = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16))
        return opened.tell(), made.hexdigest()


def names_below(folder: Path) -> list[str]:
    """The files below a folder; `os.walk` passes over a folder that is renamed meanwhile."""
    return sorted(
        (Path(place) / name).relative_to(folder).as_posix()
        for place, _, names in os.walk(folder)
        for name in names
        if not _UNFINISHED.fullmatch(name)
    )


def states_below(folder: Path) -> Iterator[tuple[str, State]]:
    """The size and the time of each file below a folder, the arrays of its checkpoints too."""
    for name in names_below(folder):
        with suppress(FileNotFoundError):  # Orbax has renamed its folder meanwhile
            stat = (folder / name).stat()
            yield name, (stat.st_size, stat.st_mtime_ns)
