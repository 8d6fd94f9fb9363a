"""Marks on checkpoints that are being read: a reader marks the step that it reads, and a training
beside it waits to remove that step.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxpar.base.errors import UserError, read_json
from jaxpar.base.process.processes import machine, process_start

_MARK = ".reading-"
_HOURS = 2
"""The hours for which a mark counts whose reader is on another machine, where nobody sees whether
it runs.
"""
_ABSENT = (FileNotFoundError, NotADirectoryError)
"""The errors that say that a mark, or a run folder, does not exist."""
_KINDS = {"step": int, "machine": str, "pid": int, "began": str}


@contextmanager
def in_use(run: Path, step: int) -> Iterator[None]:
    """Mark a step of a run as being read. Where the run folder cannot be written, nothing is
    marked.

    Args:
      step: the step that is read in the context.
    """
    pid = os.getpid()
    content = {
        "step": step,
        "machine": machine(),
        "pid": pid,
        "began": process_start(pid) or "",
    }
    mark = run / f"{_MARK}{step}-{uuid.uuid4().hex}"
    unfinished = mark.with_name(f".unfinished{mark.name}")
    with suppress(OSError):
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        unfinished.replace(mark)
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


def steps_in_use(run: Path, steps: Iterable[int]) -> set[int]:
    """Find the steps of a run that are being read, or may be: a mark that the file system does not
    give stays, and counts. The mark of a reader that has died is removed.

    Args:
      steps: the steps that the run has. All of them may be read where a mark does not name its
        step.
    """
    try:
        names = os.listdir(run)
    except _ABSENT:
        return set()
    except OSError:
        return set(steps)
    found = set[int]()
    for mark in [run / name for name in names if name.startswith(_MARK)]:
        try:
            step = _read_mark(mark)
        except OSError:
            found.update(_steps_by_name(mark) or steps)
            continue
        if step is not None:
            found.add(step)
            continue
        with suppress(OSError):
            mark.unlink(missing_ok=True)
    return found


def _steps_by_name(mark: Path) -> set[int]:
    """Return the step in the name of a mark; a mark of an earlier version names none."""
    step, dash, _ = mark.name.removeprefix(_MARK).partition("-")
    return {int(step)} if dash and step.isascii() and step.isdecimal() else set()


def _read_mark(mark: Path) -> int | None:
    """Read the step of a mark; None = its reader is gone, or it says nothing.

    Raises:
      OSError: the file system does not give the mark, which says nothing about its reader.
    """
    try:
        age = time.time() - mark.stat().st_mtime
        content = read_json(mark, _KINDS)
        step = content["step"]
        if content["machine"] == machine():
            is_read = process_start(content["pid"]) == content["began"]
        else:
            is_read = age < _HOURS * 3600
    except _ABSENT:
        return None
    except (UserError, KeyError) as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, _ABSENT):
            raise cause from error
        return None
    return step if is_read else None
