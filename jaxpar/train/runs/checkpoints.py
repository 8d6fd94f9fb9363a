"""The checkpoints of a run, to be read: which steps there are, and their arrays on any mesh.
Nothing in their folder is made or removed here, as a training may be writing there.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxpar.base.console import PlainConsole
from jaxpar.base.errors import Say, UserError
from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.train.runs.folder.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    Depth,
    Manifest,
    UnreadCheckpoint,
    require_whole,
)
from jaxpar.train.runs.folder.orbax_names import STATE
from jaxpar.train.runs.folder.steps import DAMAGED, set_aside
from jaxpar.train.runs.folder.val_losses import Losses, lowest
from jaxpar.train.runs.orbax_options import LiteralPath, item_handlers, writing_processes
from jaxpar.train.runs.stores import StoreOf, store_of


def warn(line: str) -> None:
    """Print a line on standard error, where a program has given no other way to say it."""
    PlainConsole(stderr=True, soft_wrap=True).print(line)


class Checkpoints:
    """The checkpoints of one run, to be read.

    Attributes:
      store: the store that keeps them.
      folder: the folder on this machine that has each of them in a folder of its step.
    """

    def __init__(self, folder: Path, say: Say = warn, store: StoreOf = store_of):
        """Open the checkpoints of a run.

        Args:
          folder: the folder of the checkpoints, which may be absent.
          say: gets a line about each checkpoint that is damaged or has no manifest.
          store: makes the store that keeps the checkpoints of the folder.

        Raises:
          UserError: the folder is a URL.
        """
        self.store = store(folder)
        self.folder = self.store.folder
        self._say = say
        # Orbax takes a metric with its checkpoint only, and here a step is saved before it is
        # evaluated.
        self._losses = Losses(self.folder, say)
        # Each step is opened by itself, so that a damaged one is no hindrance to another.
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(**item_handlers(self.store.disk)),
            multiprocessing_options=writing_processes(self.store.disk),
        )

    def latest(self) -> int | None:
        """Return the newest finished step, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Return every finished step, sorted."""
        return self.store.steps()

    def best(self, without: Container[int] = ()) -> int | None:
        """Return the step with the lowest validation loss, or None.

        Args:
          without: steps that are left out.
        """
        self._losses.read()
        return lowest(self._losses.known, [step for step in self.steps() if step not in without])

    def require_whole(self, step: int, depth: Depth = "sample") -> Manifest | None:
        """Compare a step with its manifest, and say where it has none.

        Returns:
          The manifest, or None.

        Raises:
          DamagedCheckpoint: the step differs from what was saved.
        """
        place = self.folder / str(step)
        try:
            self.store.read(step)
            found = require_whole(place, step, depth)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"checkpoint {place} is damaged: {error}", place) from error
        if found is None:
            self._say(
                f"checkpoint {place} has no {MANIFEST}, as those of an earlier version: it is "
                "taken as it is, unchecked"
            )
        return found

    def data(self, step: int) -> dict[str, Any]:
        """Read the data that were saved beside the state of a step; a UserError where they cannot
        be read.
        """
        return self._read(step, data=ocp.args.JsonRestore()).data

    def names(self, step: int) -> list[str]:
        """List the names of the arrays of a finished step's state, such as `params.blocks.q`; a
        UserError where they cannot be read.
        """
        with self._readable(step):
            found: Any = self._saved_form(step)
            leaves = jax.tree_util.tree_leaves_with_path(found.state)
        return [path_name(path) for path, _ in leaves]

    def restore(
        self, step: int, shapes: PyTree, part: bool = False, besides: str | None = None
    ) -> PyTree:
        """Read the state of a finished step.

        Args:
          shapes: ShapeDtypeStructs with shardings, whose names, shapes and dtypes must be the saved
            ones.
          part: whether `shapes` is a dictionary of some fields of the state; nothing else is read.
          besides: the beginning of the names of arrays that may have been saved besides, and are
            not read.

        Raises:
          UserError: files are missing or cut short, or the state belongs to another model,
            precision or optimizer.
        """
        more = self._require_form(step, shapes, part, besides)
        arguments = ocp.checkpoint_utils.construct_restore_args(shapes)
        return self._read(
            step, state=ocp.args.PyTreeRestore(shapes, arguments, partial_restore=part or more)
        ).state

    def _require_form(self, step: int, shapes: PyTree, part: bool, besides: str | None) -> bool:
        """Compare names, shapes and dtypes with what was saved before anything is read: Orbax casts
        silently. Return whether there are arrays besides.
        """
        with self._readable(step):
            found: Any = self._saved_form(step)
            saved = _forms(found.state)
            wanted = _forms(shapes)
            if not saved:
                raise ValueError("it holds no state")
        names: Sequence[str] = list(wanted)
        others = sorted(saved.keys() - wanted.keys())
        more = [name for name in others if besides is not None and name.startswith(besides)]
        if not part:
            names = [*names, *(name for name in others if name not in more)]
        for name in names:
            there = saved.get(name, "absent")
            here = wanted.get(name, "absent")
            if there != here and not _is_wider_moment(name, there, here):
                raise UserError(
                    f"checkpoint {self.folder / str(step)} is of another model, precision or "
                    f"optimizer ({name} is {there} there and {here} here): take those of its run's "
                    "config.toml, or of the program that trained it"
                )
        return bool(more)

    def _saved_form(self, step: int) -> Any:
        """Read the names, shapes and dtypes of a step's arrays, by item."""
        self.store.read(step)
        return self._reader.metadata(self._place(step)).item_metadata

    def _read(self, step: int, **items: ocp.args.CheckpointArgs) -> Any:
        with self._readable(step):
            if STATE in items:
                self.store.read(step)
            return self._reader.restore(self._place(step), ocp.args.Composite(**items))

    def _place(self, step: int) -> LiteralPath:
        return LiteralPath(self.folder / str(step))

    @contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Turn Orbax's failure to read into a DamagedCheckpoint, and into an UnreadCheckpoint where
        the disk did not give a file that is there: such a step is neither moved nor removed.
        """
        self._await_save()
        try:
            yield
        # too little memory, or a device that fails, says nothing about the files
        except (UserError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        # whatever Orbax, TensorStore or a parser of theirs raises over a damaged file
        except Exception as error:
            place = self.folder / str(step)
            why = f"checkpoint {place} cannot be read ({first_line(error)})"
            kind = UnreadCheckpoint if _is_of_the_disk(error) else DamagedCheckpoint
            # a run beside may be removing it, or a copy of it may be under way
            raise kind(
                f"{why}: try again if a run or a copy is writing there, or take another step",
                place,
            ) from error

    def _await_save(self) -> None:
        """Wait until the save of this process is finished; a reader has none."""


class Whole(NamedTuple):
    """The newest step that is whole.

    Attributes:
      step: the step's number; None = there is none.
      manifest: the step's manifest; None = it has none, or this process did not read it.
    """

    step: int | None = None
    manifest: Manifest | None = None


def find_newest_whole(checkpoints: Checkpoints, say: Say, may_lack: bool = False) -> Whole:
    """Find the newest step that is whole, and move newer ones, which are damaged, aside. For one
    process alone.

    Args:
      say: gets a line about each step that was moved.
      may_lack: whether there may be no whole step although there were some, as others are at hand.

    Returns:
      The step; none where the run has no checkpoint yet.

    Raises:
      UserError: all are damaged, or one that may be whole cannot be read.
    """
    folder = checkpoints.folder
    steps = checkpoints.store.steps()
    for step in reversed(steps):
        try:
            return Whole(step, checkpoints.require_whole(step))
        except DamagedCheckpoint as error:
            if isinstance(error.__cause__, UnreadCheckpoint):
                raise UserError(
                    f"checkpoint {folder / str(step)} cannot be read ({error.__cause__}), and may "
                    "be whole: start again once its disk answers, or move it away to go on from an "
                    "earlier one"
                ) from error
            say(set_aside(folder / str(step), str(error.__cause__)))
    if steps and not may_lack:
        raise UserError(
            f"no checkpoint of {folder.parent} is whole, and they were moved to its folder "
            f"{DAMAGED}: bring one back, or start again, which begins the run anew"
        )
    return Whole()


_OF_TENSORSTORE = re.compile(r"os_error_code='(\d+)'")
"""The end of TensorStore's message where the operating system refused it a file."""


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, is the operating system's, and does not
    say that a file is missing, which is damage.
    """
    while error is not None:
        codes = [int(code) for code in _OF_TENSORSTORE.findall(str(error))]
        if isinstance(error, OSError) and error.errno is not None:
            codes.append(error.errno)
        if any(code != errno.ENOENT for code in codes):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _forms(tree: PyTree) -> dict[str, str]:
    """Return the dtype and the shape of each leaf, by its name."""
    return {
        path_name(path): f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


_CHANGES_DTYPES = (
    "look for what changes dtypes, such as jax_enable_x64, or in an optimizer of your own"
)


def require_same_form(
    state: PyTree, wanted: PyTree, what: str, advice: str = _CHANGES_DTYPES
) -> None:
    """Refuse to save a state that could not be restored.

    Args:
      wanted: the ShapeDtypeStructs by which it will be restored.
      what: the name of the state in the message.
      advice: what to try.

    Raises:
      UserError: a name, a shape or a dtype differs.
    """
    here = _forms(state)
    there = _forms(wanted)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise UserError(
                f"{what} is not saved, as this run could not go on from it: {name} is "
                f"{here.get(name, 'absent')} and was {there.get(name, 'absent')}: {advice}"
            )


def _is_wider_moment(name: str, there: str, here: str) -> bool:
    """Return whether a saved bfloat16 is the second moment of an earlier version, which is float32
    now: the same number.
    """
    return (
        ".nu." in name
        and there.startswith("bfloat16")
        and here == there.replace("bfloat16", "float32", 1)
    )
