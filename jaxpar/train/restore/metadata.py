"""What a checkpoint has of a state, and the metadata that are saved beside it and read again.

The metadata tell whether a state is of the step that its folder says, in which order its layers
are, and whose optimizer, parts, teacher and frozen weights it was trained with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxpar.base.errors import UserError, require_kinds, short
from jaxpar.models import AnyModel, Params
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.guard.replicas import sum_of_array
from jaxpar.train.optimizer.given_optimizer import saved_name
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint
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


def state_metadata(
    experiment: Experiment,
    iterator: Any,
    tokens: int | None,
    frozen: int | None,
    teacher: str | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Return the metadata that are saved beside a state: the state of the data iterator, its number
    of tokens, the order of the layers, the `fingerprint` of the frozen parameters, the names of
    parts of one's own, the name of the optimizer, the fingerprint of one that a program gave, what
    tells its teacher from another, and the step.
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
    """Return what `state_metadata` had saved.

    Args:
      checkpoints: those of the run.
      step: that of the checkpoint.
      layers: how many layers its model has.

    Raises:
      DamagedCheckpoint: it is of another step.
      UserError: it is of other kinds than were saved, or cannot be read.
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
      checkpoints: those of the run.
      step: what its folder says.
      found: what it says itself.

    Raises:
      DamagedCheckpoint: the two differ.
    """
    if found != step:
        place = checkpoints.folder / str(step)
        raise DamagedCheckpoint(
            f"checkpoint {place} is step {found} under another name",
            place,
        )


def saved_part(state: TrainState, model: AnyModel) -> TrainState:
    """Return what a checkpoint has of a state: all but the parameters that are frozen."""
    return state._replace(params=model.trained(state.params))


class SavedState(NamedTuple):
    """What a checkpoint has of a state whose hooks keep arrays too: those in the form of the
    parameters that are trained, by the names of the hooks.
    """

    step: Any
    params: Params
    opt_state: Any
    hooks: dict[str, Params]


OF_HOOKS = "hooks."
"""What the names of the arrays of hooks begin with."""


def saved_hooks(state: TrainState, hooks: dict[str, Params]) -> TrainState | SavedState:
    """Return a state with the arrays of hooks, as it is saved."""
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
    """Add up the bits of parameters, in any layout: those of other weights are others."""
    return sum(int(_sum_on_device(leaf)) for leaf in jax.tree.leaves(params)) % 2**32


@jax.jit
def _sum_on_device(x: jax.Array) -> jax.Array:
    return sum_of_array(on_device(x))
