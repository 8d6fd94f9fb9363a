"""What lies in a run folder, read back: its config, a checkpoint's state on any mesh, weights to start from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpar.base.config import Config, ModelConfig, flatten, parse
from jaxpar.base.errors import UserError
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import path_name
from jaxpar.models import Model, Params
from jaxpar.models.hf import import_hf, model_config_from_hf
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.state import TrainState, reorder_state, state_shapes, state_shardings

ORDER = "layer_order"
# What a config may set freely over weights of another: how it runs and trains, not what its numbers mean.
_FREE = ("vocab_multiple", "dropout", "init_std", "scan_layers", "max_seq_len")


def read_run_config(folder: Path) -> Config:
    """The config a run folder was made with."""
    path = folder / "config.toml"
    if not path.exists():
        raise UserError(f"{folder} is no run folder: it has no config.toml")
    return parse(path.read_text(encoding="utf-8"), str(path))


def pick_step(checkpoints: Checkpoints, step: int) -> int:
    """The step asked for, or with 0 the best, or the newest when none was evaluated; a UserError when not there."""
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{checkpoints.folder} has no finished checkpoint")
    if step and step not in steps:
        raise UserError(f"{checkpoints.folder} has no step {step}: it has {', '.join(map(str, steps))}")
    if step:
        return step
    best = checkpoints.best()
    return steps[-1] if best is None else best


def restore_state(
    checkpoints: Checkpoints, step: int, model: Model, config: Config, plan: Plan
) -> tuple[TrainState[jax.Array], dict[str, Any]]:
    """The training state of a checkpoint on this plan's mesh (any mesh), and what was saved beside it."""
    layers, order = config.model.layers, checkpoints.data(step).get(ORDER)
    wanted, saved = stored_order(plan, layers), None if order is None else tuple(order)
    shardings = state_shardings(model, config, plan)
    if saved == wanted:
        return checkpoints.restore(step, state_shapes(model, config, plan), shardings)
    # Layers are read as they lie there, over the stages if that can be, and then each stage is sent its own.
    there = saved or tuple(range(layers))
    rules = plan.rules if len(there) % plan.size("layers") == 0 else replace(plan.rules, layers=(), stage=())
    found, data = checkpoints.restore(
        step,
        state_shapes(model, config, plan, there),
        state_shardings(model, config, replace(plan, rules=rules), there),
    )
    move = partial(reorder_state, before=saved, after=wanted, config=config)
    return jax.jit(move, out_shardings=shardings)(found), data


def beside_state(plan: Plan, config: Config, iterator: Any, tokens: int | None) -> dict[str, Any]:
    """What is saved beside a state: the data iterator's, the tokens it goes over, and the order of stored layers."""
    return {"iterator": iterator, "training_tokens": tokens, ORDER: stored_order(plan, config.model.layers)}


def initial_params(config: Config, plan: Plan) -> Params:
    """The parameters that `train.init` names: of a run folder's best checkpoint (or its newest, where none was
    evaluated), or of a Hugging Face folder. On this plan's mesh, layers as the model has them: see `init_state`.

    Raises:
      UserError: no such folder, another model, or a checkpoint that cannot be read.
    """
    source, model, plan = Path(config.train.init), Model(config.model), unstaged(plan)
    if not (source / "config.toml").exists():
        require_model(model_config_from_hf(source), config.model, source)
        return import_hf(source, model, plan)
    theirs = read_run_config(source)
    require_model(theirs.model, config.model, source)
    require_shapes(Model(theirs.model), model, source)
    checkpoints = Checkpoints(source / "checkpoints")
    # The optimizer's state, which is read too, must be as it lies there; it is dropped.
    stored = replace(config, precision=replace(theirs.precision, compute=config.precision.compute))
    kinds = theirs.precision
    plan = replace(plan, params=kinds.params, gradients=kinds.gradients, moments=kinds.moments)
    state, _ = restore_state(checkpoints, pick_step(checkpoints, 0), model, stored, plan)
    return state.params


def require_model(theirs: ModelConfig, ours: ModelConfig, source: Path) -> None:
    """Refuse weights of another model than a config's.

    Raises:
      UserError: with what differs.
    """
    there, here = flatten(theirs), flatten(ours)
    differing = [f"{key} is {there[key]} there and {here[key]} here" for key in here if here[key] != there[key]]
    differing = [text for text in differing if text.split()[0] not in _FREE]
    if differing:
        raise UserError(f"{source} is not the model of this config: {'; '.join(differing)}")


def require_shapes(theirs: Model, ours: Model, source: Path) -> None:
    """Refuse a run whose arrays have other shapes, as those of another `vocab_multiple` do.

    Raises:
      UserError: with the first of them.
    """
    leaves = zip(*(jax.tree_util.tree_leaves_with_path(model.shapes()) for model in (theirs, ours)), strict=True)
    for (path, there), (_, here) in leaves:
        if there.shape != here.shape:
            raise UserError(
                f"{source} has {path_name(path)} {list(there.shape)}, this config {list(here.shape)}: "
                "take its model.vocab_multiple and model.max_seq_len"
            )


def unstaged(plan: Plan) -> Plan:
    """The plan with layers as the model has them, each of them whole on all stages: what a file holds; and its arrays
    on the device, where they are read."""
    rules = replace(plan.rules, layers=(), stage=())
    return replace(plan, rules=rules, parameters="device", optimizer="device")
