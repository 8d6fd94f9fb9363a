"""Hugging Face folders, and PEFT's, in and out: `families` ties the names of tensors to ours,
`layout` says how each lies, `load` reads and `export` writes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.models.hf.families import hf_config, model_config_from_hf
    from jaxpar.models.hf.load import import_hf

_ROOMS = {"hf_config": "families", "import_hf": "load", "model_config_from_hf": "families"}
__all__ = ["hf_config", "import_hf", "model_config_from_hf"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: to know a family one needs no safetensors."""
    if name in _ROOMS:
        return getattr(import_module(f"jaxpar.models.hf.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
