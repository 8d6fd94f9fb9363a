"""Checkpoints of a run in a bucket, on fsspec's file system in memory, and without a training."""

import itertools
import json
import os
import re
import threading
import time
import uuid
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.base.config import CheckpointConfig, Config
from jaxpar.base.errors import UserError, with_urls
from jaxpar.base.storage import Bucket
from jaxpar.train.goodput.measured import _write_seconds
from jaxpar.train.runs import stores, training_checkpoints
from jaxpar.train.runs.bucket import copy, copy_of, folder_here, remote_runs, run_here, send, sender
from jaxpar.train.runs.bucket.layout import UPLOADED, names_below
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.run_folder import is_run, keep_config
from jaxpar.train.runs.folder.steps import set_aside
from jaxpar.train.runs.locks import run_lock
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

STATE = {"w": np.arange(12.0, dtype=np.float32).reshape(3, 4)}


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Bucket:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remote_runs, "_COPIES", {})
    return Bucket(f"memory://{uuid.uuid4().hex}/run")


def another_process(bucket: Bucket) -> Path:
    """The copy that another process makes of the run."""
    remote_runs._COPIES.clear()
    return run_here(bucket.url)


def state(times: float) -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: jax.numpy.asarray(x * times), STATE)


def restored(folder: Path, step: int) -> np.ndarray:
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(1)
    )
    return np.asarray(Checkpoints(folder / "checkpoints").restore(step, shapes)["w"])


def train(folder: Path, *steps: int, keep: int = 2) -> None:
    """What a training writes into its folder."""
    keep_config(folder, Config())
    checkpoints = TrainingCheckpoints(
        folder / "checkpoints", CheckpointConfig(keep=keep, keep_best=False)
    )
    for step in steps:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        checkpoints.save(step, state(step), {"place": step})
        checkpoints.record(step, 1 / step)
    checkpoints.remove_old()
    checkpoints.close()


def test_what_one_process_saved_another_goes_on_with(bucket):
    assert not is_run(run_here(bucket.url))
    train(run_here(bucket.url), 1, 2)
    folder = another_process(bucket)
    assert is_run(folder) and folder_here(bucket.url) == folder
    checkpoints = Checkpoints(folder / "checkpoints")
    assert checkpoints.steps() == [1, 2] and checkpoints.best() == 2
    assert checkpoints.data(2) == {"place": 2}
    # arrays are fetched when they are read
    assert not (folder / "checkpoints/2/state").exists()
    np.testing.assert_array_equal(restored(folder, 2), 2 * STATE["w"])
    assert (folder / "metrics.jsonl").read_text().count("step") == 2
    train(folder, 3)
    assert Checkpoints(another_process(bucket) / "checkpoints").steps() == [2, 3]
    left = {name.split("/")[1] for name in bucket.files() if name.startswith("checkpoints")}
    assert left == {"2", "3"}


def test_a_process_trains_again_after_what_it_could_not_send(bucket, monkeypatch):
    """As in a notebook, where a step that failed to leave this machine is no step of the run."""
    folder = run_here(bucket.url)
    train(folder, 1)
    with monkeypatch.context() as broken, pytest.raises(UserError, match="could not be written"):
        broken.setattr(sender, "size_and_hash", lambda file: 1 / 0)
        train(folder, 2)
    assert bucket.find(f"checkpoints/2/{UPLOADED}") is None
    train(folder, 3)
    assert Checkpoints(another_process(bucket) / "checkpoints").steps() == [1, 3]


def test_a_step_that_an_outage_kept_here_is_sent_at_the_next_save(bucket, monkeypatch, capsys):
    folder = run_here(bucket.url)
    keep_config(folder, Config())
    checkpoints = TrainingCheckpoints(folder / "checkpoints", CheckpointConfig(keep_best=False))
    own = copy_of(folder)

    def refuse(self: Bucket, file: Path, name: str) -> None:
        raise UserError(f"{name} cannot be written (503), and was tried for 300 s")

    with monkeypatch.context() as outage:
        outage.setattr(Bucket, "send", refuse)
        checkpoints.save(1, state(1), {})
        checkpoints._manager.wait_until_finished()
        with pytest.raises(UserError):  # noted; no save has waited for it yet
            own.sender._step.result(30)  # pyright: ignore[reportOptionalMemberAccess]
    checkpoints.save(2, state(2), {})
    checkpoints.close()
    assert "step 1 was not sent" in capsys.readouterr().err
    assert Checkpoints(another_process(bucket) / "checkpoints").steps() == [1, 2]


def test_a_step_that_cannot_be_sent_twice_ends_the_run(bucket, monkeypatch):
    folder = run_here(bucket.url)
    keep_config(folder, Config())
    checkpoints = TrainingCheckpoints(folder / "checkpoints", CheckpointConfig(keep_best=False))
    tried: list[str] = []

    def refuse(self: Bucket, files: Any) -> None:
        tried.append(self.url)
        raise UserError(f"{self.url} cannot be written (503), and was tried for 300 s")

    with monkeypatch.context() as outage:
        outage.setattr(Bucket, "send_all", refuse)
        checkpoints.save(1, state(1), {})
        for _ in range(2):
            with pytest.raises(UserError, match="503"):
                checkpoints.wait()
    with pytest.raises(UserError, match="503"):
        checkpoints.close()
    assert len(tried) == 2


def test_a_step_that_a_training_beside_removes_meanwhile_is_no_hindrance(bucket, monkeypatch):
    train(run_here(bucket.url), 1, 2)
    fetch_all = Bucket.fetch_all

    def remove_before(self: Bucket, files: Any) -> None:
        # it was listed
        self.remove(name for name in self.files() if name.startswith("checkpoints/1/"))
        fetch_all(self, files)

    monkeypatch.setattr(Bucket, "fetch_all", remove_before)
    folder = another_process(bucket)
    assert Checkpoints(folder / "checkpoints").steps() == [2]
    np.testing.assert_array_equal(restored(folder, 2), 2 * STATE["w"])


def test_a_save_takes_until_the_bucket_has_it(bucket, monkeypatch):
    folder = run_here(bucket.url)
    keep_config(folder, Config())
    checkpoints = TrainingCheckpoints(folder / "checkpoints", CheckpointConfig(keep_best=False))
    send = Bucket.send

    def send_slowly(self: Bucket, file: Path, name: str) -> None:
        if "/state/" in name:
            time.sleep(0.8)
        send(self, file, name)

    monkeypatch.setattr(Bucket, "send", send_slowly)
    began = time.time()
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    took = time.time() - began
    assert 0.8 < checkpoints.store.seconds <= took
    checkpoints.close()
    # and so it does for who reads the run elsewhere, by the time of the last object
    assert 0.8 < _write_seconds(another_process(bucket), 1) < took + 1


def test_what_other_processes_sent_of_a_step_is_fetched_to_go_back_to_it(bucket):
    """As in a rollback: each process has the parts of arrays that it has sent."""
    folder = run_here(bucket.url)
    train(folder, 1)
    remote_runs._COPIES.clear()
    folder = run_here(bucket.url)
    own = copy_of(folder)
    assert own is not None
    own.complete(1)
    parts = sorted((folder / "checkpoints/1/state").rglob("*"))
    lost = [part for part in parts if part.is_file()][::2]
    kept = {part: part.read_bytes() for part in lost}
    for part in lost:
        part.unlink()
    # it was saved by this training, so it was not in the bucket when that began
    own._steps.pop(1)
    own.complete(1)
    assert not any(part.exists() for part in lost)  # nobody else has sent any
    own.sender = SimpleNamespace(has_peers=True, stopped=False)  # pyright: ignore[reportAttributeAccessIssue]
    own.complete(1)
    assert {part: part.read_bytes() for part in lost} == kept


def test_a_step_without_its_last_object_is_none_and_is_cleared_away(bucket, capsys):
    train(run_here(bucket.url), 1, 2)
    whole = bucket.files("checkpoints/2")
    bucket.remove([f"checkpoints/2/{UPLOADED}"])
    folder = another_process(bucket)
    assert "step 2 is left out, as it has no uploaded.json" in capsys.readouterr().err
    assert Checkpoints(folder / "checkpoints").steps() == [1]
    assert bucket.files("checkpoints/2").keys() == whole.keys() - {
        UPLOADED,
        f"checkpoints/2/{UPLOADED}",
    }
    train(folder, 3)
    assert not bucket.files("checkpoints/2")
    np.testing.assert_array_equal(restored(another_process(bucket), 1), STATE["w"])


def test_a_save_that_is_cut_leaves_the_step_before(bucket, monkeypatch):
    train(run_here(bucket.url), 1, keep=1)
    send_object = Bucket.send

    def cut(self, file, name):
        if "checkpoints/2/state" in name:
            raise UserError(f"{self.url}/{name} cannot be written: 503")
        send_object(self, file, name)

    monkeypatch.setattr(Bucket, "send", cut)
    with pytest.raises(UserError, match=r"memory://.*: 503"):
        train(another_process(bucket), 2, keep=1)
    folder = another_process(bucket)
    assert Checkpoints(folder / "checkpoints").steps() == [1]
    np.testing.assert_array_equal(restored(folder, 1), STATE["w"])


def test_the_old_step_goes_after_the_last_object_of_the_new(bucket, monkeypatch):
    done = list[str]()
    write = Bucket.write
    remove = Bucket.remove
    monkeypatch.setattr(
        Bucket, "write", lambda self, name, text: (done.append(name), write(self, name, text))
    )

    def removing(self, names):
        names = list(names)
        done.extend(f"-{name}" for name in names)
        remove(self, names)

    monkeypatch.setattr(Bucket, "remove", removing)
    train(run_here(bucket.url), 1, 2, keep=1)
    new = done.index(f"checkpoints/2/{UPLOADED}")
    # a reader that finds it has all of a step, and without it none
    gone = [place for place, name in enumerate(done) if name.startswith("-checkpoints/1/")]
    assert gone and min(gone) > new
    assert done[min(gone)] == f"-checkpoints/1/{UPLOADED}"


def test_an_array_that_is_not_as_it_was_sent_is_refused(bucket):
    train(run_here(bucket.url), 1)
    name = max(bucket.files("checkpoints/1/state"), key=lambda name: bucket.files()[name].size)
    content = bytearray(bucket.read(name))
    content[-1] ^= 1
    bucket.write(name, bytes(content))
    with pytest.raises(UserError, match=f"{re.escape(name)} is not as"):
        restored(another_process(bucket), 1)


def test_the_arrays_of_a_damaged_step_stay_in_the_bucket_and_are_not_fetched(bucket):
    folder = run_here(bucket.url)
    train(folder, 1, 2)
    set_aside(folder / "checkpoints" / "2", "too odd")
    send(folder)
    assert any(name.startswith("damaged/2/state/") for name in bucket.files())
    folder = another_process(bucket)
    assert (folder / "damaged/2/manifest.json").exists()
    assert not (folder / "damaged/2/state").exists()
    send(folder)
    assert any(name.startswith("damaged/2/state/") for name in bucket.files())


def test_a_step_whose_last_object_is_damaged_is_left_out_and_said(bucket, capsys):
    train(run_here(bucket.url), 1, 2)
    bucket.write(f"checkpoints/2/{UPLOADED}", b'{"state/')
    assert Checkpoints(another_process(bucket) / "checkpoints").steps() == [1]
    assert "warning: step 2 is left out" in capsys.readouterr().err
    assert bucket.find(f"checkpoints/2/{UPLOADED}") is not None  # it stays for whoever looks


def test_a_bucket_that_does_not_answer_is_not_a_damaged_step(bucket, monkeypatch):
    train(run_here(bucket.url), 1)
    folder = another_process(bucket)
    away = UserError("503")

    def fetch(self, name, file):
        raise away

    monkeypatch.setattr(Bucket, "fetch", fetch)
    with pytest.raises(UserError) as error:
        restored(folder, 1)
    assert error.value is away


def test_files_beside_the_checkpoints_are_sent_when_they_change(bucket):
    folder = run_here(bucket.url)
    train(folder, 1)
    (folder / "loss.png").write_bytes(b"picture")
    send(folder)
    assert bucket.read("loss.png") == b"picture"
    (folder / "loss.png").unlink()
    send(folder)
    assert bucket.find("loss.png") is None


def test_the_copies_of_processes_that_are_gone_are_removed(bucket, tmp_path, monkeypatch):
    mine = run_here(bucket.url).parent
    gone = mine.with_name(mine.name.replace(str(os.getpid()), str(2**22 + 1)))
    # as of a machine whose name begins with that of this one
    elsewhere = mine.with_name(mine.name.replace(str(os.getpid()), "7").replace("-", "-2-"))
    left = mine.with_name(f"8@another-{mine.name.rpartition('-')[2]}")
    for folder in (gone, elsewhere, left):
        folder.mkdir()
    month_ago = time.time() - 30 * 24 * 3600
    os.utime(left, (month_ago, month_ago))
    run_here(f"{bucket.url}2")
    assert mine.exists() and elsewhere.exists()
    assert not gone.exists() and not left.exists()
    assert copy_of(tmp_path) is None


def test_two_containers_with_one_name_and_number_have_copies_of_their_own(bucket, monkeypatch):
    first = run_here(bucket.url)
    remote_runs._COPIES.clear()
    monkeypatch.setattr(copy, "machine", lambda: "the same name, another count of processes")
    second = run_here(bucket.url)
    assert first != second and first.exists() and second.exists()


@pytest.fixture
def quick_beats(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    monkeypatch.setattr(run_lock, "WATCH", 0.4)
    monkeypatch.setattr(run_lock, "_SETTLE", 0.02)


def write_lock(bucket: Bucket, beats: int = 0) -> None:
    """The lock of a training on another machine."""
    owner = {"token": "t", "machine": "elsewhere 1", "pid": 5, "began": "", "since": "then"}
    bucket.write(run_lock.LOCK, json.dumps({**owner, "beats": beats}).encode())


def test_a_bucket_has_one_training_at_a_time(bucket, quick_beats):
    folder = run_here(bucket.url)
    said = list[str]()
    with closing(run_lock.SharedLock(folder, said.append)) as lock:
        before = bucket.read(run_lock.LOCK)
        with pytest.raises(UserError, match=f"{bucket.url} is being trained"):
            run_lock.SharedLock(another_process(bucket), said.append)
        remote_runs._COPIES.clear()
        time.sleep(0.2)
        assert bucket.read(run_lock.LOCK) != before  # it beats
        lock.require()
    assert bucket.find(run_lock.LOCK) is None and not said
    # it is no part of the run, and no copy has it
    write_lock(bucket)
    assert not list(another_process(bucket).iterdir())


def test_the_lock_of_a_dead_training_in_a_bucket_is_taken_over(bucket, quick_beats):
    write_lock(bucket)
    said = list[str]()
    with closing(run_lock.SharedLock(run_here(bucket.url), said.append)):
        assert b"elsewhere" not in bucket.read(run_lock.LOCK)
    assert len(said) == 2 and "watching" in said[0] and "has ended, is taken over" in said[1]


def test_a_training_of_another_machine_that_beats_is_left_alone(bucket, quick_beats):
    ended = threading.Event()

    def beat() -> None:
        for beats in itertools.count():
            write_lock(bucket, beats)
            if ended.wait(0.05):
                return

    write_lock(bucket)
    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(UserError, match="by process 5 on elsewhere"):
            run_lock.SharedLock(run_here(bucket.url), print)
    finally:
        ended.set()
        other.join()


def test_a_bucket_that_does_not_answer_has_given_the_run_to_nobody(
    bucket, quick_beats, monkeypatch
):
    with closing(run_lock.SharedLock(run_here(bucket.url), print)) as lock:
        with monkeypatch.context() as patch:
            away = UserError("503")
            patch.setattr(Bucket, "read_if_there", lambda *_: (_ for _ in ()).throw(away))
            time.sleep(0.2)
            assert lock.lost == ""
        write_lock(bucket)
        time.sleep(0.2)
        with pytest.raises(UserError, match="taken over by process 5 on elsewhere"):
            lock.require()
    assert b"elsewhere" in bucket.read(run_lock.LOCK)  # the other's stays


def test_a_process_that_is_not_the_first_forgets_the_steps_that_the_first_moved_aside(
    bucket, monkeypatch
):
    train(run_here(bucket.url), 1, 2)
    folder = another_process(bucket)
    config = CheckpointConfig(keep=2, keep_best=False)
    checkpoints = TrainingCheckpoints(folder / "checkpoints", config)
    assert checkpoints.steps() == [1, 2]
    # of two processes this is the second: the first says that step 1 is the newest that is whole
    monkeypatch.setattr(training_checkpoints.jax, "process_index", lambda: 1)
    monkeypatch.setattr(training_checkpoints, "number_from_first", lambda _: 1)
    assert checkpoints.newest_whole() == (1, None)
    assert checkpoints.steps() == [1]
    monkeypatch.undo()
    # what is saved under that number now is not the bucket's step of before
    checkpoints.save(2, state(5), {"place": 2})
    checkpoints.wait()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(1)
    )
    np.testing.assert_array_equal(checkpoints.restore(2, shapes)["w"], 5 * STATE["w"])
    checkpoints.close()


def test_a_second_run_of_a_process_sees_what_others_have_written_meanwhile(bucket, monkeypatch):
    monkeypatch.setattr(copy, "_FRESH_SECONDS", 0.0)
    folder = run_here(bucket.url)
    train(folder, 1)
    bucket.write("metrics.jsonl", b"of another machine")
    assert run_here(bucket.url) == folder
    assert (folder / "metrics.jsonl").read_bytes() == b"of another machine"
    # while it is trained here, the copy is what counts
    checkpoints = TrainingCheckpoints(folder / "checkpoints", CheckpointConfig(keep=2))
    bucket.write("metrics.jsonl", b"of another machine again")
    assert (run_here(bucket.url) / "metrics.jsonl").read_bytes() == b"of another machine"
    checkpoints.close()


def test_a_beat_is_not_tried_again_for_longer_than_a_beat(bucket, quick_beats, monkeypatch):
    """Who watches the lock takes it over after a while, and a later write would be over theirs."""
    asked = list[float | None]()
    write = Bucket.write

    def note(self, name, content, seconds=None):
        asked.append(seconds)
        write(self, name, content)

    monkeypatch.setattr(Bucket, "write", note)
    with closing(run_lock.SharedLock(run_here(bucket.url), print)):
        until = time.monotonic() + 10
        while not asked and time.monotonic() < until:
            time.sleep(0.01)
    assert set(asked) == {run_lock.BEAT}
    assert run_lock.BEAT < run_lock.WATCH


def test_a_write_is_tried_again_for_as_long_as_it_may(bucket, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("503")

    monkeypatch.setattr(type(bucket._fs), "pipe_file", fail)
    began = time.monotonic()
    with pytest.raises(UserError, match="was tried for 0 s"):
        bucket.write("x", b"", seconds=0.1)
    assert time.monotonic() - began < 10  # of 300 seconds


def test_a_run_that_is_refused_sends_nothing_more(bucket):
    folder = run_here(bucket.url)
    keep_config(folder, Config())
    checkpoints = TrainingCheckpoints(folder / "checkpoints", CheckpointConfig(keep_best=False))
    found = copy_of(folder)
    assert found is not None and found.sender is not None and not found.sender.stopped
    checkpoints.abandon()
    assert found.sender.stopped
    assert bucket.find("config.toml") is None


def test_a_step_that_is_written_after_the_run_was_lost_is_not_sent(bucket, monkeypatch):
    folder = run_here(bucket.url)
    keep_config(folder, Config())
    checkpoints = TrainingCheckpoints(folder / "checkpoints", CheckpointConfig(keep_best=False))
    stopped = threading.Event()
    write_manifest = training_checkpoints.write_manifest

    def write_late(*arguments: Any) -> None:
        assert stopped.wait(30)
        write_manifest(*arguments)

    monkeypatch.setattr(training_checkpoints, "write_manifest", write_late)
    checkpoints.save(1, state(1), {})
    checkpoints.store.stop()
    stopped.set()
    checkpoints.wait()
    assert (folder / "checkpoints/1").is_dir() and not bucket.files("checkpoints")
    checkpoints.close()


def test_the_disk_that_is_too_full_is_that_of_the_copy(bucket, tmp_path, monkeypatch):
    folder = run_here(bucket.url)
    checkpoints = TrainingCheckpoints(folder / "checkpoints", CheckpointConfig())
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(UserError) as error:
        checkpoints.save(1, state(1), {})
    said = with_urls(str(error.value))
    assert f"the disk of {tmp_path / 'jaxpar'}, which has the copy of {bucket.url}, has 1 B" in said
    monkeypatch.undo()
    checkpoints.close()


def test_a_folder_that_is_renamed_while_files_are_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "gone", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    scan = os.scandir

    def scan_what_is_left(path: Any) -> Any:
        if Path(path).name == "gone":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_what_is_left)
    assert names_below(tmp_path) == ["a/file", "z/file"]
