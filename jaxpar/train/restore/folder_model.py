"""The model of a folder, be it a run's, Hugging Face's or PEFT's, and checks that its weights fit a
config.
"""

from __future__ import annotations

import os
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

_MOST_FOLDERS = 32
"""The most folders that a model's weights may lie in: an adapter beside an adapter beside a run,
each merged into the next. Nobody has so many.
"""
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


def folders_of(source: Path) -> list[Path]:
    """List the folders that a model's weights lie in: an adapter is followed by the folder of its
    base model, and a run with LoRA by the folder of the weights that are frozen beside it.

    Returns:
      The folders, `source` first. The last has all weights of its model itself.

    Raises:
      UserError: the folders lead back to one of them, are too many, or one does not exist.
    """
    found = [source]
    while (beside := _folder_beside(found[-1])) is not None:
        if any(same_folder(beside, folder) for folder in found):
            way = " -> ".join(str(folder.absolute()) for folder in (*found, beside))
            raise UserError(
                f"{source} leads to no whole weights: its adapters go round in a circle, {way}: "
                f"write the folder of the whole model into {_where_named(found[-1])}"
            )
        if len(found) == _MOST_FOLDERS:
            raise UserError(
                f"{source} lies beside more than {_MOST_FOLDERS} folders, each an adapter of the "
                "next: merge some of them first (export one without --adapter)"
            )
        found.append(beside)
    return found


def _folder_beside(source: Path) -> Path | None:
    """Find the folder of the base weights that the weights of another lie beside; None where they
    lie beside none.
    """
    if is_run(source):
        config = read_run_config(source)
        frozen = config.model.lora.rank and config.train.init
        return folder_here(config.train.init) if frozen else None
    if peft.is_adapter(source):
        return peft.base_folder(source)
    return None


def _where_named(source: Path) -> str:
    """Say where a folder names the folder of its base weights."""
    if is_run(source):
        return f"train.init of {source / 'config.toml'}, and delete its last line, the checksum"
    return f"base_model_name_or_path of {source / peft.CONFIG}"


def same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one folder, by whatever links."""
    return os.path.realpath(one) == os.path.realpath(other)


def adapters_of(source: Path) -> list[Path]:
    """List the folders of `folders_of` up to the first that is no adapter: the folders that may
    have the tokenizer.
    """
    if is_run(source):
        return [source]
    folders = folders_of(source)
    whole = (place for place, there in enumerate(folders) if is_run(there))
    return folders[: next(whole, len(folders)) + 1]


def model_of(source: Path) -> ModelConfig:
    """Read the model of a run folder, of a Hugging Face folder, or of the folder of a PEFT adapter.
    A UserError says that the folder is none of these, or that the library does not compute its
    model.
    """
    folders_of(source)
    return _model_of(source)


def _model_of(source: Path) -> ModelConfig:
    if is_run(source):
        return read_run_config(source).model
    if not peft.is_adapter(source):
        return model_config_from_hf(source)
    base = base_config(_model_of(peft.base_folder(source)))
    return replace(base, lora=peft.lora_of(source, base))


def frozen_folder(source: Path, lora: Lora) -> Path:
    """Find the folder of the weights that stay frozen when LoRA is trained on from `source`: where
    the source has the same LoRA, the base weights that it lies beside.
    """
    folders = folders_of(source)
    first = next(folder for folder in folders if not lora.rank or _model_of(folder).lora != lora)
    return first.absolute()


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
