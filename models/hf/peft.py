"""LoRA's matrices in the form of Hugging Face's PEFT: adapter_config.json beside
adapter_model.safetensors.

PEFT has A as [r, in] and B as [out, r], under the name of the linear that they stand beside. Dims
have the letters of `jaxpar.models.hf.layout`, and r for the rank.
"""

from __future__ import annotations

import math
from pathlib import Path

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.errors import UserError, read_json, reading
from jaxpar.base.layout.plan import Plan
from jaxpar.models.hf.config_json import hf_config
from jaxpar.models.hf.export import (
    hf_tensors,
    require_library_parts,
    write_folder,
    write_json,
    write_tensors,
)
from jaxpar.models.hf.families import HF_FAMILIES, model_type
from jaxpar.models.hf.layout import Tensor, dim_letters, dim_sizes, require_mapping
from jaxpar.models.hf.load import Source, find_tensors, pair_up, read_params
from jaxpar.models.model import Model
from jaxpar.models.part_protocols import Params

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_KINDS = {"base_model_name_or_path": str | None, "r": int | None, "lora_alpha": float | None}
_PREFIX = "base_model.model."
_A = ".lora_A.weight"
_B = ".lora_B.weight"
# What else PEFT may compute, and the values for which it does not. Dropout of A's input acts in
# PEFT's training only.
_COMPUTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "arrow_config": (None,),
    # the others change the base's weights
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


def is_adapter(folder: Path) -> bool:
    """Return whether a folder is a PEFT adapter's."""
    return (folder / CONFIG).exists()


def base_folder(folder: Path) -> Path:
    """Find the folder of the model that an adapter belongs to, as an absolute path:
    `base_model_name_or_path`, relative to the adapter's folder or to the current folder.

    Raises:
      UserError: there is no such folder, or the adapter's config cannot be read.
    """
    name = read_json(folder / CONFIG, _KINDS).get("base_model_name_or_path") or ""
    with reading(folder / CONFIG):  # what is too long for a name
        found = [path for path in (folder / name, Path(name)) if name and path.is_dir()]
    if not found:
        raise UserError(
            f"{folder / CONFIG}: base_model_name_or_path={name!r} is no folder here, seen from "
            "the adapter's folder or "
            "from this one: download the model, and write its folder there"
        )
    return found[0].absolute()


def lora_of(folder: Path, base: ModelConfig) -> Lora:
    """Read the rank, alpha and targets of an adapter.

    Args:
      folder: the adapter's folder.
      base: the sizes of the model that the adapter belongs to.

    Returns:
      The values of `model.lora`.

    Raises:
      UserError: the config cannot be read or has a setting that the model does not compute, or no
        tensor belongs to a matrix of a block.
    """
    config = read_json(folder / CONFIG, _KINDS)
    for key, accepted in _COMPUTED.items():
        if config.get(key, accepted[0]) not in accepted:
            raise UserError(
                f"{folder / CONFIG}: {key}={config[key]!r} is not supported: only {accepted[0]!r}"
            )
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if rank is None or alpha is None or rank < 1:
        raise UserError(
            f"{folder / CONFIG} has no usable r and lora_alpha: found {rank!r} and {alpha!r}"
        )
    names = _tensors(folder)
    linears = _linears(base)
    targets = [
        our
        for module, ours in linears.items()
        if module.format(layer=0) + _A in names
        for our in ours
    ]
    if not targets:
        raise UserError(
            f"{folder / WEIGHTS} has a pair beside none of {', '.join(linears)}: is it an "
            "adapter of this model?"
        )
    return Lora(rank, float(alpha), tuple(targets))


def import_adapter(folder: Path, model: Model, plan: Plan, allow_nonfinite: bool = False) -> Params:
    """Read the LoRA matrices of a model, and no other parameters, each straight into its sharding.

    Args:
      folder: the adapter's folder.
      model: the model, whose config has the adapter's rank and targets.
      plan: the plan that says where the matrices go.
      allow_nonfinite: whether entries may be NaN or infinite.

    Returns:
      The matrices, in the tree of `model.trained(model.shapes())`.

    Raises:
      UserError: the adapter cannot be read, does not fit the model or has an entry that is not
        finite, or the plan does not fit the model.
    """
    require_mapping(model)
    helps = f"is it an adapter of this model? {CONFIG} names it as base_model_name_or_path"
    pairs = pair_up(
        {tensor.name: tensor for tensor in _layout(model)},
        _tensors(folder),
        str(folder / WEIGHTS),
        lambda missing, extra: helps,
    )
    return read_params(pairs, model, plan, model.trained(model.shapes()), allow_nonfinite)


def export_adapter(params: Params, model: Model, folder: Path, base: str) -> None:
    """Write a folder that PEFT loads, with one tensor at a time in host memory, as `export_hf`
    does. Every process must call this.

    Args:
      params: parameters in any sharding.
      model: the model of the parameters, which has LoRA.
      folder: a folder that does not exist yet or is empty.
      base: the folder of the model that the adapter belongs to.

    Raises:
      UserError: the model has parts of one's own or no form at Hugging Face, the folder has files,
        a write failed, or PEFT has one pair for matrices that have their own here.
    """
    require_library_parts(model)
    hf_config(model.config)  # refuses what transformers could not load the base as
    layout = [tensor._replace(name=_PREFIX + tensor.name) for tensor in _layout(model)]
    lora = model.config.lora
    linears = _linears(model.config)
    for module, ours in linears.items():
        if len(ours) > 1 and set(ours).intersection(lora.targets):
            raise UserError(
                f"PEFT has one pair beside {_last(module)} for what has one each beside "
                f"{', '.join(ours)} here: export "
                "the merged model, without --adapter"
            )
    adapted = [module for module, ours in linears.items() if set(ours).intersection(lora.targets)]
    weights = HF_FAMILIES[model_type(model.config)].tensors
    letters = dim_letters(model)
    # the input of [in, out]
    stored = {module: weights[f"{module}.weight"][0].split()[0] for module in adapted}
    inputs_first = any(
        letters[f"blocks.lora.{linears[module][0]}.a"][:-1] == dims
        for module, dims in stored.items()
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [_last(module) for module in adapted],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": inputs_first,
        "inference_mode": True,
    }
    arrays = hf_tensors(params, model, "float32", layout)

    def write(unfinished: Path) -> None:
        write_json(unfinished / CONFIG, config)
        write_tensors(unfinished / WEIGHTS, layout, arrays, "float32")

    write_folder(folder, write, arrays)


def _tensors(folder: Path) -> dict[str, Source]:
    if not (folder / WEIGHTS).exists():
        raise UserError(f"{folder} has no {WEIGHTS}: save the adapter again, with save_pretrained")
    found = find_tensors([folder / WEIGHTS])
    return {name.removeprefix(_PREFIX): source for name, source in found.items()}


def _linears(config: ModelConfig) -> dict[str, list[str]]:
    """Return Hugging Face's names of the linears that may have a pair, each with our names of the
    matrices that it holds.
    """
    rows = HF_FAMILIES[model_type(config)].tensors.items()
    there = Model(config).axes["blocks"]
    found = {
        name.removesuffix(".weight"): [param.removeprefix("blocks.") for param in row[1:]]
        for name, row in rows
    }
    return {
        name: ours
        for name, ours in found.items()
        if "{layer}" in name
        and "{expert}" not in name
        and name + ".weight" in dict(rows)
        and all(our in there and len(there[our]) > 2 and our != "router" for our in ours)
    }


def _layout(model: Model) -> list[Tensor]:
    """List the tensors of an adapter."""
    letters = dim_letters(model)
    sizes = dim_sizes(model)
    targets = model.config.lora.targets
    linears = _linears(model.config)
    tensors = list[Tensor]()
    for layer in range(model.config.layers):
        for module, ours in linears.items():
            if not set(ours) <= set(targets):
                continue
            a, b = ([f"blocks.lora.{our}.{x}" for our in ours] for x in "ab")
            name = module.format(layer=layer)
            ins = letters[a[0]][:-1]
            outs = letters[b[0]][1:]
            size_in, size_out = (math.prod(sizes[c] for c in dims) for dims in (ins, outs))
            tensors.append(
                Tensor(
                    name + _A,
                    (sizes["r"], size_in),
                    ("r", ins),
                    tuple(a),
                    (layer,),
                    None,
                )
            )
            tensors.append(
                Tensor(
                    name + _B,
                    (len(ours) * size_out, sizes["r"]),
                    (outs, "r"),
                    tuple(b),
                    (layer,),
                    0,
                )
            )
    return tensors


def _last(module: str) -> str:
    """Return the end of a linear's name that is enough to tell it from other linears."""
    return ".".join(module.split(".")[-2:])
