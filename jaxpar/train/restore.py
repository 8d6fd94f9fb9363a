"""Restores a checkpoint's state on any mesh, and loads weights to start from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpar.base.config import Config, ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.plan import Plan
from jaxpar.base.toml import flatten
from jaxpar.models import Model, Params
from jaxpar.models.hf import import_hf, model_config_from_hf
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.run_folder import read_run_config
from jaxpar.train.state import TrainState, reorder_state, state_shapes, state_shardings

ORDER = "layer_order"
# What a config may set freely although its weights come from another: how the model runs, not what its weights mean.
_FREE = ("vocab_multiple", "dropout", "init_std", "scan_layers", "max_seq_len")


def load_run(folder: Path, step: int, config: Config, plan: Plan) -> tuple[int, TrainState[jax.Array]]:
    """Load a run's checkpoint on this plan's mesh and return its step and state; 0 = the best, or the newest where none
    was evaluated.

    Raises:
      UserError: there is no such checkpoint, or it cannot be read.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{checkpoints.folder} has no finished checkpoint")
    if step and step not in steps:
        raise UserError(f"{checkpoints.folder} has no step {step}: it has {', '.join(map(str, steps))}")
    if not step:
        best = checkpoints.best()
        step = steps[-1] if best is None else best
    return step, restore_state(checkpoints, step, config, plan)[0]


def restore_state(
    checkpoints: Checkpoints, step: int, config: Config, plan: Plan
) -> tuple[TrainState[jax.Array], dict[str, Any]]:
    """Restore the training state of a checkpoint on this plan's mesh (any mesh), and what was saved beside it."""
    model, layers, data = Model(config.model), config.model.layers, checkpoints.data(step)
    wanted, saved = stored_order(plan, layers), data.get(ORDER)
    if saved == (None if wanted is None else list(wanted)):
        return checkpoints.restore(step, state_shapes(model, config, plan)), data
    # Layers are read in their saved order, over the stages if possible, and then each stage is sent its own.
    there = tuple(saved or range(layers))
    rules = plan.rules if len(there) % plan.size("layers") == 0 else replace(plan.rules, layers=(), stage=())
    found = checkpoints.restore(step, state_shapes(model, config, replace(plan, rules=rules), there))
    move = partial(reorder_state, before=there, after=wanted, config=config)
    return jax.jit(move, out_shardings=state_shardings(model, config, plan))(found), data


def beside_state(plan: Plan, config: Config, iterator: Any, tokens: int | None) -> dict[str, Any]:
    """Return what is saved beside a state: the data iterator's state, its number of tokens, and the layers' order."""
    return {"iterator": iterator, "training_tokens": tokens, ORDER: stored_order(plan, config.model.layers)}


def initial_params(config: Config, plan: Plan) -> Params:
    """Load the parameters that `train.init` names: those of a run folder's best checkpoint (the newest if none was
    evaluated) or of a Hugging Face folder. They are on this plan's mesh, with the model's order of layers, as
    `init_state` takes them.

    Raises:
      UserError: there is no such folder, it is of another model, or the checkpoint cannot be read.
    """
    return load_params(Path(config.train.init), config, plan)


def load_params(source: Path, config: Config, plan: Plan, step: int = 0) -> Params:
    """Load the parameters of a run folder's checkpoint (see `load_run`), or of a Hugging Face folder."""
    model, plan = Model(config.model), drop_stages(plan)
    if not (source / "config.toml").exists():
        require_model(model_config_from_hf(source), config.model, source)
        return import_hf(source, model, plan)
    theirs = read_run_config(source)
    require_model(theirs.model, config.model, source)
    kinds = theirs.precision  # the optimizer's state is read too, and dropped, so its dtypes must be those saved
    plan = replace(plan, params=kinds.params, gradients=kinds.gradients, moments=kinds.moments)
    return load_run(source, step, config, plan)[1].params


def require_model(theirs: ModelConfig, ours: ModelConfig, source: Path) -> None:
    """Refuse weights of a model other than the config's, with a UserError that says what differs."""
    there, here = flatten(theirs), flatten(ours)
    differing = [f"{key} is {there[key]} there and {here[key]} here" for key in here if here[key] != there[key]]
    differing = [text for text in differing if text.split()[0] not in _FREE]
    if differing:
        raise UserError(f"{source} is not the model of this config: {'; '.join(differing)}")


def drop_stages(plan: Plan) -> Plan:
    """Return the plan without stages: layers are in the model's order, as in a file, and each is whole on all stages.
    Its arrays are on the device, where they are read."""
    rules = replace(plan.rules, layers=(), stage=())
    return replace(plan, rules=rules, parameters="device", optimizer="device")
