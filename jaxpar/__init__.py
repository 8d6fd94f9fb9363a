"""jaxpar: language models in JAX under any mix of parallelisms, one answer on every layout, and
parts for any model.

    mesh   = jaxpar.make_mesh(data=2, fsdp=-1, tensor=2)
    layout = jaxpar.Layout(mesh, jaxpar.ShardingRules(), compute="bfloat16")

The wings: `parallel` (ops, and what they are made of), `kernels`, `verify` (is it the same
answer?), `rehearse` (what will it cost?), `plan`, `train`, `data`, `models`, `show`. Each is loaded
when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar import data, kernels, models, parallel, plan, rehearse, show, train, verify
    from jaxpar.base.config import Config, load_config, override
    from jaxpar.base.config.checks import check
    from jaxpar.base.errors import UserError
    from jaxpar.base.layout.mesh import DcnSpec, MeshSpec, make_mesh
    from jaxpar.base.layout.placements import placements
    from jaxpar.base.layout.plan import Plan
    from jaxpar.base.layout.sharding import Layout, ShardingRules
    from jaxpar.base.layout.specs import spec_for
    from jaxpar.base.process.runtime import start
    from jaxpar.rehearse.targets import load_target
    from jaxpar.train.experiment import Experiment
    from jaxpar.train.experiments import make_experiment
    from jaxpar.train.optimizer.state_layout import optimizer_state

_NAMES = {
    "base.config.checks": ("check",),
    "base.config": ("Config", "load_config", "override"),
    "base.errors": ("UserError",),
    "base.layout.mesh": ("DcnSpec", "MeshSpec", "make_mesh"),
    "base.layout.plan": ("Plan",),
    "base.process.runtime": ("start",),
    "base.layout.placements": ("placements",),
    "base.layout.sharding": ("Layout", "ShardingRules"),
    "base.layout.specs": ("spec_for",),
    "rehearse.targets": ("load_target",),
    "train.optimizer.state_layout": ("optimizer_state",),
    "train.experiment": ("Experiment",),
    "train.experiments": ("make_experiment",),
}
_WINGS = ("data", "kernels", "models", "parallel", "plan", "rehearse", "show", "train", "verify")
__all__ = [
    "Config",
    "DcnSpec",
    "Experiment",
    "Layout",
    "MeshSpec",
    "Plan",
    "ShardingRules",
    "UserError",
    "check",
    "data",
    "kernels",
    "load_config",
    "load_target",
    "make_experiment",
    "make_mesh",
    "models",
    "optimizer_state",
    "override",
    "parallel",
    "placements",
    "plan",
    "rehearse",
    "show",
    "spec_for",
    "start",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load a wing, or a name of one, when it is first asked for, so that help and a version need no
    JAX.
    """
    if name == "__version__":
        return import_module("jaxpar.base.version").jaxpar_version()
    if name in _WINGS:
        return import_module(f"jaxpar.{name}")
    for module, names in _NAMES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f"jaxpar.{module}"), name))
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
