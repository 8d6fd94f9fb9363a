"""The stores that keep the steps of a run: in its folder, in a bucket, on the disk of each process,
or wherever a program's own store keeps them.

Orbax reads and writes a step as a folder of this machine, so every store has a folder with a folder
for each step: a store that keeps them elsewhere brings them there and takes them from there. The
code that reads and writes checkpoints asks the store, and never which kind it is.

Whose disk the folder is on (`Disk`) says which processes do what:

    what                                      shared         copy            own
    makes the folder, needs room (`writes`)   first          each            each
    writes manifests (`hashes`)               first          first           each
    writes a part of an array                 those with it  one with it     each with it
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import jax

from jaxpar.base.atomic_write import make_folder, sync, writing
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, require_local
from jaxpar.base.layout.sharding import PyTree
from jaxpar.base.machine import cache_folder
from jaxpar.base.process.multihost import run_together
from jaxpar.train.runs.bucket import copy_of
from jaxpar.train.runs.bucket.copy import NotAsSent, RunCopy
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint, read_manifest
from jaxpar.train.runs.folder.orbax_names import STEP_METADATA
from jaxpar.train.runs.folder.steps import clear_up, steps_in
from jaxpar.train.runs.locks.in_use import in_use, steps_in_use

Disk = Literal["shared", "copy", "own"]
"""The kind of disk that a checkpoint is on: one that all processes see; a process's own, with a
copy of a run in a bucket and the files that it sends; or a process's own, with all that it holds.
"""


class CheckpointStore:
    """The store of a run's steps; this class keeps them in a folder that all processes see.

    A store that keeps them elsewhere overrides what differs: `read`, `write`, `update`, `remove`
    and `steps`, and `clear_up`. It is made with the folder, and from then on has in it a folder for
    each of its steps, from which the arrays (`state`) may be missing until they are read.

    Attributes:
      folder: the folder that has a folder for each step, by its number.
      disk: the kind of disk that the folder is on.
      seconds: the time that it took to keep the last step, once it was written to the folder, where
        `write` leaves that to a thread.
    """

    disk: Disk = "shared"
    seconds: float = 0.0

    def __init__(self, folder: Path):
        """Name the folder, without a look at it yet.

        Args:
          folder: the folder, which may be absent.

        Raises:
          UserError: the folder is a URL.
        """
        require_local(folder)
        self.folder = folder.absolute()

    @property
    def writes(self) -> bool:
        """Whether this process writes the files that all have: the first one does, or each on its
        own disk.
        """
        return self.disk != "shared" or jax.process_index() == 0

    @property
    def hashes(self) -> bool:
        """Whether this process writes manifests: the first one does, as its copy of a run in a
        bucket is its own; or each on its own disk.
        """
        return self.disk == "own" or jax.process_index() == 0

    def steps(self) -> list[int]:
        """List the steps that are kept, sorted."""
        return steps_in(self.folder)

    def read(self, step: int) -> None:
        """Bring all files of a step into its folder, as its arrays are about to be read.

        Args:
          step: the step, which may be one that is not kept any more.

        Raises:
          DamagedCheckpoint: the step differs from what was written.
          UserError: the step cannot be read.
        """

    def in_use(self, step: int) -> AbstractContextManager[None]:
        """Mark a step as being read, so that a training beside keeps it for that time.

        Args:
          step: the step that is read in the context.
        """
        return in_use(self.folder.parent, step)

    def steps_in_use(self, steps: Sequence[int]) -> set[int]:
        """Find the steps that are being read, or may be.

        Args:
          steps: the steps that there are.
        """
        return steps_in_use(self.folder.parent, steps)

    def open(self) -> None:
        """Begin to write. All processes must call this.

        Raises:
          UserError: the folder cannot be written.
        """

        def make() -> None:
            if self.writes:
                with writing(self.folder):
                    make_folder(self.folder)

        run_together(make)

    def clear_up(self, keep: int, best: int | None) -> list[str]:
        """Take folders out that Orbax would take for a step and that are none, before a training is
        resumed. A store elsewhere overrides this: a part of its steps may be missing without
        damage.

        Args:
          keep: the number of the newest steps that are kept.
          best: the step that is kept besides; None = none is.

        Returns:
          A line for each folder that was moved aside, or that could not be read and is left.

        Raises:
          UserError: a folder cannot be moved.
        """
        return clear_up(self.folder, keep, best) if self.writes else []

    def require_room(self, state: PyTree) -> None:
        """Require that this process can write its part of a step.

        Raises:
          UserError: the step cannot be written, and the message says what to do.
        """
        if self.writes:
            require_space(self.folder, bytes_to_write(state, self.disk), self._disk_name)
            _require_writable(self.folder)

    @property
    def _disk_name(self) -> str:
        """The name of the folder's disk in messages."""
        return f"the disk of {self.folder}"

    def write(self, step: int) -> None:
        """Keep a step, whose folder has its name now. Each process calls this in a thread of
        Orbax's, before older steps are removed.

        Once this has returned, or `wait`, the step is durable: the run can be resumed from it, also
        after a power cut.

        Args:
          step: the step, all of whose files are there and have reached the disk, but for its name
            and the time when it was whole, which Orbax notes last.

        Raises:
          Exception: the step cannot be kept; whatever the error is, the older steps stay.
        """
        place = self.folder / str(step)
        sync(place / STEP_METADATA)
        sync(place)
        sync(self.folder)

    def update(self, step: int) -> None:
        """Keep a file that was added to the folder of a step after it was written: its validation
        loss.
        """

    def wait(self) -> None:
        """Wait until what was written is kept.

        Raises:
          UserError: a step could not be kept.
        """

    def remove(self, step: int) -> None:
        """Keep a step no longer, as newer ones are there, or the run is not resumed from it. Each
        process calls this; in the folder, Orbax has removed the step, or it was moved aside.
        """

    def close(self) -> None:
        """Keep what is left, as nothing more is written.

        Raises:
          UserError: the rest cannot be kept.
        """

    def stop(self) -> None:
        """Keep nothing more, not even a step that is still being written: the training fails, or is
        over, and the run may be another's.
        """

    def end(self) -> None:
        """End what keeps steps in the background, once what is on its way is kept or has failed:
        the run is given back, and nothing is kept afterwards.
        """


class OwnDiskStore(CheckpointStore):
    """A store that keeps the part of each process in a folder of its own machine, with all that it
    holds.
    """

    disk: Disk = "own"


class BucketStore(CheckpointStore):
    """A store that keeps the steps of a run in a bucket, of which each process has a copy."""

    disk: Disk = "copy"

    def __init__(self, folder: Path, copy: RunCopy):
        """Name the folder and the copy, without a look at them yet.

        Args:
          folder: the folder of the checkpoints in the copy.
        """
        super().__init__(folder)
        self._copy = copy

    def read(self, step: int) -> None:
        try:
            self._copy.complete(step)
        # a bucket that does not answer has not damaged anything
        except NotAsSent as error:
            raise DamagedCheckpoint(str(error), self.folder / str(step)) from error

    def open(self) -> None:
        self._copy.start_sending()
        super().open()

    def clear_up(self, keep: int, best: int | None) -> list[str]:
        return []  # what a bucket has is a step only once all of it is there

    @property
    def _disk_name(self) -> str:
        return f"the disk of {cache_folder()}, which has the copy of {self.folder.parent},"

    def write(self, step: int) -> None:
        if self._copy.sender is not None:
            self._copy.sender.send_step(step)

    def wait(self) -> None:
        if self._copy.sender is not None:
            self._copy.sender.wait()
            self.seconds = self._copy.sender.seconds

    def remove(self, step: int) -> None:
        self._copy.leave_out(step)

    def close(self) -> None:
        if self._copy.sender is not None:
            self._copy.sender.send()

    def stop(self) -> None:
        if self._copy.sender is not None:
            self._copy.sender.stop()

    def end(self) -> None:
        if self._copy.sender is not None:
            self._copy.sender.close()


StoreOf = Callable[[Path], CheckpointStore]
"""A function that makes the store of a folder of checkpoints."""


def store_of(folder: Path) -> CheckpointStore:
    """Make the store of a folder of checkpoints: a bucket's where its run is the copy of one.

    Args:
      folder: the folder, which may be absent.
    """
    copy = copy_of(folder.absolute().parent)
    return CheckpointStore(folder) if copy is None else BucketStore(folder, copy)


_BESIDE = 2**20
"""The bytes of what is written beside the arrays: the form of the state, the manifest, metrics."""


def require_space(folder: Path, size: int, disk: str) -> None:
    """Require room for one more checkpoint.

    A checkpoint needs as much as the last one took, which was compressed, or else the bytes of the
    state.

    Args:
      size: the bytes of the state.
      disk: the name of the disk in messages.

    Raises:
      UserError: there is less room; the message says how much.
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
            f"the next checkpoint takes {bytes_text(needed)} and {disk} "
            f"has {bytes_text(free)} left: make room and start again ({kept})"
        )


def _require_writable(folder: Path) -> None:
    """Require that files can be made in a folder, by making one and removing it."""
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"a checkpoint could not be written to {folder} ({error.strerror}): look at that "
            "folder and its disk, and start again from the last one"
        ) from error


def bytes_to_write(state: PyTree, disk: Disk) -> int:
    """Count the bytes of a state that are written to a disk: to one that all see, by all of them;
    into a copy of its own, by this process; or to a disk of its own, each part that it holds, once.
    """
    leaves = jax.tree.leaves(state)
    if disk == "shared":
        return sum(leaf.nbytes for leaf in leaves)
    shards = [leaf.addressable_shards for leaf in leaves]
    if disk == "copy":
        return sum(one.data.nbytes for held in shards for one in held if one.replica_id == 0)
    return sum(sum({str(one.index): one.data.nbytes for one in held}.values()) for held in shards)
