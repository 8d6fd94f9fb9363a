"""The checkpoints of a run that trains: they are written in the background, and the newest few and
the best one are kept. A second writer would clear away an unfinished one of the first as a
leftover, so who writes has the lock of the run.

Whose disk the folder is on (`_disk`, see `orbax_options.Disk`) says which processes do what:

    what                                      shared         copy            own
    makes the folder, needs room (`_writes`)  first          each            each
    clears up at the start                    first          none            each
    writes manifests (`_hashes`)              first          first           each
    asks for the lock before a save           first          first           each
    writes a part of an array                 those with it  one with it     each with it
    sends the step to a bucket (`_sender`)    none           each            none

What becomes of a step, in this order:

    thread           what it does
    the caller's     `save` waits until the step before is there, and asks for lock and room
    the caller's     Orbax copies the arrays to host memory and chooses the steps to remove
    the caller's     the sender is told of the step; `save` returns, and the training goes on
    Orbax's          the files are written, in a folder STEP.orbax-checkpoint-tmp-...
    Orbax's          `_write_manifest` adds the manifest to it, and waits until the disk has all
    Orbax's          the folder is renamed to STEP, and `Manager` waits until the disk has its name
    Orbax's          the steps that were chosen are removed
    the caller's     `record` notes the loss, before or after the step is there
    the sender's     once the folder STEP is there, its files are sent
    the caller's     the next `save`, `wait` or `close` waits for both threads (`_finish_save`),
                     raises what failed there, and writes the losses that waited for the step

`_saving` is the step of which this is under way: set before Orbax is called, as its thread reads it
there; None again once both threads are done, or have failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from jaxpar.base.atomic_write import make_folder, sync_below, writing
from jaxpar.base.config import CheckpointConfig
from jaxpar.base.errors import Say, UserError
from jaxpar.base.machine import cache_folder
from jaxpar.base.process.multihost import number_from_first, run_together, told_by_first
from jaxpar.train.runs.bucket.sender import Sender
from jaxpar.train.runs.checkpoints import Checkpoints, PyTree, first_line, warn
from jaxpar.train.runs.disk_space import require_space, require_writable
from jaxpar.train.runs.folder.manifest import MANIFEST, write_manifest
from jaxpar.train.runs.folder.orbax_names import UNFINISHED
from jaxpar.train.runs.folder.steps import clear_up, set_aside, steps_in
from jaxpar.train.runs.folder.val_losses import lowest
from jaxpar.train.runs.locks.in_use import steps_in_use
from jaxpar.train.runs.newest_whole import Whole, find_newest_whole
from jaxpar.train.runs.orbax_options import (
    ORBAX_SECONDS,
    KeepBest,
    KeepRead,
    LiteralPath,
    Manager,
    item_handlers,
    steps_from_first,
    writing_processes,
)


class TrainingCheckpoints(Checkpoints):
    """The checkpoints of one run, which this process reads and writes."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        identity: Mapping[str, Any] | None = None,
        say: Say = warn,
        require_lock: Callable[[], None] = lambda: None,
        own_disk: bool = False,
        seconds: float = ORBAX_SECONDS,
    ):
        """Open the checkpoints of a run, and clear away what is none.

        Args:
          folder: the folder that has them, each in a folder of its step; it is made.
          config: which are kept.
          identity: what tells the data and the tokenizer of the run from others.
          say: gets a line about each checkpoint that is damaged or has no manifest.
          require_lock: is called before each save, on the first process or on each that has them on
            a disk of its own, and raises where another training has the run, or its folder is gone.
          own_disk: whether each process has its part of them on a disk of its own.
          seconds: how long a save may take, as `longest_save` says of a state.

        Raises:
          UserError: Orbax cannot open them, or one that is damaged cannot be moved aside.
        """
        super().__init__(folder, say, own_disk)
        self._config = config
        self._seconds = seconds
        self._identity = identity or {}
        self._require_lock = require_lock
        self._read_now = KeepRead(self.folder.parent)
        self._saving: int | None = None
        if self._copy is not None:
            self._copy.start_sending()
        else:  # what a bucket has is a step only once all of it is there
            self._clear_up()
        self._losses.read()
        self._manager = self._open()

    def _clear_up(self) -> None:
        """Take away what Orbax would stumble over, and say what."""
        if self._writes:
            lines = run_together(lambda: clear_up(self.folder, self._config.keep, self._kept()))
        else:
            lines = run_together(list[str])
        for line in lines:
            self._say(line)

    def _kept(self) -> int | None:
        """The step that is kept besides the newest, before Orbax has looked at the folder."""
        if not self._config.keep_best:
            return None
        self._losses.read()
        return lowest(self._losses.known, steps_in(self.folder))

    def _open(self) -> Manager:
        policies: list[Any] = [managers.LatestN(self._config.keep), self._read_now]
        if self._config.keep_best:
            policies.append(KeepBest(self._losses.known))
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                # By default the others begin to write once one process says that the folders are
                # there, which holds of its own ones alone.
                create_directories_asynchronously=self._disk == "shared",
                post_finalization_callback=self._write_manifest,
                timeout_secs=math.ceil(self._seconds),
            ),
            preservation_policy=managers.AnyPreservationPolicy(policies),
            create=False,
            cleanup_tmp_directories=True,
            multiprocessing_options=writing_processes(self._disk),
        )
        run_together(self._make_folder)
        try:
            handlers = item_handlers(self._disk)
            return Manager(LiteralPath(self.folder), options=options, item_handlers=handlers)
        # Orbax reads a few files of every checkpoint, and hands on what fails
        except Exception as error:
            why = first_line(error)
            raise UserError(f"the checkpoints in {self.folder} cannot be opened ({why})") from error

    @property
    def _writes(self) -> bool:
        """Whether this process writes what all have: the first one, or each on its own disk."""
        return self._disk != "shared" or jax.process_index() == 0

    @property
    def _hashes(self) -> bool:
        """Whether this process writes manifests: the first one, as that of a run in a bucket is its
        own; or each on its own disk.
        """
        return self._disk == "own" or jax.process_index() == 0

    def _make_folder(self) -> None:
        if self._writes:
            with writing(self.folder):
                make_folder(self.folder)

    def steps(self) -> list[int]:
        """Return every finished step, sorted, and that which is being saved."""
        return sorted(self._manager.all_steps())

    def best(self, without: Container[int] = ()) -> int | None:
        """Return the step with the lowest validation loss among those kept, or None.

        Args:
          without: steps that are left out.
        """
        return lowest(self._losses.known, [step for step in self.steps() if step not in without])

    def newest_whole(self, may_lack: bool = False) -> Whole:
        """Find the step to go on after, and move those aside that are newer and damaged.

        All processes must call this.

        Args:
          may_lack: whether there may be none although there were some, as others are at hand.

        Returns:
          The step; its manifest is known to the first process.

        Raises:
          UserError: all are damaged, or one cannot be read, which may be whole.
        """
        main = jax.process_index() == 0

        def find() -> Whole:
            return find_newest_whole(self, self._say, may_lack) if main else Whole()

        found = run_together(find)
        step = number_from_first(-1 if found.step is None else found.step)
        self._leave_out_after(step)
        self._manager.reload()
        return Whole(None if step < 0 else step, found.manifest)

    def _leave_out_after(self, step: int) -> None:
        """Take the newer steps out of this process's own copy of a run in a bucket. The first
        process has moved them aside in its copy alone, and all must know the same steps.
        """
        if self._copy is None:
            return
        for newer in self.steps():  # as they were before the first process moved any
            if newer > step:
                self._copy.leave_out(newer)

    def set_aside(self, step: int, problem: str) -> None:
        """Move a step aside that cannot be read, and say so. For one process alone.

        Args:
          step: the step.
          problem: what is wrong with it.
        """
        self._say(set_aside(self.folder / str(step), problem))
        self._manager.reload()

    def save(
        self, step: int, state: PyTree, data_state: dict[str, Any], val_loss: float | None = None
    ) -> None:
        """Save in the background, unless the step is already saved. All processes must call this.

        Args:
          step: the number of the step.
          state: the arrays.
          data_state: what is kept beside them, as JSON has it; `data` returns it.
          val_loss: its validation loss, in nats a token, which may also follow: see `record`.

        Raises:
          UserError: the save before failed, the disk is too full, another training has the run, a
            newer step is saved, or this one cannot be written.
        """
        # what the first process knows counts, as all must save alike
        if told_by_first(step not in self.steps()):
            # The save waits for the one before, and then removes old checkpoints: no loss is
            # written into those.
            run_together(self._finish)
            self._losses.forget(step)  # of a checkpoint that was there before and is not
            run_together(lambda: self._require_room(state))
            self._read_now.look(self.steps())
            try:
                run_together(lambda: self._begin_save(step, state, data_state))
            except BaseException:
                self._saving = None
                raise
        if val_loss is not None:
            self.record(step, val_loss)

    def _begin_save(self, step: int, state: PyTree, data_state: dict[str, Any]) -> None:
        with self._writing():
            items = ocp.args.Composite(
                state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data_state)
            )
            self._saving = step
            begun = self._manager.save(step, args=items)
            if begun and self._sender is not None:
                self._sender.send_step(step)
        if not begun:  # Orbax saves none below its newest
            newest = max(self.steps(), default=0)
            raise UserError(
                f"step {step} is not saved: {self.folder} has step {newest}, and only newer ones "
                "are added: go on from that one, or use another --run folder"
            )

    def _require_room(self, state: PyTree) -> None:
        """Require on the first process that the run is still this one's, and that a save has room:
        on its disk, or on that of each process where each has a copy of its own. What keeps one
        from writing is found here, where all leave together, and not inside of Orbax.
        """
        if jax.process_index() == 0 or self._disk == "own":
            self._require_lock()
        if not self._writes:
            return
        if self._disk == "shared":
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            require_space(self.folder, size)
        elif self._disk == "own":
            require_space(self.folder, _held_bytes(state))
        else:
            disk = f"the disk of {cache_folder()}, which has the copy of {self.folder.parent},"
            require_space(self.folder, _own_bytes(state), disk)
        require_writable(self.folder)

    def _write_manifest(self) -> None:
        """Write the manifest of the step that is being saved, and wait until the disk has all of
        it; Orbax calls this in its thread, once all files are there and before the step has its
        name.
        """
        step = self._saving
        if step is None:
            return
        for folder in self.folder.glob(f"{step}{UNFINISHED}*"):
            if self._hashes:
                write_manifest(folder, step, self._identity)
            if self._writes:
                sync_below(folder)

    def _finish_save(self) -> None:
        """Wait until what was saved is there, with its manifest and its loss."""
        try:
            self._await_save()
            if self._sender is not None:
                self._sender.wait()
        except BaseException:
            self._saving = None
            # Orbax counts what it could not write among its steps
            if jax.process_count() == 1:
                self._manager.reload()
            raise
        step = self._saving
        self._saving = None
        if self._hashes and step is not None:
            place = self.folder / str(step)
            # where Orbax called too late, when the step had its name
            if not (place / MANIFEST).exists():
                write_manifest(place, step, self._identity)
                sync_below(place)
        self._losses.write()

    @property
    def sending_seconds(self) -> float:
        """How long the last step took from its save until a bucket had it; 0 = there is none."""
        return 0.0 if self._sender is None else self._sender.seconds

    def record(self, step: int, val_loss: float) -> None:
        """Keep the validation loss of a step that was saved. A step without one, or with NaN, is
        never the best.
        """
        if step in self.steps() and math.isfinite(val_loss):
            self._losses.add(step, val_loss)

    def wait(self) -> None:
        """Wait until what was saved is there, with its losses; raise a UserError where it could not
        be written. All processes must call this.
        """
        run_together(self._finish)

    def _finish(self) -> None:
        with self._writing():
            self._finish_save()

    def _await_save(self) -> None:
        self._manager.wait_until_finished()

    def close(self, together: bool = True) -> None:
        """Wait for what is being written.

        Args:
          together: whether all processes call this, and then they end alike; otherwise this one
            ends alone.

        Raises:
          UserError: something went wrong in the background (a full disk, say).
        """
        try:
            if together:
                run_together(self._finish_and_close)
            else:
                self._finish_and_close()
        finally:
            self.stop_sending()

    def stop_sending(self) -> None:
        """Send nothing more to a bucket, unless it is asked for."""
        if self._sender is not None:
            self._sender.stop()

    def abandon(self) -> None:
        """Give up what works in the background for a run that could not be opened: nothing is being
        saved, and nothing is sent.
        """
        self.stop_sending()
        self._manager.close()

    def _finish_and_close(self) -> None:
        with self._writing():
            self._finish_save()
            self._manager.close()
            if self._sender is not None:
                self._sender.send()

    @property
    def _sender(self) -> Sender | None:
        """What sends the steps that are written here to a bucket; None = nothing does."""
        return None if self._copy is None else self._copy.sender

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn Orbax's failure to write into a UserError; it raises what its threads, storage and
        JSON raise.
        """
        try:
            yield
        except Exception as error:
            self.stop_sending()
            if self._hashes:  # a folder that was moved away explains it better
                self._require_lock()
            if _took_too_long(error):
                if jax.process_count() > 1:
                    who = "another process has not written its part of a checkpoint"
                    look = "look at what it said"
                else:
                    who = "a checkpoint was not written"
                    look = "look whether the disk answers"
                raise UserError(
                    f"{who} to {self.folder} in time ({self._seconds:.0f} s): {look}, and start "
                    "again from the last one"
                ) from error
            why = f"a checkpoint could not be written to {self.folder} ({first_line(error)})"
            raise UserError(
                f"{why}: look at the space that is left, and start again from the last one"
            ) from error

    def remove_old(self) -> None:
        """Remove what is neither among the newest nor the best nor being read: a save cannot know
        how its own step evaluates. All processes must call this.
        """
        self.wait()
        # what the first process sees counts, as all must remove alike
        for step in steps_from_first(self._old_steps()):
            self._manager.delete(step)

    def _old_steps(self) -> list[int]:
        """The steps that this process would remove."""
        steps = self.steps()
        kept = {
            *steps[-self._config.keep :],
            self.best() if self._config.keep_best else None,
            *steps_in_use(self.folder.parent, steps),
        }
        return [step for step in steps if step not in kept]


def _took_too_long(error: Exception) -> bool:
    """Whether an error of Orbax is that of waiting in vain, for a disk or for another process."""
    return isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in str(error)


def _held_bytes(state: PyTree) -> int:
    """The bytes of a state that this process holds, each part of an array once."""
    return sum(
        sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        for leaf in jax.tree.leaves(state)
    )


def _own_bytes(state: PyTree) -> int:
    """The bytes of a state that this process writes into a copy of its own."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    )
