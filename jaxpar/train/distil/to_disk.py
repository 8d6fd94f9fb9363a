"""The writing of a teacher's answers to disk: its most likely entries for every token of training
data.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError
from jaxpar.base.machine import machine_memory
from jaxpar.data.top_k_files import (
    Header,
    describe,
    require_no_answers,
    windows_in_order,
    writing_answers,
)
from jaxpar.train.batch import put_batch
from jaxpar.train.distil.answers import answered_shapes, compile_answers
from jaxpar.train.experiments import kernel_notes, make_experiment
from jaxpar.train.restore import load_params, load_run
from jaxpar.train.run_data import load_run_data
from jaxpar.train.runs.folder.run_folder import is_run
from jaxpar.train.state_memory import require_memory


def write_top_k(
    config: Config,
    folder: Path,
    out: Path,
    k: int,
    step: int = 0,
    say: Say = lambda line: None,
) -> Header:
    """Write the k most likely entries for every token of a config's training data.

    Args:
      config: the config of a run or of a Hugging Face folder, with the data and the sequences of
        the training that the answers are for; its mesh may be any without stages.
      folder: the run folder or Hugging Face folder of the teacher.
      out: the folder that is written.
      k: the number of entries of a token.
      step: the checkpoint of a run; 0 = the best, or the newest where none was evaluated.
      say: gets each note, and the progress.

    Returns:
      The header of the answers.

    Raises:
      UserError: there is no checkpoint, the data are read in documents, several processes ask, k is
        more than the vocabulary, or `out` has answers already.
    """
    if not 1 <= k <= config.model.vocab_size:
        raise UserError(
            f"--top-k is 1 to model.vocab_size={config.model.vocab_size}, and was given {k}"
        )
    require_no_answers(out)
    if config.data.objective != "next":
        raise UserError(
            f"--top-k is of the next token, and data.objective={config.data.objective}: try "
            "data.objective=next"
        )
    experiment = make_experiment(config, training=False)
    if jax.process_count() > 1:
        raise UserError(
            f"--top-k writes from one process, and these are {jax.process_count()}: run it on one"
        )
    config = experiment.config
    plan = experiment.plan
    if plan.size("stage") > 1:
        raise UserError("--top-k runs without a pipeline: use mesh.stage=1")
    require_memory(experiment, machine_memory(), training=False)
    for note in kernel_notes(experiment, training=False):
        say(note)
    _, corpus = load_run_data(config.data, config.model.vocab_size, folder, say)
    header = describe(corpus, config.data, config.model.vocab_size, k)
    if is_run(folder):
        step, params = load_run(folder, step, experiment)
    else:
        params = load_params(folder, experiment, step)
    header = header._replace(teacher=str(folder), step=step)
    program = compile_answers(experiment, k)
    asked = answered_shapes(experiment)
    batch = config.train.batch
    left = list(header.windows)
    with writing_answers(out, header) as writer:
        for rows in windows_in_order(corpus, header, batch):
            while not left[0]:
                left.pop(0)
            here = min(batch, left[0])
            left[0] -= here
            found = program(params, put_batch({name: rows[name] for name in asked}, plan))
            ids, log_probs = jax.device_get(found.top)
            writer.write(ids, log_probs, here)
    return header
