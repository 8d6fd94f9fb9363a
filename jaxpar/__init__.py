"""jaxpar: GPT-2 and LLaMA in JAX under any mix of parallelisms, the same answer on every layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.base.config import Config, check, load_config, override
    from jaxpar.base.errors import UserError
    from jaxpar.base.mesh import DcnSpec, MeshSpec, make_mesh
    from jaxpar.base.runtime import start
    from jaxpar.base.sharding import Plan, ShardingRules, placements, spec_for

__all__ = [
    "Config", "DcnSpec", "MeshSpec", "Plan", "ShardingRules", "UserError", "check", "load_config", "make_mesh",
    "override", "placements", "spec_for", "start",
]  # fmt: skip
_WINGS = ("kernels", "models", "parallel", "plan", "rehearse", "show", "train", "verify")
_ROOMS = ("errors", "config", "mesh", "runtime", "sharding")


def __getattr__(name: str) -> Any:
    """A wing, or a name of `__all__`, when it is first asked for: help and a version have no use for JAX."""
    if name in _WINGS:
        return import_module(f"jaxpar.{name}")
    if name in __all__:
        for room in _ROOMS:
            found = vars(import_module(f"jaxpar.base.{room}"))
            if name in found:
                return globals().setdefault(name, found[name])
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
