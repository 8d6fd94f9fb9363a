"""Hugging Face folders, and PEFT's, in and out.

In the order in which to read: `families` ties names of settings and tensors to ours, a row for each
family; `config_json` reads and writes a config.json; `layout` ties each tensor to our parameters,
`misfits` says why tensors do not fit, `load` reads a folder and `export` writes one. Beside these,
`compressed` packs 2:4 matrices, and `peft` reads and writes LoRA's adapters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.models.hf.config_json import hf_config, model_config_from_hf
    from jaxpar.models.hf.load import import_hf

_ROOMS = {"hf_config": "config_json", "import_hf": "load", "model_config_from_hf": "config_json"}
__all__ = ["hf_config", "import_hf", "model_config_from_hf"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: safetensors is not needed to know a family."""
    if name in _ROOMS:
        return getattr(import_module(f"jaxpar.models.hf.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
