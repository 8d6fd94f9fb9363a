"""What is refused today in a run of an earlier version stops nobody who wants its weights, and
training may mend it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.base.config import Config, ModelConfig, load_config, override
from jaxpar.base.config.checks import check, outdated
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.toml import to_toml
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs
from jaxpar.cli.main import main
from jaxpar.cli.trained import EvalArgs
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.restore import saved_part, state_metadata
from jaxpar.train.runs.folder.run_folder import (
    compare_run,
    keep_config,
    refused_changes,
    replaced_values,
)
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.step import init_state

# What an earlier version took, the keys that are refused for it today, and what may stand there
# instead.
OLD = {
    "floor above the rate": (
        {"train.min_learning_rate_ratio": 3.0},
        {"train.min_learning_rate_ratio": 0.1},
    ),
    "beta2": ({"optimizer.adamw.beta2": 1.0}, {"optimizer.adamw.beta2": 0.95}),
    "no rate": ({"train.learning_rate": 0.0}, {"train.learning_rate": 1e-3}),
    "decay": ({"train.decay_steps": 500, "train.steps": 8}, {"train.decay_steps": 0}),
    "moments": (
        {"precision.moments": "bfloat16", "optimizer.adamw.beta1": 0.98},
        {"precision.moments": "float32"},
    ),
    "seed": ({"train.seed": -1}, {"train.seed": 1}),
    "log": ({"metrics.log_every": 0}, {"metrics.log_every": 10}),
}


def config(data: Path) -> Config:
    sizes = {
        "vocab_size": 256,
        "layers": 1,
        "embed": 16,
        "heads": 2,
        "mlp": 16,
        "max_seq_len": 16,
    }
    (data / "text.txt").write_text("the mesh of devices " * 40)
    return override(
        Config(model=ModelConfig(**sizes), mesh=MeshSpec(platform="cpu")),
        {
            "data.source": "text",
            "data.path": str(data / "text.txt"),
            "data.seq_len": 16,
            "train.batch": 4,
            "train.warmup_steps": 0,
        },
    )


@pytest.mark.parametrize("name", OLD)
def test_an_old_value_is_refused_for_training_alone_and_may_be_replaced(
    name: str, tmp_path: Path
) -> None:
    old, new = OLD[name]
    before = override(config(tmp_path), old)
    assert check(before, training=False) == before
    with pytest.raises(UserError):
        check(before)
    keep_config(tmp_path / "run", before)
    (tmp_path / "run" / "checkpoints" / "5" / "state").mkdir(parents=True)
    assert load_config(str(tmp_path / "run")) == before
    after = check(override(before, new))
    assert not refused_changes(tmp_path / "run", before, after)
    assert compare_run(tmp_path / "run", after) == before
    (key, value), *_ = new.items()
    assert f"{key} {old[key]} -> {value}" in replaced_values(before, after)
    # which was not refused, and so is the run's
    other = replace(after, train=replace(after.train, z_loss=1e-6))
    with pytest.raises(UserError, match=r"another config \(train\.z_loss: "):
        compare_run(tmp_path / "run", other)


def test_good_values_are_not_replaced(tmp_path: Path) -> None:
    assert not outdated(config(tmp_path)) and not replaced_values(
        config(tmp_path), override(Config(), OLD["beta2"][1])
    )


def test_a_command_line_refuses_what_it_gives_and_not_what_a_run_has(tmp_path: Path) -> None:
    old = config(tmp_path)
    for changes, _ in OLD.values():
        old = override(old, changes)
    (tmp_path / "old.toml").write_text(to_toml(old))
    assert (
        config_args("jaxpar eval", EvalArgs, [str(tmp_path / "old.toml"), "--json"])[1].config
        == old
    )
    with pytest.raises(UserError, match=r"train\.batch=0 is below 1"):
        config_args("jaxpar eval", EvalArgs, [str(tmp_path / "old.toml"), "--train.batch", "0"])
    with pytest.raises(UserError, match=r"train\.seed=-1 is below 0"):
        check(
            config_args("jaxpar train", TrainArgs, [str(tmp_path / "old.toml")], training=True)[
                1
            ].config
        )


@pytest.mark.slow
def test_an_old_run_is_evaluated_generated_from_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    old = config(tmp_path)
    for changes, _ in OLD.values():
        old = override(old, changes)
    run = tmp_path / "run"
    experiment = make_experiment(old, jax.devices()[:1], training=False)
    model = experiment.model
    state = init_state(Experiment(override(old, {"train.seed": 1}), model, experiment.plan))
    keep_config(run, old)
    checkpoints = TrainingCheckpoints(run / "checkpoints", old.checkpoint)
    checkpoints.save(
        5,
        saved_part(state, model),
        state_metadata(experiment, None, None, None),
    )
    checkpoints.close()
    assert main(["eval", str(run)]) == 0
    assert main(["generate", str(run), "--prompt", "the", "--max-tokens", "2"]) == 0
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0
    found = capsys.readouterr().out
    assert "step 5: validation loss" in found and "exported step 5" in found
    assert np.isfinite(float(found.partition("validation loss ")[2].split()[0]))
