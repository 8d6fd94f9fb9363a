"""Run folders in a bucket: each process has a copy of its own on this machine, in which everything
works as in a local run, and what changes there is sent to the bucket.

An object store has no rename and cannot append, and Orbax writes to no S3 server but Amazon's. So a
checkpoint is written into the copy, and then sent, by each process its own files. Its last object,
`uploaded.json`, has the size and the hash of every other: a step without it is no step. The small
files of a run (config.toml, metrics.jsonl, loss.png, ...) are sent whole where they have changed:
before each step's last object, every half minute, and at the end.

The arrays of the steps in a bucket are fetched when they are first read.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.errors import UserError, is_kind, is_url, name_by_url, parse_json, reading
from jaxpar.base.process.runtime import cache_folder
from jaxpar.base.storage import Bucket, Found, as_url, local_path, say
from jaxpar.models.hf.hub import hub_folder, is_hub

UPLOADED = "uploaded.json"
"""The last object of a step: the size and the hash of each file of it."""
LOCK = "lock.json"
"""Says which training has a run folder (`jaxpar.train.runs.run_lock`); it is no part of the run."""
_CHECKPOINTS = "checkpoints"
_ARRAYS = "state/"
_PARTS = "parts/"
_CHUNK = re.compile(r"state/.*/\d+(\.\d+)*")
"""A part of an array, which the process that holds it writes; other files all write alike."""
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}")
"""A file on its way to its name (`runtime.replacing`)."""
_EVERY_SECONDS = 30.0
_PEERS_SECONDS = 1800.0
"""How long the first process waits for the files of another."""
_LOOK_SECONDS = 0.2

Sizes = dict[str, tuple[int, str]]
"""The size and the hash of files, by name."""
State = tuple[int, int]
"""The size and the time of a file, by which a change is noticed."""


class NotAsSent(UserError):
    """A step in a bucket is not as it was sent: an object is missing, or is another."""


class RunCopy:
    """The copy of a run folder that this process has.

    Attributes:
      url: that of the run.
      folder: the copy.
    """

    def __init__(self, url: str):
        self.url = url
        self.folder = _new_folder(url)
        name_by_url(self.folder, url)
        self._bucket = Bucket(url)
        self._steps: dict[int, Sizes] = {}
        """The files of the steps in the bucket that are whole."""
        self._absent: dict[int, Sizes] = {}
        """Those files of them that were not fetched yet."""
        self._known: dict[str, Found] = {}
        """The small objects as they were fetched."""
        self._fetched: dict[str, State] = {}
        """The files of the copy, as they were when they were fetched."""
        self.sender: Sender | None = None
        self.refresh()

    def refresh(self) -> None:
        """Fetch what has changed in the bucket, but no arrays.

        Raises:
          UserError: the bucket cannot be read.
        """
        found = self._bucket.files()
        left_out = (_CHECKPOINTS, LOCK)
        small = {name: one for name, one in found.items() if not name.startswith(left_out)}
        steps = self._read_steps(_whole_steps(found))
        for step in self._steps.keys() - steps.keys():
            shutil.rmtree(self._step_folder(step), ignore_errors=True)
            self._absent.pop(step, None)
        for step, files in steps.items():
            if self._steps.get(step) != files:
                shutil.rmtree(self._step_folder(step), ignore_errors=True)
                arrays = [name for name in files if name.startswith(_ARRAYS)]
                self._absent[step] = {name: files[name] for name in arrays}
            # with what was written after the step, as its loss
            prefix = f"{_CHECKPOINTS}/{step}/"
            beside = {name: one for name, one in found.items() if name.startswith(prefix)}
            arrays = (prefix + _ARRAYS, prefix + _PARTS, prefix + UPLOADED)
            small |= {name: one for name, one in beside.items() if not name.startswith(arrays)}
        self._steps = steps
        self._fetch_changed(small)
        for step in steps:
            _set_time(self._step_folder(step), found[f"{_CHECKPOINTS}/{step}/{UPLOADED}"])
        self._fetched = dict(_states(self.folder))

    def refresh_page(self) -> None:
        """Fetch what a page about the run needs: its config and its metrics, and which steps there
        are.

        Raises:
          UserError: the bucket cannot be read.
        """
        found = self._bucket.files()
        self._fetch_changed({n: found[n] for n in ("config.toml", "metrics.jsonl") if n in found})
        for step, marker in _whole_steps(found).items():
            folder = self._step_folder(step)
            folder.mkdir(parents=True, exist_ok=True)
            _set_time(folder, marker)

    def complete(self, step: int) -> None:
        """Fetch the arrays of a step, if they were not yet.

        Args:
          step: the step.

        Raises:
          NotAsSent: a file is missing, or is not as it was sent. Where a run beside has removed the
            step, the copy is refreshed, and has it no longer.
          UserError: the bucket cannot be read.
        """
        absent = self._absent.get(step)
        if absent is None:
            return
        folder = self._step_folder(step)
        prefix = f"{_CHECKPOINTS}/{step}/"
        try:
            self._bucket.fetch_all((prefix + name, folder / name) for name in absent)
        except UserError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if self._bucket.find(prefix + UPLOADED) is None:
                self.refresh()
            raise NotAsSent(str(error)) from error
        for name, (size, made) in absent.items():
            if _size_and_hash(folder / name) != (size, made):
                raise NotAsSent(
                    f"{self.url}/{prefix}{name} is not as it was sent: it is damaged, so take "
                    "another step"
                )
        del self._absent[step]

    def leave_out(self, step: int) -> None:
        """Take a step that the run does not go on after out of the copy; what the bucket has of it
        stays, and is not fetched again by `complete`.

        Args:
          step: the step, which may be absent.
        """
        shutil.rmtree(self._step_folder(step), ignore_errors=True)
        self._absent.pop(step, None)

    def start_sending(self) -> None:
        """Begin to send what changes in the copy; all processes must call this. What an earlier
        training left unfinished in the bucket is removed; what one of this process could not send
        is no step of the copy any more.

        Raises:
          UserError: the bucket cannot be read and written.
        """
        if self.sender is not None:
            self.sender.close()
            self.sender = None
            self.refresh()
            for step in _steps_below(self.folder) - self._steps.keys():
                shutil.rmtree(self._step_folder(step), ignore_errors=True)
        self.sender = Sender(self.folder, self._bucket, set(self._steps), self._fetched)

    def _read_steps(self, steps: Iterable[int]) -> dict[int, Sizes]:
        """Read the last objects of steps; a step whose last object is damaged is left out, and
        said.
        """
        found = {}
        for step in steps:
            name = f"{_CHECKPOINTS}/{step}/{UPLOADED}"
            content = self._bucket.read_if_there(name)
            if content is None:  # a run beside has removed it meanwhile
                continue
            try:
                found[step] = _sizes_of(content, f"{self.url}/{name}")
            except UserError as error:
                say(f"warning: step {step} is left out: {error}")
        return found

    def _step_folder(self, step: int) -> Path:
        return self.folder / _CHECKPOINTS / str(step)

    def _fetch_changed(self, wanted: Mapping[str, Found]) -> None:
        new = [name for name, found in wanted.items() if self._known.get(name) != found]
        new += [n for n in wanted if n not in new and not (self.folder / n).exists()]
        self._bucket.fetch_all((name, self.folder / name) for name in new)
        for name in new:
            _set_time(self.folder / name, wanted[name])
            self._known[name] = wanted[name]


class Sender:
    """Sends what changes in the copy of a run, in a thread of its own, one thing after another."""

    def __init__(self, folder: Path, bucket: Bucket, steps: set[int], fetched: Mapping[str, State]):
        """Begin; all processes must call this.

        Args:
          folder: the copy.
          bucket: the run folder in the bucket.
          steps: those that are whole there.
          fetched: the small files of the copy, as they are in the bucket.
        """
        self._folder = folder
        self._bucket = bucket
        self._steps = set(steps)
        self._main = jax.process_index() == 0
        self._peers = jax.process_count() - 1
        self._index = jax.process_index()
        self._sent = {name: state for name, state in fetched.items() if self._is_small(name)}
        """The small files as they were sent."""
        self._call = _told_by_first()
        self._thread = ThreadPoolExecutor(1)
        self._step: Future[None] | None = None
        self._stopped = threading.Event()
        if self._main:
            self._remove_unfinished()
            threading.Thread(target=self._send_now_and_then, daemon=True).start()
        if self._peers:
            multihost_utils.sync_global_devices("jaxpar_bucket_run")

    def send_step(self, step: int) -> None:
        """Send a step once it is on this machine as a whole; `wait` says how that ended."""
        self.wait()
        self._step = self._thread.submit(self._send_step, step)

    def wait(self) -> None:
        """Wait for the last step, and raise what kept it from being sent."""
        if self._step is not None:
            self._step.result()

    def stop(self) -> None:
        """Send no more of itself, and wait no longer for a step that could not be written on this
        machine. `send` still sends.
        """
        self._stopped.set()

    def close(self) -> None:
        """Stop, once what is being sent has been sent or has failed."""
        self.stop()
        self._thread.shutdown()

    def send(self) -> None:
        """Send what has changed, and remove from the bucket what was removed here.

        Raises:
          UserError: the bucket cannot be written, or the last step could not be sent.
        """
        self.wait()
        if self._main:
            self._thread.submit(self._send_small).result()
            self._thread.submit(self._remove_retired).result()

    def _send_now_and_then(self) -> None:
        while not self._stopped.wait(_EVERY_SECONDS):
            # what fails is said by `_try`, and raised by the next step
            with suppress(UserError, RuntimeError):
                self._thread.submit(self._send_small).result()

    def _send_step(self, step: int) -> None:
        folder = self._folder / _CHECKPOINTS / str(step)
        while not folder.is_dir():  # Orbax renames it, once all of it is there
            if self._stopped.is_set():
                return
            time.sleep(_LOOK_SECONDS)
        prefix = f"{_CHECKPOINTS}/{step}/"
        names = [name for name in _names_below(folder) if self._main or _CHUNK.fullmatch(name)]
        names = [name for name in names if not name.startswith("metrics/")]
        rows = {name: _size_and_hash(folder / name) for name in names}
        self._bucket.send_all((folder / name, prefix + name) for name in names)
        if not self._main:
            self._bucket.write(self._part(step, self._index), _text(rows))
            return
        parts = [self._part(step, peer) for peer in range(1, self._peers + 1)]
        for part in parts:
            rows |= self._await_part(part)
        self._send_small()
        self._bucket.write(prefix + UPLOADED, _text(rows))
        self._steps.add(step)
        self._bucket.remove(parts)
        self._remove_retired()

    def _part(self, step: int, process: int) -> str:
        """What a process has sent of a step, in this call of the command."""
        return f"{_CHECKPOINTS}/{step}/{_PARTS}{self._call}.{process}.json"

    def _await_part(self, part: str) -> Sizes:
        until = time.monotonic() + _PEERS_SECONDS
        while self._bucket.find(part) is None:
            if time.monotonic() > until:
                raise UserError(
                    f"another process has not sent its files of {self._bucket.url}/{part} within "
                    f"{_PEERS_SECONDS:.0f} s: look whether it runs"
                )
            time.sleep(1.0)
        return _sizes_of(self._bucket.read(part), part)

    def _send_small(self) -> None:
        """Send the files beside the checkpoints, and the losses in these, as far as they have
        changed.
        """
        now = {name: state for name, state in _states(self._folder) if self._is_small(name)}
        changed = [name for name, state in now.items() if self._sent.get(name) != state]
        with reading(self._folder):
            self._bucket.send_all((self._folder / name, name) for name in changed)
        gone = self._sent.keys() - now.keys()
        # those of a step go with it, after its last object
        self._bucket.remove(name for name in gone if not name.startswith(_CHECKPOINTS + "/"))
        self._sent = now

    def _is_small(self, name: str) -> bool:
        if not name.startswith(_CHECKPOINTS + "/"):
            return True
        _, step, *rest = name.split("/")
        later = rest[:1] in (["metrics"], ["val_loss.json"])
        return step.isdecimal() and int(step) in self._steps and later

    def _remove_retired(self) -> None:
        """Remove the steps that are gone here, each with its last object first. A step that is here
        and not in the bucket may be what they have gone for: then they stay until it is there.
        """
        if _steps_below(self._folder) - self._steps:
            return
        for step in sorted(self._steps):
            if not (self._folder / _CHECKPOINTS / str(step)).exists():
                self._steps.remove(step)
                self._remove_step(step, self._bucket.files(f"{_CHECKPOINTS}/{step}"))

    def _remove_unfinished(self) -> None:
        found = self._bucket.files(_CHECKPOINTS)
        whole = _whole_steps(found)
        steps = {_step_of(name) for name in found} - {None} - whole.keys()
        for step in steps:
            self._remove_step(step, found)

    def _remove_step(self, step: int | None, found: Mapping[str, Found]) -> None:
        prefix = f"{_CHECKPOINTS}/{step}/"
        names = [name for name in found if name.startswith(prefix)]
        self._bucket.remove(sorted(names, key=lambda name: name != prefix + UPLOADED))


_COPIES: dict[str, RunCopy] = {}
"""The copies that this process has, by URL."""


def run_here(path: str | Path) -> Path:
    """Find the folder of a run, which need not be there yet, on this machine.

    Args:
      path: a folder of this machine, which is returned as it is, or a URL.

    Returns:
      The folder; of a URL, the copy that this process has.

    Raises:
      UserError: the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path)
    url = as_url(path)
    if url not in _COPIES:
        _COPIES[url] = RunCopy(url)
    return _COPIES[url].folder


def folder_here(path: str | Path) -> Path:
    """Find a folder to read, a run's or one of Hugging Face, on this machine.

    Args:
      path: a folder of this machine, which is returned as it is, a URL, or a model of the Hugging
        Face Hub, `hf://org/name`.

    Returns:
      The folder; of a URL, a copy.

    Raises:
      UserError: the bucket or the Hub cannot be read.
    """
    if not is_url(path):
        return Path(path)
    if is_hub(path):
        return hub_folder(path)
    url = as_url(path)
    if url in _COPIES or Bucket(url).find("config.toml") is not None:
        return run_here(url)
    return local_path(url)


@contextmanager
def writing_folder(path: str | Path) -> Iterator[Path]:
    """Give a folder of this machine to write into; that of a URL is sent once all of it is written.

    Args:
      path: a folder of this machine, which is given as it is, or a URL.

    Yields:
      The folder, which need not be there yet.

    Raises:
      UserError: there is something under the URL already, or the bucket cannot be written.
    """
    if not is_url(path):
        yield Path(path)
        return
    bucket = Bucket(path)
    if bucket.files():
        raise UserError(f"{bucket.url} has objects already: give another URL, or remove them")
    folder = _new_folder(bucket.url)
    folder.rmdir()
    name_by_url(folder, bucket.url)
    yield folder
    if jax.process_index() == 0:
        bucket.send_all((folder / name, name) for name in _names_below(folder))


def copy_of(folder: Path) -> RunCopy | None:
    """Find the copy that a folder is; None = it is a folder of this machine like any other."""
    return next((copy for copy in _COPIES.values() if copy.folder == folder.absolute()), None)


def send(folder: Path) -> None:
    """Send what has changed in a run folder that is a copy; all processes may call this.

    Args:
      folder: any run folder.

    Raises:
      UserError: the bucket cannot be written.
    """
    copy = copy_of(folder)
    if copy is not None and copy.sender is not None:
        copy.sender.send()


def _new_folder(url: str) -> Path:
    """Make the folder of a copy, which is removed when this process ends; so are those of processes
    that were killed.
    """
    above = cache_folder() / "buckets" / "runs"
    above.mkdir(parents=True, exist_ok=True)
    machine = platform.node()
    for folder in above.glob("*@*"):  # other machines may share the cache
        pid, _, of = folder.name.partition("@")
        if of.startswith(machine + "-") and pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    made = hashlib.sha256(url.encode()).hexdigest()[:12]
    own = f"{os.getpid()}@{machine}-{made}"
    folder = above / own / PurePosixPath(url.partition("://")[2]).name
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    return folder


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def _told_by_first() -> str:
    """A text that tells this call of a command from others, the same on all processes."""
    own = uuid.uuid4().bytes
    if jax.process_count() > 1:
        rows = np.frombuffer(own, np.uint8)
        own = bytes(np.asarray(multihost_utils.broadcast_one_to_all(rows), np.uint8))
    return own.hex()


def _steps_below(folder: Path) -> set[int]:
    """The steps that are on this machine."""
    names = (path.name for path in (folder / _CHECKPOINTS).glob("[0-9]*"))
    return {int(name) for name in names if name.isdecimal()}


def _step_of(name: str) -> int | None:
    parts = name.split("/")
    if len(parts) > 2 and parts[0] == _CHECKPOINTS and parts[1].isdecimal():
        return int(parts[1])
    return None


def _whole_steps(found: Mapping[str, Found]) -> dict[int, Found]:
    """The steps that have their last object, with that."""
    steps = {}
    for name, one in found.items():
        step = _step_of(name)
        if step is not None and name == f"{_CHECKPOINTS}/{step}/{UPLOADED}":
            steps[step] = one
    return steps


def _sizes_of(content: bytes, origin: str) -> Sizes:
    """Read the files of a step, as `_text` has written them."""
    rows = parse_json(content, origin)
    if not is_kind(rows, dict[str, list[Any]]) or any(len(row) != 2 for row in rows.values()):
        raise UserError(f"{origin} is not as it was written")
    return {name: (size, made) for name, (size, made) in rows.items()}


def _text(rows: Sizes) -> bytes:
    return json.dumps(rows, indent=1).encode()


def _size_and_hash(file: Path) -> tuple[int, str]:
    with reading(file), file.open("rb") as opened:
        made = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16))
        return opened.tell(), made.hexdigest()


def _names_below(folder: Path) -> list[str]:
    return sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and not _UNFINISHED.fullmatch(file.name)
    )


def _states(folder: Path) -> Iterator[tuple[str, State]]:
    """The size and the time of each file below a folder but the arrays of its checkpoints."""
    for name in _names_below(folder):
        with suppress(FileNotFoundError):  # Orbax has renamed its folder meanwhile
            stat = (folder / name).stat()
            yield name, (stat.st_size, stat.st_mtime_ns)


def _set_time(path: Path, found: Found) -> None:
    if found.modified and path.exists():
        os.utime(path, (found.modified, found.modified))
