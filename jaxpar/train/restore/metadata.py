"""The part of a state that a checkpoint has, and the metadata that are saved beside it and read
again.

The metadata tell whether a state is of the step that its folder says, in which order its layers
are, and whose optimizer, parts, teacher and frozen weights it was trained with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpar.base.errors import UserError, read_json, require_kinds, short
from jaxpar.models import AnyModel, Params
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.guard.replicas import sum_of_array
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.given_optimizer import GIVEN, saved_name
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint
from jaxpar.train.runs.folder.orbax_names import DATA_FILE
from jaxpar.train.runs.folder.run_folder import finished_steps, read_run_config
from jaxpar.train.runs.folder.steps import CHECKPOINTS
from jaxpar.train.state import TrainState

STEP = "step"
ORDER = "layer_order"
FROZEN = "frozen"
PARTS = "parts"
OPTIMIZER = "optimizer"
OPTIMIZER_FINGERPRINT = "optimizer_fingerprint"
TEACHER = "teacher"
_KINDS = {
    STEP: int | None,
    "iterator": dict[str, Any] | None,
    "training_tokens": int | None,
    ORDER: list[int] | None,
    FROZEN: int | None,
    PARTS: dict[str, str] | None,
    OPTIMIZER: str | None,
    OPTIMIZER_FINGERPRINT: dict[str, str] | None,
    TEACHER: str | None,
}
_GIVEN_KINDS = {key: _KINDS[key] for key in (OPTIMIZER, PARTS)}


def state_metadata(
    experiment: Experiment,
    iterator: Any,
    tokens: int | None,
    frozen: int | None,
    teacher: str | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Collect the metadata that are saved beside a state: the state of the data iterator, its
    number of tokens, the order of the layers, the `fingerprint` of the frozen parameters, the names
    of a program's own parts, the name of the optimizer, the fingerprint of an optimizer that a
    program gave, the identity of the teacher, and the step.
    """
    model = experiment.model
    order = stored_order(experiment.plan, model.config.layers)
    return {
        "iterator": iterator,
        "training_tokens": tokens,
        ORDER: order,
        FROZEN: frozen,
        PARTS: model.own_parts(),
        OPTIMIZER: saved_name(experiment.optimizer),
        OPTIMIZER_FINGERPRINT: experiment.optimizer_fingerprint,
        TEACHER: teacher,
        STEP: step,
    }


def read_metadata(checkpoints: Checkpoints, step: int, layers: int) -> dict[str, Any]:
    """Read the metadata that `state_metadata` had saved.

    Args:
      layers: the number of layers of its model.

    Raises:
      DamagedCheckpoint: the metadata are of another step.
      UserError: the values are of other kinds than were saved, or cannot be read.
    """
    place = f"what is beside the state of {checkpoints.folder / str(step)}"
    data = require_kinds(checkpoints.data(step), _KINDS, place)
    # None in those of earlier versions
    if data.get(STEP) is not None:
        require_step(checkpoints, step, data[STEP])
    order = data.get(ORDER)
    if order is None:
        return data
    # -1: uneven stages leave a place empty
    layers_there = sorted(layer for layer in order if layer != -1)
    if layers_there != list(range(layers)):
        raise UserError(
            f"{place}: {ORDER} is not the numbers of {layers} layers, found {short(order)}"
        )
    return data


def require_step(checkpoints: Checkpoints, step: int, found: int) -> None:
    """Refuse a checkpoint whose folder has been given the name of another step.

    Args:
      step: the step in the name of its folder.
      found: the step in its metadata.

    Raises:
      DamagedCheckpoint: the two differ.
    """
    if found != step:
        place = checkpoints.folder / str(step)
        raise DamagedCheckpoint(
            f"checkpoint {place} is step {found} under another name",
            place,
        )


def require_parts(model: AnyModel, saved: dict[str, str], place: Path) -> None:
    """Refuse a checkpoint of a model with other parts, whose parameters may have the same names.

    Args:
      saved: the names of the parts that were saved (`AnyModel.own_parts`).
      place: the folder of the checkpoint.

    Raises:
      UserError: the model has other parts.
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
      saved: the name of the optimizer that was saved; None in checkpoints of earlier versions.
      place: the folder of the checkpoint.

    Raises:
      UserError: one of the two optimizers was given, and not the other.
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


def saved_part(state: TrainState, model: AnyModel) -> TrainState:
    """Return the part of a state that a checkpoint has: all but the parameters that are frozen."""
    return state._replace(params=model.trained(state.params))


class SavedState(NamedTuple):
    """The part of a state that a checkpoint has, with the arrays that hooks keep, by the names of
    the hooks: trees in the form of the parameters that are trained.
    """

    step: Any
    params: Params
    opt_state: Any
    hooks: dict[str, Params]


OF_HOOKS = "hooks."
"""The beginning of the names of the arrays of hooks."""


def saved_hooks(state: TrainState, hooks: dict[str, Params]) -> TrainState | SavedState:
    """Add the arrays of hooks to a state, as it is saved."""
    return SavedState(*state, hooks) if hooks else state


def fingerprint(model: AnyModel, params: Params) -> int | None:
    """Add up the bits of the frozen parameters, in any layout; None where none is frozen."""
    if not model.config.lora.rank:
        return None
    trained = model.trained(params)["blocks"]
    frozen = params | {
        "blocks": {name: leaf for name, leaf in params["blocks"].items() if name not in trained}
    }
    return sum_of_bits(frozen)


def sum_of_bits(params: Params) -> int:
    """Add up the bits of parameters, in any layout: other weights have another sum."""
    return sum(int(_sum_on_device(leaf)) for leaf in jax.tree.leaves(params)) % 2**32


@jax.jit
def _sum_on_device(x: jax.Array) -> jax.Array:
    return sum_of_array(on_device(x))


def given_notes(folder: Path) -> list[str]:
    """Say what a program gave a run that a command cannot know: a command takes the config's in its
    place, and numbers with that are not the run's.

    Args:
      folder: a run folder; where it has no checkpoint, nothing is known.

    Returns:
      A sentence for the optimizer, and one for the parts of the model; none where all is the
      config's.

    Raises:
      UserError: the newest checkpoint or the config cannot be read.
    """
    steps = finished_steps(folder)
    if not steps:
        return []
    file = folder / CHECKPOINTS / str(steps[-1]) / DATA_FILE
    metadata = read_json(file, _GIVEN_KINDS) if file.exists() else {}
    config = read_run_config(folder)
    notes = []
    if metadata.get(OPTIMIZER) == GIVEN:
        notes.append(
            f"{folder} was trained with an optimizer that a program gave, and a command takes its "
            f"config's, optimizer.name={config.optimizer.name}: what is said of the optimizer's "
            "state, its memory and its update is not that run's; from Python, give make_experiment "
            "the optimizer="
        )
    parts = metadata.get(PARTS)
    if parts:
        named = ", ".join(f"{part}={name}" for part, name in parts.items())
        notes.append(
            f"{folder} was trained with parts of a model that a program gave ({named}), and a "
            f"command takes its config's, model.family={config.model.family}: what is said is not "
            "of that run's model; from Python, give make_experiment the model="
        )
    return notes
