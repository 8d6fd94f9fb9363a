"""Checkpoints on the disk of a machine, beside those of the run folder: which are taken, and which
are not; without a training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import CheckpointConfig
from jaxpar.base.errors import UserError
from jaxpar.train.runs import local_tier
from jaxpar.train.runs.local_tier import LocalTier, Starts, note_start, read_starts
from jaxpar.train.runs.locks.run_lock import RunLock

STATE = {"w": jnp.arange(12.0).reshape(3, 4)}
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


def tier_of(run: Path) -> LocalTier:
    run.mkdir(exist_ok=True)
    return LocalTier(str(run.parent / "local"), run, SHAPES, None)


def train(run: Path, first: int, *steps: int) -> None:
    """What a training that goes on after `first` saves."""
    tier = tier_of(run)
    tier.open(first, CheckpointConfig(), {"data": "d"})
    note_start(run, first)
    for step in steps:
        tier.checkpoints.save(step, {"w": step * STATE["w"]}, {"place": step})
    tier.checkpoints.close()
    tier.release()


def steps_of(run: Path) -> list[int]:
    tier = tier_of(run)
    tier.release()
    return tier.steps


def test_a_folder_is_given_back_where_another_process_cannot_take_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_on_another(work: Callable[[], Any]) -> Any:
        found = work()
        if isinstance(found, RunLock):
            raise UserError("process 1 cannot go on")
        return found

    with monkeypatch.context() as patched, pytest.raises(UserError, match="cannot go on"):
        patched.setattr(local_tier, "run_together", fails_on_another)
        tier_of(tmp_path / "run")
    tier_of(tmp_path / "run").release()


def test_a_run_finds_its_newest_local_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 0, 2, 4, 6)
    tier = tier_of(run)
    assert tier.steps == [4, 6] and tier.manifest(6).identity["data"] == "d"
    assert tier.why_not(6) == "has none between step 6 and the last one"
    tier.open(6, CheckpointConfig(), {})
    np.testing.assert_array_equal(tier.checkpoints.restore(6, SHAPES)["w"], 6 * STATE["w"])
    assert tier.checkpoints.data(6) == {"place": 6}
    tier.checkpoints.close()
    tier.release()


def test_those_of_another_run_are_refused_by_its_name(tmp_path: Path) -> None:
    train(tmp_path / "one", 0, 2)
    with pytest.raises(UserError, match=f"of another run, {re.escape(str(tmp_path / 'one'))}: "):
        tier_of(tmp_path / "two")
    assert steps_of(tmp_path / "one") == [2]


def test_a_step_that_is_damaged_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(run, 0, 2, 4)
    files = (tmp_path / "local/0/checkpoints/4/state").rglob("*")
    file = max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert steps_of(run) == [2]
    assert re.search(r"local checkpoint \S+/4 is damaged \(.*other bytes", capsys.readouterr().err)


def test_what_a_run_did_not_go_on_from_is_left_out_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run went on from step 2 of its folder on another machine."""
    run = tmp_path / "run"
    train(run, 0, 2, 4)
    note_start(run, 2)
    assert steps_of(run) == [2]
    assert "4 is of a training that the run did not go on from" in capsys.readouterr().err
    train(run, 2, 4)
    assert steps_of(run) == [2, 4]


def test_steps_after_the_one_that_is_gone_on_from_are_removed(tmp_path: Path) -> None:
    """Other processes did not have them."""
    run = tmp_path / "run"
    train(run, 0, 2, 4)
    train(run, 2)
    assert steps_of(run) == [2]


def test_another_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    tier = tier_of(tmp_path / "run")
    with pytest.raises(UserError, match="is being trained"):
        tier_of(tmp_path / "run")
    tier.release()


def test_no_step_is_used_by_other_processes_than_saved_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(run, 0, 2)
    monkeypatch.setattr("jaxpar.train.runs.local_tier._parts_of", lambda *_: "of two processes")
    tier = tier_of(run)
    tier.release()
    assert not tier.steps and tier.why_not(0) == "has none that can be used"
    assert "was saved by another number of processes" in capsys.readouterr().err


def test_the_starts_of_a_run_say_what_it_came_through(tmp_path: Path) -> None:
    assert read_starts(tmp_path) is None
    (tmp_path / "starts.json").write_text('{"run": "x", "first": [1]}')
    with pytest.raises(UserError, match="as it was written"):
        read_starts(tmp_path)
    starts = Starts("x", (0, 6, 4))
    assert starts.went_through(2, 100)
    assert starts.went_through(1, 4) and not starts.went_through(1, 5)
    assert starts.went_through(0, 4) and not starts.went_through(0, 6)
    assert not starts.went_through(3, 1), "a training that never began"
