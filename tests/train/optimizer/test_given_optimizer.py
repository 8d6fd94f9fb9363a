"""An optimizer that a program gives is told from another whose state has the same form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from traced_steps import config_of

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.train import run
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.given_optimizer import as_optimizer, other_optimizer_note
from jaxpar.train.optimizer.pruning import PruningState
from jaxpar.train.restore.metadata import require_optimizer, state_metadata


def experiment_of(optimizer: Any, **mesh: int) -> Experiment:
    config = config_of("llama", **mesh)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return make_experiment(config, devices, optimizer=optimizer)


def lion(rate: float) -> optax.GradientTransformation:
    """With numbers in three places: in the program, as a constant array, and in the state."""
    weights = jax.numpy.array([rate, 1.0])
    return optax.chain(
        optax.scale_by_lion(),
        optax.scale_by_schedule(lambda count: -weights[count % 2]),
    )


def closing_in_a_jit(rate: float) -> optax.GradientTransformation:
    """With its number as an array that an inner program closes over."""
    rates = jax.numpy.array([rate, 1.0])
    scale = jax.jit(lambda x: -x * rates[0])
    return optax.stateless(lambda updates, _: jax.tree.map(scale, updates))


def with_rate_in_state(rate: float) -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.lion)(rate)


@pytest.mark.parametrize(
    ("trained_with", "given"),
    [
        (optax.lion(1e-4), optax.lion(1e-3)),
        (optax.adam(1e-3), optax.nadam(1e-3)),
        (closing_in_a_jit(1e-3), closing_in_a_jit(1e-4)),
        (lion(1e-4), lion(1e-3)),
        (with_rate_in_state(1e-4), with_rate_in_state(1e-3)),
    ],
)
def test_another_optimizer_with_a_state_of_the_same_form_is_noticed(
    trained_with: optax.GradientTransformation, given: optax.GradientTransformation
) -> None:
    before = experiment_of(trained_with)
    now = experiment_of(given)
    assert jax.tree.structure(before.state.opt_state) == jax.tree.structure(now.state.opt_state)
    said = other_optimizer_note(before.optimizer_fingerprint, now.optimizer_fingerprint, 7)
    assert said.startswith("warning: the optimizer that is given is not the one")
    assert "until step 7" in said


@pytest.mark.parametrize("make", [lion, with_rate_in_state])
def test_the_same_optimizer_made_again_is_the_same_on_any_mesh(make: Any) -> None:
    before = experiment_of(make(1e-4), data=2, tensor=2)
    now = experiment_of(make(1e-4), fsdp=2, stage=2)
    assert before.optimizer_fingerprint == now.optimizer_fingerprint is not None


def test_what_is_not_known_is_not_said() -> None:
    """Other versions may write one optimizer in two ways; a config's settings are compared."""
    here = experiment_of(optax.lion(1e-4)).optimizer_fingerprint
    assert here is not None
    older = {"program": "0", "versions": "jax 0.9, optax 0.2.6"}
    assert other_optimizer_note(older, here, 7) == ""
    assert other_optimizer_note(None, here, 7) == ""  # a checkpoint of an earlier version
    assert experiment_of(None).optimizer_fingerprint is None


def test_an_optimizer_of_ones_own_class_prunes_and_is_not_the_configs(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"pruning.method": "magnitude", "pruning.end": 100}
    config = override(config_of("llama"), changes)
    lion = optax.lion(1e-3)
    mine = Optimizer("mine", lambda _: lion, by_layer=True, clip_norm=0.0)
    devices = jax.devices()[:1]
    experiment = make_experiment(config, devices, optimizer=mine)
    assert isinstance(experiment.state.opt_state, PruningState)
    assert as_optimizer(experiment.optimizer, config) is experiment.optimizer  # pruned once
    assert experiment.optimizer_fingerprint is not None
    saved = state_metadata(experiment, None, None, None)["optimizer"]
    require_optimizer(experiment.optimizer, saved, tmp_path)
    configs_own = make_experiment(config, devices)
    with pytest.raises(UserError, match="a program gave"):
        require_optimizer(configs_own.optimizer, saved, tmp_path)
    with pytest.raises(UserError, match=r"optimizer\.name=adamw, "):
        saved = state_metadata(configs_own, None, None, None)["optimizer"]
        require_optimizer(experiment.optimizer, saved, tmp_path)


@pytest.mark.slow
def test_a_run_says_that_it_goes_on_with_another_optimizer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "data.source": "text",
        "data.path": str(tmp_path / "text.txt"),
        "data.seq_len": 16,
        "model.vocab_size": 256,
        "train.batch": 4,
        "train.steps": 3,
        "train.warmup_steps": 0,
        "train.eval_every": 0,
        "mesh.platform": "cpu",
    }
    (tmp_path / "text.txt").write_text("a mesh, a ring and a shard. " * 200)
    config = override(config_of("llama"), changes)

    def train_until(step: int, rate: float) -> str:
        stopped: Config = override(config, {"train.stop_at": step})
        optimizer = optax.lion(rate)
        experiment = make_experiment(stopped, jax.devices()[:1], optimizer=optimizer)
        run(experiment, tmp_path / "run")
        out, err = capfd.readouterr()
        return " ".join((out + err).split())

    warning = "the optimizer that is given is not the one"
    assert warning not in train_until(1, 1e-4)
    assert warning not in train_until(2, 1e-4)
    assert f"warning: {warning} that this run was trained with until step 2" in train_until(3, 1e-3)
