"""The run of a trained model whose matrices were pruned at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax

from jaxpar.base.config import Config
from jaxpar.base.config.sparsity import MATRICES
from jaxpar.base.errors import Say, UserError
from jaxpar.data.corpus import train_batches
from jaxpar.kernels.weight_forms import NOfM
from jaxpar.models import Params, in_parts
from jaxpar.train.batch import batch_rows, put_batch
from jaxpar.train.experiments import make_experiment
from jaxpar.train.optimizer.one_shot import Criterion, Target, prune_once
from jaxpar.train.restore import (
    drop_stages,
    keep_import,
    load_params,
    require_new_run,
)
from jaxpar.train.run_data import load_run_data

_MOST_COUNTED = 2**31


def prune_run(
    config: Config,
    source: Path,
    target: Path,
    matrices: tuple[str, ...],
    sparsity: float,
    criterion: Criterion,
    batches: int,
    say: Say,
) -> float:
    """Write a run folder whose checkpoint at step 0 holds a model that was pruned at once.

    Args:
      config: the config of the new run. Where its `model.sparsity` has a form, the form says what
        is left of each group of its targets.
      source: a run folder, or a Hugging Face folder.
      matrices: the names of the matrices that are pruned; none = all of a block.
      sparsity: the share that becomes zero, where there is no form.
      batches: the number of training batches that the criterion looks at.
      say: gets each line about the data.

    Returns:
      The share of all entries of the blocks that is zero.

    Raises:
      UserError: the source or the data cannot be read, the target is a run already, or a matrix
        cannot be pruned (`prune_once`).
    """
    if config.model.lora.rank > 0:
        raise UserError(
            f"{source} has LoRA, whose pairs would stay dense: `jaxpar convert` merges them into a "
            "folder that can be pruned"
        )
    experiment = make_experiment(config)  # JAX starts on the platform of its mesh
    require_new_run(target, config)
    plan = replace(drop_stages(experiment.plan), overlap=experiment.plan.overlap.without_auto())
    model = in_parts(experiment.model, "pruning")
    params = load_params(source, experiment)
    _, corpus = load_run_data(config.data, config.model.vocab_size, source, say)
    batch = config.train.batch
    rows = batch_rows(batch, plan)
    read = train_batches(corpus.train, config.data, batch, rows, config.model.vocab_size)
    form = config.model.sparsity
    if form.form and (form.block or not form.trains_all):
        raise UserError(
            f"model.sparsity.block={list(form.block)}: pruning at once compares single entries: "
            "leave the block empty"
        )
    left = Target(
        form.targets if form.form else matrices,
        sparsity,
        NOfM(*form.counts) if form.form else None,
    )
    text: Iterator[dict[str, jax.Array]] = (put_batch(rows, plan) for rows in islice(read, batches))
    pruned = prune_once(model, params, text, plan, left, criterion)
    keep_import(experiment, pruned, source, target)
    return _share_of_zeros(pruned)


def _share_of_zeros(params: Params) -> float:
    """Compute the share of the entries of the blocks' matrices that is zero."""
    blocks = params["blocks"]
    matrices = [blocks[name] for name in MATRICES if name in blocks]
    return sum(map(_zeros, matrices)) / sum(leaf.size for leaf in matrices)


def _zeros(x: jax.Array) -> int:
    """Count zeros, in parts whose number int32 holds."""
    if x.size < _MOST_COUNTED:
        return int((x == 0).sum())
    return sum(_zeros(part) for part in x)
