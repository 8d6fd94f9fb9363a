"""Folders whose weights lie beside those of another: adapters of adapters, runs with LoRA, and those
that go round in a circle.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import Config, Lora, ModelConfig, TrainConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.cli.main import main
from jaxpar.launch.local import train_config
from jaxpar.models import Model
from jaxpar.models.hf import peft
from jaxpar.models.hf.export import export_hf
from jaxpar.train.experiment import Experiment
from jaxpar.train.restore import adapters_of, config_of, frozen_folder, load_params, model_of
from jaxpar.train.restore.folder_model import folders_of
from jaxpar.train.runs.folder.run_folder import keep_config

MODEL = ModelConfig("llama", vocab_size=256, layers=1, embed=16, heads=2, mlp=32, max_seq_len=32)
LORA = Lora(2)


def adapter(folder: Path, base: str | Path) -> Path:
    """The folder of an adapter that has no weights; whether it goes round is told before."""
    folder.mkdir(exist_ok=True)
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (folder / peft.CONFIG).write_text(json.dumps(said))
    return folder


def run(folder: Path, init: str | Path) -> Path:
    """A run folder with LoRA and nothing but its config."""
    folder.mkdir(exist_ok=True)
    model = replace(MODEL, lora=LORA)
    keep_config(folder, Config(model=model, train=TrainConfig(init=str(init))))
    return folder


def of_itself(folder: Path) -> Path:
    return adapter(folder / "a", folder / "a")


def of_itself_from_its_own_folder(folder: Path) -> Path:
    return adapter(folder / "a", ".")


def of_itself_by_a_link(folder: Path) -> Path:
    made = adapter(folder / "a", folder / "link")
    os.symlink(made, folder / "link")
    return made


def of_two(folder: Path) -> Path:
    adapter(folder / "b", folder / "a")
    return adapter(folder / "a", folder / "b")


def of_five_behind_one(folder: Path) -> Path:
    for number in range(5):
        adapter(folder / str(number), folder / str((number + 1) % 5))
    return adapter(folder / "a", folder / "0")


def of_a_run(folder: Path) -> Path:
    return run(folder / "a", folder / "a")


def of_a_run_and_an_adapter(folder: Path) -> Path:
    adapter(folder / "b", folder / "a")
    return run(folder / "a", folder / "b")


CIRCLES = (
    of_itself,
    of_itself_from_its_own_folder,
    of_itself_by_a_link,
    of_two,
    of_five_behind_one,
    of_a_run,
    of_a_run_and_an_adapter,
)


@pytest.mark.parametrize("make", CIRCLES)
def test_a_circle_is_told_by_whatever_reads_it(make, tmp_path: Path) -> None:
    folder = make(tmp_path)
    for read in (
        model_of,
        lambda source: frozen_folder(source, LORA),
        lambda source: config_of(source, tmp_path / "new"),
    ):
        with pytest.raises(UserError, match=r"in a circle, /.* -> /"):
            read(folder)


@pytest.mark.parametrize("make", CIRCLES)
def test_a_circle_is_a_line_of_each_command(
    make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make(tmp_path))
    for words in (
        ["generate", folder, "--prompt", "x", "--mesh.platform", "cpu"],
        ["convert", folder, str(tmp_path / "out")],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("jaxpar: error: ") and "\n" not in said


def test_a_long_row_of_adapters_is_refused(tmp_path: Path) -> None:
    for number in range(2000):
        adapter(tmp_path / str(number), tmp_path / str(number + 1))
    with pytest.raises(UserError, match="beside more than 32 folders"):
        model_of(tmp_path / "0")


def trained(folder: Path) -> tuple[Path, Experiment]:
    """An adapter beside another, beside a whole model; and the model on one device."""
    model = Model(MODEL)
    plan = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
    export_hf(jax.jit(model.init)(jax.random.key(0)), model, folder / "base")
    adapted = Model(replace(MODEL, lora=LORA))
    params = jax.tree.map(lambda x: x + 0.1, jax.jit(adapted.init)(jax.random.key(1)))
    peft.export_adapter(params, adapted, folder / "first", str(folder / "base"))
    peft.export_adapter(params, adapted, folder / "second", str(folder / "first"))
    return folder / "second", Experiment(Config(model=MODEL), model, plan)


@pytest.mark.slow
def test_adapters_of_adapters_are_merged_one_after_the_other(tmp_path: Path) -> None:
    second, experiment = trained(tmp_path)
    first, base = tmp_path / "first", tmp_path / "base"
    assert folders_of(second) == adapters_of(second) == [second, first, base]
    once, twice, whole = (load_params(it, experiment) for it in (first, second, base))
    moved = jax.tree.map(jnp.subtract, once, whole)
    assert any(np.abs(leaf).max() > 0.01 for leaf in jax.tree.leaves(moved))
    for have, want in zip(
        jax.tree.leaves(jax.tree.map(jnp.subtract, twice, once)),
        jax.tree.leaves(moved),
        strict=True,
    ):
        np.testing.assert_allclose(have, want, atol=1e-5)
    assert config_of(second, tmp_path / "new").model.lora == model_of(first).lora


@pytest.mark.parametrize("setting", ["train.init", "distill.teacher"])
def test_a_run_is_no_beginning_and_no_teacher_of_itself(setting: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time. " * 200)
    config = override(
        Config(model=MODEL, mesh=MeshSpec(data=-1)),
        {"data.source": "text", "data.path": str(tmp_path / "text.txt"), "data.seq_len": 16},
    )
    config = override(config, {setting: str(tmp_path / "run" / ".." / "run")})
    with pytest.raises(UserError, match=f"{setting}=.* this run"):
        train_config(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()
