"""Hugging Face's config.json: both ways, its forms over the years, and refusals of what jaxpar does not compute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.models.hf import hf_config, model_config_from_hf

GPT2 = ModelConfig(family="gpt2", vocab_size=101, layers=3, embed=16, heads=4, mlp=24, max_seq_len=12)
LLAMA = dataclasses.replace(GPT2, family="llama", kv_heads=2, head_dim=6, tied_head=False)
UNTIED = dataclasses.replace(GPT2, tied_head=False)
MIXTRAL = dataclasses.replace(LLAMA, experts=4, experts_per_token=3, rope_theta=1e6)
LONG = dataclasses.replace(LLAMA, rope_theta=500000.0, rope_factor=8.0, rope_original_seq_len=32, norm_eps=1e-6)


@pytest.mark.parametrize(
    "config", [GPT2, UNTIED, LLAMA, LONG, MIXTRAL], ids=["gpt2", "untied", "llama", "llama3", "mixtral"]
)
def test_config_round_trip(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    assert model_config_from_hf(tmp_path) == config


def changed(config: ModelConfig, tmp_path: Path, **changes) -> ModelConfig:
    """The config read back after keys of its config.json were changed; `...` takes one out."""
    table = {key: value for key, value in (hf_config(config) | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(table))
    return model_config_from_hf(tmp_path)


def test_forms_of_rope(tmp_path):
    scaling = hf_config(LONG)["rope_scaling"]
    five = {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": scaling | {"rope_theta": 500000.0}}
    assert changed(LONG, tmp_path, **five) == LONG
    older = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    assert changed(LONG, tmp_path, rope_scaling=older) == LONG
    plain = {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 10}}
    assert changed(LLAMA, tmp_path, **plain) == dataclasses.replace(LLAMA, rope_theta=10.0)
    assert changed(LLAMA, tmp_path, rope_scaling=..., rope_theta=...) == LLAMA


def test_absent_keys_mean_what_transformers_means(tmp_path):
    assert changed(GPT2, tmp_path, n_inner=None).mlp == 64
    assert changed(GPT2, tmp_path, tie_word_embeddings=..., activation_function=...) == GPT2
    older = changed(LLAMA, tmp_path, num_key_value_heads=..., head_dim=..., tie_word_embeddings=..., rms_norm_eps=...)
    absent = dict.fromkeys(("num_local_experts", "num_experts_per_tok", "rope_theta", "rope_scaling"), ...)
    assert changed(MIXTRAL, tmp_path, **absent) == dataclasses.replace(MIXTRAL, experts=8, experts_per_token=2)
    assert older == dataclasses.replace(LLAMA, kv_heads=0, head_dim=0, tied_head=False, norm_eps=1e-6)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"model_type": "lama"}, r"model_type 'lama' .* \(did you mean 'llama'\?\): only gpt2, llama"),
        (LLAMA, {"model_type": ...}, "config.json has no model_type"),
        (LLAMA, {"hidden_size": ...}, "config.json has no hidden_size: add it"),
        (LLAMA, {"hidden_size": "16"}, "embed is a whole number, found '16'"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True is not supported: only False"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu' or 'swish'"),
        (GPT2, {"activation_function": "relu"}, "activation_function='relu' is not supported: only 'gelu_new'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is not supported: only default"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "has no low_freq_factor"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096 is not supported: only None"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: only 1"),
    ],
)
def test_config_refusals(config, changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        changed(config, tmp_path, **changes)


def test_unreadable_config(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*config.json: No such file"):
        model_config_from_hf(tmp_path)
    for text, message in (("{", "is not valid JSON"), ("[]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            model_config_from_hf(tmp_path)


def test_gpt2_has_no_free_head_dim():
    for field, value in (("masks", ("window(8)",)), ("logit_softcap", 8)):
        with pytest.raises(UserError, match=rf"a llama checkpoint cannot say model.{field}=.*8.*without"):
            hf_config(ModelConfig(family="llama", **{field: value}))
    with pytest.raises(UserError, match=r"a gpt2 checkpoint cannot say model.head_dim=8.*it must be 4"):
        hf_config(dataclasses.replace(GPT2, head_dim=8))
