"""The config.json of Hugging Face, read as the sizes of a model and written from them.

The table of a family (`families`) says which of our fields stands at which key. This module has the
settings that take more than a table: windows, the extension of RoPE and the scale of queries. It
also refuses models that no such file can express. Reading comes first, and then writing.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, read_json
from jaxpar.base.ranges import require_ranges
from jaxpar.base.toml import flatten, from_dict
from jaxpar.models.families import family_of
from jaxpar.models.hf.families import REQUIRED, HfFamily, Json, Local, hf_family, model_type
from jaxpar.models.masks import has_window, read_word

_ROPE = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}
"""The keys of the llama3 context extension, by our fields."""
_TYPES = {"causal": "full_attention", "window": "sliding_attention"}
"""The names in `layer_types` of a layer that sees all, and of one that has a window."""


def model_config_from_hf(path: str | Path) -> ModelConfig:
    """Read the sizes of a Hugging Face checkpoint from its config.json.

    Dropout and `vocab_multiple` are choices of the training run, not of the checkpoint, and so keep
    our defaults. Change them with `dataclasses.replace`.

    Args:
      path: a folder with a config.json.

    Returns:
      The sizes, as `Model` takes them.

    Raises:
      UserError: the folder is not there, config.json cannot be read or lacks a key, or
        `jaxpar.models` cannot compute the model.
    """
    folder = Path(path)
    if not folder.exists():
        raise UserError(
            f"there is no {folder}: give a run folder, or a folder with a Hugging Face checkpoint"
        )
    file = folder / "config.json"
    hf = read_json(file)
    name = str(_value(hf, "model_type", REQUIRED, file=file))
    family = hf_family(name, str(file))
    try:
        return _model_config(hf, family, file)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{file} has a value that no such model has ({error}): download it again"
        ) from error


def _model_config(hf: Json, family: HfFamily, file: Path) -> ModelConfig:
    """Read the sizes of a model of a family, as `model_config_from_hf` documents."""
    values = {field: _value(hf, *row, file=file) for field, row in family.sizes.items()}
    _require_fixed(hf, family, file)
    if family.rope_theta:
        values |= _rope_fields(hf, family, file)
    config = from_dict(ModelConfig, {"family": family.family, **values}, str(file))
    try:
        # 0 = not said, see below
        require_ranges(ModelConfig, flatten(config) | {"mlp": config.mlp or 1})
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    if family.local:  # a word for each layer, of which there are no more than any model has
        config = dataclasses.replace(config, masks=tuple(_masks(hf, family, config.layers, file)))
    else:
        config = dataclasses.replace(config, masks=(family.whole,))
    _require_several_experts(config, str(file))
    if family.query_scalar:
        config = dataclasses.replace(config, query_scale=_query_scale(hf, family, config, file))
    return dataclasses.replace(
        config,
        mlp=config.mlp or 4 * config.embed,
        # In a ModelConfig 0 means "as usual", so a checkpoint that spells out the usual value gives
        # an equal config.
        kv_heads=0 if config.kv_heads == config.heads else config.kv_heads,
        head_dim=0 if config.head_dim * config.heads == config.embed else config.head_dim,
    )


def _require_fixed(hf: Json, family: HfFamily, file: Path) -> None:
    """Refuse a file with a setting that our models of the family do not compute."""
    for key, accepted in family.fixed.items():
        if hf.get(key, accepted[0]) not in accepted:
            raise UserError(
                f"{file}: {key}={hf[key]!r} is not supported: only "
                f"{' or '.join(map(repr, accepted))}"
            )


def _query_scale(hf: Json, family: HfFamily, config: ModelConfig, file: Path) -> float:
    """Read the scale of queries; 0 = the usual scale, by the size of a head."""
    scalar = float(_value(hf, "query_pre_attn_scalar", family.query_scalar, file=file))
    if scalar == config.head_size:
        return 0.0
    return 1 / math.sqrt(scalar)


def _masks(
    hf: Json,
    family: HfFamily,
    layers: int,
    file: Path,
) -> list[str]:
    """Return the words of the layers, of one period."""
    local = family.local
    assert local is not None
    window = hf.get(local.key, local.absent)
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(f"{file}: {local.key}={window!r} is no number of tokens: download it again")
    if local.where:
        types = hf.get("layer_types")
    else:
        types = None
    if types is None:
        types = [
            _TYPES["window" if local.where is None or local.where(hf, i) else "causal"]
            for i in range(layers)
        ]
    if len(types) != layers or not set(types) <= set(_TYPES.values()):
        raise UserError(
            f"{file}: layer_types has {len(types)} entries, "
            f"{', '.join(sorted(set(map(str, types))))}: only "
            f"{' and '.join(_TYPES.values())} are supported, one for each of {layers} layers"
        )
    words = [
        family.whole if window is None or kind == _TYPES["causal"] else local.word(window)
        for kind in types
    ]
    period = next(
        p
        for p in range(1, max(layers, 1) + 1)
        if all(word == words[i % p] for i, word in enumerate(words))
    )
    return words[:period]


def _value(
    table: Json,
    key: str,
    absent: object,
    null: object = None,
    *,
    file: Path,
) -> Any:
    """Look up a value of a config.json, or the value that an absent key or a null stands for."""
    value = table.get(key)
    if value is None and absent is REQUIRED:
        raise UserError(f"{file} has no {key}: add it, or download the file again")
    if value is None:
        if key in table and null is not None:
            return null
        return absent
    return value


def _rope_fields(hf: Json, family: HfFamily, file: Path) -> Json:
    """Read our fields of RoPE.

    transformers 5 writes all in `rope_parameters`, where layers with a window may have a table of
    their own; 4 writes the extension in `rope_scaling`, and the base of those layers in
    `rope_local_base_freq`.
    """
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    local = rope.get(_TYPES["window"]) or {}
    if _TYPES["causal"] in rope:
        rope = rope.get(_TYPES["causal"]) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if (
        kind not in ("default", "llama3", "linear")
        or local.get("rope_type", "default") != "default"
    ):
        if kind in ("default", "llama3", "linear"):
            kind = local["rope_type"]
        raise UserError(
            f"{file}: rope_type {kind!r} is not supported: only default, llama3 and linear"
        )
    rotated = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1))
    if rotated != 1:
        raise UserError(
            f"{file}: partial_rotary_factor={rotated!r} is not supported: only 1, the whole "
            "head rotates"
        )
    whole_key, local_key = family.theta_keys
    fields = {"rope_theta": rope.get("rope_theta", hf.get(whole_key, family.rope_theta))}
    if family.local_theta:
        fields["rope_local_theta"] = local.get("rope_theta", hf.get(local_key, family.local_theta))
    if kind != "default":
        if kind == "llama3":
            keys = _ROPE
        else:
            keys = {"rope_factor": "factor"}
        fields |= {field: _value(rope, key, REQUIRED, file=file) for field, key in keys.items()}
        fields["rope_scaling"] = kind
    return fields


def hf_config(config: ModelConfig) -> Json:
    """Make the config.json of a model, in a form that transformers 4.43 and later (llama3 RoPE) can
    read.

    Token ids are null: a ModelConfig knows no tokenizer, and transformers' defaults belong to
    another vocabulary.

    Raises:
      UserError: the family has no model type, or its config.json cannot express one of the sizes.
    """
    name = model_type(config)
    family = hf_family(name, "model.family")
    _require_several_experts(config, f"a {name} checkpoint")
    _require_sayable(config, family, name)
    hf: Json = {"architectures": [family.architecture], "model_type": name}
    hf |= _sizes_said(config, family)
    hf |= {key: accepted[0] for key, accepted in family.fixed.items()}
    hf |= {"bos_token_id": None, "eos_token_id": None}
    if family.rope_theta:
        hf |= _rope_said(config, family)
    if family.local_theta:
        hf[family.theta_keys[1]] = config.rope_local_theta or config.rope_theta
    if family.query_scalar:
        hf["query_pre_attn_scalar"] = _query_scalar(config)
    if family.local:
        hf |= _windows_said(config, family, family.local)
    return hf | dict(family.written)


def _require_sayable(config: ModelConfig, family: HfFamily, name: str) -> None:
    """Refuse a model that the config.json of its family cannot wholly describe: it would be read as
    another model.
    """
    head_dim = config.head_size
    if "head_dim" not in family.sizes and head_dim * config.heads != config.embed:
        raise UserError(
            f"a {config.family} checkpoint cannot say model.head_dim={head_dim}: with "
            f"model.heads={config.heads} "
            f"and model.embed={config.embed} it must be {config.embed // config.heads}"
        )
    windows = _windows(config, family)
    extends_rope = config.rope_factor != 1
    unsaid = {
        "masks": windows and not _can_say_windows(config, family),
        "query_scale": config.query_scale and not _can_say_scale(config, family),
        "rope_local_theta": config.rope_local_theta and not family.local_theta,
        # 0 is RoPE as in other layers, scaled as they are; the file has a base of its own there,
        # which is not scaled.
        "rope_factor": family.local_theta
        and windows
        and not config.rope_local_theta
        and extends_rope,
        "rope_scaling": "rope_scaling" in family.fixed and extends_rope,
        "shared_experts": config.shared_experts,
        "sublayers": config.sublayers != "serial",
        "query_layer": config.query_layer,
        "activation": config.activation not in ("family", family_of(config).activation),
        "router": config.router != "token_choice",
        "token_types": "token_types" in family.sizes and not config.token_types,
        "tied_head": "tied_head" not in family.sizes and not config.tied_head,
        "logit_softcap": config.logit_softcap and "logit_softcap" not in family.sizes,
        "attention_softcap": config.attention_softcap and "attention_softcap" not in family.sizes,
    }
    lost = [field for field, wrong in unsaid.items() if wrong]
    if lost:
        said = f"model.{lost[0]}={getattr(config, lost[0])}"
        raise UserError(
            f"a {name} checkpoint cannot say {said}: it would be read as that of a model without"
        )


def _windows(config: ModelConfig, family: HfFamily) -> set[str]:
    """Return the words of the layers that do not see all that the family's layers may."""
    return {word for word in config.masks if word != family.whole}


def _can_say_windows(config: ModelConfig, family: HfFamily) -> bool:
    """Return whether the file can say which layers have which window: it has one number, and
    perhaps the layers that the number is for.
    """
    local = family.local
    windows = _windows(config, family)
    if local is None or len(windows) > 1:
        return False
    if len(set(config.masks)) > 1 and local.where is None:
        return False
    return all(
        has_window(word) and read_word(word).looks_ahead == local.both_sides for word in windows
    )


def _query_scalar(config: ModelConfig) -> int:
    """Return the whole number whose inverse root is the scale of queries, or is nearest to it."""
    if config.query_scale:
        return round(config.query_scale**-2)
    return config.head_size


def _can_say_scale(config: ModelConfig, family: HfFamily) -> bool:
    """Return whether the file can say the scale of queries, by a whole number."""
    said = _query_scalar(config) ** -0.5
    return bool(family.query_scalar) and math.isclose(config.query_scale, said, rel_tol=1e-6)


def _sizes_said(config: ModelConfig, family: HfFamily) -> Json:
    """Write the sizes, by the names of the file."""
    spelled_out = {"kv_heads": config.kv_head_count, "head_dim": config.head_size}
    values = dataclasses.asdict(config) | spelled_out
    said: Json = {}
    for field, (key, _, *null) in family.sizes.items():
        is_null = bool(null) and values[field] == null[0]
        said[key] = None if is_null else values[field]
    return said


def _rope_said(config: ModelConfig, family: HfFamily) -> Json:
    """Write the base of RoPE, and its extension."""
    keys = _ROPE if config.rope_scaling == "llama3" else {"rope_factor": "factor"}
    scaling = {"rope_type": config.rope_scaling}
    scaling |= {key: getattr(config, field) for field, key in keys.items()}
    return {
        family.theta_keys[0]: config.rope_theta,
        "rope_scaling": scaling if config.rope_factor != 1 else None,
    }


def _windows_said(config: ModelConfig, family: HfFamily, local: Local) -> Json:
    """Write the number of a window, and the layers that have it."""
    windows = _windows(config, family)
    if windows:
        number = local.number(windows.pop(), config.max_seq_len)
    else:
        number = local.absent if local.both_sides else None
    said: Json = {local.key: number}
    with_windows, without = local.extra
    said |= without if number is None else with_windows
    if local.where:
        words = [config.masks[i % config.kinds] for i in range(config.layers)]
        said["layer_types"] = [
            _TYPES["causal" if word == family.whole else "window"] for word in words
        ]
    return said


def _require_several_experts(config: ModelConfig, origin: str) -> None:
    """Refuse a single expert for each token, whose weight is 1 in a Mixtral and its probability
    here.
    """
    if config.experts > 1 and config.experts_per_token == 1:
        raise UserError(
            f"{origin}: one expert for each token (num_experts_per_tok, "
            "model.experts_per_token=1) has the weight 1 in "
            "a Mixtral and its probability here, so it would be another model: only 2 or more "
            "are read and written"
        )
