"""A step is compared with its manifest before it is read: damage is named, moved aside by a
training and left out by a reader, and the step before is taken.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpar.train.runs.folder.manifest as manifest
from jaxpar.base.checksum_line import require_intact, seal
from jaxpar.base.config import CheckpointConfig, Config
from jaxpar.base.errors import UserError
from jaxpar.base.toml import to_toml
from jaxpar.cli.checkpoints import checkpoints_command
from jaxpar.train.runs import list_checkpoints
from jaxpar.train.runs.checkpoints import Checkpoints, find_newest_whole
from jaxpar.train.runs.folder.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    UnreadCheckpoint,
    require_whole,
    write_manifest,
)
from jaxpar.train.runs.folder.orbax_names import STEP_METADATA
from jaxpar.train.runs.folder.steps import clear_up, steps_in
from jaxpar.train.runs.folder.val_losses import Losses
from jaxpar.train.runs.locks.in_use import in_use, steps_in_use
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

PIECE = mmap.ALLOCATIONGRANULARITY


def flip(file: Path, place: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A folder with files of several pieces, and a manifest of step 7."""
    folder = tmp_path / "7"
    (folder / "state" / "d").mkdir(parents=True)
    for name, size in (("state/d/large", 350), ("state/small", 3), ("data", 0)):
        (folder / name).write_bytes(np.random.default_rng(size).bytes(size))
    write_manifest(folder, 7, {"data": "x"})
    return folder


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_PIECE", PIECE)
    monkeypatch.setattr(manifest, "SAMPLED", 2 * PIECE)


def test_a_whole_step_is_whole_at_any_depth(step: Path) -> None:
    for depth in ("sizes", "sample", "whole"):
        found = require_whole(step, 7, depth)
        assert found is not None and found.size == 353 and found.identity == {"data": "x"}


@pytest.mark.parametrize("name", ["state/d/large", "state/small", MANIFEST])
def test_any_flipped_bit_is_found(step: Path, name: str) -> None:
    flip(step / name, -2)
    with pytest.raises(DamagedCheckpoint, match=name.rpartition("/")[2]):
        require_whole(step, 7, "whole")


def test_what_is_missing_cut_or_another_step_is_named(step: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="it is step 7 under another name"):
        require_whole(step, 8)
    (step / "state/small").write_bytes(b"12")
    with pytest.raises(DamagedCheckpoint, match="state/small has 2 of 3 bytes"):
        require_whole(step, 7, "sizes")
    (step / "state/small").unlink()
    with pytest.raises(DamagedCheckpoint, match="state/small is missing"):
        require_whole(step, 7, "sizes")
    (step / MANIFEST).unlink()
    assert require_whole(step, 7) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"piece": 0},
        {"files": None},
        {"files": {"state/d/a": []}},
        {"files": {"state/d/a": ["x", "0"]}},
        {"files": {"state/d/a": [1, 0]}},
        {"files": {"state/d/a": [1]}},
    ],
)
def test_a_manifest_that_says_nonsense_is_damaged_though_its_check_is_right(
    step: Path, changes: dict[str, object]
) -> None:
    written = json.loads((step / MANIFEST).read_text()) | changes
    said = {key: value for key, value in written.items() if key != "check" and value is not None}
    said["check"] = manifest._check(said)
    (step / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(DamagedCheckpoint, match="does not say what was saved"):
        require_whole(step, 7)


def test_a_sample_reads_the_first_piece_of_each_file_and_some_of_the_rest(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(20 * PIECE))
    write_manifest(tmp_path, 1, {})
    flip(tmp_path / "large", 9 * PIECE)
    caught = 0
    for _ in range(200):
        try:
            require_whole(tmp_path, 1, "sample")
        except DamagedCheckpoint:
            caught += 1
    # 2 of 19 pieces a time: 21 of 200 on average, and 0 or 100 in less than one run of a billion
    assert 0 < caught < 100
    flip(tmp_path / "large", 9 * PIECE)
    flip(tmp_path / "large", 5)
    with pytest.raises(DamagedCheckpoint, match="large has other bytes"):
        require_whole(tmp_path, 1, "sample")


def save(folder: Path, *steps: int) -> list[str]:
    """Save steps, and open the folder again as a training does; return what it says."""
    said = list[str]()
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig(keep=3), {}, said.append)
    for number in steps:
        checkpoints.save(number, {"w": np.full((4, 8), number, np.float32)}, {})
    checkpoints.close()
    return said


def reopen(folder: Path) -> tuple[int | None, list[str]]:
    """The step that a training would go on after, and what it says."""
    said = list[str]()
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig(keep=3), {}, said.append)
    found = checkpoints.newest_whole().step
    checkpoints.close()
    return found, said


def test_every_saved_step_has_a_manifest_and_a_damaged_one_is_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2, 3)
    assert all((folder / str(number) / MANIFEST).exists() for number in (1, 2, 3))
    largest = max((folder / "3").rglob("d/*"), key=lambda file: file.stat().st_size)
    flip(largest, 10)
    found, said = reopen(folder)
    assert found == 2 and steps_in(folder) == [1, 2]
    assert (tmp_path / "damaged" / "3" / "state").exists()
    assert len(said) == 1 and "has other bytes than were saved" in said[0]
    assert str(tmp_path / "damaged" / "3") in said[0]


def test_a_folder_that_is_no_step_and_one_under_another_name_are_moved_aside(
    tmp_path: Path,
) -> None:
    """Orbax would take both for the newest steps, and would save none that is older."""
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2)
    (folder / "2").rename(folder / "40")
    (folder / "999").mkdir()
    assert steps_in(folder) == [1, 40]
    found, said = reopen(folder)
    assert found == 1 and sorted(path.name for path in (tmp_path / "damaged").iterdir()) == [
        "40",
        "999",
    ]
    assert "it holds no checkpoint" in said[0] and "it is step 2 under another name" in said[1]
    assert not save(folder, 5) and steps_in(folder) == [1, 5]


def test_what_a_killed_run_was_removing_is_removed_without_a_word(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2, 3)
    (folder / "1" / "data" / "metadata").unlink()
    said = list[str]()
    TrainingCheckpoints(folder, CheckpointConfig(keep=2, keep_best=False), {}, said.append).close()
    assert steps_in(folder) == [2, 3] and not said and not (tmp_path / "damaged").exists()


def test_where_no_step_is_whole_the_run_does_not_begin_anew_without_a_word(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    flip(folder / "1" / "state" / "_METADATA", 5)
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole.*bring one back"):
        reopen(folder)
    assert reopen(folder)[0] is None


def test_a_damaged_loss_is_none_and_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig())
    for number, loss in ((1, 2.0), (2, 3.0)):
        checkpoints.save(number, {"w": np.zeros(3, np.float32)}, {}, loss)
    checkpoints.close()
    said = list[str]()
    file = folder / "1" / "val_loss.json"
    file.write_text(file.read_text().replace("2.0", "6.0"))
    reader = Checkpoints(folder, say=said.append)
    assert reader.best() == 2 and reader.best() == 2
    assert len(said) == 1 and "step 1 counts as never evaluated" in said[0]
    file.unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val_loss": 2.0}\n')
    assert Checkpoints(folder, say=said.append).best() == 1 and len(said) == 1


def test_a_sealed_text_is_as_it_was_written_or_without_its_last_line() -> None:
    text = seal("[train]\nsteps = 20\n")
    require_intact(text, "config.toml")
    changed = text.replace("20", "30")
    with pytest.raises(UserError, match=r"config.toml is not as it was written.*delete its last"):
        require_intact(changed, "config.toml")
    require_intact(changed.rpartition("# Checksum")[0], "config.toml")


def test_a_step_that_is_read_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig(keep=1, keep_best=False))
    state = {"w": np.zeros(3, np.float32)}
    checkpoints.save(1, state, {})
    with in_use(tmp_path, 1):
        checkpoints.save(2, state, {})
        checkpoints.save(3, state, {})
        checkpoints.wait()
        checkpoints.remove_old()
        assert steps_in(folder) == [1, 3] and steps_in_use(tmp_path, []) == {1}
    checkpoints.save(4, state, {})
    checkpoints.close()
    assert steps_in(folder) == [4]
    dead = tmp_path / ".reading-0"
    dead.write_text('{"step": 4, "machine": "", "pid": 1, "began": ""}')
    assert steps_in_use(tmp_path, []) == {4}, "another machine's, which may run"
    dead.write_text("{")
    assert not steps_in_use(tmp_path, []) and not dead.exists()


@pytest.mark.parametrize(("name", "found"), [("5-ab", {5}), ("ab", {1, 2})])
def test_a_mark_that_the_file_system_does_not_give_stays_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: set[int]
) -> None:
    """One failed read took the mark away, and the step could be removed while it was read."""
    mark = tmp_path / f".reading-{name}"
    mark.write_text('{"step": 5, "machine": "", "pid": 1, "began": ""}')

    def fail(path: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert steps_in_use(tmp_path, [1, 2]) == found
    assert steps_in_use(tmp_path, [1, 2]) == {5}
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        assert steps_in_use(tmp_path, [1, 2]) == {1, 2}
    assert not steps_in_use(tmp_path / "absent", [1, 2])


def test_the_list_of_checkpoints_names_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    folder = run / "checkpoints"
    save(folder, 1, 2)
    (run / "config.toml").write_text(to_toml(Config()))
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig(keep=3))
    checkpoints.save(3, {"w": np.zeros(3, np.float32)}, {}, 2.5)
    checkpoints.close()
    flip(max((folder / "2").rglob("d/*"), key=lambda file: file.stat().st_size), 9)
    (folder / "1" / MANIFEST).unlink()
    assert checkpoints_command([str(run)]) == 0
    assert capsys.readouterr().out.count("all files there") == 2
    assert checkpoints_command([str(run), "--verify"]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert "no manifest" in rows[1] and "has other bytes" in rows[2]
    assert "2.5000" in rows[3] and "whole, the best" in rows[3]
    assert steps_in(folder) == [1, 2, 3], "nothing was moved"


@pytest.mark.parametrize("looked_at", ["require_whole", "bytes_of"])
def test_the_list_leaves_out_a_step_that_a_training_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: str
) -> None:
    run = tmp_path / "run"
    save(run / "checkpoints", 1, 2)
    (run / "config.toml").write_text(to_toml(Config()))
    look = getattr(list_checkpoints, looked_at)

    def remove_first(place: Path, *more: Any) -> Any:
        if place.name == "1":
            shutil.rmtree(place)
        return look(place, *more)

    monkeypatch.setattr(list_checkpoints, looked_at, remove_first)
    found = list_checkpoints.list_checkpoints(run, "sizes")
    assert [(row.step, row.problem) for row in found.rows] == [(2, "")]


def test_a_step_of_which_the_disk_does_not_give_the_last_file_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints" / "3"
    (folder / "state").mkdir(parents=True)
    (folder / STEP_METADATA).write_text("{}")
    write_manifest(folder, 3, {})
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == STEP_METADATA:
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    (said,) = clear_up(folder.parent, 1, None)
    assert "is left as it is" in said and "Input/output error" in said
    assert folder.exists()


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (OSError(5, "Input/output error"), False),
        (ValueError("Failed to open: 'x': Input/output error [os_error_code='5']"), False),
        (FileNotFoundError(2, "No such file or directory"), True),
        (ValueError("NOT_FOUND: no metadata [os_error_code='2']"), True),
        (ValueError("DATA_LOSS: a checksum differs"), True),
    ],
)
def test_what_the_disk_refuses_orbax_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_damage: bool
) -> None:
    checkpoints = Checkpoints(tmp_path)

    def fail(*_: object, **__: object) -> None:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("the array is not there") from cause

    monkeypatch.setattr(checkpoints._reader, "restore", fail)
    with pytest.raises(DamagedCheckpoint) as raised:
        checkpoints.data(3)
    assert isinstance(raised.value, UnreadCheckpoint) != is_damage


@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")]
)
def test_too_little_memory_at_a_restore_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    checkpoints = Checkpoints(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checkpoints._reader, "restore", fail)
    with pytest.raises(type(error)):
        checkpoints.data(3)


@pytest.mark.parametrize("name", [".zarray", ".zgroup", ".zattrs"])
def test_the_hidden_files_of_zarr_are_in_the_manifest(tmp_path: Path, name: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).write_text("{}")
    write_manifest(tmp_path, 3, {})
    (tmp_path / "state" / name).write_text("[]")
    with pytest.raises(DamagedCheckpoint, match=name):
        require_whole(tmp_path, 3, "whole")


@pytest.mark.parametrize("times", [1, 1000])
def test_a_step_that_the_file_system_does_not_give_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    folder = tmp_path / "checkpoints" / "3"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "x").write_bytes(b"abc")
    write_manifest(folder, 3, {})
    monkeypatch.setattr("jaxpar.train.runs.folder.manifest._SETTLE", 0.0)
    read = Path.read_bytes
    failing = iter(range(times))

    def fail_first(path: Path) -> bytes:
        if path.name == MANIFEST and next(failing, None) is not None:
            raise OSError(116, "Stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail_first)
    checkpoints = Checkpoints(folder.parent)
    if times == 1:
        assert find_newest_whole(checkpoints, pytest.fail).step == 3
    else:
        with pytest.raises(UserError, match="may be whole"):
            find_newest_whole(checkpoints, pytest.fail)
        clear_up(folder.parent, 0, None)
    assert folder.exists()


def test_a_step_that_is_saved_anew_has_no_loss_of_the_one_before(tmp_path: Path) -> None:
    losses = Losses(tmp_path, pytest.fail)
    losses.add(3, 2.5)  # its save failed: it has no folder
    losses.forget(3)
    (tmp_path / "3").mkdir()
    losses.write()
    assert not list((tmp_path / "3").iterdir())
