"""Restores what a checkpoint has of a state, on any mesh and in another order of layers too, and
refuses a checkpoint of another model or optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpar.base.errors import UserError
from jaxpar.models import AnyModel
from jaxpar.models.lora import has_old_names, with_new_names, with_old_names
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.given_optimizer import GIVEN, saved_name
from jaxpar.train.restore.metadata import OF_HOOKS, saved_part
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.state import TrainState, state_shapes
from jaxpar.train.step import reorder_state


def restore_trained(
    checkpoints: Checkpoints,
    step: int,
    experiment: Experiment,
    saved: Sequence[int] | None,
    whole: bool,
    hook: str = "",
) -> TrainState[Any]:
    """Restore what a checkpoint has: all but the parameters that are frozen.

    Args:
      checkpoints: those of the run.
      step: that of the checkpoint.
      experiment: the run's model, on a plan of any mesh.
      saved: the order of its layers; None = the model's.
      whole: whether all of it is read; if not, step and optimizer are empty.
      hook: the name of a hook whose arrays are read in place of the parameters, which alone are
        read then.

    Returns:
      The state on the mesh, with the plan's order of layers.

    Raises:
      DamagedCheckpoint: the checkpoint is not what was saved.
      UserError: it cannot be read, or is of another model.
    """
    model = experiment.model
    config = experiment.config
    plan = experiment.plan
    optimizer = experiment.optimizer
    layers = config.model.layers
    renamed = model.config.lora.rank > 0 and has_old_names(checkpoints.names(step))

    def read(shapes: TrainState[jax.ShapeDtypeStruct]) -> TrainState[Any]:
        if renamed:
            return with_new_names(read_as_named(with_old_names(shapes)))
        return read_as_named(shapes)

    def read_as_named(shapes: TrainState[jax.ShapeDtypeStruct]) -> TrainState[Any]:
        if whole:
            return checkpoints.restore(step, shapes, besides=OF_HOOKS)
        if hook:
            wanted = {"hooks": {hook: shapes.params}}
            found = checkpoints.restore(step, wanted, part=True)
            return TrainState((), found["hooks"][hook], ())
        found = checkpoints.restore(step, {"params": shapes.params}, part=True)
        return TrainState((), found["params"], ())

    wanted = stored_order(plan, layers)
    if saved == (None if wanted is None else list(wanted)):
        return read(saved_part(experiment.state, model))
    # Layers are read in their saved order, over the stages if possible, and then each stage is sent
    # its own.
    there = tuple(saved or range(layers))
    if len(there) % plan.size("layers") == 0:
        rules = plan.rules
    else:
        rules = replace(plan.rules, layers=(), stage=())
    shapes = state_shapes(model, replace(plan, rules=rules), optimizer, there)
    found = read(saved_part(shapes, model))
    shardings = saved_part(experiment.shardings, model)
    move = partial(reorder_state, before=there, after=wanted, model=model, optimizer=optimizer)
    if not whole:
        shardings = TrainState((), shardings.params, ())
    return jax.jit(move, out_shardings=shardings)(found)


def require_parts(model: AnyModel, saved: dict[str, str], place: Path) -> None:
    """Refuse a checkpoint of a model with other parts, whose parameters may have the same names.

    Args:
      model: the model.
      saved: the names of the parts that were saved (`AnyModel.own_parts`).
      place: the folder of the checkpoint.

    Raises:
      UserError: the parts are others.
    """
    ours = model.own_parts()
    if saved != ours:
        there, here = (
            ", ".join(f"{part}={name}" for part, name in parts.items()) or "the library's own"
            for parts in (saved, ours)
        )
        raise UserError(
            f"{place} is of a model whose parts are {there}, and here they are {here}: give "
            "make_experiment, or open_trained, the model=Model(config.model, ...) that was trained"
        )


def require_optimizer(optimizer: Optimizer, saved: str | None, place: Path) -> None:
    """Refuse the state of an optimizer that a program gave for the config's, and the reverse: two
    optimizers may keep arrays of the same form.

    Args:
      optimizer: the optimizer.
      saved: the name of that which was saved; None in checkpoints of earlier versions.
      place: the folder of the checkpoint.

    Raises:
      UserError: one of the two was given, and not the other.
    """
    if saved is None or (saved == GIVEN) == (saved_name(optimizer) == GIVEN):
        return
    if saved == GIVEN:
        raise UserError(
            f"{place} was trained with an optimizer that a program gave, and here it is "
            f"optimizer.name={optimizer.name}: give make_experiment the optimizer= that it was "
            "trained with"
        )
    raise UserError(
        f"{place} was trained with optimizer.name={saved}, and here an optimizer is given: leave "
        "out optimizer=, or begin another run with train.init"
    )


def require_no_average(checkpoints: Checkpoints, step: int) -> None:
    """Refuse to evaluate the parameters of an optimizer that averages them, where nobody says how.

    Args:
      checkpoints: those of the run.
      step: that of the checkpoint.

    Raises:
      UserError: the state is one of `optax.contrib.schedule_free`.
    """
    for name in checkpoints.names(step):
        if name.startswith("opt_state") and name.endswith("weight_sum"):
            raise UserError(
                f"{checkpoints.folder / str(step)} was trained with a schedule-free optimizer that "
                "is not its config's, and what is to be evaluated is its average: give that "
                "optimizer"
            )
