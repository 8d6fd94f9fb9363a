"""A run's folder: its `config.toml`, the files of its tokenizer, and its checkpoints, by Orbax's
manager.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint.options import MultiprocessingOptions

from jaxpar.base.config import RESOLVED, CheckpointConfig, Config, incompatible_changes, parse
from jaxpar.base.config.checks import outdated
from jaxpar.base.console import PlainConsole
from jaxpar.base.errors import UTF8, UserError, reading, require_local
from jaxpar.base.layout.sharding import path_name
from jaxpar.base.process.runtime import number_from_first, run_together, told_by_first, write_whole
from jaxpar.base.sealed import require_intact, seal
from jaxpar.base.toml import flatten, to_toml
from jaxpar.models import FAMILIES
from jaxpar.train.runs.bucket_runs import NotAsSent, RunCopy, Sender, copy_of
from jaxpar.train.runs.disk_space import require_space
from jaxpar.train.runs.in_use import steps_in_use
from jaxpar.train.runs.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    Depth,
    Manifest,
    UnreadCheckpoint,
    require_whole,
    write_manifest,
)
from jaxpar.train.runs.steps import DAMAGED, clear_up, set_aside, steps_in
from jaxpar.train.runs.val_losses import Losses, lowest

CHECKPOINTS = "checkpoints"
"""The folder of a run that has its checkpoints, each in a folder of its step."""


def is_run(folder: Path) -> bool:
    """Whether it is a run folder; a URL is refused (UserError)."""
    require_local(folder)
    return os.path.exists(folder / "config.toml")  # which is False of a name that is too long


def read_run_config(folder: Path) -> Config:
    """Read the config that a run folder was made with, or last went on with; without one it is
    refused (UserError).
    """
    path = folder / "config.toml"
    if not is_run(folder):
        raise UserError(f"{folder} is no run folder: it has no config.toml")
    with reading(path):
        text = path.read_text(encoding=UTF8)
    require_intact(text, str(path))
    return parse(text, str(path))


def finished_steps(folder: Path) -> list[int]:
    """Return the steps of a run folder's finished checkpoints, as they are at the moment."""
    return steps_in(folder / CHECKPOINTS)


def moved_data(changes: Sequence[str]) -> list[str]:
    """Return the changes of a config (see `incompatible_changes`) that are more than another place
    of its data.
    """
    return [text for text in changes if not text.startswith(("data.path: ", "data.val_path: "))]


def refused_changes(folder: Path, before: Config, config: Config) -> list[str]:
    """Return the changes that make a config another experiment than the run in a folder.

    A run without a finished checkpoint is no experiment yet. An import that has not trained has its
    arrays alone. What a run of an earlier version has and is refused today may be replaced.

    Args:
      folder: the run folder.
      before: the config in it.
      config: the config that it is to go on with.

    Returns:
      The changes, as `incompatible_changes` writes them.
    """
    steps = finished_steps(folder)
    if not steps:
        return []
    changed = incompatible_changes(before, config)
    if steps == [0]:
        return [text for text in changed if text.startswith(("model.", "precision."))]
    replaceable = outdated(before)
    return [text for text in changed if text.partition(":")[0] not in replaceable]


def replaced_values(before: Config, config: Config) -> str:
    """Say which values of a run, that are refused today, a config replaces; empty = none."""
    was = flatten(before)
    now = flatten(config)
    changed = sorted(key for key in outdated(before) if was[key] != now[key])
    values = ", ".join(f"{key} {was[key]} -> {now[key]}" for key in changed)
    if values:
        return f"settings of this run that are refused today are replaced: {values}"
    return ""


def compare_run(folder: Path, config: Config, data_compared: bool = False) -> Config | None:
    """Require that a folder is no run yet, or that its run is the same experiment. Nothing is
    written.

    Only process 0 looks, and tells the others what it found.

    Args:
      folder: the run folder, or where it will be.
      config: the experiment.
      data_compared: whether the data are known to be those of the run, wherever they lie now.

    Returns:
      On process 0 the config that is in the folder, or None; None elsewhere.

    Raises:
      UserError: the folder is of another experiment, is no run folder or cannot be used; or it is a
        URL.
    """
    require_local(folder)
    main = jax.process_index() == 0
    return run_together(lambda: _compare_run(folder, config, data_compared) if main else None)


def _compare_run(folder: Path, config: Config, data_compared: bool) -> Config | None:
    if is_run(folder):
        before = read_run_config(folder)
        theirs = before.model.family
        if theirs != config.model.family and theirs not in FAMILIES:
            raise UserError(
                f"{folder} is a run of {theirs}, a whole model that a program gave: give "
                "make_experiment the model= that was trained, or use another --run folder"
            )
        changed = refused_changes(folder, before, config)
        if data_compared:
            changed = moved_data(changed)
        if changed:
            differences = "; ".join(changed[:3] + ["..."] * (len(changed) > 3))
            why = f"{folder} holds a run of another config ({differences})"
            raise UserError(f"{why}: use another --run folder, or give the old values")
        return before
    if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is there and is no run folder (it has no config.toml): use another --run "
            "folder"
        )
    return None


def keep_config(folder: Path, config: Config) -> None:
    """Write a run's `config.toml`, on process 0, which tells the others whether it succeeded (else
    a UserError).
    """
    main = jax.process_index() == 0
    text = seal(to_toml(_for_next_call(config), RESOLVED))
    run_together(lambda: write_whole(folder / "config.toml", text) if main else None)


def _for_next_call(config: Config) -> Config:
    """Return the config without what it says for one call alone."""
    return replace(config, data=replace(config.data, accept_changed=False))


PyTree = Any  # a TrainState or any other tree, because Orbax looks only at the leaves


class _Best:
    """For Orbax, keeps the checkpoint with the lowest of some losses by step, which grow while the
    run goes on.
    """

    def __init__(self, losses: dict[int, float]):
        self._losses = losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint whether it is the best; Orbax asks this before it removes
        any.
        """
        best = lowest(self._losses, [info.step for info in checkpoints])
        return [info.step == best for info in checkpoints]


_UNFINISHED = ".orbax-checkpoint-tmp"
"""What the name of a step ends in while it is written."""


def warn(line: str) -> None:
    """Say a line on standard error, where the program has no other way to say it."""
    PlainConsole(stderr=True, soft_wrap=True).print(line)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _is_not_of_unread_future(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


# What Orbax logs is raised too, or is of no use to whoever trains; its lines have no form of ours.
# Of its writes that fail together it raises the first, and asyncio logs the others.
logging.getLogger("absl").addFilter(_is_not_of_orbax)
logging.getLogger("asyncio").addFilter(_is_not_of_unread_future)


class _InUse:
    """For Orbax, keeps the checkpoints that are being read, as the first process saw it before a
    save: readers come and go, and all processes must keep the same.
    """

    def __init__(self, run: Path):
        self._run = run
        self._read: list[int] = []

    def look(self) -> None:
        """Look which steps are being read; all processes must call this."""
        main = jax.process_index() == 0
        self._read = _from_first(sorted(steps_in_use(self._run)) if main else [])

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint whether a reader has marked it."""
        return [info.step in self._read for info in checkpoints]


def _from_first(steps: Sequence[int]) -> list[int]:
    """Return on every process the steps that the first one gives; all must call this."""
    count = number_from_first(len(steps))
    padded = [*steps, *[0] * count][:count]
    return [number_from_first(step) for step in padded]


class Checkpoints:
    """The checkpoints of one run, which are written in the background; the newest few and the best
    one are kept.

    Without a config they are only read: nothing in the folder is made or removed. A training run
    may be writing there, and a second writer would clear away its unfinished checkpoint as a
    leftover.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig | None = None,
        identity: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = warn,
        guard: Callable[[], None] = lambda: None,
    ):
        """Open the checkpoints of a run.

        Args:
          folder: the folder that has them, each in a folder of its step.
          config: which are kept; None = they are only read.
          identity: what tells the data and the tokenizer of the run from others.
          say: gets a line about each checkpoint that is damaged or has no manifest.
          guard: is called on the first process before each save, and raises where another training
            has the run, or its folder is gone.

        Raises:
          UserError: Orbax cannot open them, or one that is damaged cannot be moved aside.
        """
        self._config = config
        self._identity = identity or {}
        self._say = say
        self._guard = guard
        require_local(folder)
        self.folder = folder.absolute()
        self._copy = copy_of(self.folder.parent)
        # Orbax takes a metric with its checkpoint only, and here a step is saved before it is
        # evaluated.
        self._losses = Losses(self.folder, say)
        self._in_use = _InUse(self.folder.parent)
        self._saving: int | None = None
        # Each step is opened by itself, so that a damaged one is no hindrance to another.
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(**_handlers(self._copy)),
            multiprocessing_options=_processes(self._copy),
        )
        self._manager: ocp.CheckpointManager | None = None
        if config is not None:
            if self._copy is not None:
                self._copy.start_sending()
            else:  # what a bucket has is a step only once all of it is there
                self._clear_up(config)
            self._losses.read()
            self._manager = self._open(config)

    def _clear_up(self, config: CheckpointConfig) -> None:
        """Take away what Orbax would stumble over, and say what."""
        if jax.process_index() == 0:
            best = self.best() if config.keep_best else None
            lines = run_together(lambda: clear_up(self.folder, config.keep, best))
        else:
            lines = run_together(list[str])
        for line in lines:
            self._say(line)

    def _open(self, config: CheckpointConfig) -> ocp.CheckpointManager:
        policies: list[Any] = [managers.LatestN(config.keep), self._in_use]
        if config.keep_best:
            policies.append(_Best(self._losses.known))
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
            preservation_policy=managers.AnyPreservationPolicy(policies),
            create=True,
            cleanup_tmp_directories=True,
            multiprocessing_options=_processes(self._copy),
        )
        try:
            handlers = _handlers(self._copy)
            return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        # Orbax makes the folder, reads a few files of every checkpoint, and hands on what fails
        except Exception as error:
            why = _first_line(error)
            raise UserError(f"the checkpoints in {self.folder} cannot be opened ({why})") from error

    def latest(self) -> int | None:
        """Return the newest finished step, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Return every finished step, sorted, and that which is being saved."""
        if self._manager is None:
            return steps_in(self.folder)
        return sorted(self._manager.all_steps())

    def best(self, without: Container[int] = ()) -> int | None:
        """Return the step with the lowest validation loss among those kept, or None.

        Args:
          without: steps that are left out.
        """
        if self._manager is None:
            self._losses.read()
        return lowest(self._losses.known, [step for step in self.steps() if step not in without])

    def require_whole(self, step: int, depth: Depth = "sample") -> Manifest | None:
        """Compare a step with its manifest, and say where it has none.

        Args:
          step: the step.
          depth: how much of it is read.

        Returns:
          The manifest, or None.

        Raises:
          DamagedCheckpoint: it is not as it was saved.
        """
        place = self.folder / str(step)
        try:
            self._complete(step)
            found = require_whole(place, step, depth)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"checkpoint {place} is damaged: {error}") from error
        if found is None:
            self._say(
                f"checkpoint {place} has no {MANIFEST}, as those of an earlier version: it is "
                "taken as it is, unchecked"
            )
        return found

    def newest_whole(self) -> tuple[int | None, Manifest | None]:
        """Find the step to go on after, and move those aside that are newer and damaged.

        All processes must call this.

        Returns:
          The step, or None where there is none; and on the first process its manifest.

        Raises:
          UserError: all are damaged, or one cannot be read, which may be whole.
        """
        main = jax.process_index() == 0
        found = run_together(lambda: self._newest_whole() if main else (None, None))
        step = number_from_first(-1 if found[0] is None else found[0])
        self._leave_out_after(step)
        self._reload()
        return (None if step < 0 else step), found[1]

    def _leave_out_after(self, step: int) -> None:
        """Take the newer steps out of this process's own copy of a run in a bucket. The first
        process has moved them aside in its copy alone, and all must know the same steps.
        """
        if self._copy is None:
            return
        for newer in self.steps():  # as they were before the first process moved any
            if newer > step:
                self._copy.leave_out(newer)

    def _newest_whole(self) -> tuple[int | None, Manifest | None]:
        steps = steps_in(self.folder)
        for step in reversed(steps):
            try:
                return step, self.require_whole(step)
            except DamagedCheckpoint as error:
                if isinstance(error.__cause__, UnreadCheckpoint):
                    raise UserError(
                        f"checkpoint {self.folder / str(step)} cannot be read ({error.__cause__}), "
                        "and may be whole: start again once its disk answers, or move it away to "
                        "go on from an earlier one"
                    ) from error
                self._say(set_aside(self.folder / str(step), str(error.__cause__)))
        if steps:
            raise UserError(
                f"no checkpoint of {self.folder.parent} is whole, and they were moved to its "
                f"folder {DAMAGED}: bring one back, or start again, which begins the run anew"
            )
        return None, None

    def set_aside(self, step: int, problem: str) -> None:
        """Move a step aside that cannot be read, and say so. For one process alone.

        Args:
          step: the step.
          problem: what is wrong with it.
        """
        self._say(set_aside(self.folder / str(step), problem))
        self._reload()

    def _reload(self) -> None:
        """Have Orbax look again at what is there."""
        if self._manager is not None:
            self._manager.reload()

    def save(
        self, step: int, state: PyTree, data_state: dict[str, Any], val_loss: float | None = None
    ) -> None:
        """Save in the background, unless the step is already saved; `val_loss` may also follow, see
        `record`.
        """
        assert self._manager, "opened for reading"
        # what the first process knows counts, as all must save alike
        if told_by_first(step not in self.steps()):
            # The save waits for the one before, and then removes old checkpoints: no loss is
            # written into those.
            run_together(self._finish)
            self._losses.forget(step)  # of a checkpoint that was there before and is not
            run_together(lambda: self._require_room(state))
            self._in_use.look()
            with self._writing():
                items = ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data_state)
                )
                self._saving = step
                self._manager.save(step, args=items)
                if self._sender is not None:
                    self._sender.send_step(step)
        if val_loss is not None:
            self.record(step, val_loss)

    def _require_room(self, state: PyTree) -> None:
        """Require on the first process that the run is still this one's, and that a save has room:
        on its disk, or on that of each process where each has a copy of its own.
        """
        main = jax.process_index() == 0
        if main:
            self._guard()
        if self._copy is not None:
            require_space(self.folder, _own_bytes(state))
        elif main:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            require_space(self.folder, size)

    def _write_manifest(self) -> None:
        """Write the manifest of the step that is being saved; Orbax calls this in its thread, once
        all files are there and before the step has its name.
        """
        if jax.process_index() == 0 and self._saving is not None:
            step = self._saving
            for folder in self.folder.glob(f"{step}{_UNFINISHED}*"):
                write_manifest(folder, step, self._identity)

    def _finish_save(self) -> None:
        """Wait until what was saved is there, with its manifest and its loss."""
        assert self._manager
        try:
            self._manager.wait_until_finished()
            if self._sender is not None:
                self._sender.wait()
        except BaseException:
            self._saving = None
            # Orbax counts what it could not write among its steps
            if jax.process_count() == 1:
                self._reload()
            raise
        step = self._saving
        self._saving = None
        if jax.process_index() == 0 and step is not None:
            place = self.folder / str(step)
            # where Orbax called too late, when the step had its name
            if not (place / MANIFEST).exists():
                write_manifest(place, step, self._identity)
        self._losses.write()

    def record(self, step: int, val_loss: float) -> None:
        """Keep the validation loss of a step that was saved. A step without one, or with NaN, is
        never the best.
        """
        if step in self.steps() and math.isfinite(val_loss):
            self._losses.add(step, val_loss)

    def data(self, step: int) -> dict[str, Any]:
        """Return what `save` was given beside the state; raise a UserError where it cannot be
        read.
        """
        return self._read(step, data=ocp.args.JsonRestore()).data

    def names(self, step: int) -> list[str]:
        """Return the names of the arrays of a finished step's state, as `params.blocks.q`; a
        UserError says that they cannot be read.
        """
        with self._readable(step):
            found: Any = self._saved_form(step)
            leaves = jax.tree_util.tree_leaves_with_path(found.state)
        return [path_name(path) for path, _ in leaves]

    def restore(self, step: int, shapes: PyTree, part: bool = False) -> PyTree:
        """Return the state of a finished step, with the shardings of `shapes`.

        These are ShapeDtypeStructs, whose names, shapes and dtypes must be those that were saved. A
        `part` is a dictionary of some fields of the state; nothing else is read. A UserError says
        that files are missing or cut short, or that the state is of another model, precision or
        optimizer.
        """
        self._check(step, shapes, part)
        arguments = ocp.checkpoint_utils.construct_restore_args(shapes)
        return self._read(
            step, state=ocp.args.PyTreeRestore(shapes, arguments, partial_restore=part)
        ).state

    def _check(self, step: int, shapes: PyTree, part: bool) -> None:
        """Compare names, shapes and dtypes with what was saved before anything is read: Orbax casts
        silently.
        """
        with self._readable(step):
            found: Any = self._saved_form(step)
            saved, wanted = (
                {
                    path_name(path): f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}"
                    for path, leaf in leaves
                }
                for leaves in map(jax.tree_util.tree_leaves_with_path, (found.state, shapes))
            )
            if not saved:
                raise ValueError("it holds no state")
        for name in [*wanted, *([] if part else sorted(saved.keys() - wanted.keys()))]:
            there = saved.get(name, "absent")
            here = wanted.get(name, "absent")
            if there != here and not _is_wider_moment(name, there, here):
                raise UserError(
                    f"checkpoint {self.folder / str(step)} is of another model, precision or "
                    f"optimizer ({name} is {there} there and {here} here): take those of its run's "
                    "config.toml, or of the program that trained it"
                )

    def _saved_form(self, step: int) -> Any:
        """Return names, shapes and dtypes of what a step has, by item."""
        self._complete(step)
        return self._reader.metadata(self.folder / str(step)).item_metadata

    def _read(self, step: int, **items: ocp.args.CheckpointArgs) -> Any:
        with self._readable(step):
            if "state" in items:
                self._complete(step)
            return self._reader.restore(self.folder / str(step), ocp.args.Composite(**items))

    @contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Turn Orbax's failure to read into a DamagedCheckpoint."""
        if self._manager is not None:
            self._manager.wait_until_finished()
        try:
            yield
        except UserError:
            raise
        # whatever Orbax, TensorStore or a parser of theirs raises over a damaged file
        except Exception as error:
            why = f"checkpoint {self.folder / str(step)} cannot be read ({_first_line(error)})"
            # a run beside may be removing it, or a copy of it may be under way
            raise DamagedCheckpoint(
                f"{why}: try again if a run or a copy is writing there, or take another step"
            ) from error

    def wait(self) -> None:
        """Wait until what was saved is there, with its losses; raise a UserError where it could not
        be written. All processes must call this.
        """
        if self._manager is not None:
            run_together(self._finish)

    def _finish(self) -> None:
        with self._writing():
            self._finish_save()

    def close(self) -> None:
        """Wait for what is being written, and raise what went wrong in the background (a full disk,
        say).
        """
        if self._manager is None:
            return
        try:
            with self._writing():
                self._finish_save()
                self._manager.close()
                if self._sender is not None:
                    self._sender.send()
        finally:
            if self._sender is not None:
                self._sender.stop()

    @property
    def _sender(self) -> Sender | None:
        """What sends the steps that are written here to a bucket; None = nothing does."""
        if self._copy is None or self._config is None:
            return None
        return self._copy.sender

    def _complete(self, step: int) -> None:
        """Have the arrays of a step on this machine, where the run is in a bucket."""
        if self._copy is None:
            return
        try:
            self._copy.complete(step)
        # a bucket that does not answer has not damaged anything
        except NotAsSent as error:
            raise DamagedCheckpoint(str(error)) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn Orbax's failure to write into a UserError; it raises what its threads, storage and
        JSON raise.
        """
        try:
            yield
        except Exception as error:
            if self._sender is not None:
                self._sender.stop()
            why = f"a checkpoint could not be written to {self.folder} ({_first_line(error)})"
            raise UserError(
                f"{why}: look at the space that is left, and start again from the last one"
            ) from error

    def remove_old(self) -> None:
        """Remove what is neither among the newest nor the best nor being read: a save cannot know
        how its own step evaluates. All processes must call this.
        """
        if self._manager is None or self._config is None:
            return
        self.wait()
        # what the first process sees counts, as all must remove alike
        for step in _from_first(self._old_steps(self._config)):
            self._manager.delete(step)

    def _old_steps(self, config: CheckpointConfig) -> list[int]:
        """The steps that this process would remove."""
        steps = self.steps()
        kept = {
            *steps[-config.keep :],
            self.best() if config.keep_best else None,
            *steps_in_use(self.folder.parent),
        }
        return [step for step in steps if step not in kept]


def _own_bytes(state: PyTree) -> int:
    """The bytes of a state that this process writes into a copy of its own."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    )


def _processes(copy: RunCopy | None) -> MultiprocessingOptions:
    """Who writes: the first process writes what all have, or, where each has a folder of its own,
    each does.
    """
    if copy is None or jax.process_count() == 1:
        return MultiprocessingOptions()
    return MultiprocessingOptions(primary_host=None)


def _handlers(copy: RunCopy | None) -> dict[str, Any]:
    """What writes the parts of a checkpoint. Where each process has a folder of its own, a part of
    an array is a file of its own too (by default those of a process are in few files, which the
    first one joins).
    """
    if copy is None or jax.process_count() == 1:
        return {"state": ocp.PyTreeCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
    processes = _processes(copy)
    arrays = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(primary_host=None, replica_id=0))
    )
    return {
        "state": ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, multiprocessing_options=processes, type_handler_registry=arrays
        ),
        "data": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
    }


def _first_line(error: Exception) -> str:
    """The first line of what an error says, or its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _is_wider_moment(name: str, there: str, here: str) -> bool:
    """Whether a saved bfloat16 is the second moment of an earlier version, which is float32 now:
    the same number.
    """
    return (
        ".nu." in name
        and there.startswith("bfloat16")
        and here == there.replace("bfloat16", "float32", 1)
    )
