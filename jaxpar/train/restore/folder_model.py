"""The model of a folder, be it a run's, Hugging Face's or PEFT's, and whether its weights fit a
config.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.config.sparsity import Sparsity
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten
from jaxpar.models.hf import model_config_from_hf, peft
from jaxpar.models.views import base_config
from jaxpar.train.runs.bucket import folder_here
from jaxpar.train.runs.folder.run_folder import is_run, read_run_config

# What a config may set freely although its weights come from another: how the model runs, not what
# its weights mean.
_FREE = {
    "vocab_multiple",
    "dropout",
    "init_std",
    "scan_layers",
    "max_seq_len",
    *(f"lora.{key}" for key in vars(Lora())),
    *(f"sparsity.{key}" for key in vars(Sparsity())),
}


def model_of(source: Path) -> ModelConfig:
    """Return the model of a run folder, of a Hugging Face folder, or of the folder of a PEFT
    adapter. A UserError says that it is none of these, or that the model is one that is not
    computed here."""
    if is_run(source):
        return read_run_config(source).model
    if not peft.is_adapter(source):
        return model_config_from_hf(source)
    base = base_config(model_of(peft.base_folder(source)))
    return replace(base, lora=peft.lora_of(source, base))


def frozen_folder(source: Path, lora: Lora) -> Path:
    """Return the folder of the weights that stay frozen when LoRA goes on from `source`: where the
    source has the same LoRA, those that it is beside."""
    while lora.rank and model_of(source).lora == lora:
        if peft.is_adapter(source):
            source = peft.base_folder(source)
        else:
            source = folder_here(read_run_config(source).train.init)
    return source.absolute()


def require_model(theirs: ModelConfig, ours: ModelConfig, source: Path) -> None:
    """Refuse weights of a model other than the config's, with a UserError that says what
    differs.
    """
    there = flatten(theirs)
    here = flatten(ours)
    differing = [key for key in here if here[key] != there[key] and key not in _FREE]
    if differing:
        found = "; ".join(f"{key} is {there[key]} there and {here[key]} here" for key in differing)
        raise UserError(f"{source} is not the model of this config: {found}")
