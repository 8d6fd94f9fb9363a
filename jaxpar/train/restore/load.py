"""Functions that load the state of a run, or the weights of any folder, on any mesh and in another
order of layers too.

Weights that are frozen beside LoRA lie in another folder, which may be a run in its turn: so the
state of a run and the weights of a folder are loaded by functions that call each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpar.base.config import Lora
from jaxpar.base.config.sparsity import Sparsity
from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model, Params, in_parts
from jaxpar.models.hf import import_hf, peft
from jaxpar.models.hidden import PROJECTIONS
from jaxpar.models.lora import has_old_names, with_new_names, with_old_names
from jaxpar.models.views import fold_views
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import with_projections
from jaxpar.train.restore.folder_model import model_of, require_model
from jaxpar.train.restore.metadata import (
    FROZEN,
    OF_HOOKS,
    OPTIMIZER,
    ORDER,
    PARTS,
    fingerprint,
    read_metadata,
    require_optimizer,
    require_parts,
    require_step,
    saved_part,
)
from jaxpar.train.restore.which_step import read_whole_step
from jaxpar.train.runs.bucket import folder_here
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.run_folder import is_run, read_run_config
from jaxpar.train.runs.stores import StoreOf, store_of
from jaxpar.train.state import TrainState, state_shapes
from jaxpar.train.step import evaluation_params, init_state, reorder_state


def load_params(source: Path, experiment: Experiment, step: int = 0) -> Params:
    """Load the parameters of a model from a folder.

    An adapter of the config's own rank, alpha and targets stays beside its matrices; another is
    merged into them. LoRA that the source does not have begins as PEFT begins it, from
    `train.seed`. Matrices that are as sparse as the config's are read as they are stored; matrices
    of another form get zeros where they do not multiply.

    Args:
      source: a run folder, a Hugging Face folder, or the folder of a PEFT adapter.
      experiment: the experiment of the model, on any plan.
      step: the checkpoint of a run; 0 = the best, or the newest where none was evaluated.

    Returns:
      The parameters on the plan's mesh, with the model's order of layers, as `init_state` takes
      them.

    Raises:
      UserError: there is no such folder, it has another model, or its weights cannot be read.
    """
    theirs = model_of(source)
    config = experiment.config
    model = in_parts(experiment.model, f"weights of {source}")
    plan = drop_stages(experiment.plan)
    require_model(theirs, config.model, source)
    lora = config.model.lora
    # The projections of a training are its own, and begin anew.
    bare = replace(experiment, plan=plan, model=model.with_projections(None))
    there = _with_views(bare, theirs.lora, theirs.sparsity)
    params = _stored_params(source, there, step)
    key = jax.random.key(config.train.seed)
    shardings = plan.sharding(model.axes, model.shapes())
    if model.projections is not None:
        own = {PROJECTIONS: shardings[PROJECTIONS]}
        params |= jax.jit(lambda: model.init_projections(key), out_shardings=own)()
    if theirs.lora == lora and theirs.sparsity.keeps_as(config.model.sparsity):
        return params
    params = fold_views(params, in_parts(there.model, f"weights of {source}"))
    if not lora.rank:
        return params
    init_lora = jax.jit(
        lambda: model.trained(model.init(key)), out_shardings=model.trained(shardings)
    )
    return Model.merge(params, init_lora())


def _stored_params(source: Path, there: Experiment, step: int) -> Params:
    """Read the parameters of a folder as they are stored, on an experiment with its own model."""
    plan = there.plan
    model = in_parts(there.model, f"weights of {source}")
    nonfinite = there.config.train.allow_nonfinite
    if is_run(source):
        _, params = load_run(source, step, _as_run(source, there))
        params.pop(PROJECTIONS, None)
        return params
    if peft.is_adapter(source):
        base = load_params(peft.base_folder(source), _with_views(there, Lora(), Sparsity()))
        return Model.merge(base, peft.import_adapter(source, model, plan, nonfinite))
    return import_hf(source, model, plan, nonfinite)


def _as_run(source: Path, there: Experiment) -> Experiment:
    """Make the experiment of a run's own training, whose parameters are read in the dtype in which
    they were saved.
    """
    run = read_run_config(source)
    training = replace(there.config, train=run.train, optimizer=run.optimizer, pruning=run.pruning)
    precision = run.precision
    return replace(
        there,
        config=training,
        model=with_projections(there.model, run),
        plan=replace(there.plan, params=precision.params, moments=precision.moments),
        own_optimizer=None,
    )


def _with_views(experiment: Experiment, lora: Lora, sparsity: Sparsity) -> Experiment:
    """Change an experiment's model to one with this LoRA, and with matrices as sparse."""
    sizes = replace(experiment.config.model, lora=lora, sparsity=sparsity)
    return replace(
        experiment,
        config=replace(experiment.config, model=sizes),
        model=experiment.model.with_config(sizes),
    )


def drop_stages(plan: Plan) -> Plan:
    """Remove the stages of a plan: layers are in the model's order, as in a file, and each is whole
    on all stages. Its arrays are on the device, where they are read.
    """
    rules = replace(plan.rules, layers=(), stage=())
    return replace(plan, rules=rules, parameters="device", optimizer="device")


def load_run(
    folder: Path, step: int, experiment: Experiment, store: StoreOf = store_of
) -> tuple[int, Params]:
    """Load the parameters of a run's checkpoint. The optimizer's state is not read.

    A damaged checkpoint is left out with a note, and the one that is chosen without it is taken
    (`read_whole_step`).

    Args:
      step: the step of the checkpoint; 0 = the best, or the newest where none was evaluated.
      experiment: the experiment of its model, on a plan of any mesh.
      store: makes the store that keeps the checkpoints, where the run has one of its own.

    Returns:
      The step, and the parameters on the mesh.

    Raises:
      DamagedCheckpoint: the checkpoint of `step` is damaged, or all are.
      UserError: there is no such checkpoint, or it cannot be read.
    """

    def read(checkpoints: Checkpoints, chosen: int) -> Params:
        state, _ = restore_state(checkpoints, chosen, experiment, whole=False)
        return state.params

    return read_whole_step(folder, step, read, store)


def restore_state(
    checkpoints: Checkpoints, step: int, experiment: Experiment, whole: bool = True
) -> tuple[TrainState[jax.Array], dict[str, Any]]:
    """Restore the training state of a checkpoint.

    Args:
      experiment: the experiment of the run's model, on a plan of any mesh.
      whole: whether all of the state is read; if not, its parameters alone are.

    Returns:
      The state on the mesh, and the values that were saved beside it. Parameters that are frozen
      are loaded from `train.init`.

    Raises:
      UserError: the checkpoint or the frozen weights cannot be read, they belong to a model of
        other parts, the whole state belongs to an optimizer that a program gave and here it is the
        config's (or the other way round), or the frozen weights are no longer the run's.
    """
    config = experiment.config
    model = experiment.model
    data = read_metadata(checkpoints, step, config.model.layers)
    place = checkpoints.folder / str(step)
    require_parts(model, data.get(PARTS) or {}, place)
    if whole:
        require_optimizer(experiment.optimizer, data.get(OPTIMIZER), place)
    averages = experiment.optimizer.averages(experiment.state.opt_state)
    if not whole and not averages:
        _require_no_average(checkpoints, step)
    state: TrainState[Any] = _restore_trained(
        checkpoints, step, experiment, data.get(ORDER), whole or averages
    )
    if whole:
        require_step(checkpoints, step, int(jax.device_get(state.step)))
    if config.model.lora.rank:
        state = state._replace(params=_with_frozen(experiment, state.params, data))
    if averages and not whole:
        state = TrainState((), evaluation_params(experiment, state), ())
    return state, data


def _restore_trained(
    checkpoints: Checkpoints,
    step: int,
    experiment: Experiment,
    saved: Sequence[int] | None,
    whole: bool,
    hook: str = "",
) -> TrainState[Any]:
    """Restore all that a checkpoint has: all but the parameters that are frozen.

    Args:
      experiment: the experiment of the run's model, on a plan of any mesh.
      saved: the order of its layers; None = the model's.
      whole: whether all of it is read; if not, step and optimizer are empty.
      hook: the name of a hook; its arrays alone are then read, in place of the parameters.

    Returns:
      The state on the mesh, with the plan's order of layers.

    Raises:
      DamagedCheckpoint: the checkpoint is not what was saved.
      UserError: the checkpoint cannot be read, or is of another model.
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


def _require_no_average(checkpoints: Checkpoints, step: int) -> None:
    """Refuse to evaluate the parameters of an optimizer that averages them, where nobody says how.

    Raises:
      UserError: the state belongs to `optax.contrib.schedule_free`.
    """
    for name in checkpoints.names(step):
        if name.startswith("opt_state") and name.endswith("weight_sum"):
            raise UserError(
                f"{checkpoints.folder / str(step)} was trained with a schedule-free optimizer that "
                "is not its config's, and what is to be evaluated is its average: give that "
                "optimizer"
            )


def hooks_with_arrays(checkpoints: Checkpoints, step: int) -> set[str]:
    """Find the names of the hooks whose arrays a checkpoint has."""
    names = checkpoints.names(step)
    return {name.split(".")[1] for name in names if name.startswith(OF_HOOKS)}


def restore_hook(checkpoints: Checkpoints, step: int, experiment: Experiment, hook: str) -> Params:
    """Restore the arrays that a hook keeps beside a state.

    Args:
      experiment: the experiment of the run's model, on a plan of any mesh.
      hook: the name of a hook that has arrays in the checkpoint.

    Returns:
      The arrays on the mesh, in the form of the parameters that are trained.

    Raises:
      UserError: the arrays cannot be read, or belong to another model.
    """
    order = read_metadata(checkpoints, step, experiment.config.model.layers).get(ORDER)
    return _restore_trained(checkpoints, step, experiment, order, whole=False, hook=hook).params


def _with_frozen(experiment: Experiment, trained: Params, data: dict[str, Any]) -> Params:
    """Add to the trained parameters those that are frozen beside LoRA, which `train.init` has."""
    config = experiment.config
    model = experiment.model
    source = folder_here(config.train.init)
    frozen = init_state(experiment, load_params(source, experiment)).params
    if fingerprint(model, frozen) != data.get(FROZEN):
        raise UserError(
            f"{source} has other weights now than those that this run trains LoRA beside: bring "
            "them back"
        )
    return model.merge(frozen, trained)
