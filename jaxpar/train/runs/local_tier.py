"""Checkpoints in two tiers: beside the checkpoints of the run folder, which may be in a bucket or
on a disk that all share, each process has newer ones in a folder of its own machine
(`checkpoint.local`).

A local step counts only if every process has its part of it whole, so all agree on which steps they
have. With several processes each has the parts of the arrays that its devices hold, which are good
for the same layout alone; a single process has all of them.

The run folder names the run, and the step after which each training of it began. By these a
checkpoint on the disk of a machine is known as one of this run, and as one that the run has not
gone back behind meanwhile, on other machines.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.experimental import multihost_utils

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import CheckpointConfig
from jaxpar.base.errors import UserError, read_json, require_local, with_urls
from jaxpar.base.layout.sharding import path_name
from jaxpar.base.process.multihost import numbers_from_first, run_on_first, run_together
from jaxpar.train.runs.bucket import send
from jaxpar.train.runs.checkpoints import PyTree, warn
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint, Manifest, require_whole
from jaxpar.train.runs.folder.steps import CHECKPOINTS
from jaxpar.train.runs.locks.run_lock import RunLock
from jaxpar.train.runs.orbax_options import longest_save
from jaxpar.train.runs.stores import OwnDiskStore
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

_OWNER = "run.json"
"""The file that says which run the checkpoints of a folder belong to."""
_KEPT = 2
_MOST = 8
"""The number of the newest steps that processes tell each other."""
_LOCAL = "local"
"""The key of a local step's record, in the identity of its manifest."""
_NONE = -1
STARTS = "starts.json"
"""The file of a run folder that has the starts, once `checkpoint.local` was used."""
_RUN = re.compile("[0-9a-f]{32}")
_STARTS_KINDS = {"run": str, "first": list[int]}


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
    found = read_json(file, _STARTS_KINDS)
    run = found.get("run", "")
    if not _RUN.fullmatch(run):
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
        _write_starts(folder, found)
    return found


def note_start(folder: Path, first: int) -> None:
    """Add a training to the starts of a run, where it has any. For one process alone.

    Args:
      first: the step after which the training starts.

    Raises:
      UserError: the file is damaged, or cannot be written.
    """
    found = read_starts(folder)
    if found is not None:
        _write_starts(folder, found._replace(first=(*found.first, first)))


def _write_starts(folder: Path, starts: Starts) -> None:
    write_whole(folder / STARTS, json.dumps(starts._asdict()) + "\n")
    send(folder)  # at once: who has it not takes the checkpoints for those of another run


class LocalTier:
    """The local checkpoints of a run that this process has.

    Attributes:
      steps: the steps that every process had whole when the run was opened, sorted.
      checkpoints: reads and writes them, once `open` was called.
    """

    checkpoints: TrainingCheckpoints

    def __init__(self, local: str, run: Path, state: PyTree, order: Any):
        """Take the local folder, and find its whole steps. All processes must call this, and then
        `release`.

        Args:
          local: the path in `checkpoint.local`.
          run: the run folder, whose lock is held.
          state: the arrays that are saved, as ShapeDtypeStructs with their shardings.
          order: the order in which layers are saved.

        Raises:
          UserError: the folder cannot be used, or has checkpoints of another run.
        """
        self._local = local
        self._run = run
        self._place = Path(local).absolute() / str(jax.process_index())
        starts = run_on_first(lambda: begin_starts(run)) or Starts("", ())
        self._starts = _starts_from_first(starts)
        self._parts = _parts_of(state, order)
        self._seconds = longest_save(state)
        with ExitStack() as stack:  # another process may fail where this one does not
            self._lock = run_together(lambda: stack.enter_context(closing(self._take())))
            self._whole = run_together(self._find_whole)
            self._rows = _steps_of_all(sorted(self._whole))
            stack.pop_all()
        self.steps = sorted(set.intersection(*self._rows))

    def _take(self) -> RunLock:
        """Take the folder of this process for this run."""
        require_local(Path(self._local))
        owner = self._place / _OWNER
        own = {"run": self._starts.run, "folder": with_urls(str(self._run))}
        if owner.exists():
            found = read_json(owner, {"run": str, "folder": str})
            if found.get("run") != self._starts.run:
                raise UserError(
                    f"checkpoint.local={self._local} has checkpoints of another run, "
                    f"{found.get('folder')}: name another folder, or remove {self._place}"
                )
        lock = RunLock(self._place, warn)
        try:
            write_whole(owner, json.dumps(own) + "\n")
        except BaseException:
            lock.close()
            raise
        return lock

    def _find_whole(self) -> dict[int, Manifest]:
        """Find the steps of this process that can be used; say on standard error what is wrong with
        the others, as no other process knows of them.
        """
        found = {}
        store = OwnDiskStore(self._place / CHECKPOINTS)
        for step in store.steps():
            place = store.folder / str(step)
            try:
                manifest = require_whole(place, step)
                problem = self._problem(step, manifest)
            except DamagedCheckpoint as error:
                manifest = None
                problem = f"is damaged ({error})"
            if manifest is None or problem:
                warn(f"warning: the local checkpoint {place} {problem}: it is left out")
            else:
                found[step] = manifest
        return found

    def _problem(self, step: int, manifest: Manifest | None) -> str:
        """Say why an undamaged step cannot be used; empty = it can."""
        noted = {} if manifest is None else manifest.identity.get(_LOCAL, {})
        start = noted.get("start")
        if start is None:
            return "has no manifest"
        if not self._starts.went_through(start, step):
            return "is of a training that the run did not go on from"
        if noted.get("parts") != self._parts:
            return "was saved by another number of processes, or in another layout"
        return ""

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of this process's part of a step.

        Args:
          step: a step of `steps`.
        """
        return self._whole[step]

    def why_not(self, step: int) -> str:
        """Say why the run folder's step is taken, and none of the local ones.

        Args:
          step: the step of the run folder.
        """
        lacking = [str(index) for index, row in enumerate(self._rows) if not row]
        if self.steps:
            return f"has none between step {step} and the last one"
        if len(lacking) == len(self._rows):
            return "has none that can be used"
        if lacking:
            return f"has none that can be used of process {', '.join(lacking)}"
        return "has none that every process has whole"

    def open(self, first: int, config: CheckpointConfig, identity: Mapping[str, Any]) -> None:
        """Begin to write. Steps that the run is not resumed from are removed. All processes must
        call this.

        Args:
          first: the step after which the run is resumed.
          config: the settings of the run folder's checkpoints.
          identity: the hashes by which the data and the tokenizer of the run are told from others.

        Raises:
          UserError: the checkpoints cannot be opened.
        """
        run_together(lambda: self._remove_others([s for s in self.steps if s <= first]))
        noted = {"start": len(self._starts.first), "parts": self._parts}
        self.checkpoints = TrainingCheckpoints(
            self._place / CHECKPOINTS,
            replace(config, keep=_KEPT, keep_best=False),
            {**identity, _LOCAL: noted},
            warn,
            self._lock.require,
            OwnDiskStore,
            self._seconds,
        )

    def _remove_others(self, kept: list[int]) -> None:
        """Remove everything but some steps."""
        folder = self._place / CHECKPOINTS
        names = {str(step) for step in kept}
        for path in folder.glob("*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def release(self) -> None:
        """Give the folder back."""
        self._lock.close()


def _parts_of(state: PyTree, order: Any) -> str:
    """Hash the layout of a process's parts of a state; for a single process, which has all, return
    a fixed word.

    Args:
      state: ShapeDtypeStructs with their shardings.
      order: the order of the layers in the state.
    """
    count = jax.process_count()
    if count == 1:
        return "all"
    rows = [f"{count} processes", f"order {order}"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        held = sorted({str(place) for place in places})
        rows.append(f"{path_name(path)} {leaf.dtype} {leaf.shape} {held}")
    return xxhash.xxh3_128("\n".join(rows).encode()).hexdigest()


def _steps_of_all(steps: list[int]) -> list[set[int]]:
    """Tell all processes the steps that each of them has; all must call this."""
    newest = steps[-_MOST:]
    row = np.full(_MOST, _NONE, np.int32)
    row[: len(newest)] = newest
    if jax.process_count() == 1:
        rows = row[None]
    else:
        rows = multihost_utils.process_allgather(row)
    return [{int(step) for step in one if step != _NONE} for one in rows]


def _starts_from_first(starts: Starts) -> Starts:
    """Give every process the starts that the first one has read; all must call this."""
    name = bytes(numbers_from_first(starts.run.encode()))
    return Starts(name.decode(), tuple(numbers_from_first(starts.first)))
