"""Which checkpoints are being read: a reader marks the step that it reads, and a training beside it
waits to remove that step.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxpar.base.errors import UserError, read_json
from jaxpar.base.process.processes import machine, process_start

_MARK = ".reading-"
_HOURS = 2
"""How long a mark counts whose reader is on another machine, where nobody sees whether it runs."""
_KINDS = {"step": int, "machine": str, "pid": int, "began": str}


@contextmanager
def in_use(run: Path, step: int) -> Iterator[None]:
    """Mark a step of a run as being read. Where the run folder cannot be written, nothing is
    marked.

    Args:
      run: the run folder.
      step: the step that is read inside.
    """
    pid = os.getpid()
    content = {
        "step": step,
        "machine": machine(),
        "pid": pid,
        "began": process_start(pid) or "",
    }
    mark = run / f"{_MARK}{uuid.uuid4().hex}"
    unfinished = mark.with_name(f".unfinished{mark.name}")
    with suppress(OSError):
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        unfinished.replace(mark)
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


def steps_in_use(run: Path) -> set[int]:
    """Return the steps of a run that are being read. The mark of a reader that has died is removed.

    Args:
      run: the run folder.
    """
    found = set[int]()
    with suppress(OSError):
        for mark in list(run.glob(f"{_MARK}*")):
            if (step := _read_mark(mark)) is None:
                mark.unlink(missing_ok=True)
            else:
                found.add(step)
    return found


def _read_mark(mark: Path) -> int | None:
    """Return the step of a mark; None = its reader is gone, or the mark cannot be read."""
    try:
        age = time.time() - mark.stat().st_mtime
        content = read_json(mark, _KINDS)
        step = content["step"]
        if content["machine"] == machine():
            is_read = process_start(content["pid"]) == content["began"]
        else:
            is_read = age < _HOURS * 3600
    except (UserError, OSError, KeyError):
        return None
    return step if is_read else None
