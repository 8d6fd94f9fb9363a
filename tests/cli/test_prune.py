"""`jaxpar prune`: a new run of a trained one, with its zeros, which is evaluated and trained on."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpar.base.config import Config, override
from jaxpar.cli.main import main
from jaxpar.launch.local import train_config as train
from jaxpar.train.experiments import make_experiment
from jaxpar.train.restore import load_params
from jaxpar.train.runs.folder.run_folder import read_run_config

pytestmark = pytest.mark.slow

SMALL = {
    "model.layers": 2,
    "model.embed": 32,
    "model.mlp": 64,
    "model.max_seq_len": 32,
    "data.seq_len": 32,
    "data.max_bytes": 50_000,
    "train.steps": 6,
    "train.batch": 8,
    "train.warmup_steps": 0,
    "train.eval_batches": 1,
    "train.final_eval_batches": 1,
    "mesh.platform": "cpu",
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "mesh.data": 1,
}


def test_a_run_is_pruned_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = override(Config(), SMALL)
    train(override(config, {"train.stop_at": 4}), tmp_path / "dense")
    pruned = tmp_path / "pruned"
    words = ["prune", str(tmp_path / "dense"), str(pruned), "--batches", "2"]
    assert main([*words, "--model.sparsity.form", "2:4"]) == 0
    assert "50.0% of the blocks' matrices are zero" in capsys.readouterr().out
    made = read_run_config(pruned)
    assert made.model.sparsity.form == "2:4"
    up = load_params(pruned, make_experiment(made))["blocks"]["up"]
    groups = jnp.sum((up != 0).reshape(2, 8, 4, 64), axis=2)
    assert bool((groups == 2).all())
    assert train(made, pruned).step == 6

    unstructured = ["prune", str(tmp_path / "dense"), str(tmp_path / "half"), "--matrices", "up"]
    assert main([*unstructured, "--criterion", "magnitude", "--sparsity", "0.75"]) == 0
    half = load_params(tmp_path / "half", make_experiment(config))["blocks"]
    assert float(jnp.mean(half["up"] == 0)) == 0.75 and bool((half["down"] != 0).all())

    assert main([*words, "--model.sparsity.form", "2:4"]) == 2
    assert "has checkpoints already" in capsys.readouterr().err
    other = [*words[:2], str(tmp_path / "other"), "--sparsity", "0.5"]
    assert main([*other, "--model.sparsity.form", "2:4"]) == 2
    assert "--sparsity has no effect with model.sparsity.form=2:4" in capsys.readouterr().err
