"""Hooks: what a program does at steps of a run, in order, saved, and given back on another mesh."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import Config, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.train.guard.time_limit import TimeLimit
from jaxpar.train.hooks import Hook, HookedRun, OnRow
from jaxpar.train.hooks.given import load_states, require_hooks, states_of
from jaxpar.train.loop import open_run, run
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.locks.run_lock import LOCK
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

pytestmark = pytest.mark.usefixtures("keeps_programs")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("in the beginning was the word, and the word was with code. " * 60)
    sizes: dict[str, Any] = {"vocab_size": 256, "embed": 16, "heads": 2, "mlp": 32, "layers": 3}
    return override(
        Config(
            model=ModelConfig(family="gpt2", max_seq_len=32, **sizes),
            mesh=MeshSpec(data=2, fsdp=2),
        ),
        {
            "data.source": "text",
            "data.path": str(text),
            "data.seq_len": 32,
            "train.steps": 8,
            "train.batch": 8,
            "train.warmup_steps": 2,
            "train.eval_every": 4,
            "train.eval_batches": 1,
            "train.final_eval_batches": 1,
            "checkpoint.every": 4,
            "metrics.log_every": 1,
            "mesh.platform": "cpu",
        },
    )


class Ema(Hook):
    """An average of the weights."""

    def __init__(self) -> None:
        self.average: Any = None
        self.begun: list[int] = []

    def on_begin(self, run: HookedRun, state: Any) -> None:
        self.begun.append(run.after)
        self.model = run.experiment.model
        if self.average is None:
            self.average = jax.tree.map(jnp.copy, self.model.trained(state.params))

    def on_step(self, step: int, state: Any) -> None:
        trained = self.model.trained(state.params)
        self.average = jax.tree.map(lambda a, b: 0.5 * (a + b), self.average, trained)

    def evaluated(self, params: Any) -> Any:
        return self.model.merge(params, self.average)

    def params(self) -> Any:
        return self.average

    def load_params(self, params: Any) -> None:
        self.average = params


class Calls(Hook):
    """Remembers how it was called."""

    def __init__(self, stop_at: int = 0, name: str = "Calls") -> None:
        self.calls: list[str] = []
        self.stop_at = stop_at
        self.own_name = name

    @property
    def name(self) -> str:
        return self.own_name

    def on_begin(self, run: HookedRun, state: Any) -> None:
        self.run = run
        self.calls.append(f"begin {run.after}")

    def on_step(self, step: int, state: Any) -> None:
        assert int(state.step) == step
        self.calls.append(f"step {step}")
        if step == self.stop_at:
            self.run.stop("its own rule")

    def on_row(self, step: int, row: dict[str, float]) -> None:
        if "loss" in row:
            row["squared"] = row["loss"] ** 2

    def before_save(self, step: int, state: Any) -> None:
        assert int(state.step) == step
        self.calls.append(f"save {step}")

    def on_evaluation(self, step: int, loss: float) -> None:
        self.calls.append(f"evaluation {step}")

    def on_end(self, step: int) -> None:
        assert (self.run.folder / LOCK).exists()
        self.calls.append(f"end {step}")

    def state_dict(self) -> Any:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(f"loaded {state['calls']}")


class Losses(Hook):
    """Remembers every validation loss that it was told of, as a rule by which a run stops does."""

    def __init__(self) -> None:
        self.told: dict[str, float] = {}

    def on_evaluation(self, step: int, loss: float) -> None:
        self.told[str(step)] = loss

    def state_dict(self) -> Any:
        return self.told

    def load_state_dict(self, state: Any) -> None:
        self.told = state


@pytest.mark.parametrize("is_made", [True, False], ids=["made", "missed"])
def test_the_loss_of_the_step_that_a_run_goes_on_after_is_told_again(
    is_made: bool, config: Config, tmp_path: Path
) -> None:
    """A step is saved before it is evaluated: what was learned after the save was lost."""
    whole = Losses()
    run(config, tmp_path / "whole", [whole])
    first = Losses()
    run(override(config, {"train.stop_at": 4}), tmp_path / "two", [first])
    assert first.told == {"4": whole.told["4"]}
    file = tmp_path / "two" / "metrics.jsonl"
    if not is_made:
        rows = [line for line in file.read_text().splitlines() if "val_loss" not in line]
        file.write_text("\n".join(rows) + "\n")
    again = Losses()
    run(config, tmp_path / "two", [again])
    assert again.told == whole.told


def test_an_evaluation_that_a_finished_run_missed_takes_what_hooks_give(
    config: Config, tmp_path: Path
) -> None:
    run(config, tmp_path / "run", [Ema()])
    file = tmp_path / "run" / "metrics.jsonl"
    losses = [row["val_loss"] for row in read_metrics(tmp_path / "run") if "val_loss" in row]
    rows = [line for line in file.read_text().splitlines() if '"step": 8, "val_loss"' not in line]
    assert len(rows) == len(file.read_text().splitlines()) - 1
    file.write_text("\n".join(rows) + "\n")
    result = run(config, tmp_path / "run", [Ema()])
    assert result.val_loss == losses[-1]


def test_a_finished_run_calls_no_hook(config: Config, tmp_path: Path) -> None:
    run(config, tmp_path / "run", [Calls()])
    again = Calls()
    run(config, tmp_path / "run", [again])
    assert again.calls == []


def test_each_method_is_called_at_its_place(config: Config, tmp_path: Path) -> None:
    calls = Calls()
    run(config, tmp_path / "whole", [calls])
    assert calls.calls == [
        "begin 0",
        *(f"step {step}" for step in range(1, 5)),
        *("save 4", "evaluation 4"),
        *(f"step {step}" for step in range(5, 9)),
        *("save 8", "evaluation 8"),
        "end 8",
    ]
    rows = [row for row in read_metrics(tmp_path / "whole") if "loss" in row]
    assert [row["squared"] for row in rows] == [row["loss"] ** 2 for row in rows]


@pytest.mark.slow
def test_an_average_is_saved_and_goes_on_with_other_stages(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Ema()
    run(config, tmp_path / "whole", [whole])
    stopping = Calls(stop_at=6)
    stopped = run(config, tmp_path / "two", [Ema(), stopping])
    assert stopped.interrupted and stopped.step == 6
    assert "stopped by its own rule after step 6, saved" in capsys.readouterr().out
    resumed, again = Ema(), Calls()
    staged = override(config, {"mesh.data": 1, "mesh.stage": 2, "pipeline.microbatches": 2})
    run(staged, tmp_path / "two", [resumed, again])
    assert again.calls[:2] == [f"loaded {stopping.calls.index('save 6') + 1}", "begin 6"]
    assert resumed.begun == [6]
    # the layers of two stages of three lie in four places
    assert resumed.average["blocks"]["up"].shape[0] == 4
    want = np.asarray(whole.average["blocks"]["up"])
    found = np.asarray(resumed.average["blocks"]["up"])[np.array([0, 1, 2])]
    np.testing.assert_allclose(found, want, atol=1e-5)
    losses = [
        {row["step"]: row["val_loss"] for row in read_metrics(tmp_path / name) if "val_loss" in row}
        for name in ("whole", "two")
    ]
    assert losses[1][8] == pytest.approx(losses[0][8], rel=1e-5)  # of the average, in both
    # without the hook what it kept is left where it is
    plain = run(override(config, {"train.steps": 9, "train.stop_at": 9}), tmp_path / "two")
    assert plain.step == 9
    said = " ".join(capsys.readouterr().out.split())
    assert "has a state of Calls, and no such hook is given" in said
    assert "has arrays of Ema, and no such hook is given" in said
    run(override(config, {"train.steps": 10, "train.stop_at": 10}), tmp_path / "two", [Ema()])
    said = " ".join(capsys.readouterr().out.split())
    assert "has no arrays of the hook Ema, which starts anew" in said


def test_what_is_written_inside_is_written_while_the_folder_is_held(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = override(config, {"train.stop_at": 1})
    with open_run(short, tmp_path / "run") as opened:
        assert opened.after == 0 and (opened.folder / LOCK).exists()
        assert opened.train().step == 1
        assert (opened.folder / LOCK).exists()
        with pytest.raises(UserError, match="was trained already"):
            opened.train()
    assert not (tmp_path / "run" / LOCK).exists()
    ended = list[Path]()
    monkeypatch.setattr(TrainingCheckpoints, "abandon", lambda one: ended.append(one.folder))
    with pytest.raises(ZeroDivisionError), open_run(config, tmp_path / "run") as opened:
        assert opened.after == 1
        _ = 1 / 0
    with pytest.raises(UserError, match="hooks= takes objects"):
        run(config, tmp_path / "run", [print])  # pyright: ignore[reportArgumentType]
    assert ended == [tmp_path / "run" / "checkpoints"] * 2
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_limit_of_time_knows_how_long_a_step_with_hooks_takes(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures from step to step, and what a hook does is time of the step."""
    found = list[float]()
    asks = TimeLimit.asks

    def note(limit: TimeLimit) -> str:
        said = asks(limit)
        found.append(limit.reserve)
        return said

    class Slow(Hook):
        def on_step(self, step: int, state: Any) -> None:
            time.sleep(0.5)

    monkeypatch.setattr(TimeLimit, "asks", note)
    short = override(config, {"train.stop_at": 3, "train.max_time": "1h"})
    run(short, tmp_path / "run", [Slow()])
    assert found[1] - found[0] >= 0.5


def test_arrays_of_another_form_are_refused_by_the_hook_that_keeps_them(
    config: Config, tmp_path: Path
) -> None:
    class Odd(Ema):
        def params(self) -> Any:
            return {"blocks": self.average["blocks"]}

    with pytest.raises(UserError, match=r"hook Odd .*let its params\(\)"):
        run(override(config, {"train.stop_at": 1}), tmp_path / "run", [Odd()])


def test_a_hook_that_fails_is_the_error_and_the_steps_until_then_are_saved(
    config: Config, tmp_path: Path
) -> None:
    def fail(step: int, row: dict[str, float]) -> None:
        if step == 3:
            row["mine"] = "text"  # pyright: ignore[reportArgumentType]

    with pytest.raises(UserError, match=r"the hook OnRow has put mine='text' into a row"):
        run(config, tmp_path / "run", [OnRow(fail)])
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "loss" in row] == [1, 2, 3]
    with open_run(config, tmp_path / "run") as opened:
        assert opened.after == 4


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([print], r"hooks= takes .*jaxpar\.train\.Hook, .*OnRow\(function\)"),
        ([Calls(), Calls()], "2 hooks are called Calls"),
        ([Calls(name="a/b")], "called 'a/b'"),
    ],
)
def test_hooks_that_could_not_be_called_are_refused(hooks: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_hooks(hooks)


def test_what_is_no_function_of_a_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"\(step, row\), .*given None"):
        OnRow(None)  # pyright: ignore[reportArgumentType]


def test_other_hooks_on_another_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.train.hooks.given.number_from_first", lambda own: own + 1)
    with pytest.raises(UserError, match="given different hooks"):
        require_hooks([Calls()])


class Keeps(Hook):
    """Has this state."""

    def __init__(self, state: Any, name: str = "mine") -> None:
        self.state, self.own_name = state, name

    @property
    def name(self) -> str:
        return self.own_name

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [(1, 2), {1: "a"}, float("nan"), object(), b"x", {"a": {3}}])
def test_a_state_that_would_come_back_otherwise_is_refused(state: Any) -> None:
    with pytest.raises(UserError, match="the hook mine would"):
        states_of([Keeps(state)])


def test_states_go_back_by_name_and_others_are_told() -> None:
    said: list[str] = []
    saved = states_of([Keeps({"n": [1, 2.5, None]}, "one"), Keeps("x", "gone"), Hook()])
    one = Keeps(0, "one")
    load_states([one, Keeps(0, "new"), Hook()], saved, said.append)
    assert one.state == {"n": [1, 2.5, None]}
    assert ["no state of the hook new" in said[0], "a state of gone" in said[1], len(said)] == [
        True,
        True,
        2,
    ]
