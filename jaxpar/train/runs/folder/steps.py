"""The steps in a folder of checkpoints, and the clearing away of folders that are no step, or
damaged.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jaxpar.base.errors import UserError, read_json
from jaxpar.train.runs.folder.manifest import UnreadCheckpoint, require_whole
from jaxpar.train.runs.folder.orbax_names import STATE, STEP_METADATA

CHECKPOINTS = "checkpoints"
"""The folder of a run that has its checkpoints, each in a folder of its step."""
DAMAGED = "damaged"
"""The folder of a run that damaged checkpoints are moved to; nothing removes them there."""


def steps_in(folder: Path) -> list[int]:
    """List the steps of a folder of checkpoints, sorted: folders whose name is a number, with a
    state in them. A step that is still being copied there counts.

    Args:
      folder: the folder, which may be absent.
    """
    # also where the name is too long, which is an error of `iterdir`
    if not os.path.isdir(folder):
        return []
    names = [path.name for path in folder.iterdir() if _is_number(path.name)]
    return sorted(int(name) for name in names if _holds_checkpoint(folder / name))


def _holds_checkpoint(path: Path) -> bool:
    """Return whether a folder has any part of a checkpoint. The arrays may still be in a bucket."""
    return (path / STATE).exists() or (path / STEP_METADATA).exists()


def _is_number(name: str) -> bool:
    """Return whether a name is a number as steps are written, so not 040."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def clear_up(folder: Path, keep: int, best: int | None) -> list[str]:
    """Take out of a folder of checkpoints what Orbax would take for a step and is none, or that
    lacks a part, before a training opens it.

    A step that is not kept, because there are enough newer ones, was being removed when its run
    was killed: the rest of it is removed. What is left is moved aside.

    Args:
      keep: the number of the newest steps that are kept.
      best: the step that is kept besides; None = none is.

    Returns:
      A line for each folder that was moved aside, or that could not be read and is left.

    Raises:
      UserError: a folder cannot be moved.
    """
    if not os.path.isdir(folder):
        return []
    said = []
    whole = 0
    numbers = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    for path in sorted(numbers, key=lambda path: int(path.name), reverse=True):
        try:
            problem = _missing(path)
        except UnreadCheckpoint as error:
            said.append(f"warning: checkpoint {path} is left as it is: {error}")
            continue
        if not problem:
            whole += 1
        elif whole >= keep and int(path.name) != best:
            shutil.rmtree(path, ignore_errors=True)
        else:
            said.append(set_aside(path, problem))
    return said


def _missing(path: Path) -> str:
    """Say why a folder is not the step of its name, without reading large files; empty = it is. An
    UnreadCheckpoint says that this cannot be known.
    """
    try:
        if not _is_number(path.name) or not _holds_checkpoint(path):
            return "it holds no checkpoint"
        require_whole(path, int(path.name), "sizes")
        read_json(path / STEP_METADATA)
    except UnreadCheckpoint:
        raise
    except OSError as error:
        raise UnreadCheckpoint(f"it cannot be looked at ({error.strerror})") from error
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise UnreadCheckpoint(f"{STEP_METADATA} cannot be read ({cause.strerror})") from error
        return str(error)
    return ""


def set_aside(path: Path, problem: str) -> str:
    """Move a damaged step out of the way of the run, where nothing removes it, and return a line
    that says so.

    Args:
      path: the folder of the step, in the run's folder of checkpoints.
      problem: what is wrong with it.

    Raises:
      UserError: the folder cannot be moved.
    """
    aside = path.parent.parent / DAMAGED
    names = (path.name, *(f"{path.name}-{number}" for number in range(1, 1000)))
    try:
        aside.mkdir(exist_ok=True)
        target = next(aside / name for name in names if not (aside / name).exists())
        path.rename(target)
    except OSError as error:
        raise UserError(
            f"checkpoint {path} is damaged ({problem}) and cannot be moved to {aside} "
            f"({error.strerror}): move it away"
        ) from error
    return f"warning: checkpoint {path} is damaged ({problem}): it was moved to {target}"
