"""The command that converts from and to checkpoints of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxpar.base.config import Config
from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten
from jaxpar.cli.arguments import (
    given_keys,
    parse_words,
    positional,
    shorten_schedule,
)


@dataclass(frozen=True)
class ConvertArgs:
    """Hugging Face checkpoint to run folder, or run folder to Hugging Face checkpoint."""

    config: Config
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of an export."""
    step: int = 0
    """Checkpoint to export; 0 = the best one, or the newest when none was evaluated."""
    adapter: bool = False
    """Export LoRA alone, in the form of PEFT; otherwise it is merged into the weights."""
    compressed: bool = False
    """Export sparse matrices as values and indices, in a file of our own; otherwise with their
    zeros.
    """


_OF_AN_EXPORT = (
    "mesh.",
    "rules.",
    "memory.parameters",
    "pipeline.",
    "model.scan_layers",
    "data.bos",
    "train.init",
)
"""The settings that an export reads: where the weights are and how they lie, and what goes beside
them.
"""


def convert_command(words: list[str]) -> int:
    """jaxpar convert HF_OR_PEFT RUN_FOLDER [--section.key value ...], or RUN_FOLDER OUT [--dtype D]
    [--adapter | --compressed]
    """
    from jaxpar.train.runs.bucket import folder_here, run_here, send, writing_folder

    names = positional(convert_command.__doc__, ConvertArgs(Config()), words, 2, urls=True)
    source = folder_here(names[0])
    if (source / "config.toml").exists():
        with writing_folder(names[1]) as target:
            _export(source, target, words[2:])
    else:
        target = run_here(names[1])
        _import(source, target, words[2:])
        send(target)
    return 0


def _export(source: Path, target: Path, words: list[str]) -> None:
    """Write a run's checkpoint as Hugging Face has it, and say so.

    Raises:
      UserError: a flag has no effect on an export, or the run cannot be exported.
    """
    from jaxpar.train import restore
    from jaxpar.train.runs.folder.run_folder import read_run_config

    base = read_run_config(source)
    args = parse_words(convert_command.__doc__, ConvertArgs(base), words)
    before = flatten(base)
    changed = [key for key, value in flatten(args.config).items() if value != before[key]]
    idle = [key for key in changed if not key.startswith(_OF_AN_EXPORT)]
    if idle:
        raise UserError(
            f"--{idle[0]} has no effect: an export takes a mesh, rules and where parameters "
            "lie alone"
        )
    if args.adapter and args.dtype != ConvertArgs.dtype:
        raise UserError("--dtype has no effect: an adapter is float32, as it was trained")
    if args.adapter and args.compressed:
        raise UserError("--compressed has no effect with --adapter, which is dense: give one")
    step = restore.export_run(
        args.config,
        source,
        target,
        args.step,
        args.dtype,
        args.adapter,
        args.compressed,
    )
    what = "the adapter, float32" if args.adapter else args.dtype
    if args.compressed:
        what = f"compressed, {args.dtype}"
    console().print(f"exported step {step} of {source} to {target} ({what} safetensors)")


def _import(source: Path, target: Path, words: list[str]) -> None:
    """Make a run folder of a Hugging Face or PEFT folder, and say how it is trained on.

    Raises:
      UserError: a flag has no effect on an import, or the folder cannot be imported.
    """
    from jaxpar.data.vocabulary.special_tokens import TOKENIZER
    from jaxpar.train import restore

    base = restore.config_of(source, target)
    args = parse_words(convert_command.__doc__, ConvertArgs(base), words)
    if args.dtype != ConvertArgs.dtype or args.step or args.adapter or args.compressed:
        why = f"{source} is no run folder, so this is an import"
        raise UserError(f"--dtype, --step, --adapter and --compressed have no effect: {why}")
    if args.config.model.lora.rank and not base.model.lora.rank:  # LoRA has a rate of its own
        base = restore.config_of(source, target, lora=True)
        args = parse_words(convert_command.__doc__, ConvertArgs(base), words)
    args = shorten_schedule(args, given_keys(words))
    restore.import_run(args.config, source, target)
    config = args.config
    console().print(
        f"imported {source} as step 0 of {target}: `jaxpar train {target} --data.path TEXT` "
        "trains it on"
    )
    console().print(
        "its settings are those of a fine-tuning: "
        f"train.learning_rate={config.train.learning_rate:g}, "
        f"optimizer.adamw.weight_decay={config.optimizer.weight_decay:g}, "
        f"data.seq_len={config.data.seq_len}, "
        f"precision.compute={config.precision.compute}"
    )
    if not (target / TOKENIZER).exists():
        console().print(
            f"{source} has no {TOKENIZER}: put it into {target}, or give data.tokenizer"
        )
