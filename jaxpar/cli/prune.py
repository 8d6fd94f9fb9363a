"""`jaxpar prune`: a run of a trained model, pruned at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.base.config import Config, override
from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.base.ranges import Range
from jaxpar.cli.arguments import given_keys, parse_words, positional


@dataclass(frozen=True)
class PruneArgs:
    """A trained model, pruned at once from some text, as a new run."""

    config: Config
    criterion: Literal["wanda", "magnitude"] = "wanda"
    """wanda: by magnitude times the norm of what an entry multiplies, for each output
    (arXiv:2306.11695); magnitude: for each matrix."""
    sparsity: Annotated[float, Range(0.0, 0.9999)] = 0.5
    """The share that becomes zero. Where model.sparsity.form says N:M, that is what is left."""
    matrices: tuple[str, ...] = ()
    """Those of every block that are pruned, some of q, k, v, out, gate, up, down; none = all."""
    batches: Annotated[int, Range(1, 100_000)] = 8
    """Training batches that the criterion looks at."""


def prune_command(words: list[str]) -> int:
    """jaxpar prune RUN_OR_HF_FOLDER NEW_RUN [--criterion C] [--sparsity S] [--section.key value
    ...]
    """
    from jaxpar.train import restore
    from jaxpar.train.pruned_run import prune_run
    from jaxpar.train.runs.bucket import folder_here, run_here, send
    from jaxpar.train.runs.folder.run_folder import is_run, read_run_config

    names = positional(prune_command.__doc__, PruneArgs(Config()), words, 2, urls=True)
    source = folder_here(names[0])
    target = run_here(names[1])
    if is_run(source):
        # where a call of the source ended is nothing to a new run
        base = override(read_run_config(source), {"train.stop_at": 0})
    else:
        base = restore.config_of(source, target)
    args = parse_words(prune_command.__doc__, PruneArgs(base), words[2:])
    form = args.config.model.sparsity.form
    idle = [name for name in ("sparsity", "matrices") if name in given_keys(words[2:])]
    if form and idle:
        raise UserError(
            f"--{idle[0]} has no effect with model.sparsity.form={form}: leave it out, or name "
            "model.sparsity.targets"
        )
    zeros = prune_run(
        args.config,
        source,
        target,
        args.matrices,
        args.sparsity,
        args.criterion,
        args.batches,
        console().print,
    )
    send(target)
    console().print(
        f"pruned {source} by {args.criterion}: {zeros:.1%} of the blocks' matrices are zero in "
        f"step 0 of {target}"
    )
    return 0
