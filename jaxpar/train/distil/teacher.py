"""The teacher of a training: a model that runs beside it, or answers that a model has written to
disk.

Either way a batch has the teacher's most likely entries beside its labels, so that the step and its
loss are the same. A teacher that runs beside has a mesh and a plan of its own on the same devices;
it has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
from jax.stages import Compiled

from jaxpar.base.batch_arrays import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.config.hidden_pairs import read_pairs
from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import local_bytes
from jaxpar.data.batches import ReadBeside
from jaxpar.data.corpus import Corpus
from jaxpar.data.top_k_files import describe, is_top_k_folder, open_answers, tokenizer_hash
from jaxpar.models import Batch, Params
from jaxpar.parallel.zigzag import TOKENS
from jaxpar.train.distil.answers import answered_shapes, compile_answers, teacher_experiment
from jaxpar.train.experiment import Experiment
from jaxpar.train.generation.trained import folder_tokenizer
from jaxpar.train.restore import load_params, sum_of_bits
from jaxpar.train.runs.bucket import folder_here


class Teacher(NamedTuple):
    """The source of a teacher's answers for a training.

    Attributes:
      identity: a text that tells it from other teachers, so that a resumed run has the same.
      note: a line for the log.
      read: reads its answers from disk; None where the teacher runs beside.
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
          The teacher's most likely entries and their log-probabilities [B, S, k], and its hidden
          states [B, S, P, T] where they are learned, in the student's layout.
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
    """Open the teacher of a training; None where the config has none.

    Raises:
      UserError: the teacher has another vocabulary, tokenizer or data, its folder cannot be read,
        or several processes ask for a teacher that runs beside.
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
    """List the numbers of layers after which a teacher returns its hidden states, one for each of
    the student's pairs.
    """
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
