"""Validation loss of a finished or running run, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxpar.base.config import Config, check
from jaxpar.base.errors import UserError
from jaxpar.base.processes import together
from jaxpar.base.runtime import start
from jaxpar.models import Model
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.data import load_corpus
from jaxpar.train.loop import evaluate
from jaxpar.train.plans import kernel_notes, make_plan
from jaxpar.train.restore import pick_step, restore_state
from jaxpar.train.step import compile_eval_step


class Evaluation(NamedTuple):
    """Validation loss (nats a token) and perplexity of the checkpoint of a step."""

    step: int
    val_loss: float
    perplexity: float


def evaluate_run(
    config: Config, folder: Path, step: int = 0, say: Callable[[str], None] = lambda line: None
) -> Evaluation:
    """Evaluate a run's checkpoint under `config`, whose mesh may be another than the run's, on the batches of a run's
    end (`train.final_eval_batches`; by default the whole validation set).

    Raises:
      UserError: no checkpoint, no validation data, a mesh that does not fit.
    """
    check(config)
    plan, model = make_plan(config, start(config.mesh, config.compile.cache)), Model(config.model)
    for note in kernel_notes(config, plan, training=False):
        say(note)
    corpus = together(lambda: load_corpus(config.data, config.model.vocab_size))
    if corpus.val is None:
        raise UserError("there is no validation data: set data.val_fraction or data.val_path")
    checkpoints = Checkpoints(folder / "checkpoints")
    step = pick_step(checkpoints, step)
    state, _ = restore_state(checkpoints, step, model, config, plan)
    loss = evaluate(
        compile_eval_step(model, config, plan), state.params, corpus.val, config, plan, config.train.final_eval_batches
    )
    return Evaluation(step, loss, math.exp(min(loss, 700)))
