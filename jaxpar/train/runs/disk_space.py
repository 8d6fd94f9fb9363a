"""Whether a checkpoint can be written to its disk, asked before anything of it is written."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.train.runs.folder.manifest import read_manifest
from jaxpar.train.runs.folder.steps import steps_in

_BESIDE = 2**20
"""Bytes for what is written beside the arrays: the form of the state, the manifest, metrics."""


def require_space(folder: Path, size: int, disk: str = "") -> None:
    """Require room for one more checkpoint.

    It needs as much as the last one took, which was compressed, or else the bytes of the state.

    Args:
      folder: the folder of the run's checkpoints.
      size: bytes of the state.
      disk: what a message calls the disk; empty = that of the folder.

    Raises:
      UserError: there is less; the message says how much.
    """
    steps = steps_in(folder)
    needed = size
    # a state of step 0 has moments that are zero and compress to nothing
    if steps and steps[-1]:
        try:
            last = read_manifest(folder / str(steps[-1]))
        except UserError:
            last = None
        if last is not None:
            needed = last.size
    needed += _BESIDE
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # nothing says how much is left
    if free < needed:
        kept = f"step {steps[-1]} is kept" if steps else "none was saved before"
        raise UserError(
            f"the next checkpoint takes {bytes_text(needed)} and {disk or f'the disk of {folder}'} "
            f"has {bytes_text(free)} left: make room and start again ({kept})"
        )


def require_writable(folder: Path) -> None:
    """Require that files can be made in a folder, by making one and removing it.

    Args:
      folder: the folder of the run's checkpoints.

    Raises:
      UserError: none can be made.
    """
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"a checkpoint could not be written to {folder} ({error.strerror}): look at that "
            "folder and its disk, and start again from the last one"
        ) from error
