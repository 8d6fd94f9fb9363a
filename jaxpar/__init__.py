"""jaxpar: GPT-2 and LLaMA in JAX under any mix of parallelisms, the same answer on every layout."""

from jaxpar.config import Config, check, load_config, override
from jaxpar.errors import UserError
from jaxpar.mesh import DcnSpec, MeshSpec, make_mesh
from jaxpar.runtime import start
from jaxpar.sharding import Plan, ShardingRules, placements, spec_for

__all__ = [
    "Config", "DcnSpec", "MeshSpec", "Plan", "ShardingRules", "UserError", "check", "load_config", "make_mesh",
    "override", "placements", "spec_for", "start",
]  # fmt: skip
