"""The making of an experiment from a config: its model and its plan (mesh, rules and choices),
which are checked against each other and the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from jaxpar.base.compiler import step_options
from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.config.hidden_pairs import read_pairs
from jaxpar.base.errors import UserError
from jaxpar.base.jax_settings import require_usual_settings
from jaxpar.base.layout.mesh import MeshAxis, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.specs import DoesNotDivide
from jaxpar.base.process.runtime import start
from jaxpar.models import AnyModel, Model
from jaxpar.models.hidden import Projections
from jaxpar.parallel.host_memory import check_offload
from jaxpar.parallel.pipeline import check_stages, microbatches
from jaxpar.train.activations import check_names
from jaxpar.train.experiment import Experiment, pipelined_microbatches
from jaxpar.train.experiments.checks import (
    check_batch,
    check_own_model,
    check_padding,
    check_parameters,
    require_pruned,
)
from jaxpar.train.experiments.notes import offload_asked
from jaxpar.train.optimizer import require_runnable
from jaxpar.train.optimizer.given_optimizer import AnyOptimizer

_MOST_ATTEMPTS = 8
"""The number of meshes that are tried for an advice; slices (`mesh.dcn`) may be what does not
divide.
"""

if TYPE_CHECKING:  # it needs grain, which a program without data need not have
    from jaxpar.data.corpus import Corpus


def make_experiment(
    config: Config,
    devices: list[jax.Device] | None = None,
    model: AnyModel | None = None,
    optimizer: AnyOptimizer = None,
    corpus: Corpus | None = None,
    training: bool = True,
) -> Experiment:
    """Make what a config needs to run on these devices, and check it as a whole.

    The rules are the config's, except where there are more devices than heads (`fit_rules`).
    `plan_notes` says what was changed.

    Args:
      devices: the devices of the mesh, which may be those of a target; None = the devices of
        `jaxpar.start(config.mesh)`, which the commands take: simulated ones where `mesh.platform`
        is cpu, the devices of all processes where `mesh.distributed` is set, else all that are
        here.
      model: the model, perhaps with parts of a program's own, or a whole `jaxpar.models.OwnModel`,
        for which `config.model` means nothing; None = the model of `config.model`.
      optimizer: any optax transformation, or an `Optimizer`; None = the optimizer of
        `config.optimizer`.
      corpus: the data, where they are loaded already; None = `config.data` says where they are.
      training: whether the experiment is to be trained. Otherwise a setting that only training
        reads may have any value of its type, as in a run of an earlier version.

    Returns:
      The experiment, whose `config` is the one given, but for the model's own sizes.

    Raises:
      UserError: JAX has a setting that no step runs with (`require_usual_settings`), `check`
        refuses a setting, the devices cannot be had (`jaxpar.start`), the mesh does not fit them,
        mesh axes do not divide a dim or the batch, the optimizer state is split neither as its
        parameters nor further, XLA does not know an option, the devices' host memory cannot be used
        as it is asked for, `context.check_split` refuses the plan, documents are packed and the
        blocks would mix them, or the optimizer cannot be run with it (`require_runnable`).
    """
    require_usual_settings()
    if model is not None and not model.has_blocks:
        config = replace(config, model=model.config)
    check(config, training)
    if model is None:
        model = Model(config.model)
    if devices is None:
        devices = start(config.mesh)
    try:
        return _assemble(config, devices, model, optimizer, corpus)
    except DoesNotDivide as error:
        fits = _fitting_mesh(error, config, devices, model)
        raise DoesNotDivide(error.what, fits, error.otherwise) from error


def _fitting_mesh(
    error: DoesNotDivide, config: Config, devices: list[jax.Device], model: AnyModel
) -> dict[MeshAxis, int]:
    """Find smaller sizes of mesh axes that divide all dims, and not just the dims of one array."""
    fits = dict(error.fits)
    for _ in range(_MOST_ATTEMPTS):
        smaller = replace(config, mesh=replace(config.mesh, **fits))
        sizes = vars(smaller.mesh)
        needed = len(devices) if -1 in sizes.values() else devices_needed(smaller.mesh)
        try:
            _assemble(smaller, devices[:needed], model, None, None)
        except DoesNotDivide as another:
            fits |= another.fits
        except UserError:  # it is refused for something else, which is said then
            break
        else:
            break
    return fits


def with_config(
    experiment: Experiment,
    config: Config,
    devices: list[jax.Device] | None = None,
) -> Experiment:
    """Make an experiment anew with other settings, and with the same model where the model's
    settings are the same.

    The choices that `jaxpar.plan.resolve` made for an experiment are checked against its model,
    mesh and batch again; the values of the single settings are not (`make_experiment` has done so).

    Args:
      experiment: the experiment whose parts are used again.
      devices: other devices; None = the devices of the experiment.

    Raises:
      UserError: the new parts do not fit each other, in the ways that `make_experiment` refuses,
        except what `check` and `jaxpar.start` refuse.
    """
    return _assemble(
        config,
        devices or experiment.devices,
        experiment.model.with_config(config.model),
        experiment.own_optimizer,
        experiment.corpus,
    )


def _assemble(
    config: Config,
    devices: list[jax.Device],
    model: AnyModel,
    optimizer: AnyOptimizer,
    corpus: Corpus | None,
) -> Experiment:
    """Make an experiment of these parts, which are checked against each other."""
    if not model.has_blocks:
        check_own_model(config)
    elif model.config != config.model:
        raise UserError("the model has other sizes than the config: make it of config.model")
    model = with_projections(model, config)
    mesh = make_mesh(config.mesh, devices)
    experiment = Experiment(config, model, _plan_on(mesh, config, model), optimizer, corpus)
    require_runnable(experiment.optimizer, experiment.plan)
    require_pruned(experiment)
    check_parameters(experiment)
    check_batch(experiment)
    if config.data.pack and isinstance(model, Model):
        model.require_documents()
    if model.has_blocks:
        check_padding(config)
    check_names(experiment)
    if config.compiler.options:
        step_options(mesh, config.compiler.options)
    if asked := offload_asked(experiment.plan):
        check_offload(asked, mesh.devices.flat[0], config.memory.offload_anyway)
    return experiment


def make_plan(config: Config, devices: list[jax.Device] | None = None) -> Plan:
    """Make the plan of a config, as `make_experiment` does.

    Args:
      devices: the devices of the mesh; None = the devices of `jaxpar.start(config.mesh)`.

    Raises:
      UserError: `make_experiment` refuses the config.
    """
    return make_experiment(config, devices).plan


def _plan_on(mesh: Mesh, config: Config, model: AnyModel) -> Plan:
    """Make the plan of a config on a mesh, before it is checked against the model and the batch."""
    memory = config.memory
    precision = config.precision
    rules, _ = model.fit_rules(config.rules, mesh.shape)
    plan = Plan(
        mesh,
        rules,
        compute=precision.compute,
        params=precision.params,
        gradients=precision.gradients,
        moments=precision.moments,
        overlap=config.overlap,
        context=config.context,
        attention=config.kernels.attention,
        pipeline=config.pipeline,
        remat=memory.policy,
        keep=memory.keep,
        loss_mib=memory.loss_mib,
        parameters=memory.parameters,
        optimizer=memory.optimizer,
    )
    if plan.size("stage") > 1:
        count = microbatches(config, mesh.shape)
        check_stages(plan, config.model.layers, count, config.model.kinds)
        plan = replace(plan, pipeline=replace(config.pipeline, microbatches=count))
    sequences = config.train.microbatch // pipelined_microbatches(plan)
    rows = sequences // plan.size("batch")
    return replace(plan, overlap=config.overlap.for_rows(rows))


def with_projections(model: AnyModel, config: Config) -> AnyModel:
    """Give a model the projections through which it learns a teacher's hidden states.

    Args:
      model: the model, with any projections or none.

    Returns:
      The model; a whole model of a program's own comes back as it is, since it learns of no
      teacher.

    Raises:
      UserError: `distill.hidden` has a word that is no pair of layers.
    """
    distill = config.distill
    if not isinstance(model, Model):
        return model
    if not distill.teacher or not distill.hidden:
        return model.with_projections(None)
    return model.with_projections(Projections(read_pairs(distill.hidden), distill.hidden_width))
