"""The table of a run's checkpoints: a row for each, with what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint, Depth, bytes_of, require_whole
from jaxpar.train.runs.folder.run_folder import read_run_config
from jaxpar.train.runs.folder.steps import CHECKPOINTS, DAMAGED
from jaxpar.train.runs.folder.val_losses import Losses
from jaxpar.train.runs.stores import CheckpointStore, store_of


class CheckpointRow(NamedTuple):
    """A checkpoint of a run, and whether it is damaged.

    Attributes:
      step: the step's number.
      size: the bytes on disk.
      loss: its validation loss, in nats a token; None = it was not evaluated.
      has_manifest: whether there was a manifest to compare it with.
      problem: what is wrong with it; empty = nothing was found.
    """

    step: int
    size: int
    loss: float | None
    has_manifest: bool
    problem: str


class RunCheckpoints(NamedTuple):
    """The checkpoints of a run.

    Attributes:
      rows: a row for each checkpoint, from the oldest; none for one that a training has removed
        meanwhile.
      notes: lines on other damage.
      aside: the folders of damaged checkpoints that a training has moved aside.
    """

    rows: list[CheckpointRow]
    notes: list[str]
    aside: list[Path]


def list_checkpoints(folder: Path, depth: Depth) -> RunCheckpoints:
    """Look at the checkpoints of a run, and write nothing.

    Raises:
      UserError: the folder is no run folder, or its config is damaged.
    """
    read_run_config(folder)
    store = store_of(folder / CHECKPOINTS)
    notes = list[str]()
    losses = Losses(store.folder, notes.append)
    losses.read()
    found = [_row(store, step, losses.known.get(step), depth) for step in store.steps()]
    rows = [row for row in found if row is not None]
    aside = sorted((folder / DAMAGED).glob("[0-9]*"))
    return RunCheckpoints(rows, notes, aside)


def _row(
    store: CheckpointStore, step: int, loss: float | None, depth: Depth
) -> CheckpointRow | None:
    """Look at a step; None = it was removed meanwhile."""
    place = store.folder / str(step)
    problem = ""
    has_manifest = True
    try:
        store.read(step)
        has_manifest = require_whole(place, step, depth) is not None
    except DamagedCheckpoint as error:
        problem = str(error)
    try:
        size = bytes_of(place)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {place}: {error.strerror}") from error
    if problem and not place.exists():
        return None
    return CheckpointRow(step, size, loss, has_manifest, problem)
