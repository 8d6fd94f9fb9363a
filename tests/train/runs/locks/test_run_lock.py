"""One training in a folder at a time: a second is refused by the name of the first, a dead one's
lock is taken over, and who has lost the folder stops.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import jaxpar.train.runs.locks.run_lock as run_lock
from jaxpar.base.errors import UserError
from jaxpar.base.process.processes import machine, process_start
from jaxpar.train.runs.locks.run_lock import LOCK, RunLock, SharedLock


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    monkeypatch.setattr(run_lock, "WATCH", 0.4)
    monkeypatch.setattr(run_lock, "_SETTLE", 0.05)


def write_lock(folder: Path, **changes: Any) -> None:
    """Write the lock of a process that is not this one."""
    owner = {"token": "x", "machine": machine(), "pid": os.getpid(), "began": "1", "since": "then"}
    (folder / LOCK).write_text(json.dumps(owner | changes))


def test_a_second_training_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    said = list[str]()
    with closing(SharedLock(tmp_path / "run", said.append)) as lock:
        with pytest.raises(UserError, match=rf"trained by process {os.getpid()} on \S+, "):
            RunLock(tmp_path / "run", said.append)
        lock.require()
    assert not (tmp_path / "run" / LOCK).exists() and not said
    with closing(SharedLock(tmp_path / "run", said.append)):
        pass


@pytest.mark.parametrize("how", ["another began under its number", "ended", "nobody waited for it"])
def test_the_lock_of_a_process_that_has_ended_is_taken_over_at_once(
    tmp_path: Path, how: str
) -> None:
    if how == "another began under its number":
        write_lock(tmp_path)
    else:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        write_lock(tmp_path, pid=child.pid, began=process_start(child.pid))
        with pytest.raises(UserError, match="is being trained"):
            RunLock(tmp_path, print)
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if how == "ended":
            child.wait()
    said = list[str]()
    with closing(SharedLock(tmp_path, said.append)) as lock:
        lock.require()
    assert len(said) == 1 and "which has ended, is taken over" in said[0]
    if how == "nobody waited for it":
        child.wait()


@pytest.mark.parametrize("beats", [True, False])
def test_the_lock_of_another_machine_is_watched(tmp_path: Path, beats: bool) -> None:
    write_lock(tmp_path, machine="elsewhere 1 2")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(tmp_path / LOCK)

    other = threading.Thread(target=beat if beats else lambda: None)
    other.start()
    said = list[str]()
    try:
        if beats:
            with pytest.raises(UserError, match=r"trained by process .* on elsewhere, since then"):
                RunLock(tmp_path, said.append)
        else:
            with closing(SharedLock(tmp_path, said.append)):
                pass
    finally:
        ended.set()
        other.join()
    assert "watching" in said[0] and len(said) == (1 if beats else 2)


def test_of_two_that_take_over_one_lock_the_later_is_refused(tmp_path: Path) -> None:
    """One whose line took long to print removed the lock of the other, and both had it."""
    write_lock(tmp_path)
    locks = list[RunLock]()

    def be_overtaken(line: str) -> None:
        if not locks:
            locks.append(RunLock(tmp_path, lambda line: None))

    with pytest.raises(UserError, match=f"trained by process {os.getpid()} on"):
        RunLock(tmp_path, be_overtaken)
    locks[0].require()
    locks[0].close()
    assert not (tmp_path / LOCK).exists()


def test_a_refusal_names_who_has_taken_the_lock_over_meanwhile(tmp_path: Path) -> None:
    write_lock(tmp_path, machine="elsewhere", pid=5)
    quicker = threading.Timer(0.1, lambda: write_lock(tmp_path, machine="another", pid=6))

    def begin(line: str) -> None:
        assert "watching" in line
        quicker.start()

    with pytest.raises(UserError, match="trained by process 6 on another"):
        RunLock(tmp_path, begin)
    quicker.join()


def test_a_lock_that_cannot_be_read_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(b"")
    said = list[str]()
    with closing(SharedLock(tmp_path, said.append)):
        pass
    assert "that cannot be read is taken over" in said[0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("taken over", "taken over by process 5 on elsewhere"),
        ("removed", "was removed or damaged"),
        ("moved", "is no longer there"),
    ],
)
def test_who_has_lost_the_folder_is_told_by_its_heartbeat(
    tmp_path: Path, loss: str, message: str
) -> None:
    run = tmp_path / "run"
    lock = RunLock(run, print)
    lock.require()
    if loss == "taken over":
        write_lock(run, machine="elsewhere", pid=5)
    elif loss == "removed":
        (run / LOCK).unlink()
    else:
        run.rename(tmp_path / "moved")
    lock._thread.join(5)
    assert message in lock.lost
    with pytest.raises(UserError, match=message):
        lock.require()
    lock.close()
    if loss == "taken over":
        assert (run / LOCK).exists(), "the other's"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_folder_that_has_another_ones_name_is_not_held(tmp_path: Path) -> None:
    """The account of the time was written into it until the next beat of the heart."""
    run = tmp_path / "run"
    with closing(SharedLock(run, print)) as lock:
        assert lock.holds()
        run.rename(tmp_path / "moved")
        run.mkdir()
        assert not lock.holds()
    assert not lock.holds()


def test_the_heartbeat_goes_on_where_the_file_system_does_not_say_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in an error of its thread, and another machine could take the lock over."""
    lock = RunLock(tmp_path / "run", print)
    asked = threading.Event()

    def fail(path: Path) -> bool:
        asked.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    content = lock._file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", fail)
        lock._file.unlink()
        assert asked.wait(5)
        lock._file.write_bytes(content)
    lock._thread.join(0.3)
    assert lock._thread.is_alive() and not lock.lost
    lock.close()


@pytest.mark.parametrize("times", [1, 1000])
def test_a_lock_that_the_file_system_does_not_give_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    with closing(SharedLock(tmp_path / "run", print)) as lock:
        read = Path.read_bytes
        failing = iter(range(times))

        def fail_first(path: Path) -> bytes:
            if path.name == LOCK and next(failing, None) is not None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", fail_first)
        if times == 1:
            lock.require()
        else:
            with pytest.raises(UserError, match="cannot read"):
                lock.require()
            with pytest.raises(UserError, match="cannot read"):
                RunLock(tmp_path / "run", print)
        assert not lock.lost
        monkeypatch.undo()
        lock.require()
    assert not (tmp_path / "run" / LOCK).exists()
