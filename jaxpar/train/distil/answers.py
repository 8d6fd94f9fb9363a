"""The model of a teacher that runs beside a training, and the program by which it answers a batch.

Shapes: A microbatches, B batch, S sequence, k entries of a token.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.config import Config, MemoryConfig, PrecisionConfig, TrainConfig
from jaxpar.base.errors import UserError
from jaxpar.data.top_k_files import is_top_k_folder
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Batch, Params, in_parts
from jaxpar.models.top_k import TeacherAnswer, teacher_answer
from jaxpar.models.views import base_config
from jaxpar.train.batch import batch_shapes, cut_microbatches
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.generation.trained import read_config
from jaxpar.train.runs.bucket import folder_here
from jaxpar.train.runs.folder.run_folder import is_run


def runs_beside(config: Config) -> bool:
    """Return whether a config has a teacher that runs beside the training."""
    folder = config.distill.teacher
    return bool(folder) and not is_top_k_folder(folder_here(folder))


def teacher_experiment(student: Experiment) -> Experiment:
    """Make the experiment of a teacher that runs beside: the model and the precision of its
    folder, on the student's devices in a mesh of its own, with the student's batches.

    Args:
      student: the experiment that is trained.

    Returns:
      The experiment of the teacher, which is not trained.

    Raises:
      UserError: the folder has no model, the model has another vocabulary, or the mesh does not
        fit.
    """
    config = student.config
    distill = config.distill
    folder = folder_here(distill.teacher)
    theirs = read_config(folder)
    if theirs.model.vocab_size != config.model.vocab_size:
        raise UserError(
            f"distill.teacher={folder} has a vocabulary of {theirs.model.vocab_size}, and "
            f"model.vocab_size={config.model.vocab_size}: a student has its teacher's"
        )
    if distill.step and not is_run(folder):
        raise UserError(
            f"distill.step={distill.step} has no effect: {folder} is no run folder, so it has one "
            "checkpoint"
        )
    precision = theirs.precision if is_run(folder) else config.precision
    train = TrainConfig(
        batch=config.train.batch,
        accumulation=config.train.accumulation * student.pipeline_microbatches,
    )
    own = Config(
        model=base_config(theirs.model),
        data=replace(config.data, tokenizer=theirs.data.tokenizer),
        train=train,
        mesh=distill.mesh.spec,
        rules=theirs.rules,
        memory=MemoryConfig(loss_mib=config.memory.loss_mib),
        precision=PrecisionConfig(compute=precision.compute),
        kernels=config.kernels,
    )
    try:
        return make_experiment(own, student.devices, training=False)
    except UserError as error:
        raise UserError(f"distill.teacher={folder}, on distill.mesh: {error}") from error


def answered_shapes(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a batch that a teacher reads: all but its labels, which only routers
    need, to tell padding from text.
    """
    shapes = batch_shapes(experiment.config, experiment.plan)
    if experiment.config.model.experts:
        return shapes
    return {name: leaf for name, leaf in shapes.items() if name != "labels"}


def compile_answers(
    experiment: Experiment, k: int, after: tuple[int, ...] = (), dtype: str = "float32"
) -> Compiled:
    """Compile the program `(params, batch) -> TeacherAnswer` of a teacher, which takes a batch in
    the microbatches of a training step, one after another.

    Args:
      experiment: the teacher, on a plan without stages.
      k: the number of entries of a token in the answer.
      after: the numbers of layers after which it returns its hidden states.
      dtype: the dtype of the hidden states.

    Returns:
      The program; its answers [B, S, ...] have the batch's rows in their own order.

    Raises:
      UserError: the model is a whole model of a program's own, or the CPU could mix up collectives.
    """
    plan = experiment.plan
    config = experiment.config
    accumulation = config.train.accumulation
    model = in_parts(experiment.model, "a teacher's answers")

    def answer(params: Params, rows: Batch) -> TeacherAnswer:
        return teacher_answer(model, params, rows, plan, k, after, dtype)

    def step(params: Params, batch: Batch) -> TeacherAnswer:
        if accumulation == 1:
            return answer(params, batch)
        cut = cut_microbatches(batch, accumulation, plan)
        found = jax.lax.map(lambda rows: answer(params, rows), cut)
        return jax.tree.map(_in_one, found)

    def _in_one(x_ABSk: jax.Array) -> jax.Array:
        return jnp.swapaxes(x_ABSk, 0, 1).reshape(-1, *x_ABSk.shape[2:])

    program = jax.jit(
        step,
        out_shardings=experiment.batch_sharding,
        compiler_options=experiment.compiler_options,
    )
    with compiling_for(plan.mesh.devices.flat[0]):
        lowered = program.lower(experiment.state.params, answered_shapes(experiment))
    compiled = lowered.compile()
    require_order(compiled, experiment.devices)
    return compiled
