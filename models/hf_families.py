"""How a family looks at Hugging Face: one table each for its config.json and for the tensors of its checkpoint.

Shapes: V vocab, P positions, D embed, H heads, K kv heads, h head_dim, F mlp, E experts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.toml import from_dict

REQUIRED = object()
Json = dict[str, Any]  # a config.json: another program wrote it, so its values may be anything


class HfFamily(NamedTuple):
    """A family's config.json and checkpoint.

    Attributes:
      family: our name of it.
      architecture: the transformers class that runs it.
      sizes: our field -> its key in config.json, and the value that an absent or null key stands for.
      fixed: keys for which our model has no field -> the values that it computes; the first is written, and is what an
        absent key means.
      rope_theta: the value that an absent key means; None for a family without RoPE.
      prefix: what some checkpoints put before every name but the head's, and others leave out.
      ignored: endings of names that are not parameters (constants that old releases saved).
      tensors: name -> (dims, parameters). The dims are a parameter's, as the file orders and merges them: "Hh D" is a
        [heads * head_dim, embed] matrix. Several parameters lie side by side along the last dim. A tensor whose name
        has {layer} or {expert} holds one layer or expert of a stacked parameter.
    """

    family: str
    architecture: str
    sizes: dict[str, tuple[str, object]]
    fixed: dict[str, tuple[object, ...]]
    rope_theta: float | None
    prefix: str
    ignored: tuple[str, ...]
    tensors: dict[str, tuple[str, ...]]


_GPT2 = HfFamily(  # its matrices are [in, out]
    family="gpt2",
    architecture="GPT2LMHeadModel",
    sizes={
        "vocab_size": ("vocab_size", REQUIRED),
        "layers": ("n_layer", REQUIRED),
        "embed": ("n_embd", REQUIRED),
        "heads": ("n_head", REQUIRED),
        "mlp": ("n_inner", 0),
        "max_seq_len": ("n_positions", REQUIRED),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied_head": ("tie_word_embeddings", True),
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    rope_theta=None,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
    tensors={
        "transformer.wte.weight": ("V D", "embed.tokens"),
        "transformer.wpe.weight": ("P D", "embed.positions"),
        "transformer.h.{layer}.ln_1.weight": ("D", "blocks.attention_norm.scale"),
        "transformer.h.{layer}.ln_1.bias": ("D", "blocks.attention_norm.bias"),
        "transformer.h.{layer}.attn.c_attn.weight": ("D Hh", "blocks.q", "blocks.k", "blocks.v"),
        "transformer.h.{layer}.attn.c_attn.bias": ("Hh", "blocks.q_bias", "blocks.k_bias", "blocks.v_bias"),
        "transformer.h.{layer}.attn.c_proj.weight": ("Hh D", "blocks.out"),
        "transformer.h.{layer}.attn.c_proj.bias": ("D", "blocks.out_bias"),
        "transformer.h.{layer}.ln_2.weight": ("D", "blocks.mlp_norm.scale"),
        "transformer.h.{layer}.ln_2.bias": ("D", "blocks.mlp_norm.bias"),
        "transformer.h.{layer}.mlp.c_fc.weight": ("D F", "blocks.up"),
        "transformer.h.{layer}.mlp.c_fc.bias": ("F", "blocks.up_bias"),
        "transformer.h.{layer}.mlp.c_proj.weight": ("F D", "blocks.down"),
        "transformer.h.{layer}.mlp.c_proj.bias": ("D", "blocks.down_bias"),
        "transformer.ln_f.weight": ("D", "head.norm.scale"),
        "transformer.ln_f.bias": ("D", "head.norm.bias"),
        "lm_head.weight": ("V D", "head.table"),
    },
)

_LLAMA = HfFamily(  # its matrices are [out, in]
    family="llama",
    architecture="LlamaForCausalLM",
    sizes={
        "vocab_size": ("vocab_size", REQUIRED),
        "layers": ("num_hidden_layers", REQUIRED),
        "embed": ("hidden_size", REQUIRED),
        "heads": ("num_attention_heads", REQUIRED),
        "kv_heads": ("num_key_value_heads", 0),
        "head_dim": ("head_dim", 0),
        "mlp": ("intermediate_size", REQUIRED),
        "max_seq_len": ("max_position_embeddings", REQUIRED),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "tied_head": ("tie_word_embeddings", False),
    },
    fixed={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    rope_theta=10000.0,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
    tensors={
        "model.embed_tokens.weight": ("V D", "embed.tokens"),
        "model.layers.{layer}.input_layernorm.weight": ("D", "blocks.attention_norm.scale"),
        "model.layers.{layer}.self_attn.q_proj.weight": ("Hh D", "blocks.q"),
        "model.layers.{layer}.self_attn.k_proj.weight": ("Kh D", "blocks.k"),
        "model.layers.{layer}.self_attn.v_proj.weight": ("Kh D", "blocks.v"),
        "model.layers.{layer}.self_attn.o_proj.weight": ("D Hh", "blocks.out"),
        "model.layers.{layer}.post_attention_layernorm.weight": ("D", "blocks.mlp_norm.scale"),
        "model.layers.{layer}.mlp.gate_proj.weight": ("F D", "blocks.gate"),
        "model.layers.{layer}.mlp.up_proj.weight": ("F D", "blocks.up"),
        "model.layers.{layer}.mlp.down_proj.weight": ("D F", "blocks.down"),
        "model.norm.weight": ("D", "head.norm.scale"),
        "lm_head.weight": ("V D", "head.table"),
    },
)

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
_MIXTRAL = _LLAMA._replace(
    architecture="MixtralForCausalLM",
    sizes=_LLAMA.sizes
    | {
        "kv_heads": ("num_key_value_heads", 8),
        "norm_eps": ("rms_norm_eps", 1e-5),
        "experts": ("num_local_experts", 8),
        "experts_per_token": ("num_experts_per_tok", 2),
    },
    fixed={"hidden_act": ("silu", "swish"), "sliding_window": (None,), "router_jitter_noise": (0.0,)},
    rope_theta=1e6,
    tensors={name: row for name, row in _LLAMA.tensors.items() if ".mlp." not in name}
    | {
        "model.layers.{layer}.block_sparse_moe.gate.weight": ("E D", "blocks.router"),
        _EXPERT + "w1.weight": ("F D", "blocks.gate"),
        _EXPERT + "w2.weight": ("D F", "blocks.down"),
        _EXPERT + "w3.weight": ("F D", "blocks.up"),
    },
)

HF_FAMILIES = {"gpt2": _GPT2, "llama": _LLAMA, "mixtral": _MIXTRAL}

# Our fields -> the keys of the llama3 context extension.
_ROPE = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}


def model_type(config: ModelConfig) -> str:
    """Return Hugging Face's name for such a model: a LLaMA with experts is a Mixtral."""
    return "mixtral" if config.experts else config.family


def hf_family(name: str, origin: str) -> HfFamily:
    """Return the table of a model type; `origin` says in an error message who asked."""
    if name in HF_FAMILIES:
        return HF_FAMILIES[name]
    known = ", ".join(HF_FAMILIES)
    raise UserError(f"{origin}: model_type {name!r} is not supported{suggest(name, HF_FAMILIES)}: only {known}")


def model_config_from_hf(path: str | Path) -> ModelConfig:
    """Read the sizes of a Hugging Face checkpoint from its config.json.

    Dropout and `vocab_multiple` are choices of the training run, not of the checkpoint, and so keep our defaults.
    Change them with `dataclasses.replace`.

    Args:
      path: the checkpoint's folder, or a file in it.

    Raises:
      UserError: config.json cannot be read or lacks a key, or `jaxpar.models` cannot compute the model.
    """
    folder = Path(path)
    if not folder.exists():
        raise UserError(f"there is no {folder}: give a run folder, or a folder with a Hugging Face checkpoint")
    file = (folder if folder.is_dir() else folder.parent) / "config.json"
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}: it tells the model's sizes, download it too") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error}): download it again") from error
    if not isinstance(hf, dict):
        raise UserError(f"{file} is not a JSON object: download it again")
    name = str(_value(hf, "model_type", REQUIRED, file))
    family = hf_family(name, str(file))
    values = {field: _value(hf, key, absent, file) for field, (key, absent) in family.sizes.items()}
    for key, accepted in family.fixed.items():
        if hf.get(key, accepted[0]) not in accepted:
            raise UserError(f"{file}: {key}={hf[key]!r} is not supported: only {' or '.join(map(repr, accepted))}")
    if family.rope_theta:
        values |= _rope_fields(hf, family.rope_theta, file)
    config = from_dict(ModelConfig, {"family": family.family, **values}, str(file))
    return dataclasses.replace(
        config,
        mlp=config.mlp or 4 * config.embed,
        # In a ModelConfig 0 means "as usual", so a checkpoint that spells out the usual value gives an equal config.
        kv_heads=0 if config.kv_heads == config.heads else config.kv_heads,
        head_dim=0 if config.head_dim * config.heads == config.embed else config.head_dim,
    )


def hf_config(config: ModelConfig) -> Json:
    """Return the config.json of a model, in a form that transformers 4.43 and later (llama3 RoPE) can read.

    Token ids are null: a ModelConfig knows no tokenizer, and transformers' defaults belong to another vocabulary.

    Raises:
      UserError: the family's config.json cannot express the sizes.
    """
    name = model_type(config)
    family = hf_family(name, "model.family")
    head_dim = config.head_size
    if "head_dim" not in family.sizes and head_dim * config.heads != config.embed:
        raise UserError(
            f"a {config.family} checkpoint cannot say model.head_dim={head_dim}: with model.heads={config.heads} "
            f"and model.embed={config.embed} it must be {config.embed // config.heads}"
        )
    for field in ("masks", "logit_softcap", "attention_softcap", "query_scale", "rope_local_theta", "rope_scaling"):
        if getattr(config, field) != getattr(ModelConfig(), field):
            raise UserError(
                f"a {config.family} checkpoint cannot say model.{field}={getattr(config, field)}: it would be read as "
                f"that of a model without"
            )
    values = dataclasses.asdict(config) | {"kv_heads": config.kv_head_count, "head_dim": head_dim}
    hf: Json = {"architectures": [family.architecture], "model_type": name}
    hf |= {key: values[field] for field, (key, _) in family.sizes.items()}
    hf |= {key: accepted[0] for key, accepted in family.fixed.items()}
    hf |= {"bos_token_id": None, "eos_token_id": None}
    if family.rope_theta:
        scaling = {"rope_type": "llama3"} | {key: values[field] for field, key in _ROPE.items()}
        hf |= {"rope_theta": config.rope_theta, "rope_scaling": scaling if config.rope_factor != 1 else None}
    return hf


def _value(table: Json, key: str, absent: object, file: Path) -> Any:
    value = table.get(key)
    if value is None and absent is REQUIRED:
        raise UserError(f"{file} has no {key}: add it, or download the file again")
    return absent if value is None else value


def _rope_fields(hf: Json, theta: float, file: Path) -> Json:
    """Return our rope fields; transformers 5 writes all in `rope_parameters`, 4 the extension in `rope_scaling`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{file}: rope_type {kind!r} is not supported: only default and llama3")
    rotated = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1))
    if rotated != 1:
        raise UserError(f"{file}: partial_rotary_factor={rotated!r} is not supported: only 1, the whole head rotates")
    fields = {"rope_theta": rope.get("rope_theta", hf.get("rope_theta", theta))}
    if kind == "llama3":
        fields |= {field: _value(rope, key, REQUIRED, file) for field, key in _ROPE.items()}
    return fields
