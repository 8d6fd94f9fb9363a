"""Fine-tuning against PEFT and transformers: the same losses from the same start, and adapters in
both directions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.models import Model
from jaxpar.models.hf import peft
from jaxpar.models.views import base_config
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan
from jaxpar.train.optimizer.learning_rate import learning_rate
from jaxpar.train.restore import config_of, load_params
from jaxpar.train.step import init_state, make_train_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PEFT: Any = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

STEPS = 20
ROWS = 8
S = 16
V = 91
MODELS: dict[str, tuple[Any, list[str]]] = {
    "llama": (
        lambda: transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            initializer_range=0.1,
        ),
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "gpt2": (
        lambda: transformers.GPT2Config(
            vocab_size=V,
            n_embd=48,
            n_layer=3,
            n_head=6,
            n_inner=72,
            n_positions=32,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            initializer_range=0.1,
        ),
        ["c_fc", "c_proj"],
    ),
}


def base_model(name: str, folder: Path) -> Any:
    """A tiny random model of transformers, saved."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name][0]())
    model.save_pretrained(folder)
    return model.eval()


def adapter(model: Any, folder: Path, targets: list[str]) -> Any:
    """A random adapter of PEFT beside a model, B's among them, saved with a base that is named from
    its folder.
    """
    torch.manual_seed(1)
    lora = PEFT.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=targets,
        init_lora_weights=False,
        fan_in_fan_out="c_fc" in targets or "c_attn" in targets,
        task_type="CAUSAL_LM",
    )
    adapted = PEFT.get_peft_model(model, lora)
    adapted.save_pretrained(folder)
    file = folder / peft.CONFIG
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "../base"})
    )
    return adapted


def config_for(source: Path) -> Config:
    changes = {
        "data.seq_len": S,
        "data.source": "stdlib",
        "train.batch": ROWS,
        "train.steps": STEPS,
        "train.warmup_steps": 4,
        "train.learning_rate": 5e-3,
        "optimizer.adamw.weight_decay": 0.1,
        "train.clip_norm": 0.5,
        "mesh.data": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "model.vocab_multiple": 8,
    }
    return override(config_of(source, source), changes)


def batches() -> np.ndarray:
    """Tokens [steps, rows, S + 1], such that there is something to learn: a token decides the next
    one mostly.
    """
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, V, (STEPS, ROWS, S + 1))
    after = rng.permutation(V)
    for t in range(S):
        tokens[..., t + 1] = np.where(
            rng.random((STEPS, ROWS)) < 0.8, after[tokens[..., t]], tokens[..., t + 1]
        )
    return tokens.astype(np.int32)


def losses_of_torch(model: Any, config: Config) -> list[float]:
    """A plain loop with AdamW, which decays matrices alone, as the Trainer of transformers does."""
    train = config.train
    adamw = config.optimizer.adamw
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": adamw.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        betas=(adamw.beta1, adamw.beta2),
        eps=adamw.eps,
    )
    found = []
    for step, rows in enumerate(torch.from_numpy(batches()).long()):
        for group in optimizer.param_groups:
            group["lr"] = float(learning_rate(train)(step))
        loss = torch.nn.functional.cross_entropy(
            model(rows[:, :-1]).logits.reshape(-1, V), rows[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, train.clip_norm)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def losses_here(config: Config, source: Path) -> tuple[list[float], Any]:
    plan = make_plan(config)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state = init_state(experiment, load_params(source, make_experiment(config)))
    step = None
    found = []
    step = make_train_step(experiment)
    for rows in batches():
        state, metrics = step(
            state,
            put_batch(
                {"tokens": rows[:, :-1], "labels": rows[:, 1:]},
                plan,
            ),
        )
        found.append(float(metrics["loss"]))
    return found, state.params


@cache
def compiled_logits(config: Config) -> Any:
    return jax.jit(partial(Model(config.model).logits, plan=make_plan(config)))


def logits_here(config: Config, params: Any) -> np.ndarray:
    return np.asarray(
        compiled_logits(config)(
            params,
            {"tokens": jax.numpy.asarray(batches()[0][:, :-1])},
        )
    )


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(batches()[0][:, :-1]).long()).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_lora_learns_as_with_peft_and_adapters_go_both_ways(name: str, tmp_path: Path) -> None:
    theirs = adapter(
        base_model(name, tmp_path / "base"),
        tmp_path / "adapter",
        MODELS[name][1],
    )
    config = override(config_for(tmp_path / "adapter"), {"train.learning_rate": 2e-2})
    params = load_params(tmp_path / "adapter", make_experiment(config))
    np.testing.assert_allclose(
        logits_here(config, params),
        logits_of(theirs),
        rtol=0,
        atol=2e-5,
    )
    want = losses_of_torch(theirs, config)
    found, params = losses_here(config, tmp_path / "adapter")
    assert want[-1] < 0.97 * want[0]
    np.testing.assert_allclose(found, want, rtol=2e-5)
    peft.export_adapter(params, Model(config.model), tmp_path / "back", str(tmp_path / "base"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    back = PEFT.PeftModel.from_pretrained(model, str(tmp_path / "back"))
    np.testing.assert_allclose(
        logits_here(config, params), logits_of(back.eval()), rtol=0, atol=2e-5
    )
    assert (back.peft_config["default"].r, back.peft_config["default"].lora_alpha) == (4, 6)


@pytest.mark.parametrize("name", MODELS)
def test_full_fine_tuning_learns_as_with_transformers(name: str, tmp_path: Path) -> None:
    theirs = base_model(name, tmp_path / "base")
    config = config_for(tmp_path / "base")
    want = losses_of_torch(theirs, config)
    found, _ = losses_here(config, tmp_path / "base")
    assert want[-1] < 0.9 * want[0]
    np.testing.assert_allclose(found, want, rtol=2e-5)


def test_the_one_pair_of_a_fused_matrix_is_read_and_not_written(tmp_path: Path) -> None:
    theirs = adapter(base_model("gpt2", tmp_path / "base"), tmp_path / "adapter", ["c_attn"])
    config = config_for(tmp_path / "adapter")
    params = load_params(tmp_path / "adapter", make_experiment(config))
    assert config.model.lora.targets == ("q", "k", "v")
    np.testing.assert_allclose(
        logits_here(config, params),
        logits_of(theirs),
        rtol=0,
        atol=2e-5,
    )
    # an adapter is merged where the config has none
    without = replace(config, model=base_config(config.model))
    merged = load_params(tmp_path / "adapter", make_experiment(without))
    np.testing.assert_allclose(
        logits_here(without, merged),
        logits_of(theirs),
        rtol=0,
        atol=2e-5,
    )
    with pytest.raises(UserError, match=r"attn.c_attn .* q, k, v here"):
        peft.export_adapter(params, Model(config.model), tmp_path / "back", "")
