"""The reasons why the tensors of a folder do not fit a model, and what helps: they are quantised,
the folder contradicts itself, or the model is another than the folder's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxpar.base.errors import UserError, read_json, short
from jaxpar.base.toml import flatten
from jaxpar.models.hf.config_json import model_config_from_hf
from jaxpar.models.hf.families import HF_FAMILIES, Json, model_type
from jaxpar.models.hf.layout import hf_layout
from jaxpar.models.model import Model
from jaxpar.models.views import base_config

_CONFIG = "config.json"
_SAID_BY = ("quantization_config", "compression_config")
"""The keys of config.json that state a quantisation; the second is compressed-tensors' former key.
"""
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""The methods of quantisation by the file that they write beside config.json."""
_ENDINGS = {
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    "_scale_inv": "blocks of fp8",
    ".weight_packed": "compressed-tensors",
    ".weight_global_scale": "compressed-tensors",
    ".weight_zero_point": "compressed-tensors",
    ".weight_scale_2": "modelopt",
    ".weight_scale": "",
    ".input_scale": "",
    ".output_scale": "",
    ".scales": "",
    "_blocks": "mxfp4",
    "_scales": "mxfp4",
    ".codebooks": "AQLM",
    ".W_q": "HQQ",
    "._data": "quanto",
}
"""Ends of the names of tensors that only quantised weights have -> the method, where one alone
writes such names."""
_BEFORE_STATE = ".quant_state."
"""The text in bitsandbytes' names before the kind of numbers."""
_OF_A_TRAINING = ("dropout", "init_std", "scan_layers", "vocab_multiple")
"""Settings of a model that no config.json states."""
_NARROW = ("F4", "F6_", "F8_", "I8", "U8")
"""The beginnings of the dtypes of quantised weights."""


def require_unquantised(
    folder: Path, wanted: Sequence[str], dtypes: Mapping[str, str], readable: Sequence[str]
) -> None:
    """Refuse the tensors of a quantised model, by the name of the method.

    The names and dtypes of the tensors show that they are quantised, and config.json names the
    method: a method may leave weights in 16 bits, which are read.

    Args:
      folder: the folder of the checkpoint.
      wanted: the names of the model's tensors.
      dtypes: the dtype of each tensor that is there, by its name.
      readable: the dtypes that are read.

    Raises:
      UserError: the tensors are quantised.
    """
    strangers = [name for name in dtypes if name not in wanted]
    signs = [name for name in strangers if _method_of(name) is not None]
    signs += [name for name in wanted if dtypes.get(name, "").startswith(_NARROW)]
    fits = not strangers and all(dtypes.get(name) in readable for name in wanted)
    said = "" if fits else _said_method(folder)
    if not (signs or said):
        return
    method = said or next(filter(None, map(_method_of, signs)), "")
    by = f" by {method}" if method else ""
    tensor = signs[0] if signs else next(iter(strangers), "")
    shown = f" (it has {tensor}, of {dtypes[tensor]})" if tensor else ""
    raise UserError(
        f"{folder} has quantised weights{by}{shown}, and only weights of 16 or 32 bits are read: "
        "take the model that it was made from, or load it with the library that quantised it, "
        "dequantize it, and save it in 16 or 32 bits first"
    )


def _method_of(name: str) -> str | None:
    """Return the method that writes a tensor of this name, empty where several do; None = it is no
    tensor of quantised weights."""
    if _BEFORE_STATE in name:
        return "bitsandbytes"
    return next((method for end, method in _ENDINGS.items() if name.endswith(end)), None)


def _said_method(folder: Path) -> str:
    """Return the method of quantisation that a folder's files name; empty = they name none."""
    config = _config(folder)
    for key in _SAID_BY:
        said = config.get(key)
        if not said:
            continue
        method = said.get("quant_method") if isinstance(said, dict) else None
        if isinstance(method, str) and method:
            return f"{short(method)[1:-1]}, as {key} of its {_CONFIG} says"
        return f"what {key} of its {_CONFIG} says"
    return next((method for name, method in _FILES.items() if (folder / name).is_file()), "")


def _config(folder: Path) -> Json:
    """Read a folder's config.json; empty where there is none."""
    file = folder / _CONFIG
    return read_json(file) if file.is_file() else {}


def what_helps(folder: Path, model: Model, missing: Sequence[str], extra: Sequence[str]) -> str:
    """Say what helps where the tensors of a folder do not fit a model.

    Args:
      folder: the folder of the checkpoint.
      missing: the names of tensors that the model needs and the folder lacks.
      extra: the names of tensors that the folder has and the model has no place for.

    Returns:
      The end of a sentence.
    """
    if not (folder / _CONFIG).is_file():
        return (
            f"there is no {_CONFIG} to say what they are of: put the checkpoint's own beside "
            "them, and take the model that it says"
        )
    try:
        theirs = model_config_from_hf(folder)
        same = _shapes(Model(theirs)) == _shapes(model)
    except UserError as error:
        return f"its {_CONFIG} is of no model that is computed here: {error}"
    if not same:
        there = flatten(theirs)
        here = flatten(base_config(model.config))
        told = [
            f"model.{key}={there[key]} and not {here[key]}"
            for key in here
            if here[key] != there[key] and key not in _OF_A_TRAINING
        ]
        return f"its {_CONFIG} says {', '.join(told[:3])}: take what it says"
    family = HF_FAMILIES[model_type(model.config)]
    others = _config(folder).get("architectures")
    if others and others != [family.architecture]:
        return (
            f"its {_CONFIG} says architectures={short(others)}, which has another head or none: "
            f"take a folder of {family.architecture}"
        )
    key = tied_key(model)
    if key and not extra and list(missing) == [family.head]:
        return (
            f"its {_CONFIG} says that the head is not the embedding: if it is, write "
            f'"{key}": true there; otherwise download the weights again'
        )
    return (
        f"its {_CONFIG} says otherwise than its weights: download both again, from one place, or "
        f"correct {_CONFIG}"
    )


def other_head(folder: Path, model: Model, same_shape: bool) -> str:
    """Say what helps where the head of a tied model is not its embedding.

    Args:
      folder: the folder of the checkpoint.
      same_shape: whether the head has the shape of one that is not tied.

    Returns:
      The end of a sentence.
    """
    key = tied_key(model)
    if not key or not same_shape:
        return f"download {_CONFIG} and the weights again, from one place"
    if not _config(folder) or not model_config_from_hf(folder).tied_head:
        return "set model.tied_head = false"
    return f'write "{key}": false into its {_CONFIG}, and take the model that it says'


def tied_key(model: Model) -> str:
    """Return the key of config.json that ties the head of a model; empty = its family always
    does."""
    sizes = HF_FAMILIES[model_type(model.config)].sizes
    return sizes["tied_head"][0] if "tied_head" in sizes else ""


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in hf_layout(model)}
