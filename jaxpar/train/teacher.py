"""A teacher of a training: a model that runs beside it, or answers that one has written to disk.

Either way a batch has the teacher's most likely entries beside its labels, so that the step and its
loss are the same. A teacher that runs beside has a mesh and a plan of its own on the same devices;
it has no gradient.

Shapes: A microbatches, B batch, S sequence, k entries of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxpar.base.batch_arrays import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.compiler import step_options
from jaxpar.base.config import Config, MemoryConfig, PrecisionConfig, TrainConfig
from jaxpar.base.config.hidden_pairs import read_pairs
from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import local_bytes
from jaxpar.data.corpus import Corpus, ReadBeside
from jaxpar.data.top_k_files import describe, is_top_k_folder, open_answers, tokenizer_hash
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Batch, Params, in_parts
from jaxpar.models.top_k import TeacherAnswer, teacher_answer
from jaxpar.models.views import base_config
from jaxpar.parallel.token_order import TOKENS
from jaxpar.train.experiment import Experiment
from jaxpar.train.plans import make_experiment
from jaxpar.train.restore import load_params, sum_of_bits
from jaxpar.train.runs.bucket_runs import folder_here
from jaxpar.train.runs.run_folder import is_run
from jaxpar.train.step import batch_shapes, cut_microbatches
from jaxpar.train.trained import folder_tokenizer, read_config


class Teacher(NamedTuple):
    """What a training reads of its teacher.

    Attributes:
      identity: what tells it from another, so that a run that goes on has the same.
      note: a line for the log.
      read: reads its answers from disk; None where it runs beside.
      live: answers a batch; None where the answers are on disk.
    """

    identity: str
    note: str
    read: ReadBeside | None = None
    live: LiveTeacher | None = None


@dataclass(frozen=True)
class LiveTeacher:
    """A teacher that runs beside a training, on the same devices."""

    experiment: Experiment
    params: Params
    program: Compiled
    student: Experiment

    def answer(self, batch: Batch) -> dict[str, jax.Array]:
        """Return the teacher's arrays of a batch.

        Args:
          batch: arrays [B, S] in the student's layout.

        Returns:
          Its most likely entries and their log-probabilities [B, S, k], and its hidden states
          [B, S, P, T] where they are learned, in the student's layout.
        """
        plan = self.experiment.plan
        asked = {name: batch[name] for name in answered_shapes(self.experiment)}
        found = self.program(self.params, jax.device_put(asked, plan.sharding(TOKENS)))
        top, hidden_BSPT = jax.device_put(found, self.student.plan.sharding(TOKENS))
        answers = {TEACHER_IDS: top.ids, TEACHER_LOG_PROBS: top.log_probs}
        if hidden_BSPT is not None:
            answers[TEACHER_HIDDEN] = hidden_BSPT
        if self.student.platform == "cpu":
            # Programs of two meshes that wait for each other's collectives could stand still there.
            jax.block_until_ready(answers)
        return answers


def open_teacher(experiment: Experiment, corpus: Corpus) -> Teacher | None:
    """Open the teacher of a training.

    Args:
      experiment: what is trained.
      corpus: its data.

    Returns:
      The teacher; None where the config has none.

    Raises:
      UserError: it is of another vocabulary, tokenizer or data, its folder cannot be read, or
        several processes ask for one that runs beside.
    """
    config = experiment.config
    distill = config.distill
    if not distill.teacher:
        return None
    folder = folder_here(distill.teacher)
    if is_top_k_folder(folder):
        if distill.hidden:
            raise UserError(
                f"distill.hidden={', '.join(distill.hidden)}: {folder} has answers alone, and no "
                "hidden states: name the teacher's own folder, so that it runs beside"
            )
        if distill.step:
            raise UserError(
                f"distill.step={distill.step} has no effect: {folder} has the answers of one "
                "checkpoint"
            )
        answers = open_answers(folder)
        answers.require(describe(corpus, config.data, config.model.vocab_size, distill.top_k))
        there = answers.header
        return Teacher(
            answers.identity,
            f"teacher: the {distill.top_k} of {there.k} most likely entries of {there.teacher} at "
            f"step {there.step}, from {folder}",
            lambda part_B, window_B: answers.read(part_B, window_B, distill.top_k),
        )
    return _open_live(experiment, corpus, folder)


def _open_live(experiment: Experiment, corpus: Corpus, folder: Path) -> Teacher:
    """Load a teacher that runs beside, and compile its program."""
    distill = experiment.config.distill
    if jax.process_count() > 1:
        raise UserError(
            f"distill.teacher={folder} runs beside in one process alone, and these are "
            f"{jax.process_count()}: write its answers with `jaxpar eval {folder} --top-k "
            f"{distill.top_k} --out FOLDER`, and name that folder"
        )
    teacher = teacher_experiment(experiment)
    after = _layers_shown(experiment, teacher)
    theirs = tokenizer_hash(folder_tokenizer(folder, teacher.config))
    ours = tokenizer_hash(corpus.tokenizer)
    if theirs != ours:
        raise UserError(
            f"distill.teacher={folder} has another tokenizer than these data: a student has its "
            "teacher's, take the teacher's data.tokenizer"
        )
    params = load_params(folder, teacher, distill.step)
    dtype = experiment.plan.compute
    program = compile_answers(teacher, distill.top_k, after, dtype)
    return Teacher(
        f"{sum_of_bits(params):08x}",
        f"teacher: {folder} beside the training, {local_bytes(params) / 2**20:.1f} MiB of a device",
        live=LiveTeacher(teacher, params, program, experiment),
    )


def _layers_shown(student: Experiment, teacher: Experiment) -> tuple[int, ...]:
    """After how many of its layers a teacher shows its hidden states, of the student's pairs."""
    distill = student.config.distill
    sizes = teacher.config.model
    if distill.hidden and distill.hidden_width != sizes.embed:
        raise UserError(
            f"distill.hidden_width={distill.hidden_width}: the hidden states of {distill.teacher} "
            f"have {sizes.embed} features, set it to that"
        )
    pairs = read_pairs(distill.hidden)
    for pair in pairs:
        if pair.teacher > sizes.layers:
            raise UserError(
                f"distill.hidden has {pair.student}:{pair.teacher}, and {distill.teacher} has "
                f"{sizes.layers} layers: the second number is at most {sizes.layers}"
            )
    return tuple(pair.teacher or sizes.layers for pair in pairs)


def teacher_experiment(student: Experiment) -> Experiment:
    """Make the experiment of a teacher that runs beside: the model and the precision of its
    folder, on the student's devices in a mesh of its own, with the student's batches.

    Args:
      student: what is trained.

    Returns:
      The experiment, which is not trained.

    Raises:
      UserError: the folder has no model, or it is of another vocabulary, or the mesh does not fit.
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
        accumulation=config.train.accumulation * student.microbatches,
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


def runs_beside(config: Config) -> bool:
    """Whether a config has a teacher that runs beside the training."""
    folder = config.distill.teacher
    return bool(folder) and not is_top_k_folder(folder_here(folder))


def answered_shapes(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a batch that a teacher is asked with, all but its labels."""
    shapes = batch_shapes(experiment.config, experiment.plan)
    return {name: leaf for name, leaf in shapes.items() if name != "labels"}


def compile_answers(
    experiment: Experiment, k: int, after: tuple[int, ...] = (), dtype: str = "float32"
) -> Compiled:
    """Compile the program `(params, batch) -> TeacherAnswer` of a teacher, which takes a batch in
    the microbatches of a training step, one after another.

    Args:
      experiment: the teacher, on a plan without stages.
      k: how many entries of a token it answers with.
      after: after how many of its layers it shows its hidden states.
      dtype: that of the hidden states.

    Returns:
      The program; its answers [B, S, ...] have the batch's rows in their own order.

    Raises:
      UserError: the model is a whole one of one's own, or the CPU could mix up collectives.
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
        out_shardings=plan.sharding(TOKENS),
        compiler_options=step_options(plan.mesh, config.compiler.options),
    )
    compiled = program.lower(experiment.state.params, answered_shapes(experiment)).compile()
    require_order(compiled, experiment.devices)
    return compiled
