"""Hugging Face folders, and PEFT's, in and out: `families` ties the names of tensors to ours,
`layout` says how each lies, `load` reads and `export` writes them.
"""

from jaxpar.models.hf.families import (
    hf_config,
    model_config_from_hf,
)
from jaxpar.models.hf.load import (
    import_hf,
)

__all__ = [
    "hf_config",
    "import_hf",
    "model_config_from_hf",
]
