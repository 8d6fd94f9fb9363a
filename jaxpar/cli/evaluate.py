"""`jaxpar eval`: the validation loss of a folder, or tasks of the lm-eval harness."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten
from jaxpar.cli.arguments import Overrides
from jaxpar.train.evaluate import evaluate_folder
from jaxpar.train.trained import open_trained, read_config


@dataclass(frozen=True)
class EvalArgs:
    """Validation loss of a run's checkpoint or of a Hugging Face folder, or tasks of EleutherAI's lm-eval."""

    config: Overrides
    step: int = 0
    """Checkpoint of a run; 0 = the best one, or the newest when none was evaluated."""
    tasks: str = ""
    """Tasks of lm-eval instead (extra: eval): names and paths of YAML files, with commas between."""
    limit: int = 0
    """Examples of a task; 0 = all."""
    num_fewshot: int = -1
    """Examples before each question; -1 = as the task says."""
    chat: bool = False
    """Write the prompts of tasks by the folder's chat template."""
    batch: int = 32
    """Requests of tasks that run at once."""
    json: bool = False
    """Print one JSON object."""


def evaluate_words(folder: Path, args: EvalArgs) -> None:
    """The `eval` command.

    Raises:
      UserError: see `evaluate_folder` and `run_tasks`; or a flag has no effect.
    """
    say = (lambda line: None) if args.json else console().print
    if args.batch < 1 or args.limit < 0:
        raise UserError(f"--batch is at least 1 and --limit at least 0, found {args.batch} and {args.limit}")
    if args.tasks:
        return _tasks(folder, args)
    for flag in ("limit", "num_fewshot", "chat", "batch"):
        if getattr(args, flag) != getattr(EvalArgs, flag):
            raise UserError(f"--{flag.replace('_', '-')} has no effect without --tasks")
    found = evaluate_folder(args.config, folder, args.step, say)
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits a byte"
    text = json.dumps(found._asdict()) if args.json else (
        f"step {found.step}: validation loss {found.val_loss:.4f} nats a token, "
        f"perplexity {found.perplexity:.3f}{bits}"
    )  # fmt: skip
    console().print(text)


def _tasks(folder: Path, args: EvalArgs) -> None:
    before, after = flatten(own := read_config(folder)), flatten(args.config)
    changed = {key for key in after if after[key] != before[key]}
    useless = [key for key in changed if not key.startswith("mesh.") and key != "precision.compute"]
    if useless:
        raise UserError(f"--{useless[0]} has no effect beside --tasks, which takes a mesh and precision.compute alone")
    try:
        from jaxpar.train.harness import run_tasks
    except ImportError as error:
        raise UserError(f"--tasks needs the lm-eval package ({error}): pip install 'jaxpar[eval]'") from error
    mesh = args.config.mesh if args.config.mesh != own.mesh else None
    dtype = args.config.precision.compute if "precision.compute" in changed else "auto"
    trained = open_trained(folder, mesh, dtype, args.step)
    results = run_tasks(trained, args.tasks.split(","), args.limit, args.num_fewshot, args.chat, args.batch)
    if args.json:
        return console().print(json.dumps(results["results"], default=str))
    for task, numbers in results["results"].items():
        named = {key.removesuffix(",none"): value for key, value in numbers.items() if isinstance(value, float)}
        values = ", ".join(f"{key} {value:.4f}" for key, value in named.items() if "stderr" not in key)
        console().print(f"{task}: {values}")
