"""Hugging Face checkpoint to run folder and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from jaxpar.checkpoint import Checkpoints
from jaxpar.config import Config, DataConfig, check, flatten
from jaxpar.errors import UserError
from jaxpar.evaluate import pick_step
from jaxpar.mesh import MeshSpec
from jaxpar.models import Model
from jaxpar.models.hf import export_hf, import_hf, model_config_from_hf
from jaxpar.runtime import start
from jaxpar.sharding import Plan
from jaxpar.step import init_state, make_plan
from jaxpar.train import beside_state, open_run, restore_state

# What a config may set freely over an imported model: how it runs and trains, not what its numbers mean.
_FREE = ("vocab_multiple", "dropout", "init_std", "scan_layers", "max_seq_len")


def config_of(source: Path) -> Config:
    """A config whose model is that of a Hugging Face folder; the rest is default, to be overridden."""
    model = model_config_from_hf(source)
    return Config(
        model=model, mesh=MeshSpec(data=-1), data=DataConfig(seq_len=min(DataConfig.seq_len, model.max_seq_len))
    )


def import_run(config: Config, source: Path, target: Path) -> None:
    """Make a run folder whose checkpoint at step 0 holds the weights of a Hugging Face folder.

    Raises:
      UserError: a config whose model is another, a target that holds another run or has trained already, or a bad
        checkpoint (see `import_hf`).
    """
    theirs, ours = flatten(model_config_from_hf(source)), flatten(config.model)
    differing = [
        f"{key} is {theirs[key]} there and {ours[key]} here"
        for key in ours
        if key not in _FREE and ours[key] != theirs[key]
    ]
    if differing:
        raise UserError(f"{source} is not the model of this config: {'; '.join(differing)}")
    plan, model = make_plan(check(config), start(config.mesh, config.compile.cache)), Model(config.model)
    params = import_hf(source, model, _unstaged(plan))
    open_run(target, config)
    checkpoints = Checkpoints(target / "checkpoints", config.checkpoint)
    if checkpoints.latest() is not None:
        raise UserError(f"{target} has checkpoints already: import into a new run folder")
    checkpoints.save(0, init_state(model, config, plan, params), beside_state(plan, config, None, None), None)
    checkpoints.close()


def export_run(config: Config, source: Path, target: Path, step: int, dtype: Literal["float32", "bfloat16"]) -> int:
    """Write a run's checkpoint as a Hugging Face folder; returns the step that was exported."""
    plan, model = _unstaged(make_plan(check(config), start(config.mesh, config.compile.cache))), Model(config.model)
    checkpoints = Checkpoints(source / "checkpoints")
    step = pick_step(checkpoints, step)
    state, _ = restore_state(checkpoints, step, model, config, plan)
    export_hf(state.params, model, target, dtype=dtype)
    return step


def _unstaged(plan: Plan) -> Plan:
    """The plan with layers as the model has them, each of them whole on all stages: what a file holds; and its arrays
    on the device, where they are read."""
    rules = replace(plan.rules, layers=(), stage=())
    return replace(plan, rules=rules, parameters="device", optimizer="device")
