"""Hugging Face's config.json: both ways, its forms over the years, and refusals of what jaxpar does
not compute.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.models.hf import hf_config, model_config_from_hf

GPT2 = ModelConfig(
    family="gpt2", vocab_size=101, layers=3, embed=16, heads=4, mlp=24, max_seq_len=12
)
LLAMA = dataclasses.replace(GPT2, family="llama", kv_heads=2, head_dim=6, tied_head=False)
UNTIED = dataclasses.replace(GPT2, tied_head=False)
MIXTRAL = dataclasses.replace(LLAMA, experts=4, experts_per_token=3, rope_theta=1e6)
LONG = dataclasses.replace(
    LLAMA, rope_theta=500000.0, rope_factor=8.0, rope_original_seq_len=32, norm_eps=1e-6
)
LINEAR = dataclasses.replace(LLAMA, rope_factor=8.0, rope_scaling="linear")
MISTRAL = dataclasses.replace(LLAMA, masks=("window(9)",))
QWEN2 = dataclasses.replace(LLAMA, family="qwen2")
QWEN3 = dataclasses.replace(LLAMA, family="qwen3", masks=("causal", "window(9)", "window(9)"))
GEMMA2 = dataclasses.replace(
    LLAMA,
    family="gemma2",
    masks=("window(9)", "causal"),
    attention_softcap=50.0,
    query_scale=144**-0.5,
)
GEMMA3 = dataclasses.replace(
    LINEAR,
    family="gemma3",
    masks=("window(9)", "causal"),
    rope_theta=1e6,
    rope_local_theta=1e4,
    tied_head=True,
)
CONFIGS = {
    "gpt2": (GPT2, UNTIED),
    "llama": (LLAMA, LONG, LINEAR),
    "mistral": (MISTRAL,),
    "mixtral": (MIXTRAL, dataclasses.replace(MIXTRAL, masks=("window(9)",))),
    "qwen2": (QWEN2, dataclasses.replace(QWEN2, masks=("window(9)",))),
    "qwen3": (QWEN3,),
    "gemma2": (GEMMA2, dataclasses.replace(GEMMA2, logit_softcap=30.0, attention_softcap=0.0)),
    "gemma3_text": (GEMMA3,),
}


@pytest.mark.parametrize(
    ("name", "config"), [(name, config) for name, found in CONFIGS.items() for config in found]
)
def test_config_round_trip(name, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    assert hf_config(config)["model_type"] == name
    assert model_config_from_hf(tmp_path) == config


def changed(config: ModelConfig, tmp_path: Path, **changes) -> ModelConfig:
    """The config read back after keys of its config.json were changed; `...` takes one out."""
    table = {key: value for key, value in (hf_config(config) | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(table))
    return model_config_from_hf(tmp_path)


def test_forms_of_rope(tmp_path):
    scaling = hf_config(LONG)["rope_scaling"]
    five = {
        "rope_scaling": ...,
        "rope_theta": ...,
        "rope_parameters": scaling | {"rope_theta": 500000.0},
    }
    assert changed(LONG, tmp_path, **five) == LONG
    older = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    assert changed(LONG, tmp_path, rope_scaling=older) == LONG
    plain = {
        "rope_scaling": ...,
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10},
    }
    assert changed(LLAMA, tmp_path, **plain) == dataclasses.replace(LLAMA, rope_theta=10.0)
    assert changed(LLAMA, tmp_path, rope_scaling=..., rope_theta=...) == LLAMA


def test_absent_keys_mean_what_transformers_means(tmp_path):
    assert changed(GPT2, tmp_path, n_inner=None).mlp == 64
    assert changed(GPT2, tmp_path, tie_word_embeddings=..., activation_function=...) == GPT2
    older = changed(
        LLAMA,
        tmp_path,
        num_key_value_heads=...,
        head_dim=...,
        tie_word_embeddings=...,
        rms_norm_eps=...,
    )
    absent = dict.fromkeys(
        ("num_local_experts", "num_experts_per_tok", "rope_theta", "rope_scaling"), ...
    )
    assert changed(MIXTRAL, tmp_path, **absent) == dataclasses.replace(
        MIXTRAL, experts=8, experts_per_token=2
    )
    assert changed(MISTRAL, tmp_path, num_key_value_heads=None).kv_heads == 0
    assert older == dataclasses.replace(
        LLAMA, kv_heads=0, head_dim=0, tied_head=False, norm_eps=1e-6
    )


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            LLAMA,
            {"model_type": "lama"},
            r"model_type 'lama' .* \(did you mean 'llama'\?\): only gpt2, llama",
        ),
        (LLAMA, {"model_type": ...}, "config.json has no model_type"),
        (LLAMA, {"hidden_size": ...}, "config.json has no hidden_size: add it"),
        (LLAMA, {"hidden_size": "16"}, "embed .*found '16'"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True is not supported"),
        (
            LLAMA,
            {"hidden_act": "gelu"},
            "hidden_act='gelu' is not supported: only 'silu' or 'swish'",
        ),
        (
            GPT2,
            {"activation_function": "relu"},
            "activation_function='relu' is not supported: only 'gelu_new'",
        ),
        (
            GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True is not supported",
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "yarn", "factor": 2}},
            "'yarn' is not supported",
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "has no low_freq_factor"),
        (
            LLAMA,
            {"model_type": "gemma3"},
            r"save .*\.language_model\.save_pretrained",
        ),
        (
            GEMMA2,
            {"layer_types": ["sliding_attention"]},
            "layer_types has 1 entries, sliding_attention: only full_att",
        ),
        (
            GEMMA2,
            {"layer_types": ["linear_attention"] * 3},
            "has 3 entries, linear_attention: only full_attention and",
        ),
        (
            GEMMA2,
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True is not supported",
        ),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
            "'yarn' is",
        ),
        (
            MIXTRAL,
            {"num_experts_per_tok": 1},
            "config.json: one expert for each",
        ),
        (
            LLAMA,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported: only 1",
        ),
        (LLAMA, {"rope_scaling": 8}, "no attribute 'get'"),
        (MISTRAL, {"num_hidden_layers": "3"}, "layers .*found .3."),
        (MISTRAL, {"num_hidden_layers": 2**62}, "config.json: layers=4611686018427387904 "),
        (GEMMA2, {"query_pre_attn_scalar": -1}, "no such model has"),
        (
            GEMMA3,
            {"layer_types": ..., "sliding_window_pattern": 0},
            "no such model has",
        ),
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


def test_forms_of_windows(tmp_path):
    absent = {"layer_types": ..., "sliding_window": 9}
    for pattern, masks in (
        (2, ("window(9)", "causal")),
        (6, ("window(9)",)),
        (3, (*["window(9)"] * 2, "causal")),
    ):
        older = changed(GEMMA3, tmp_path, **absent, sliding_window_pattern=pattern)
        assert older == dataclasses.replace(GEMMA3, masks=masks)
    assert changed(GEMMA2, tmp_path, **absent) == GEMMA2
    assert changed(MISTRAL, tmp_path, sliding_window=...).masks == ("window(4096)",)
    assert changed(MISTRAL, tmp_path, sliding_window=None) == LLAMA
    assert changed(MIXTRAL, tmp_path, sliding_window=...) == MIXTRAL
    older = changed(QWEN3, tmp_path, **absent, use_sliding_window=True, max_window_layers=1)
    assert older == QWEN3
    for window in ("", 0, [4]):
        with pytest.raises(UserError, match=r"config.json: sliding_window=.* no number of tokens"):
            changed(GEMMA3, tmp_path, sliding_window=window)
    off = changed(QWEN3, tmp_path, **absent, use_sliding_window=False)
    assert off == dataclasses.replace(QWEN3, masks=("causal",))


def test_forms_of_local_rope_and_soft_caps(tmp_path):
    whole = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 10.0}
    flat = {"rope_scaling": ..., "rope_theta": ..., "rope_local_base_freq": ...}
    five = {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    assert changed(GEMMA3, tmp_path, **flat, **five) == dataclasses.replace(
        GEMMA3, rope_local_theta=10.0
    )
    bare = changed(GEMMA3, tmp_path, **flat)
    assert (bare.rope_theta, bare.rope_local_theta, bare.rope_factor) == (1e6, 1e4, 1.0)
    absent = changed(
        GEMMA2,
        tmp_path,
        attn_logit_softcapping=...,
        final_logit_softcapping=...,
        query_pre_attn_scalar=...,
    )
    assert (absent.attention_softcap, absent.logit_softcap, absent.query_scale) == (
        50.0,
        30.0,
        1 / 16,
    )
    assert changed(GEMMA2, tmp_path, attn_logit_softcapping=None).attention_softcap == 0


def test_gpt2_has_no_free_head_dim():
    sizes = {
        "logit_softcap": 8.0,
        "attention_softcap": 8.0,
        "query_scale": 0.8,
        "rope_local_theta": 8.0,
    }
    for field, value in sizes.items():
        with pytest.raises(UserError, match=f"cannot say model.{field}=.*8.*without"):
            hf_config(ModelConfig(family="llama", **{field: value}))
    unsaid = [("bigbird",), ("window(8)", "causal"), ("window(8)", "window(9)")]
    for masks in [*unsaid, ("full",), ("local(8)",)]:
        with pytest.raises(UserError, match=r"cannot say model.masks=.*without"):
            hf_config(ModelConfig(family="llama", masks=masks))
    with pytest.raises(
        UserError, match=r"a gemma3_text checkpoint cannot say model.rope_factor=2.0"
    ):
        hf_config(dataclasses.replace(GEMMA3, rope_factor=2.0, rope_local_theta=0.0))
    with pytest.raises(UserError, match=r"a gemma2 checkpoint cannot say model.query_scale=0.8"):
        hf_config(dataclasses.replace(GEMMA2, query_scale=0.8))
    with pytest.raises(
        UserError,
        match=r"one expert .*model.experts_per_token=1",
    ):
        hf_config(dataclasses.replace(MIXTRAL, experts_per_token=1))
    beside = ModelConfig(family="llama", sublayers="parallel")
    with pytest.raises(UserError, match=r"cannot say model.sublayers=parallel"):
        hf_config(beside)
    with pytest.raises(UserError, match=r"a gpt2 checkpoint cannot say model.query_layer=True"):
        hf_config(dataclasses.replace(GPT2, query_layer=True))
    squared = ModelConfig(family="llama", activation="relu2")
    with pytest.raises(UserError, match=r"cannot say model.activation=relu2"):
        hf_config(squared)
    with pytest.raises(UserError, match=r"cannot say model.shared_experts=2"):
        hf_config(dataclasses.replace(MIXTRAL, shared_experts=2))
    with pytest.raises(UserError, match=r"cannot say model.router=expert_ch"):
        hf_config(dataclasses.replace(MIXTRAL, router="expert_choice"))
    with pytest.raises(
        UserError, match=r"a gpt2 checkpoint cannot say model.head_dim=8.*it must be 4"
    ):
        hf_config(dataclasses.replace(GPT2, head_dim=8))
