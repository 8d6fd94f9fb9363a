"""Hugging Face folder -> run -> Hugging Face folder, and training from an import."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.base.config import Config, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.launch.local import train_config as train
from jaxpar.models import Model
from jaxpar.models.hf.export import export_hf
from jaxpar.train.opening import first_step, open_folder
from jaxpar.train.restore import config_of, export_run, import_run, load_run

MODEL = ModelConfig(
    family="llama", vocab_size=256, layers=2, embed=32, heads=4, kv_heads=2, mlp=48, max_seq_len=32
)


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    model = Model(MODEL)
    export_hf(
        jax.jit(model.init)(jax.random.key(7)),
        model,
        tmp_path / "hf",
    )
    return tmp_path / "hf"


def config_for(folder: Path) -> Config:
    changes = {
        "mesh.platform": "cpu",
        "mesh.data": 1,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "data.seq_len": 16,
        "data.max_bytes": 50_000,
    }
    changes |= {
        "train.steps": 2,
        "train.batch": 4,
        "train.warmup_steps": 0,
        "train.eval_batches": 1,
    }
    changes |= {"train.final_eval_batches": 1}
    return override(
        config_of(folder, folder), {"data.source": "stdlib", "data.tokenizer": "bytes"} | changes
    )


@pytest.mark.slow
def test_an_import_exports_to_the_same_bits_and_trains_on(hf_folder: Path, tmp_path: Path) -> None:
    config = config_for(hf_folder)
    import_run(config, hf_folder, tmp_path / "run")
    assert export_run(config, tmp_path / "run", tmp_path / "back", 0, "float32") == 0
    want, found = (
        load_file(folder / "model.safetensors") for folder in (hf_folder, tmp_path / "back")
    )
    assert want.keys() == found.keys()
    for name in want:
        np.testing.assert_array_equal(found[name], want[name])
    opened = open_folder(config, tmp_path / "run", None, print)
    params = first_step(opened, print).state.params
    opened.checkpoints.close()
    opened.lock.close()
    _, imported = load_run(tmp_path / "run", 0, opened.experiment)
    jax.tree.map(np.testing.assert_array_equal, params, imported)
    assert train(config, tmp_path / "run").step == 2
    assert export_run(config, tmp_path / "run", tmp_path / "trained", 0, "bfloat16") == 2
    with pytest.raises(UserError, match="has checkpoints already"):
        import_run(config, hf_folder, tmp_path / "run")


@pytest.mark.slow
def test_stages_store_an_import_in_their_order_and_export_it_in_the_files(tmp_path: Path) -> None:
    model = Model(replace(MODEL, layers=5))
    export_hf(
        jax.jit(model.init)(jax.random.key(8)),
        model,
        tmp_path / "hf",
    )
    changes = {
        "mesh.tensor": 1,
        "mesh.stage": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.virtual": 2,
    }
    config = override(
        config_for(tmp_path / "hf"),
        changes | {"pipeline.layers": (1, 2, 1, 1)},
    )
    import_run(config, tmp_path / "hf", tmp_path / "run")
    export_run(config, tmp_path / "run", tmp_path / "back", 0, "float32")
    export_run(config_for(tmp_path / "hf"), tmp_path / "run", tmp_path / "unstaged", 0, "float32")
    want, *found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back", "unstaged")
    )
    for name, array in want.items():
        for tensors in found:
            np.testing.assert_array_equal(tensors[name], array)
    assert train(config, tmp_path / "run").step == 2


@pytest.mark.slow
def test_fine_tuning_in_bfloat16_with_its_state_in_host_memory(
    hf_folder: Path, tmp_path: Path
) -> None:
    changes = {
        "precision.params": "bfloat16",
        "precision.moments": "bfloat16",
        "memory.policy": "full",
    }
    changes |= {"memory.parameters": "offload", "memory.optimizer": "offload"}
    config = override(config_for(hf_folder), changes)
    import_run(config, hf_folder, tmp_path / "run")
    export_run(config, tmp_path / "run", tmp_path / "back", 0, "float32")
    want, found = (
        load_file(folder / "model.safetensors") for folder in (hf_folder, tmp_path / "back")
    )
    for name, array in want.items():
        if array.ndim > 1:
            matrix = np.asarray(array.astype(jnp.bfloat16), np.float32)
        else:
            matrix = array
        np.testing.assert_array_equal(found[name], matrix)
    assert train(config, tmp_path / "run").step == 2
    assert export_run(config, tmp_path / "run", tmp_path / "trained", 0, "bfloat16") == 2


def test_a_config_of_another_model_is_refused(hf_folder: Path, tmp_path: Path) -> None:
    config = override(config_for(hf_folder), {"model.mlp": 64})
    with pytest.raises(UserError, match="mlp is 48 there and 64 here"):
        import_run(config, hf_folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_import_grows_the_vocabulary(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rows that are the mean of the others, which the export has as well."""
    model = Model(replace(MODEL, vocab_size=250, layers=1, tied_head=tied))
    export_hf(jax.jit(model.init)(jax.random.key(7)), model, tmp_path / "hf")
    config = override(config_for(tmp_path / "hf"), {"model.vocab_size": 260})
    import_run(config, tmp_path / "hf", tmp_path / "run")
    assert "10 tokens are new, ids 250 to 259" in capsys.readouterr().err
    export_run(config, tmp_path / "run", tmp_path / "back", 0, "float32")
    want, found = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", tmp_path / "back")
    )
    assert want.keys() == found.keys()
    grown = 0
    for name, old in want.items():
        new = found[name]
        np.testing.assert_array_equal(new[: len(old)], old)
        # float32 means of 250 rows, in another order
        for row in new[len(old) :]:
            np.testing.assert_allclose(row, old.mean(0), atol=1e-7)
            grown += 1
    assert grown == (10 if tied else 20)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 260


def test_lora_learns_no_new_tokens_and_a_vocabulary_never_shrinks(
    hf_folder: Path, tmp_path: Path
) -> None:
    config = override(config_for(hf_folder), {"model.vocab_size": 260, "model.lora.rank": 2})
    with pytest.raises(UserError, match="LoRA trains no embedding"):
        import_run(config, hf_folder, tmp_path / "run")
    smaller = override(config_for(hf_folder), {"model.vocab_size": 200})
    with pytest.raises(UserError, match="vocab_size is 256 there and 200 here"):
        import_run(smaller, hf_folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
