"""LoRA runs: what their checkpoints hold, how they go on, what is exported of them, and what is
refused.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

from jaxpar.base.config import Config, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.launch.local import train_config as train
from jaxpar.models import Model
from jaxpar.models.hf import import_hf, peft
from jaxpar.models.hf.export import export_hf
from jaxpar.models.lora import with_old_names
from jaxpar.models.views import base_config
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan
from jaxpar.train.restore import (
    config_of,
    drop_stages,
    export_run,
    fingerprint,
    frozen_folder,
    import_run,
    load_params,
    load_run,
    restore_state,
    saved_part,
    state_metadata,
)
from jaxpar.train.runs.folder.run_folder import read_run_config
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.step import init_state

pytestmark = pytest.mark.usefixtures("keeps_programs")

MODEL = ModelConfig(
    family="llama", vocab_size=256, layers=2, embed=32, heads=4, kv_heads=2, mlp=48, max_seq_len=32
)
STAGES = {"mesh.data": -1, "mesh.fsdp": 2, "mesh.stage": 2, "mesh.tensor": 1}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = Model(MODEL)
    export_hf(
        jax.jit(model.init)(jax.random.key(7)),
        model,
        tmp_path / "base",
    )
    return tmp_path / "base"


def config_for(source: Path, **changes: object) -> Config:
    fixed = {
        "mesh.platform": "cpu",
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "data.seq_len": 16,
        "data.max_bytes": 50_000,
        "data.source": "stdlib",
        "data.tokenizer": "bytes",
        "train.steps": 4,
        "train.batch": 4,
        "train.warmup_steps": 0,
        "train.eval_batches": 1,
        "train.final_eval_batches": 1,
        "checkpoint.every": 2,
        "train.learning_rate": 0.05,
        "model.lora.targets": ["q", "v", "down"],
    }
    return override(config_of(source, source), fixed | changes)


def logits(config: Config, params: object) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 256, (4, 16))
    plan = drop_stages(make_plan(config))
    jitted = jax.jit(
        lambda params, batch: Model(config.model).logits(
            params,
            batch,
            plan,
        )
    )
    return np.asarray(jitted(params, {"tokens": jnp.asarray(tokens)}))


@pytest.mark.slow
def test_a_run_saves_what_it_trains_and_goes_on_with_its_base(base: Path, tmp_path: Path) -> None:
    config = config_for(base, **{"train.init": str(base), "model.lora.rank": 2})
    whole = train(config, tmp_path / "whole")
    part = override(config, {"train.stop_at": 2})
    train(part, tmp_path / "part")
    found = train(config, tmp_path / "part")
    assert (found.step, found.loss) == (4, whole.loss)
    saved = (
        ocp.StandardCheckpointer()
        .metadata(tmp_path / "part" / "checkpoints" / "4" / "state")
        .item_metadata.tree
    )
    assert saved["params"].keys() == {"blocks"}
    assert set(saved["params"]["blocks"]) == {"lora"}
    step, params = load_run(tmp_path / "part", 4, make_experiment(config))
    assert step == 4
    # Merged into its base and exported, it is a plain model with the same answers; both are
    # float32.
    export_run(config, tmp_path / "part", tmp_path / "merged", 4, "float32")
    plain = config_for(tmp_path / "merged")
    merged = import_hf(tmp_path / "merged", Model(plain.model), make_plan(plain))
    np.testing.assert_allclose(
        logits(plain, merged),
        logits(config, params),
        rtol=0,
        atol=2e-5,
    )
    untouched = load_file(tmp_path / "merged" / "model.safetensors")
    old = load_file(base / "model.safetensors")
    changed = {name for name, array in old.items() if not np.array_equal(array, untouched[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "down_proj"} and len(
        changed
    ) == 6
    # Its adapter, read again, is the same run's.
    export_run(config, tmp_path / "part", tmp_path / "adapter", 4, "float32", adapter=True)
    again = config_for(tmp_path / "adapter", **STAGES)
    import_run(again, tmp_path / "adapter", tmp_path / "imported")
    assert read_run_config(tmp_path / "imported").train.init == str(base)
    imported = read_run_config(tmp_path / "imported")
    unstaged = make_experiment(imported)
    unstaged = replace(unstaged, plan=drop_stages(unstaged.plan))
    staged = load_run(tmp_path / "imported", 0, unstaged)[1]
    np.testing.assert_allclose(
        logits(again, staged),
        logits(config, params),
        rtol=0,
        atol=2e-5,
    )
    # LoRA that goes on from an adapter or a run is beside the same base; another LoRA has it merged
    # into its base.
    for source in ("adapter", "part"):
        assert frozen_folder(tmp_path / source, config.model.lora) == base
    wider = override(again, {"model.lora.rank": 3})
    import_run(wider, tmp_path / "adapter", tmp_path / "wider")
    assert frozen_folder(tmp_path / "wider", wider.model.lora) == tmp_path / "adapter"
    load_run(tmp_path / "wider", 0, make_experiment(read_run_config(tmp_path / "wider")))
    # A full run may start from the run: its adapter is merged.
    full = config_for(base)
    started = load_params(tmp_path / "part", make_experiment(full), step=4)
    np.testing.assert_allclose(
        logits(full, started),
        logits(config, params),
        rtol=0,
        atol=2e-5,
    )


def test_a_checkpoint_with_the_old_names_of_lora_is_read_to_the_bit(
    base: Path, tmp_path: Path
) -> None:
    """Beside `q` there were `q_lora_a` and `q_lora_b`, in the optimizer's state too."""
    config = config_for(base, **{"train.init": str(base), "model.lora.rank": 2})
    experiment = make_experiment(config)
    model = experiment.model
    fresh = init_state(Experiment(config, model, experiment.plan), load_params(base, experiment))
    count = itertools.count(1)
    state = jax.tree.map(lambda x: x + next(count), fresh)
    state = state._replace(params=model.merge(fresh.params, model.trained(state.params)))
    saved = with_old_names(saved_part(state, model))
    assert "q_lora_a" in saved.params["blocks"] and "lora" not in saved.params["blocks"]
    checkpoints = TrainingCheckpoints(tmp_path / "checkpoints", config.checkpoint)
    beside = state_metadata(experiment, None, None, fingerprint(model, state.params))
    step = int(state.step)
    checkpoints.save(step, saved, beside)
    found, _ = restore_state(checkpoints, step, experiment)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, found, state)


@pytest.mark.slow
def test_a_base_that_is_gone_or_has_changed_is_said(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = config_for(base, **{"train.init": str(base), "model.lora.rank": 2, "train.stop_at": 2})
    train(config, tmp_path / "run")
    longer = override(config, {"train.stop_at": 0})
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    shutil.copytree(base, tmp_path / "kept")
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(
        UserError, match="base has other weights now than those that this run trains LoRA beside"
    ):
        train(longer, tmp_path / "run")
    shutil.rmtree(base)
    with pytest.raises(UserError, match=r"there is no .*base"):
        train(longer, tmp_path / "run")
    shutil.move(tmp_path / "kept", base)
    assert train(longer, tmp_path / "run").step == 4
    export_run(config, tmp_path / "run", tmp_path / "adapter", 4, "float32", adapter=True)
    shutil.rmtree(base)
    assert main(["convert", str(tmp_path / "adapter"), str(tmp_path / "imported")]) == 2
    said = capsys.readouterr().err.strip()
    assert "base_model_name_or_path" in said and "is no folder here" in said and "\n" not in said


def test_refusals(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there are none: name their folder in train\.init"):
        train(config_for(base, **{"model.lora.rank": 2}), tmp_path / "run")
    config = config_for(base)
    import_run(config, base, tmp_path / "plain")
    with pytest.raises(UserError, match=r"--adapter: .*plain was trained without LoRA"):
        export_run(config, tmp_path / "plain", tmp_path / "out", 0, "float32", adapter=True)
    model = Model(base_config(config.model))
    (tmp_path / "a").mkdir()
    for text, said in (
        (
            '{"r": 2, "lora_alpha": 4, "use_dora": true}',
            "use_dora=True is not supported: only False",
        ),
        ('{"r": 0, "lora_alpha": 4}', "no usable r and lora_alpha: found 0 and 4"),
        ('{"r": 2, "lora_alpha": 4}', "has no adapter_model.safetensors"),
        (
            '{"r": 2, "lora_alpha": 4, "init_lora_weights": "pissa"}',
            "init_lora_weights='pissa' is not supported",
        ),
        ("[", "adapter_config.json is not valid JSON"),
    ):
        (tmp_path / "a" / peft.CONFIG).write_text(text)
        with pytest.raises(UserError, match=said):
            peft.lora_of(tmp_path / "a", model.config)
