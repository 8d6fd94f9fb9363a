"""The validation loss of parameters while they train, or of a run or a Hugging Face folder on any
mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

from jaxpar.base.config import Config, TrainConfig
from jaxpar.base.errors import Say, UserError
from jaxpar.base.machine import machine_memory
from jaxpar.base.process.multihost import Batches, run_together
from jaxpar.data.corpus import Corpus, val_batches
from jaxpar.data.masking import make_masking
from jaxpar.data.part import Part
from jaxpar.data.vocabulary.text_bytes import count_bytes, unknown_id
from jaxpar.data.vocabulary.tokenizer import Tokenizer
from jaxpar.models import AnyModel, Params
from jaxpar.train.batch import batch_rows, empty_batch, put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import kernel_notes, make_experiment, mask_notes
from jaxpar.train.restore import load_params, load_run
from jaxpar.train.run_data import load_run_data
from jaxpar.train.runs.folder.run_folder import is_run
from jaxpar.train.runs.stores import StoreOf, store_of
from jaxpar.train.state_memory import require_memory
from jaxpar.train.step import compile_eval_step


class Evaluation(NamedTuple):
    """The validation loss (nats a token) and perplexity of the checkpoint of a step; step 0 is a
    Hugging Face folder.

    `bits_per_byte` is the loss of all tokens in bits over the bytes of their text, which can be
    compared between tokenizers; it is None where the tokens have no text, and where the loss is
    over corrupted tokens (`data.objective`), whose neighbours were seen.
    """

    step: int
    val_loss: float
    perplexity: float
    bits_per_byte: float | None


def evaluate(
    experiment: Experiment,
    program: Compiled,
    params: Params,
    corpus: Corpus,
    limit: int,
    tick: Callable[[int], None] = lambda done: None,
) -> float:
    """Compute the mean loss in nats a token over validation batches.

    Args:
      program: the compiled evaluation of the experiment (`compile_eval_step`).
      corpus: the data, some of which are for validation.
      limit: the number of batches; 0 = all.
      tick: is called after each batch, with the number of batches that are done.

    Raises:
      UserError: a process could not read its rows.
    """
    config = experiment.config
    plan = experiment.plan
    assert corpus.val is not None
    rows = batch_rows(config.train.batch, plan)
    vocab_size = config.model.vocab_size
    masking = make_masking(config.data, vocab_size, corpus.tokenizer)
    read = val_batches(
        corpus.val, config.data, config.train.batch, rows, vocab_size, limit, masking
    )
    batches = Batches(read, empty_batch(config, plan))
    sums = list[Any]()
    for batch in batches:
        sums.append(program(params, put_batch(batch, plan)))
        jax.block_until_ready(sums[-2:-1])  # the host stays one batch ahead
        tick(len(sums))
    batches.require()
    nll, tokens = np.sum(
        np.asarray(jax.device_get(sums), np.float64),
        axis=0,
    )
    return float(nll / tokens)


def final_batches(train: TrainConfig) -> int:
    """Return the number of validation batches that are evaluated after the last step; 0 = all.

    The number is `final_eval_batches`, but no more than the run has steps, or an evaluation in
    between has batches: a short try is not followed by an evaluation that takes longer than itself.
    """
    asked = train.final_eval_batches
    most = max(train.steps, train.eval_batches)
    if train.eval_batches == 0:
        return asked
    return min(asked or most, most)


def evaluate_folder(
    config: Config,
    folder: Path,
    step: int = 0,
    say: Say = lambda line: None,
    model: AnyModel | None = None,
    store: StoreOf = store_of,
) -> Evaluation:
    """Evaluate a run's checkpoint or a Hugging Face folder.

    It takes `train.final_eval_batches` batches, by default all; the evaluation at the end of a run
    takes no more batches than the run has steps.

    Args:
      config: the config of the run or of the Hugging Face folder; its mesh may be any.
      step: the checkpoint of a run; 0 = the best, or the newest where none was evaluated.
      say: receives each note on how the batches run.
      model: the model, where it has parts of a program's own; None = the config's.
      store: makes the store that keeps the checkpoints, where the run has one of its own.

    Raises:
      UserError: there is no checkpoint, the checkpoint is of another model, there is no validation
        data, or the mesh does not fit.
    """
    experiment = make_experiment(config, model=model, training=False)
    config = experiment.config
    plan = experiment.plan
    run_together(lambda: require_memory(experiment, machine_memory(), training=False))
    for note in (*kernel_notes(experiment, training=False), *mask_notes(experiment)):
        say(note)
    data = replace(config.data, path=config.data.path or config.data.val_path)
    _, corpus = load_run_data(data, config.model.vocab_size, folder, say)
    for note in corpus.tokenizer.notes if corpus.tokenizer else ():
        say(note)
    if corpus.val is None:
        raise UserError("there is no validation data: set data.val_path, or data.val_fraction")
    if is_run(folder):
        step, params = load_run(folder, step, experiment, store)
    elif plan.size("stage") > 1:
        raise UserError(f"{folder} is no run, whose layers could lie on stages: use mesh.stage=1")
    else:
        params = load_params(folder, experiment, step)
    eval_step = compile_eval_step(experiment)
    loss = evaluate(experiment, eval_step, params, corpus, config.train.final_eval_batches)
    if corpus.tokenizer is None or data.objective == "masked":
        bits = None
    else:
        bits = bits_per_byte(loss, corpus.val, corpus.tokenizer, config, say)
    return Evaluation(step, loss, math.exp(min(loss, 700)), bits)


def bits_per_byte(
    loss: float,
    stream: Part,
    tokenizer: Tokenizer,
    config: Config,
    say: Say = lambda line: None,
) -> float | None:
    """Compute the bits of the scored tokens over the bytes of their text, to which special tokens
    add none.

    Args:
      loss: the validation loss, in nats a token.
      stream: the validation data of that loss.
      config: the config, which says which batches are evaluated.
      say: gets a line where the tokenizer does not know some of the text.

    Returns:
      Bits a byte; None where there is no text.
    """
    batch = config.train.batch
    limit = config.train.final_eval_batches
    tokens = 0
    size = 0
    unknown = 0
    unknown_token = unknown_id(tokenizer)
    for row in val_batches(
        stream, config.data, batch, range(batch), config.model.vocab_size, limit
    ):
        scored = row["labels"] >= 0
        tokens += int(scored.sum())
        size += count_bytes(tokenizer, row["tokens"][scored], row["labels"][scored])
        unknown += int((row["labels"][scored] == unknown_token).sum())
    if unknown and unknown_token is not None:
        say(
            f"{unknown:,} of {tokens:,} scored tokens are "
            f"{tokenizer.decode([unknown_token])!r}, which stands for text "
            "of a length that is not known and counts no bytes, so bits a byte come out too high"
        )
    if size:
        return loss * tokens / math.log(2) / size
    return None
