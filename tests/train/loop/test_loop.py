"""Runs: stopping and resuming to the bit, run folders, evaluation, interruption."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxpar.train.evaluate as evaluate_module
import jaxpar.train.hooks.evaluations as evaluations_module
import jaxpar.train.loop as train_module
import jaxpar.train.loop.held_run as run_module
import jaxpar.train.loop.run_step as step_module
from jaxpar.base.config import Config, ModelConfig, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.kernels.attention import dispatch
from jaxpar.launch import local
from jaxpar.launch.local import train_config as train
from jaxpar.show import figures
from jaxpar.train import opening
from jaxpar.train.evaluate import evaluate_folder
from jaxpar.train.experiments import make_experiment
from jaxpar.train.goodput import read_lives
from jaxpar.train.hooks import Hook, OnRow
from jaxpar.train.metrics import read_metrics
from jaxpar.train.optimizer.learning_rate import learning_rate
from jaxpar.train.restore import restore_state
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint
from jaxpar.train.runs.folder.run_folder import read_run_config
from jaxpar.train.runs.locks.run_lock import LOCK
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

pytestmark = pytest.mark.usefixtures("keeps_programs")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    words = ["tensor", "mesh", "shard", "ring", "gather", "scatter", "host", "slice"]
    text.write_text(" ".join(rng.choice(words, 3000)), encoding="utf-8")
    sizes = {
        "layers": 2,
        "embed": 32,
        "heads": 4,
        "mlp": 64,
        "max_seq_len": 32,
        "dropout": 0.1,
    }
    return override(
        Config(
            model=ModelConfig(**sizes),
            mesh=MeshSpec(data=2, fsdp=2, tensor=2),
        ),
        {
            "data.source": "text",
            "data.path": str(text),
            "data.seq_len": 32,
            "train.steps": 20,
            "train.batch": 8,
            "train.accumulation": 2,
            "train.warmup_steps": 2,
            "train.eval_every": 5,
            "train.eval_batches": 2,
            "checkpoint.every": 5,
            "metrics.log_every": 1,
            "mesh.platform": "cpu",
        },
    )


@pytest.fixture(scope="module")
def drawn() -> list[int]:
    """The rows that metrics.jsonl had at each drawing of the loss of `whole`, of which the first
    failed.
    """
    return []


@pytest.fixture(scope="module")
def whole(config: Config, drawn: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps, never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    real_save = figures.save_figure

    def save(figure: Any, file: Path) -> None:
        rows = read_metrics(folder)
        drawn.append(len(rows))
        if len(drawn) == 1:
            raise OSError("the disk is full")
        if rows[-1]["step"] == 20:  # those before take as long, and are not looked at
            real_save(figure, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_EVERY", 0.0)
        patch.setattr(figures, "save_figure", save)
        result = train(config, folder)
    assert result.step == 20 and not result.interrupted
    return folder


def final_state(folder: Path, config: Config) -> Any:
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.latest()
    assert step is not None
    return step, *restore_state(checkpoints, step, make_experiment(config))


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {
        row["step"]: (row["loss"], row["grad_norm"])
        for row in read_metrics(folder)
        if "loss" in row
    }


def logged(folder: Path, key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in read_metrics(folder) if key in row}


class Counted(Hook):
    """A hook that remembers the steps of the rows that it was called with."""

    def __init__(self, name: str = "counted") -> None:
        self.steps: list[int] = []
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def on_row(self, step: int, row: dict[str, float]) -> None:
        if "loss" in row:
            self.steps.append(step)

    def state_dict(self) -> dict[str, list[int]]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.steps = state["steps"]


def test_damage_of_step_100_is_not_blamed_on_step_10(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    opened: Any = SimpleNamespace(source=checkpoints, after=10, is_new=False)
    for step, own in [(100, False), (10, True)]:
        with pytest.raises(DamagedCheckpoint) as raised:
            checkpoints.data(step)
        assert run_module._is_of_first_step(opened, raised.value) == own


@pytest.mark.users_flags
def test_stopped_after_seven_steps_and_resumed_equals_the_uninterrupted_run_to_the_bit(
    config: Config, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stopped"
    reported: list[dict[str, float]] = []
    rows = OnRow(lambda step, row: reported.append({"step": step, **row}))
    part = override(config, {"train.stop_at": 7})
    stopped = train_module.run(part, folder, [rows, Counted()])
    assert reported == read_metrics(folder)
    assert stopped.step == 7
    part = override(config, {"train.stop_at": 9})
    counted = Counted()
    train_module.run(part, folder, [counted, Counted("other")])
    assert counted.steps == [*range(1, 10)]
    said = "has no state of the hook other, which starts anew"
    assert said in capsys.readouterr().out.replace("\n", " ")
    resumed = train(config, folder)
    assert resumed.step == 20
    assert losses(folder) == losses(whole) and sorted(losses(whole)) == list(range(1, 21))
    (step, state, data), (want_step, want, want_data) = (
        final_state(folder, config),
        final_state(whole, config),
    )
    assert step == want_step == 20
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert data == want_data
    assert resumed.val_loss == logged(whole, "final_val_loss")[20]
    # and of step 7, where it stopped
    assert logged(folder, "val_loss").items() > logged(whole, "val_loss").items()


def test_the_loss_is_drawn_while_the_run_goes_on_and_a_drawing_that_fails_does_not_end_it(
    whole: Path, drawn: list[int]
) -> None:
    assert len(drawn) >= 3 and drawn[1] < drawn[-1] == len(read_metrics(whole))


def test_a_run_learns_and_leaves_its_folder_complete(config: Config, whole: Path) -> None:
    curve = losses(whole)
    assert curve[20][0] < curve[1][0] - 0.5
    assert read_run_config(whole) == config
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (whole / "tokenizer.json").exists()
    checkpoints = Checkpoints(whole / "checkpoints")
    assert checkpoints.latest() == 20 and checkpoints.best() == 20
    # Of the same few batches each time, which the best checkpoint goes by; of the whole set once,
    # at the end.
    assert sorted(logged(whole, "val_loss")) == [5, 10, 15, 20] and sorted(
        logged(whole, "final_val_loss")
    ) == [20]
    assert 0 < abs(logged(whole, "val_loss")[20] - logged(whole, "final_val_loss")[20]) < 0.1


def test_each_second_of_a_run_has_one_cause(whole: Path) -> None:
    (life,) = read_lives(whole).lives
    took = {cause for cause, seconds in life.seconds.items() if seconds > 0}
    assert took >= {"productive", "startup", "compiling", "evaluation", "saving", "other"}
    assert not took & {"wasted", "guard", "down", "restoring"}
    assert (life.lowest, life.step, life.saves) == (0, 20, 4)
    rows = [row for row in read_metrics(whole) if "goodput" in row]
    assert len(rows) == 20
    for row in rows:
        causes = {key for key in row if key.startswith(("productive_", "badput_"))}
        assert sum(row[key] for key in causes) == pytest.approx(row["wall_seconds"])
        assert row["goodput"] == pytest.approx(row["productive_seconds"] / row["wall_seconds"])
    # the rest is the last save, and a picture
    assert rows[-1]["wall_seconds"] <= life.ended - life.began


def test_what_is_written_at_the_end_is_written_while_the_folder_is_held(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = dict[str, bool]()

    def lock_is_there(name: str) -> None:
        held[name] = (tmp_path / "run" / LOCK).exists()

    monkeypatch.setattr(figures, "save_figure", lambda _, file: lock_is_there(file.name))
    monkeypatch.setattr(local, "send", lambda *_: lock_is_there("bucket"))
    train(override(config, {"train.stop_at": 2}), tmp_path / "run")
    assert held == {"loss.png": True, "bucket": True}
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.slow
def test_a_folder_says_how_its_last_training_ended(config: Config, tmp_path: Path) -> None:
    train(override(config, {"train.stop_at": 2}), tmp_path / "run")
    assert read_lives(tmp_path / "run").lives[-1].how == "ended after step 2"

    def stop(step: int, _: dict[str, float]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    train(config, tmp_path / "run", hooks=[OnRow(stop)])
    assert read_lives(tmp_path / "run").lives[-1].how == "stopped by SIGTERM after step 4, saved"

    def fail(step: int, _: dict[str, float]) -> None:
        raise ValueError("a program's own mistake\nin two lines")

    with pytest.raises(ValueError, match="mistake"):
        train(config, tmp_path / "run", hooks=[OnRow(fail)])
    how = read_lives(tmp_path / "run").lives[-1].how
    assert how == "ended by an error: a program's own mistake"


def test_what_a_refused_opening_began_is_ended(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[Path]()

    def refuse(*_: object) -> None:
        raise UserError("not this one")

    monkeypatch.setattr(opening, "_choose_tier", refuse)
    monkeypatch.setattr(
        TrainingCheckpoints, "abandon", lambda checkpoints: ended.append(checkpoints.folder)
    )
    with pytest.raises(UserError, match="not this one"):
        train(config, tmp_path / "run")
    assert ended == [tmp_path / "run" / "checkpoints"]
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_checkpoint_evaluates_to_the_logged_loss_on_another_mesh(
    config: Config, whole: Path
) -> None:
    other = override(config, {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2})
    result = evaluate_folder(other, whole)
    assert result.step == 20
    np.testing.assert_allclose(result.val_loss, logged(whole, "final_val_loss")[20], rtol=1e-5)


def test_why_no_kernel_serves_is_said_once(
    config: Config, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run as it starts, and by an evaluation, which drops nothing out: as if CPUs had kernels
    that never serve.
    """
    monkeypatch.setattr(dispatch, "kernels_for", lambda platform: ["splash", "pallas_tpu"])
    line = "attention by plain XLA, in tiles, and no kernel"
    train(config, whole)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        said.count(line)
        == said.count(f"{line} (splash: dropout of attention weights; pallas_tpu: dropout of")
        == 1
    )
    found: list[str] = []
    evaluate_folder(config, whole, say=found.append)
    assert found == [f"{line} (splash: on cpu; pallas_tpu: on cpu)"]


def test_a_finished_run_is_not_run_again(
    config: Config, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole / "metrics.jsonl").read_text()
    assert train(config, whole).step == 20
    assert "done already" in capsys.readouterr().out
    assert (whole / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_run_whose_time_is_over_saves_and_the_same_call_goes_on(
    config: Config, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The begin is given: a minute's limit, of which all but 5 s were gone before the call."""
    folder = tmp_path / "limited"
    limited = override(config, {"train.max_time": "1m"})
    result = train(limited, folder, began=time.monotonic() - 55)
    assert result.interrupted and result.step == 1
    assert "stopped by train.max_time=1m after step 1, saved" in capsys.readouterr().out
    assert train(override(config, {"train.max_time": "1h"}), folder).step == 20
    assert losses(folder) == losses(whole)


def test_a_folder_of_another_config_is_refused_and_kept(
    config: Config, whole: Path, tmp_path: Path
) -> None:
    before = (whole / "config.toml").read_text()
    with pytest.raises(UserError, match=r"another config \(train.learning_rate: 0.001 -> 0.5\)"):
        train(override(config, {"train.learning_rate": 0.5}), whole)
    assert (whole / "config.toml").read_text() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="no run folder"):
        train(config, tmp_path)


@pytest.mark.slow
def test_an_interrupt_finishes_the_step_saves_and_the_same_call_goes_on(
    config: Config,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also in the middle of an evaluation after which nothing was to be saved; the next call makes
    up for it.
    """
    folder = tmp_path / "interrupted"
    config = override(config, {"checkpoint.every": 20})
    real_put = step_module.put_batch
    real_eval = evaluations_module.compile_eval_step
    calls = list[int]()
    evaluations = list[int]()

    def put_and_interrupt(rows: Any, plan: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real_put(rows, plan)

    def note_and_make(*args: Any) -> Any:
        evaluations.append(len(calls))
        return real_eval(*args)

    monkeypatch.setattr(step_module, "put_batch", put_and_interrupt)
    monkeypatch.setattr(evaluations_module, "compile_eval_step", note_and_make)
    result = train(config, folder)
    assert result.interrupted and result.step == 3
    assert len(evaluations) == 1 and evaluations[0] >= 1  # its compilation kept no step waiting
    monkeypatch.undo()

    def put_and_tell(rows: Any, plan: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return real_put(rows, plan)

    monkeypatch.setattr(evaluate_module, "put_batch", put_and_tell)
    result = train(config, folder)
    assert result.interrupted and result.step == 5 and result.val_loss is None
    said = "stopped by SIGUSR1 in the evaluation after step 5, saved"
    assert said in capsys.readouterr().out
    monkeypatch.undo()
    train(config, folder)
    assert losses(folder) == losses(whole)
    assert logged(folder, "val_loss") == logged(whole, "val_loss")


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        (
            "train.learning_rate",
            1e30,
            r"at step 2: .* q \(queries\) of layer 0, .*; persistent: .*diverged; ",
        ),
        pytest.param(
            "optimizer.adamw.beta2",
            1.0,
            r"step 1 .*\d+ entries .*in \w+\.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_whose_step_is_not_finite_stops_and_saves_nothing_of_it(
    setting: str,
    value: float,
    said: str,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between log lines too: no step of these runs is logged before its last. Such settings are not
    in their ranges.
    """
    monkeypatch.setattr("jaxpar.train.experiments.make.check", lambda config, training: config)
    folder = tmp_path / "wild"
    saved = setting == "train.learning_rate"
    wild = override(
        config,
        {setting: value, "train.clip_norm": 0.0, "metrics.log_every": 100, "checkpoint.every": 1},
    )
    with pytest.raises(UserError, match=said) as error:
        train(wild, folder)
    assert "in another --run folder" in str(error.value)
    if not saved:
        assert "no checkpoint was saved" in str(error.value)
        return
    assert f"train.init={folder}; the checkpoint of step 1 is kept" in str(error.value)
    step, state, _ = final_state(folder, wild)
    assert step == 1 and all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def test_the_demo_preset_is_the_mesh_it_says() -> None:
    config = load_config("tiny")
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.platform) == (
        2,
        2,
        2,
        "cpu",
    )


def test_missing_data_is_said_before_a_budget_is_solved(
    config: Config, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        "jaxpar.launch.local.resolve",
        lambda *_, **__: pytest.fail("solved before the data was looked for"),
    )
    config = override(
        config, {"data.source": "tokens", "data.path": "nowhere.bin", "memory.budget": "1GiB"}
    )
    with pytest.raises(UserError, match=r"nowhere\.bin, .*not there"):
        train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_and_says_what_its_schedule_does(
    config: Config, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    assert train(override(config, {"train.steps": 22, "train.eval_every": 0}), folder).step == 22
    old, new = (float(learning_rate(replace(config.train, steps=steps))(20)) for steps in (20, 22))
    assert (
        "train.steps 20 -> 22: the cosine schedule now ends there, and the learning rate goes "
        f"on at {new:.2e} "
        f"where it would have been {old:.2e}"
    ) in capsys.readouterr().out
    assert logged(folder, "learning_rate")[21] == pytest.approx(new)
    assert read_run_config(folder).train.steps == 22


@pytest.mark.slow
def test_weights_of_another_run_on_another_mesh(
    config: Config, whole: Path, tmp_path: Path
) -> None:
    """Those of its best step in another dtype, with a fresh optimizer: a step at the least rate
    moves them by it.
    """
    changes = {
        "train.init": str(whole),
        "mesh.data": 8,
        "mesh.fsdp": 1,
        "mesh.tensor": 1,
        "precision.params": "bfloat16",
    }
    changes |= {"train.learning_rate": 1e-8, "train.steps": 1, "train.warmup_steps": 0}
    changes |= {"train.accumulation": 1}
    started = override(config, changes)
    assert train(started, tmp_path / "tuned").step == 1
    checkpoints = Checkpoints(whole / "checkpoints")
    best = checkpoints.best()
    theirs = read_run_config(whole)
    assert best
    want, _ = restore_state(checkpoints, best, make_experiment(theirs))
    _, found, _ = final_state(tmp_path / "tuned", started)
    for there, here in zip(
        jax.tree.leaves(want.params), jax.tree.leaves(found.params), strict=True
    ):
        # AdamW's first step is at most its rate of 1e-8, with the decay and rounding a little more.
        wanted, got = (np.asarray(leaf.astype(here.dtype), np.float32) for leaf in (there, here))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.mlp": 32}, "mlp is 64 there and 32"),
        (
            {"model.max_seq_len": 64},
            r"params\.embed\.positions .*\[32, 32\] .*\[64, 32\] .*of its run",
        ),
        (
            {"train.init": "nowhere"},
            "there is no nowhere",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    changes: dict[str, Any], says: str, config: Config, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        train(override(config, {"train.init": str(whole)} | changes), tmp_path / "run")
