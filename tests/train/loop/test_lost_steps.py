"""What was trained is saved before an error leaves: of data, of an evaluation, of what is done with
a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpar.train.loop as loop
from jaxpar.base.config import CheckpointConfig, Config, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.models import Model
from jaxpar.train import opening
from jaxpar.train.batch import empty_batch, put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.hooks import OnRow, evaluations
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.step import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("keeps_programs")

STEPS = 6
WINDOWS = 12
"""Of 16 tokens, and one more, in a twentieth of the 4000."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    file = tmp_path_factory.mktemp("data") / "ids.bin"
    np.random.default_rng(0).integers(0, 64, 4000).astype("<u2").tofile(file)
    sizes = {
        "vocab_size": 64,
        "layers": 1,
        "embed": 16,
        "heads": 2,
        "mlp": 16,
        "max_seq_len": 16,
    }
    return override(
        Config(model=ModelConfig(**sizes), mesh=MeshSpec(platform="cpu")),
        {
            "data.source": "tokens",
            "data.path": str(file),
            "data.seq_len": 16,
            "train.steps": STEPS,
            "train.batch": 4,
            "train.warmup_steps": 1,
            "train.eval_every": 4,
            "train.eval_batches": 1,
            "train.final_eval_batches": 1,
            "checkpoint.every": 0,
            "metrics.log_every": 1,
        },
    )


@pytest.fixture(scope="module")
def whole(config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run without an error."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    loop.run(config, folder)
    return losses(folder)


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


class Breaking:
    """Batches that end with an error in place of the fourth; what had been read ahead is lost
    with it.
    """

    def __init__(self, real: Any):
        self.real = real
        self.count = 0

    def __next__(self) -> Any:
        self.count += 1
        rows = next(self.real)
        if self.count == 4:
            raise OSError("the disk is gone")
        return rows

    def get_state(self) -> Any:
        return self.real.get_state()


def evaluate_nothing(*_: Any) -> Iterator[Any]:
    raise ValueError("no evaluation today")


def stop_at_row_two(step: int, row: dict[str, float]) -> None:
    if step == 2:
        raise KeyError("whoever reads the rows")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "saved"),
    [
        ("data", 3),
        pytest.param("evaluation", 4, marks=pytest.mark.slow),
        pytest.param("rows", 3, marks=pytest.mark.slow),
    ],
)
def test_the_steps_before_an_error_are_saved_and_the_run_goes_on_as_if_there_had_been_none(
    config: Config,
    whole: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    saved: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hooks: list[OnRow] = []
    real = opening.train_batches
    if what == "data":
        monkeypatch.setattr(opening, "train_batches", lambda *args: Breaking(real(*args)))
    elif what == "evaluation":
        monkeypatch.setattr(evaluations, "evaluate", evaluate_nothing)
    else:
        hooks.append(OnRow(stop_at_row_two))
    with pytest.raises((UserError, ValueError, KeyError), match=r"gone|today|reads"):
        loop.run(config, tmp_path / "run", hooks=hooks)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [saved]
    assert f"after step {saved}, which is saved" in capsys.readouterr().out
    monkeypatch.undo()
    assert loop.run(config, tmp_path / "run").step == STEPS
    found = losses(tmp_path / "run")
    assert found == {step: loss for step, loss in whole.items() if step in found}
    assert {*range(saved + 1, STEPS + 1)} <= found.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "failing"),
    [(6, 6), (2, 2)],
)
def test_an_evaluation_that_failed_is_made_up_for(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, failing: int
) -> None:
    """After the last step, where nothing is left to train, and in the middle."""
    run = tmp_path / "run"
    monkeypatch.setattr(evaluations, "evaluate", evaluate_nothing)
    config = override(config, {"train.eval_every": every, "train.final_eval_batches": 3})
    with pytest.raises(ValueError, match="today"):
        loop.run(config, run)
    assert Checkpoints(run / "checkpoints").steps() == [failing]
    monkeypatch.undo()
    result = loop.run(config, run)
    assert result.step == STEPS and result.val_loss is not None
    rows = read_metrics(run)
    assert [row["step"] for row in rows if "val_loss" in row] == list(
        range(every, STEPS + 1, every)
    )
    assert [row["step"] for row in rows if "final_val_loss" in row] == [STEPS]
    assert Checkpoints(run / "checkpoints").best() is not None
    loop.run(config, run)
    assert read_metrics(run) == rows, "an evaluation was made twice"


def test_a_save_that_fails_in_the_background_is_not_said_to_be_there(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wait(self: TrainingCheckpoints) -> None:
        raise UserError("a checkpoint could not be written: the disk is full")

    monkeypatch.setattr(TrainingCheckpoints, "wait", wait)
    with pytest.raises(KeyError, match="reads"):
        loop.run(config, tmp_path / "run", hooks=[OnRow(stop_at_row_two)])
    said = " ".join(capsys.readouterr().out.split())
    assert "which is saved" not in said and "the steps since the last checkpoint are lost" in said


def test_a_step_is_saved_before_it_is_evaluated_and_the_best_is_still_known(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses rise, so that the first checkpoint is the best; it stays beside the newest."""
    there = list[list[int]]()
    rising = iter(range(1, 9))

    def evaluate(*_: Any) -> float:
        there.append(
            sorted(
                int(path.name.split(".")[0]) for path in (tmp_path / "run/checkpoints").iterdir()
            )
        )
        return float(next(rising))

    monkeypatch.setattr(evaluations, "evaluate", evaluate)
    changes = {"train.eval_every": 2, "checkpoint.every": 2, "checkpoint.keep": 1}
    loop.run(override(config, changes), tmp_path / "run")
    assert [steps[-1] for steps in there] == [2, 4, 6], (
        "an evaluation came before the save of its step"
    )
    checkpoints = Checkpoints(tmp_path / "run/checkpoints")
    assert checkpoints.best() == 2 and checkpoints.steps() == [2, 6]


def test_a_loss_may_follow_its_checkpoint_and_what_it_makes_old_is_removed(tmp_path: Path) -> None:
    state = {"w": jax.numpy.ones(4)}
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig(keep=1))
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0)):
        checkpoints.save(step, state, {})
        checkpoints.record(step, loss)
    checkpoints.record(9, 0.0)  # was not saved
    checkpoints.remove_old()
    checkpoints.close()
    again = Checkpoints(tmp_path)
    assert again.steps() == [3] and again.best() == 3


@pytest.mark.parametrize("name", ["run[1]", "*", "**/a?"])
def test_a_step_is_whole_in_a_folder_whose_name_is_also_a_pattern(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name / "checkpoints"
    state = {"w": jax.numpy.arange(4.0)}
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig())
    checkpoints.save(1, state, {"place": 7})
    checkpoints.close()
    again = Checkpoints(folder)
    assert again.steps() == [1] and again.data(1) == {"place": 7}
    np.testing.assert_array_equal(again.restore(1, state)["w"], state["w"])


def test_a_step_with_rows_that_a_process_lacks_changes_nothing_and_says_so(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several processes; with one, there is nothing to look at."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    plan = make_plan(config, jax.devices()[:1])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state, before = (init_state(experiment) for _ in range(2))
    rows = empty_batch(config, plan) | {"labels": np.ones((4, 16), np.int32)}
    rows["labels"][3] = empty_batch(config, plan, absent=True)["labels"][3]
    step = make_train_step(experiment)
    after, metrics = step(state, put_batch(rows, plan))
    assert np.isnan(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, after, before)
    rows["labels"][3] = -1
    after, metrics = step(after, put_batch(rows, plan))
    assert np.isfinite(metrics["loss"]) and after.step == 1


@pytest.mark.parametrize(
    ("asked", "between", "steps", "taken"),
    [
        (0, 20, 4, 20),
        (0, 20, 500, 500),
        (200, 20, 4, 20),
        (200, 20, 5000, 200),
        (0, 0, 4, 0),
        (5, 20, 4, 5),
    ],
)
def test_a_short_try_does_not_evaluate_for_longer_than_it_trains(asked, between, steps, taken):
    changes = {
        "train.final_eval_batches": asked,
        "train.eval_batches": between,
        "train.steps": steps,
    }
    assert evaluations.final_batches(override(Config(), changes).train) == taken


@pytest.mark.parametrize(
    ("between", "evaluated"),
    [
        (1, ["1 batches", "the whole set"]),
        pytest.param(
            WINDOWS - 1,
            [f"{WINDOWS - 1} batches", "the whole set"],
            marks=pytest.mark.slow,
        ),
        (WINDOWS, ["the whole set"]),
        pytest.param(WINDOWS + 1, ["the whole set"], marks=pytest.mark.slow),
        pytest.param(0, ["the whole set"], marks=pytest.mark.slow),
    ],
)
def test_the_whole_set_is_evaluated_once_after_the_last_step(
    config: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    between: int,
    evaluated: list[str],
) -> None:
    """However many batches more are asked for than there are."""
    steps = WINDOWS + 6
    sizes = {"train.batch": 1, "train.steps": steps, "data.val_fraction": 0.05}
    batches = {"train.eval_batches": between, "train.final_eval_batches": 0, "train.eval_every": 0}
    loop.run(override(config, sizes | batches), tmp_path / "r")
    said = capsys.readouterr().out
    found = re.findall(r"validation loss .* \((.*), [0-9.]+ s\)", said)
    assert found == evaluated
    rows = read_metrics(tmp_path / "r")
    losses = {key: row[key] for row in rows for key in row if key.endswith("val_loss")}
    if between >= WINDOWS:
        assert losses["final_val_loss"] == losses["val_loss"]


def test_a_long_evaluation_says_how_far_it_is_and_what_makes_it_shorter(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    impatient = partial(evaluations.Evaluations, patience=0.0)
    monkeypatch.setattr("jaxpar.train.loop.training.Evaluations", impatient)
    loop.run(
        override(
            config, {"train.steps": 2, "train.eval_batches": 2, "train.final_eval_batches": 9}
        ),
        tmp_path / "r",
    )
    said = capsys.readouterr().out
    assert (
        "evaluating: 1 of 2 batches in 0:0" in said and "; train.eval_batches takes fewer" in said
    )


def test_a_checkpoint_of_a_folder_that_was_moved_away_does_not_speak_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require_lock() -> None:
        raise UserError("the run folder is no longer there")

    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig(), require_lock=require_lock)

    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", fail)
    with pytest.raises(UserError, match="folder is no longer"):
        checkpoints.close()


def test_a_checkpoint_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig())

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", fail)
    with pytest.raises(UserError, match=r"No space left.*space"):
        checkpoints.close()
