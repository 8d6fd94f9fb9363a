"""Computes the validation loss of parameters while they train, or of a run's checkpoint on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

from jaxpar.base.config import Config, check
from jaxpar.base.errors import UserError
from jaxpar.base.plan import Plan
from jaxpar.base.processes import Batches, run_together
from jaxpar.base.runtime import start
from jaxpar.models import Model, Params
from jaxpar.train.data import Tokens, load_corpus, val_batches
from jaxpar.train.plans import kernel_notes, make_plan
from jaxpar.train.restore import load_run
from jaxpar.train.step import batch_rows, compile_eval_step, empty_batch, put_batch


class Evaluation(NamedTuple):
    """The validation loss (nats a token) and perplexity of the checkpoint of a step."""

    step: int
    val_loss: float
    perplexity: float


def evaluate(eval_step: Compiled, params: Params, stream: Tokens, config: Config, plan: Plan, limit: int) -> float:
    """Return the mean loss in nats a token over the windows of `limit` validation batches; 0 = all."""
    rows = batch_rows(config.train.batch, plan)
    read = val_batches(stream, config.data, config.train.batch, rows, config.model.vocab_size, limit)
    batches = Batches(read, empty_batch(config, plan))
    sums = jax.device_get([eval_step(params, put_batch(batch, plan)) for batch in batches])
    batches.require()
    nll, tokens = np.sum(np.asarray(sums, np.float64), axis=0)
    return float(nll / tokens)


def evaluate_run(
    config: Config, folder: Path, step: int = 0, say: Callable[[str], None] = lambda line: None
) -> Evaluation:
    """Evaluate a run's checkpoint (0 = the best, or the newest where none was evaluated) on any mesh, over the batches
    that a run uses at its end (`train.final_eval_batches`, by default all). `say` receives each note on how it runs.

    Raises:
      UserError: there is no checkpoint or no validation data, or the mesh does not fit.
    """
    plan = make_plan(check(config), start(config.mesh, config.compile.cache))
    for note in kernel_notes(config, plan, training=False):
        say(note)
    corpus = run_together(lambda: load_corpus(config.data, config.model.vocab_size))
    if corpus.val is None:
        raise UserError("there is no validation data: set data.val_fraction or data.val_path")
    step, state = load_run(folder, step, config, plan)
    eval_step = compile_eval_step(Model(config.model), config, plan)
    loss = evaluate(eval_step, state.params, corpus.val, config, plan, config.train.final_eval_batches)
    return Evaluation(step, loss, math.exp(min(loss, 700)))
