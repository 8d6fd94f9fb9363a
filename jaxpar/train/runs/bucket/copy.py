"""The copy of a run in a bucket that a process has on this machine. Its small files are fetched as
they change, and the arrays of a step when they are first read.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from jaxpar.base.errors import UserError, name_by_url
from jaxpar.base.machine import cache_folder
from jaxpar.base.process.processes import machine, process_start
from jaxpar.base.storage import Bucket, Found, say
from jaxpar.train.runs.bucket.layout import (
    ARRAYS,
    LOCK,
    PARTS,
    UPLOADED,
    Sizes,
    State,
    read_sizes,
    size_and_hash,
    states_below,
    step_of,
    steps_below,
    whole_steps,
)
from jaxpar.train.runs.bucket.sender import Sender
from jaxpar.train.runs.folder.steps import CHECKPOINTS, DAMAGED

_FRESH_SECONDS = 5.0
_LISTINGS = 10
"""The number of times that a bucket is listed from which objects go while they are fetched."""
_LEFT_SECONDS = 7 * 24 * 3600.0
"""The time after which a copy of another machine that nobody has touched was left behind."""


class NotAsSent(UserError):
    """A step in a bucket differs from what was sent: an object is missing, or is another."""


class RunCopy:
    """The copy of a run folder in a bucket that this process has.

    Attributes:
      url: the URL of the run.
      folder: the folder of the copy.
    """

    def __init__(self, url: str):
        self.url = url
        self.folder = new_folder(url)
        name_by_url(self.folder, url)
        self._bucket = Bucket(url)
        self._steps: dict[int, Sizes] = {}
        """The files of the steps in the bucket that are whole."""
        self._absent: dict[int, Sizes] = {}
        """The files of these steps that were not fetched yet."""
        self._unfinished: set[int | None] = set()
        """The steps of which the bucket has a part, and not all."""
        self._known: dict[str, Found] = {}
        """The small objects as they were fetched."""
        self._fetched: dict[str, State] = {}
        """The files of the copy, as they were when they were fetched."""
        self.sender: Sender | None = None
        self._looked = 0.0
        """The time when the copy was last made equal to the bucket, by `time.monotonic`."""
        self.refresh()

    @property
    def is_stale(self) -> bool:
        """Whether the bucket may have changed by now: the copy is not being trained in, and was not
        made within the last seconds, as the parts of one command ask for it again.
        """
        if self.sender is not None and not self.sender.stopped:
            return False
        return time.monotonic() - self._looked > _FRESH_SECONDS

    def refresh(self) -> None:
        """Fetch the files that have changed in the bucket, but no arrays.

        Raises:
          UserError: the bucket cannot be read.
        """
        _while_objects_go(self._refresh)

    def _refresh(self) -> None:
        found = self._bucket.files()
        left_out = (CHECKPOINTS, LOCK)
        small = {name: one for name, one in found.items() if not name.startswith(left_out)}
        small = {name: one for name, one in small.items() if not _is_array_aside(name)}
        whole = whole_steps(found)
        steps = self._read_steps(whole)
        self._say_unfinished({step_of(name) for name in found} - {None} - whole.keys())
        for step in self._steps.keys() - steps.keys():
            self.leave_out(step)
        for step, files in steps.items():
            if self._steps.get(step) != files:
                shutil.rmtree(self._step_folder(step), ignore_errors=True)
                arrays = [name for name in files if name.startswith(ARRAYS)]
                self._absent[step] = {name: files[name] for name in arrays}
            # with what was written after the step, as its loss
            prefix = f"{CHECKPOINTS}/{step}/"
            beside = {name: one for name, one in found.items() if name.startswith(prefix)}
            arrays = (prefix + ARRAYS, prefix + PARTS, prefix + UPLOADED)
            small |= {name: one for name, one in beside.items() if not name.startswith(arrays)}
        self._steps = steps
        self._fetch_changed(small)
        for step in steps:
            _set_time(self._step_folder(step), found[f"{CHECKPOINTS}/{step}/{UPLOADED}"])
        self._fetched = dict(states_below(self.folder))
        self._looked = time.monotonic()

    def _say_unfinished(self, steps: set[int | None]) -> None:
        """Print once for each step without its last object that it is left out."""
        for step in steps - self._unfinished:
            say(
                f"{self.url}: step {step} is left out, as it has no {UPLOADED}: it is being sent, "
                "or was not sent to its end"
            )
        self._unfinished = steps

    def refresh_page(self) -> None:
        """Fetch the files that a page about the run needs: its config and its metrics, and which
        steps there are.

        Raises:
          UserError: the bucket cannot be read.
        """
        _while_objects_go(self._refresh_page)

    def _refresh_page(self) -> None:
        found = self._bucket.files()
        names = ("config.toml", "metrics.jsonl", "goodput.jsonl")
        self._fetch_changed({name: found[name] for name in names if name in found})
        for step, marker in whole_steps(found).items():
            folder = self._step_folder(step)
            folder.mkdir(parents=True, exist_ok=True)
            _set_time(folder, marker)

    def complete(self, step: int) -> None:
        """Fetch the arrays of a step that are not here yet.

        Raises:
          NotAsSent: a file is missing, or differs from what was sent. Where a run beside has
            removed the step, the copy is refreshed, and has it no longer.
          UserError: the bucket cannot be read.
        """
        absent = self._absent.get(step) or self._of_others(step)
        if not absent:
            return
        folder = self._step_folder(step)
        prefix = f"{CHECKPOINTS}/{step}/"
        try:
            self._bucket.fetch_all((prefix + name, folder / name) for name in absent)
        except UserError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if self._bucket.find(prefix + UPLOADED) is None:
                self.refresh()
            raise NotAsSent(str(error)) from error
        for name, (size, made) in absent.items():
            if size_and_hash(folder / name) != (size, made):
                raise NotAsSent(
                    f"{self.url}/{prefix}{name} is not as it was sent: it is damaged, so take "
                    "another step"
                )
        self._absent.pop(step, None)

    def _of_others(self, step: int) -> Sizes:
        """Find the files of arrays that other processes have sent for a step of this training, and
        that this process does not have.
        """
        if self.sender is None or not self.sender.has_peers or step in self._steps:
            return {}
        name = f"{CHECKPOINTS}/{step}/{UPLOADED}"
        content = self._bucket.read_if_there(name)
        if content is None:
            return {}
        folder = self._step_folder(step)
        files = read_sizes(content, f"{self.url}/{name}")
        arrays = [name for name in files if name.startswith(ARRAYS)]
        return {name: files[name] for name in arrays if not (folder / name).exists()}

    def leave_out(self, step: int) -> None:
        """Take a step out of the copy that the run is not resumed after; the objects in the bucket
        stay, and `complete` does not fetch them again.

        Args:
          step: the step, which may be absent.
        """
        shutil.rmtree(self._step_folder(step), ignore_errors=True)
        self._absent.pop(step, None)

    def start_sending(self) -> None:
        """Begin to send changes of the copy to the bucket; all processes must call this. Objects
        that an earlier training left unfinished are removed from the bucket; a step that this
        process could not send leaves the copy.

        Raises:
          UserError: the bucket cannot be read and written.
        """
        if self.sender is not None:
            self.sender.close()
            self.sender = None
            self.refresh()
            for step in steps_below(self.folder) - self._steps.keys():
                shutil.rmtree(self._step_folder(step), ignore_errors=True)
        self.sender = Sender(self.folder, self._bucket, set(self._steps), self._fetched)

    def _read_steps(self, steps: Iterable[int]) -> dict[int, Sizes]:
        """Read the last objects of steps; a step whose last object is damaged is left out with a
        note.
        """
        found = {}
        for step in steps:
            name = f"{CHECKPOINTS}/{step}/{UPLOADED}"
            content = self._bucket.read_if_there(name)
            if content is None:  # a run beside has removed it meanwhile
                continue
            try:
                found[step] = read_sizes(content, f"{self.url}/{name}")
            except UserError as error:
                say(f"warning: step {step} is left out: {error}")
        return found

    def _step_folder(self, step: int) -> Path:
        return self.folder / CHECKPOINTS / str(step)

    def _fetch_changed(self, wanted: Mapping[str, Found]) -> None:
        new = [name for name, found in wanted.items() if self._known.get(name) != found]
        new += [n for n in wanted if n not in new and not (self.folder / n).exists()]
        self._bucket.fetch_all((name, self.folder / name) for name in new)
        for name in new:
            _set_time(self.folder / name, wanted[name])
            self._known[name] = wanted[name]


def _while_objects_go(fetch: Callable[[], None]) -> None:
    """List objects and fetch them, again where an object has gone meanwhile, as where a training
    beside has removed a step.
    """
    for _ in range(_LISTINGS - 1):
        try:
            return fetch()
        except UserError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return fetch()


def _is_array_aside(name: str) -> bool:
    """Return whether an object is an array of a damaged step, which nobody reads here."""
    top, _, rest = name.partition("/")
    return top == DAMAGED and rest.partition("/")[2].startswith(ARRAYS)


def new_folder(url: str) -> Path:
    """Make the folder of a copy, which is removed when this process ends. Copies of processes that
    were killed are removed too, and copies of other machines that nobody has touched for a week.
    """
    above = cache_folder() / "buckets" / "runs"
    above.mkdir(parents=True, exist_ok=True)
    # a hash, as it says of a container too which processes its numbers are of
    here = hashlib.sha256(machine().encode()).hexdigest()[:12]
    for folder in above.glob("*@*"):  # other machines may share the cache
        if _is_left(folder, here):
            shutil.rmtree(folder, ignore_errors=True)
    made = hashlib.sha256(url.encode()).hexdigest()[:12]
    own = f"{os.getpid()}@{here}-{made}"
    folder = above / own / PurePosixPath(url.partition("://")[2]).name
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    return folder


def _is_left(folder: Path, here: str) -> bool:
    """Return whether a process that is gone has left a copy behind."""
    pid, _, of = folder.name.partition("@")
    if of.rpartition("-")[0] == here:
        return pid.isdecimal() and process_start(int(pid)) is None
    touched = [0.0]
    with suppress(OSError):  # it is removed meanwhile
        touched += [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return time.time() - max(touched) > _LEFT_SECONDS


def _set_time(path: Path, found: Found) -> None:
    if found.modified and path.exists():
        os.utime(path, (found.modified, found.modified))
