"""Validation loss of a finished or running run, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxpar.checkpoint import Checkpoints
from jaxpar.config import Config, check
from jaxpar.data import load_corpus
from jaxpar.errors import UserError
from jaxpar.models import Model
from jaxpar.runtime import start
from jaxpar.step import compile_eval_step, kernel_notes, make_plan
from jaxpar.train import evaluate, restore_state


class Evaluation(NamedTuple):
    """Validation loss (nats a token) and perplexity of the checkpoint of a step."""

    step: int
    val_loss: float
    perplexity: float


def pick_step(checkpoints: Checkpoints, step: int) -> int:
    """The step asked for, or with 0 the best, or the newest when none was evaluated; a UserError when not there."""
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{checkpoints.folder} has no finished checkpoint")
    if step and step not in steps:
        raise UserError(f"{checkpoints.folder} has no step {step}: it has {', '.join(map(str, steps))}")
    if step:
        return step
    best = checkpoints.best()
    return steps[-1] if best is None else best


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
    corpus = load_corpus(config.data, config.model.vocab_size)
    if corpus.val is None:
        raise UserError("there is no validation data: set data.val_fraction or data.val_path")
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    step = pick_step(checkpoints, step)
    state, _ = restore_state(checkpoints, step, model, config, plan)
    loss = evaluate(
        compile_eval_step(model, config, plan), state.params, corpus.val, config, plan, config.train.final_eval_batches
    )
    return Evaluation(step, loss, math.exp(min(loss, 700)))
