"""The lock of a run folder, by which one training runs in it at a time: it says who holds it, and a
heartbeat says that they still run.

The lock is a file and no lock of the system, which network file systems do not all have and
buckets never: there it is an object. The owner touches it every `BEAT` seconds. Clocks of two
machines are not compared: who finds the lock of another machine watches it, and takes it over if it
does not beat.

    the lock that is found                                    what becomes of it
    none                                                      it is made
    of a process that runs on this machine                    refused
    of a process of this machine that has ended               taken over
    of another machine, and it beats within `WATCH`           refused
    of another machine, and it does not, or is gone           taken over
    one that cannot be read, half a second later neither      taken over
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.atomic_write import writing
from jaxpar.base.errors import Say, UserError, parse_json, read_json, reading, require_kinds
from jaxpar.base.process.multihost import run_on_first, run_together
from jaxpar.base.process.processes import machine, process_start
from jaxpar.base.storage import Bucket
from jaxpar.train.runs.bucket import copy_of
from jaxpar.train.runs.bucket.layout import LOCK

BEAT = 10.0
"""The seconds between two beats."""
WATCH = 3 * BEAT
"""The seconds without a beat after which the owner of another machine's lock counts as dead."""
_SETTLE = 0.5
"""The seconds within which two that take over one lock would both be seen."""
_ABSENT = (FileNotFoundError, NotADirectoryError)
"""The errors that say that a lock does not exist."""
_KINDS = {"token": str, "machine": str, "pid": int, "began": str, "since": str}


class _Owner(NamedTuple):
    """The holder of a lock, as the lock names it; `token` tells one holding from the next."""

    token: str
    machine: str
    pid: int
    began: str
    since: str

    @property
    def text(self) -> str:
        """The owner in words, for a message."""
        host = self.machine.partition(" ")[0]
        return f"process {self.pid} on {host}, since {self.since}"


def _exists(path: Path) -> bool:
    """Return whether a path exists; a UserError where the file system does not say."""
    with reading(path):
        return path.exists()


class RunLock:
    """The lock of a run folder, held by this process until `close`."""

    def __init__(self, folder: Path, say: Say):
        """Take the lock.

        Args:
          folder: the run folder, which is made if it is absent.
          say: gets a line where a dead owner's lock is taken over.

        Raises:
          UserError: another training holds it, or the folder cannot be written.
        """
        self._folder = folder
        self._file = folder / LOCK
        pid = os.getpid()
        began = process_start(pid) or ""
        since = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        self._own = _Owner(uuid.uuid4().hex, machine(), pid, began, since)
        self._stopped = threading.Event()
        self.lost = ""
        """The reason why this process holds the lock no longer; empty = it does."""
        self._take(say)
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _take(self, say: Say) -> None:
        while not self._create():
            judged = self._read_settled()
            if judged is not None and self._is_alive(judged, say):
                # another may have taken it over while it was watched
                owner = self._read_settled() or judged
                raise UserError(
                    f"{self._folder} is being trained by {owner.text}: wait until it ends, or use "
                    "another --run folder"
                )
            whose = (
                "that cannot be read" if judged is None else f"of {judged.text}, which has ended,"
            )
            say(f"the lock {self._file} {whose} is taken over")
            # `say` may have waited, and what is there now may be the lock of one that was quicker
            if self._read_settled() != judged:
                continue
            self._remove()
            if self._create():
                time.sleep(_SETTLE)
                if self._why_lost():
                    continue
                return

    def _create(self) -> bool:
        """Write the lock if there is none, and return whether it is this process's now."""
        try:
            with writing(self._file):
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._file.open("x", encoding="utf-8") as file:
                    try:
                        file.write(json.dumps(self._own._asdict()) + "\n")
                        file.flush()
                    except BaseException:  # a full disk, or Ctrl-C
                        self._file.unlink(missing_ok=True)
                        raise
        except UserError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    def _read(self) -> _Owner | None:
        """Read who holds the lock; None = there is no lock, or it says nothing.

        Raises:
          UserError: the file system does not answer, which says nothing about the lock.
        """
        try:
            found: dict[str, Any] = read_json(self._file, _KINDS)
            return _Owner(**{name: found[name] for name in _KINDS})
        except (UserError, KeyError) as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, _ABSENT):
                raise
            return None

    def _read_settled(self) -> _Owner | None:
        """Read the lock, and once more where another process may be writing it at the moment, or a
        network file system has failed once.
        """
        owner = None
        with suppress(UserError):
            owner = self._read()
        if owner is None:
            time.sleep(_SETTLE)
            owner = self._read()
        return owner

    def _is_alive(self, owner: _Owner, say: Say) -> bool:
        """Return whether an owner runs: the system knows of this machine, and another's lock
        beats.
        """
        if owner.machine == self._own.machine:
            return process_start(owner.pid) == owner.began
        say(f"{self._file} is of {owner.text}: watching for {WATCH:.0f} s whether it still runs")
        before = self._beat_time()
        until = time.monotonic() + WATCH
        while time.monotonic() < until:
            time.sleep(min(_SETTLE, WATCH / 10))
            if self._beat_time() != before:
                # gone = it ended well just now
                return self._is_there()
        return False

    def _beat_time(self) -> int | str:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return 0

    def _is_there(self) -> bool:
        return _exists(self._file)

    def _touch(self) -> None:
        with suppress(OSError):
            os.utime(self._file)

    def _remove(self) -> None:
        with writing(self._file):
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Touch the lock until it is released or lost."""
        while not self._stopped.wait(BEAT):
            with suppress(UserError):  # who cannot read the lock has not lost it
                self.lost = self.lost or self._why_lost()
            if self.lost:
                return
            self._touch()

    def _why_lost(self) -> str:
        owner = self._read_settled()
        if owner == self._own:
            return ""
        if owner is not None:
            return (
                f"{self._folder} was taken over by {owner.text}, which found no sign of this one: "
                "only that one goes on"
            )
        if not _exists(self._folder):
            return (
                f"the run folder {self._folder} is no longer there: bring it back to where it was, "
                "and start again from its last checkpoint"
            )
        return (
            f"{self._file} was removed or damaged, so another training may be there: start again "
            "from the last checkpoint"
        )

    def require(self) -> None:
        """Require that this process still holds the lock, by reading it.

        Raises:
          UserError: another training has it, the run folder is gone, or the lock cannot be read.
        """
        self.lost = self.lost or self._why_lost()
        if self.lost:
            raise UserError(self.lost)

    def holds(self) -> bool:
        """Return whether this process holds the lock, as far as a look at this machine says: a
        folder may have been moved a moment ago, and another have its name.
        """
        if self._stopped.is_set():
            return False
        with suppress(UserError):  # who cannot read the lock has not lost it
            self._look()
        return not self.lost

    def _look(self) -> None:
        self.lost = self.lost or self._why_lost()

    def close(self) -> None:
        """Give the lock back."""
        self._stopped.set()
        self._thread.join()
        with suppress(UserError):
            if not self._why_lost():
                self._remove()


class BucketLock(RunLock):
    """The lock of a run in a bucket: an object that is written anew at each beat."""

    def __init__(self, url: str, folder: Path, say: Say):
        """Take the lock.

        Args:
          folder: this process's copy of the run.
          say: gets a line where a dead owner's lock is taken over.

        Raises:
          UserError: another training holds it, or the bucket cannot be read and written.
        """
        self._bucket = Bucket(url)
        self._beats = 0
        super().__init__(folder, say)

    @property
    def _content(self) -> bytes:
        return (json.dumps({**self._own._asdict(), "beats": self._beats}) + "\n").encode()

    def _create(self) -> bool:
        # not every server refuses to write over an object
        if self._bucket.find(LOCK) is None and self._bucket.create(LOCK, self._content):
            return True
        # what was written though the answer said no is this process's too
        return self._read() == self._own

    def _read(self) -> _Owner | None:
        content = self._bucket.read_if_there(LOCK)
        try:
            found = require_kinds(parse_json(content or b"", LOCK), _KINDS, LOCK)
            return _Owner(**{name: found[name] for name in _KINDS})
        except (UserError, KeyError):
            return None

    def _look(self) -> None:
        """Look at nothing: the heartbeat asks the bucket, which is far away."""

    def _beat_time(self) -> str:
        found = self._bucket.find(LOCK)
        return "" if found is None else found.identity

    def _is_there(self) -> bool:
        return self._bucket.find(LOCK) is not None

    def _touch(self) -> None:
        self._beats += 1
        # Another training that watches this lock takes it over after `WATCH` seconds, and then it
        # is not to be written over.
        with suppress(UserError):  # the next save will say it
            self._bucket.write(LOCK, self._content, seconds=BEAT)

    def _remove(self) -> None:
        self._bucket.remove([LOCK])

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT):
            try:
                self.lost = self.lost or self._why_lost()
            except UserError:
                # A bucket that does not answer has given it to nobody. But another may take it
                # meanwhile, so it is written only after a look.
                continue
            if self.lost:
                return
            self._touch()


class SharedLock:
    """The lock of a run folder, which the first of a run's processes holds for all."""

    def __init__(self, folder: Path, say: Say):
        """Take the lock. All processes must call this, and then `close`.

        Args:
          folder: the run folder, which is made if it is absent.
          say: gets a line where a dead owner's lock is taken over.

        Raises:
          UserError: another training holds it, or the folder cannot be written.
        """
        copy = copy_of(folder)

        def take() -> RunLock:
            return RunLock(folder, say) if copy is None else BucketLock(copy.url, folder, say)

        self._lock = run_on_first(take)
        if copy is not None:
            with ExitStack() as stack:  # the bucket may fail now
                stack.callback(self.close)
                run_together(copy.refresh)  # what another training has written until it ended
                stack.pop_all()

    @property
    def lost(self) -> str:
        """The reason why the lock is known to be held no longer; empty = it is held, or another
        process holds it.
        """
        return "" if self._lock is None else self._lock.lost

    def holds(self) -> bool:
        """Return whether this process holds the lock; True on processes but the first, which have
        none to hold.
        """
        return self._lock is None or self._lock.holds()

    def require(self) -> None:
        """Require that this process still holds the lock; processes but the first have none to
        hold.
        """
        if self._lock is not None:
            self._lock.require()

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.close()
