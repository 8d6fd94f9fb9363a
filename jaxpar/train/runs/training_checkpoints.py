"""The checkpoints of a run that trains: they are written in the background, and the newest few and
the best one are kept. A second writer would clear away an unfinished one of the first as a
leftover, so the writer must hold the lock of the run.

A step is saved in this order:

    thread           what it does
    the caller's     `save` waits until the step before is there, and asks for lock and room
    the caller's     Orbax copies the arrays to host memory and asks `Retention` which steps it
                     removes; `save` returns, and the training goes on
    Orbax's          the files are written, in a folder STEP.orbax-checkpoint-tmp-...
    Orbax's          `_write_manifest` adds the manifest to it, and waits until the disk has all
    Orbax's          the folder is renamed to STEP, and the store keeps it: the disk has its name,
                     or a thread of the store's sends it
    Orbax's          the steps that are not kept are removed
    the caller's     `record` notes the loss, before or after the step is there
    the caller's     the next `save`, `wait` or `close` waits for both threads (`_finish_save`),
                     raises what failed there, and writes the losses that waited for the step

`_saving` is the step that is being saved: it is set before Orbax is called, as Orbax's thread reads
it, and is None again once both threads are done, or have failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxpar.base.atomic_write import sync_below
from jaxpar.base.config import CheckpointConfig
from jaxpar.base.errors import Say, UserError
from jaxpar.base.process.multihost import (
    number_from_first,
    numbers_from_first,
    run_on_first,
    run_together,
    told_by_first,
)
from jaxpar.train.runs.checkpoints import (
    Checkpoints,
    PyTree,
    Whole,
    find_newest_whole,
    first_line,
    warn,
)
from jaxpar.train.runs.folder.manifest import MANIFEST, write_manifest
from jaxpar.train.runs.folder.orbax_names import UNFINISHED
from jaxpar.train.runs.folder.steps import set_aside
from jaxpar.train.runs.folder.val_losses import lowest
from jaxpar.train.runs.orbax_options import (
    ORBAX_SECONDS,
    Manager,
    Retention,
    writing_processes,
)
from jaxpar.train.runs.stores import StoreOf, store_of

_RAISES = 3
"""As often Orbax may raise a failure of its threads before it closes: each that knows of it, once.
"""


class TrainingCheckpoints(Checkpoints):
    """The checkpoints of one run, which this process reads and writes."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        identity: Mapping[str, Any] | None = None,
        say: Say = warn,
        require_lock: Callable[[], None] = lambda: None,
        store: StoreOf = store_of,
        seconds: float = ORBAX_SECONDS,
    ):
        """Open the checkpoints of a run, and clear away folders that are none.

        Args:
          folder: the folder of the checkpoints, each in a folder of its step; it is made.
          config: the settings, which say which checkpoints are kept.
          identity: the hashes by which the data and the tokenizer of the run are told from others.
          say: gets a line about each checkpoint that is damaged or has no manifest.
          require_lock: is called by each process before a save, and raises where another training
            has the run, or its folder is gone.
          store: makes the store that keeps the checkpoints of the folder.
          seconds: how long a save may take, by `longest_save`.

        Raises:
          UserError: Orbax cannot open them, or a damaged one cannot be moved aside.
        """
        super().__init__(folder, say, store)
        self._config = config
        self._seconds = seconds
        self._identity = identity or {}
        self._require_lock = require_lock
        losses = self._losses.known if config.keep_best else {}
        self._retention = Retention(self.store, config.keep, losses)
        self._saving: int | None = None
        with ExitStack() as stack:  # what the store does in the background ends where this fails
            stack.callback(self.store.end)
            self.store.open()
            for line in run_together(lambda: self.store.clear_up(config.keep, self._kept())):
                say(line)
            self._losses.read()
            self._manager = self._open()
            self._is_open = True
            self._is_left = False
            stack.pop_all()

    def _kept(self) -> int | None:
        """Find the step that is kept besides the newest, before Orbax has looked at the folder."""
        if not self._config.keep_best:
            return None
        self._losses.read()
        return lowest(self._losses.known, self.store.steps())

    def _open(self) -> Manager:
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                # By default the others begin to write once one process says that the folders are
                # there, which holds of its own ones alone.
                create_directories_asynchronously=self.store.disk == "shared",
                post_finalization_callback=self._write_manifest,
                timeout_secs=math.ceil(self._seconds),
            ),
            preservation_policy=self._retention,
            create=False,
            cleanup_tmp_directories=True,
            multiprocessing_options=writing_processes(self.store.disk),
        )
        try:
            return Manager(self.store, options)
        # Orbax reads a few files of every checkpoint, and hands on what fails
        except Exception as error:
            why = first_line(error)
            raise UserError(f"the checkpoints in {self.folder} cannot be opened ({why})") from error

    def steps(self) -> list[int]:
        """List every finished step, sorted, and the step that is being saved."""
        return sorted(self._manager.all_steps())

    def newest_whole(self, may_lack: bool = False) -> Whole:
        """Find the step to resume after, and move newer ones, which are damaged, aside.

        All processes must call this.

        Args:
          may_lack: whether there may be no whole step although there were some, as others are at
            hand.

        Returns:
          The step; its manifest is known to the first process.

        Raises:
          UserError: all are damaged, or one that may be whole cannot be read.
        """
        found = run_on_first(lambda: find_newest_whole(self, self._say, may_lack)) or Whole()
        step = number_from_first(-1 if found.step is None else found.step)
        # The first process has moved the newer ones aside in its folder alone, and all must know
        # the same steps: these are those of before.
        for newer in self.steps():
            if newer > step:
                self.store.remove(newer)
        self._manager.reload()
        return Whole(None if step < 0 else step, found.manifest)

    def set_aside(self, step: int, problem: str) -> None:
        """Move a step aside that cannot be read, and say so. For one process alone.

        Args:
          problem: what is wrong with it.
        """
        self._say(set_aside(self.folder / str(step), problem))
        self.store.remove(step)
        self._manager.reload()

    def save(
        self, step: int, state: PyTree, data_state: dict[str, Any], val_loss: float | None = None
    ) -> None:
        """Save in the background, unless the step is already saved. All processes must call this.

        Args:
          data_state: the data that are saved beside the arrays, as JSON has them; `data` returns
            them.
          val_loss: the step's validation loss, in nats a token; `record` may also add it later.

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
            self._retention.look(self.steps())
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
        if not begun:  # Orbax saves none below its newest
            newest = max(self.steps(), default=0)
            raise UserError(
                f"step {step} is not saved: {self.folder} has step {newest}, and only newer ones "
                "are added: go on from that one, or use another --run folder"
            )

    def _require_room(self, state: PyTree) -> None:
        """Require that the run is still this one's, and that a save has room. An obstacle of one
        process is found here, where all leave together, and not inside of Orbax.
        """
        self._require_lock()
        self.store.require_room(state)

    def _write_manifest(self) -> None:
        """Write the manifest of the step that is being saved, and wait until the disk has all of
        it; Orbax calls this in its thread, once all files are there and before the step has its
        name.
        """
        step = self._saving
        if step is None:
            return
        for folder in self.folder.glob(f"{step}{UNFINISHED}*"):
            if self.store.hashes:
                write_manifest(folder, step, self._identity)
            if self.store.writes:
                sync_below(folder)

    def _finish_save(self) -> None:
        """Wait until the step that was saved is there, with its manifest and its loss."""
        try:
            self._await_save()
            self.store.wait()
        except BaseException:
            self._saving = None
            self._retention.removed = []  # as nothing was
            # Orbax counts what it could not write among its steps
            if jax.process_count() == 1:
                self._manager.reload()
            raise
        step = self._saving
        self._saving = None
        if self.store.hashes and step is not None:
            place = self.folder / str(step)
            # where Orbax called too late, when the step had its name
            if not (place / MANIFEST).exists():
                write_manifest(place, step, self._identity)
                sync_below(place)
                self.store.update(step)
        self._write_losses()
        self._remove(self._retention.removed)
        self._retention.removed = []

    def _write_losses(self) -> None:
        """Write the losses of the steps that have been written to their end."""
        for step in self._losses.write():
            self.store.update(step)

    def _remove(self, steps: Sequence[int]) -> None:
        """Have the store keep steps no longer that Orbax has removed."""
        for step in steps:
            self.store.remove(step)

    def record(self, step: int, val_loss: float) -> None:
        """Keep the validation loss of a step that was saved. A step without one, or with NaN, is
        never the best.
        """
        if step in self.steps() and math.isfinite(val_loss):
            self._losses.add(step, val_loss)
            self._write_losses()

    def wait(self) -> None:
        """Wait until the step that was saved is there, with its losses; raise a UserError where it
        could not be written. All processes must call this.
        """
        run_together(self._finish)

    def _finish(self) -> None:
        with self._writing():
            self._finish_save()

    def _await_save(self) -> None:
        self._manager.wait_until_finished()

    def close(self, together: bool = True) -> None:
        """Wait for the save in the background, and close the checkpoints.

        Args:
          together: whether all processes call this, and so end alike; otherwise this one ends
            alone.

        Raises:
          UserError: a save failed in the background (a full disk, say).
        """
        try:
            if together:
                run_together(self._finish_and_close)
            else:
                self._finish_and_close()
        except KeyboardInterrupt:  # whoever asks again does not want to wait
            self.leave()
            raise
        finally:
            self.store.stop()

    def abandon(self) -> None:
        """End the work in the background, as the run is given back: nothing is kept from now on.
        What `close` would have kept is given up, where it was not called or has failed.
        """
        with ExitStack() as stack:  # the last of these first, and each of them whatever fails
            if not self._is_left:
                stack.callback(self._close_manager)
                stack.callback(self.store.end)
            self.store.stop()

    def leave(self) -> None:
        """Have `abandon` wait for nothing: what works in the background may wait for a process that
        is gone.
        """
        self._is_left = True
        self.store.stop()

    def _close_manager(self) -> None:
        """End Orbax's threads, if they were not. What failed in one of them was raised before, or
        is of a step that is given up.
        """
        for _ in range(_RAISES):
            if self._is_open:
                with suppress(Exception):
                    self._manager.close()
                    self._is_open = False

    def _finish_and_close(self) -> None:
        with self._writing():
            self._finish_save()
            self._manager.close()
            self._is_open = False
            self.store.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn Orbax's failure to write into a UserError; it raises what its threads, storage and
        JSON raise.
        """
        try:
            yield
        except Exception as error:
            self.store.stop()
            self._require_lock()  # a folder that was moved away explains it better
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
        """Remove the steps that are neither among the newest nor the best nor being read: a save
        cannot know how its own step evaluates. All processes must call this.
        """
        self.wait()
        steps = self.steps()
        # what the first process sees counts, as all must remove alike
        old = numbers_from_first(self._retention.old(steps, self.store.steps_in_use(steps)))
        for step in old:
            self._manager.delete(step)
        self._remove(old)


def _took_too_long(error: Exception) -> bool:
    """Return whether an error of Orbax says that it waited in vain, for a disk or for another
    process.
    """
    return isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in str(error)
