"""A step that is not finite, because of its weights, its data, its computation or a device: what was
the first not to be finite is named, the state is untouched, and the step is run again to tell why.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced_steps import config_of, staged

import jaxpar.train.loop.training as call_module
import jaxpar.train.opening as open_module
from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import devices_needed
from jaxpar.models import Model
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan
from jaxpar.train.goodput import read_lives
from jaxpar.train.guard.failures import Diverged, StepNumbers
from jaxpar.train.guard.nonfinite import first_nonfinite, verdict
from jaxpar.train.loop import run
from jaxpar.train.metrics import read_metrics
from jaxpar.train.restore import restore_state
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.state import TrainState
from jaxpar.train.step import init_state

pytestmark = pytest.mark.usefixtures("keeps_programs")
slow = pytest.mark.slow


def numbers(loss: float, norm: float = 1.0) -> StepNumbers:
    return StepNumbers(7, np.float32(loss), np.float32(norm), np.int32(0))


@pytest.mark.parametrize(
    ("again", "another", "moved", "said"),
    [
        (numbers(2.0), None, 0, "transient: "),
        (numbers(np.inf), numbers(np.nan), 0, "transient: "),
        (numbers(np.nan), numbers(2.0), 0, "data: "),
        (numbers(np.nan), numbers(2.0), 3, "data: "),
        (numbers(np.nan), numbers(np.nan), 0, "persistent: "),
        (numbers(2.0), None, 3, "transient, as it seems: the steps after it were finite (3)"),
    ],
)
def test_a_step_that_is_run_again_tells_a_device_from_the_data_and_the_computation(
    again: StepNumbers, another: StepNumbers | None, moved: int, said: str
) -> None:
    assert verdict(numbers(np.nan), again, another, moved).startswith(said)


LAYOUTS = {
    "scan, fsdp x tensor": config_of("llama", fsdp=2, tensor=4),
    "unrolled, dropout, microbatches": override(
        config_of("gpt2", scan=False, accumulation=2, data=2), {"model.dropout": 0.1}
    ),
    "experts": override(config_of("llama", expert=2), {"model.experts": 4}),
    "stages": staged(config_of("llama", stage=2, fsdp=2), "interleaved", 4, pipeline_virtual=2),
}


def made(config: Config) -> tuple[Experiment, TrainState, dict[str, jax.Array]]:
    """An experiment, its first state and a batch."""
    devices = jax.devices()[: devices_needed(config.mesh)]
    experiment = Experiment(config, Model(config.model), make_plan(config, devices))
    shape = (config.train.batch, config.data.seq_len + 1)
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    rows = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}
    state = init_state(Experiment(config, experiment.model, experiment.plan))
    return experiment, state, put_batch(rows, experiment.plan)


def with_entry(state: TrainState, experiment: Experiment, layer: int, value: float) -> TrainState:
    """The state with three entries of `blocks.up` of a layer as given."""
    order = stored_order(experiment.plan, experiment.config.model.layers)
    place = layer if order is None else order.index(layer)
    old = state.params["blocks"]["up"]
    entries = np.array(old)
    entries[place].reshape(-1)[:3] = value
    blocks = state.params["blocks"] | {"up": jax.device_put(entries, old.sharding)}
    return state._replace(params=state.params | {"blocks": blocks})


@slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_that_is_not_finite_is_named_with_its_layer(name: str) -> None:
    """Of a weight that is none itself, and of one so large that its product is infinite."""
    experiment, state, batch = made(LAYOUTS[name])
    nan = with_entry(state, experiment, 1, np.nan)
    said = "the parameter blocks.up of layer 1 is not finite itself, in 3 entries"
    assert first_nonfinite(experiment, nan, batch).startswith(said)
    huge = with_entry(state, experiment, 1, 3e38)
    said = "the first activation that is not finite is up (up projection of the MLP) of layer 1, in"
    assert first_nonfinite(experiment, huge, batch).startswith(said)


def tiny(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "data.max_bytes": 200_000,
        "train.steps": 8,
        "train.warmup_steps": 1,
        "train.eval_every": 0,
        "checkpoint.every": 2,
        "metrics.log_every": 1,
        "mesh.platform": "cpu",
    }
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return override(config_of("llama", data=2), values | named)


class _WithoutLabels:
    """Batches of which one, by its number, has no label that counts."""

    def __init__(self, batches: Any, number: int):
        self.batches = batches
        self.number = number
        self.read = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        rows = next(self.batches)
        self.read += 1
        if self.read == self.number:
            rows = rows | {"labels": np.full_like(rows["labels"], -1)}
        return rows

    def get_state(self) -> Any:
        return {"inner": self.batches.get_state(), "read": self.read}

    def set_state(self, state: Any) -> None:
        self.batches.set_state(state["inner"])
        self.read = state["read"]


def with_bad_batch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have no label count in the batch of this number."""
    real: Callable[..., Any] = open_module.train_batches
    monkeypatch.setattr(
        open_module, "train_batches", lambda *args: _WithoutLabels(real(*args), number)
    )


def saved_state(config: Config, folder: Path) -> tuple[int, Any]:
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.latest()
    assert step is not None
    return step, restore_state(checkpoints, step, make_experiment(config))[0]


@slow
def test_a_bad_batch_is_told_from_a_bad_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bad_batch(monkeypatch, 5)
    with pytest.raises(Diverged) as error:
        run(tiny(), tmp_path / "run")
    said = str(error.value)
    assert "at step 5: no label of the batch counts" in said
    assert "; data: run again it is the same, and finite on the next batch" in said
    step, state = saved_state(tiny(), tmp_path / "run")
    assert step == 4 and all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


@slow
def test_a_device_that_failed_once_is_told_from_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of one step are wrong, once."""
    real = call_module._compile

    def compile_with_a_fault(experiment: Experiment) -> Any:
        program, said = real(experiment)
        calls = []

        def step(state: Any, batch: Any) -> Any:
            calls.append(1)
            if len(calls) != 5:
                return program(state, batch)
            nothing = jnp.float32(np.nan)
            wrong = {"loss": nothing, "grad_norm": nothing, "learning_rate": nothing}
            wrong |= {"tokens": jnp.float32(1), "overflows": jnp.int32(0)}
            return state._replace(step=state.step + 1), wrong

        return step, said

    monkeypatch.setattr(call_module, "_compile", compile_with_a_fault)
    with pytest.raises(Diverged) as error:
        run(tiny(checkpoint__every=3, train__eval_every=0), tmp_path / "run")
    said = str(error.value)
    assert (
        "at step 5: looked at once more, all that it computes is finite; transient, as it" in said
    )
    assert "the checkpoint of step 3 is kept" in said


@slow
def test_a_computation_that_overflows_is_persistent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpar.train.experiments.make.check", lambda config, training: config)
    wild = tiny(train__learning_rate=1e30, train__clip_norm=0.0)
    with pytest.raises(Diverged) as error:
        run(wild, tmp_path / "run")
    said = str(error.value)
    first = "the activations are finite, and the first gradient of the backward pass that is not is"
    assert f"at step 2: {first} that of " in said and " of layer 1, in " in said
    assert "; persistent: run again it is the same" in said


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


def same_state(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def guard_seconds(folder: Path) -> float:
    """The time that bad steps have cost a run of one process."""
    (life,) = read_lives(folder).lives
    return life.seconds["guard"]


@slow
def test_a_skipped_step_changes_nothing_and_too_many_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped behind it and resumed, the end is the same to the bit."""
    with_bad_batch(monkeypatch, 3)
    skipping = tiny(train__on_nonfinite="skip", train__max_bad_steps=1)
    assert run(skipping, tmp_path / "whole").step == 8
    assert "warning: step 3 is skipped: loss nan" in capsys.readouterr().out
    found = losses(tmp_path / "whole")
    assert np.isnan(found[3]) and all(np.isfinite(found[step]) for step in (1, 2, 4, 8))
    assert guard_seconds(tmp_path / "whole") > 0
    run(override(skipping, {"train.stop_at": 5}), tmp_path / "stopped")
    run(skipping, tmp_path / "stopped")
    same_state(
        saved_state(skipping, tmp_path / "stopped"), saved_state(skipping, tmp_path / "whole")
    )
    # the count of bad steps is the run's, not the call's
    monkeypatch.undo()
    with_bad_batch(monkeypatch, 9)
    longer = override(skipping, {"train.steps": 12})
    with pytest.raises(Diverged, match=r"train\.max_bad_steps=1 has been reached"):
        run(longer, tmp_path / "whole")


@slow
def test_a_run_that_rolls_back_goes_on_past_the_bad_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bad_batch(monkeypatch, 5)
    rolling = tiny(train__on_nonfinite="rollback")
    assert run(rolling, tmp_path / "whole").step == 8
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: step 5 was bad: no label of the batch counts" in said
    assert "the run goes on from the checkpoint of step 4, with the batches after" in said
    assert sorted(losses(tmp_path / "whole")) == list(range(1, 9))
    assert all(np.isfinite(loss) for loss in losses(tmp_path / "whole").values())
    assert guard_seconds(tmp_path / "whole") > 0
    # one that is stopped behind it and resumed ends as this one does
    run(override(rolling, {"train.stop_at": 6}), tmp_path / "stopped")
    run(rolling, tmp_path / "stopped")
    same_state(saved_state(rolling, tmp_path / "stopped"), saved_state(rolling, tmp_path / "whole"))
