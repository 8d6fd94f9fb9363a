"""The starts of a run: a name that tells it from all others, and the step after which each training
of it began. By these a checkpoint on the disk of a machine is known as one of this run, and as one
that the run has not gone back behind meanwhile, on other machines.
"""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import NamedTuple

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError, read_json
from jaxpar.train.runs.bucket import send

STARTS = "starts.json"
"""The file of a run folder that has the starts, once `checkpoint.local` was used."""
_NAME = re.compile("[0-9a-f]{32}")
_KINDS = {"run": str, "first": list[int]}


class Starts(NamedTuple):
    """The name of a run, and where each of its trainings started.

    Attributes:
      run: a name that no other run has.
      first: the step after which each training started.
    """

    run: str
    first: tuple[int, ...]

    def went_through(self, start: int, step: int) -> bool:
        """Return whether the run as it is now has come through a step.

        Args:
          start: the number of the training that saved the step.
          step: the step's number.

        Returns:
          False where a later training began before that step, with other steps from there on.
        """
        later = self.first[start + 1 :]
        return start < len(self.first) and all(step <= first for first in later)


def read_starts(folder: Path) -> Starts | None:
    """Read the starts of a run; None = it has none, as `checkpoint.local` was never used.

    Raises:
      UserError: the file is damaged.
    """
    file = folder / STARTS
    if not file.exists():
        return None
    found = read_json(file, _KINDS)
    run = found.get("run", "")
    if not _NAME.fullmatch(run):
        raise UserError(
            f"{file} is not as it was written: remove it, and with it what checkpoint.local has"
        )
    return Starts(run, tuple(found.get("first", ())))


def begin_starts(folder: Path) -> Starts:
    """Read the starts of a run, which gets a name if it has none. For one process alone.

    Raises:
      UserError: the file is damaged, or cannot be written.
    """
    found = read_starts(folder)
    if found is None:
        found = Starts(uuid.uuid4().hex, ())
        _write(folder, found)
    return found


def note_start(folder: Path, first: int) -> None:
    """Add a training to the starts of a run, where it has any. For one process alone.

    Args:
      folder: the run folder.
      first: the step after which the training starts.

    Raises:
      UserError: the file is damaged, or cannot be written.
    """
    found = read_starts(folder)
    if found is not None:
        _write(folder, found._replace(first=(*found.first, first)))


def _write(folder: Path, starts: Starts) -> None:
    write_whole(folder / STARTS, json.dumps(starts._asdict()) + "\n")
    send(folder)  # at once: who has it not takes the checkpoints for those of another run
