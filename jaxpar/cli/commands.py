"""The commands of `jaxpar` that have no module of their own: each parses its words, calls the
library and prints.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
from rich.console import RenderableType

from jaxpar.base.config import Bos, Config, DataConfig
from jaxpar.base.config.checks import check
from jaxpar.base.console import PACKAGES, bytes_text, check_folders, console
from jaxpar.base.durations import process_began
from jaxpar.base.errors import UserError, require_local
from jaxpar.base.hardware import hardware_of, load_mesh_preset
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.machine import machine_memory, memory_of, versions
from jaxpar.base.process.runtime import start
from jaxpar.base.ranges import Range
from jaxpar.base.toml import flatten
from jaxpar.base.whole_files import write_whole
from jaxpar.cli.arguments import (
    ConfigArgs,
    Overrides,
    config_args,
    given_keys,
    parse_words,
    positional,
    run_folder,
    shorten_schedule,
)

OPTIONAL = (
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "tokenizers",
    "tensorboardX",
    "wandb",
    "mlflow-skinny",
    "transformers",
    "torch",
)


@dataclass(frozen=True)
class TrainArgs(ConfigArgs):
    """Train a config, or go on training its run."""

    run: str = ""
    """Run folder; empty = runs/NAME, or the one that the config came from."""
    verify: bool = False
    """First compare the plan with one device on a small model; refuse it if it differs."""


@dataclass(frozen=True)
class WatchArgs:
    """A run, or all runs in a folder, while they train or after: how far, how good, how fast,
    whether alive.
    """

    once: bool = False
    """Print the page and end."""
    profile: bool = False
    """Print the steps of `metrics.profile` by line of the model instead, beside what `rehearse`
    predicts.
    """
    target: str = ""
    """Predict for this system; empty = the one that the run was on."""


@dataclass(frozen=True)
class VerifyArgs(ConfigArgs):
    """Loss and every gradient of a config's plan against one device, on a small model of the same
    kind.
    """

    json: str = ""
    """Write every error with its limit as JSON; - = print it, and nothing else."""


@dataclass(frozen=True)
class ShowArgs(ConfigArgs):
    """Where the parameters of a config live, what its devices send, and pictures: of the mesh, a
    layer, masks and memory.
    """

    out: str = ""
    """Where the picture of the mesh goes; empty = NAME.png."""
    layer: str = ""
    """Draw one layer too: its matrices and activations, each with where it lies on the mesh. A .png
    or .svg.
    """
    masks: str = ""
    """Draw the attention masks too: which tiles are empty, partial and full, by kind of layer."""
    memory: str = ""
    """Draw a device's memory too, part by part, with what it has where --on says so."""
    schedule: bool = False
    """Show how microbatches go through the pipeline's stages instead, and draw that:
    NAME_schedule.png.
    """


@dataclass(frozen=True)
class BenchArgs:
    """The training step against that of `transformers` in PyTorch, in turns; `jaxpar bench generate
    CONFIG` is for generation.
    """

    config: Overrides
    rounds: Annotated[int, Range(1, 1_000_000)] = 15
    """Alternations; the ratio's quartiles are over these."""
    calls: Annotated[int, Range(1, 1_000_000)] = 10
    """Steps of each in a round."""


@dataclass(frozen=True)
class BenchGenerateArgs:
    """Prefill and decoding against those of `transformers` in PyTorch, in turns, with random
    weights.
    """

    config: Overrides
    batch: Annotated[int, Range(1, 1_000_000)] = 1
    """Prompts at once."""
    prompt_tokens: Annotated[int, Range(1, 1_000_000)] = 128
    """Tokens of each."""
    new_tokens: Annotated[int, Range(2, 1_000_000)] = 64
    """New tokens of each; the first of them is the prefill's."""
    rounds: Annotated[int, Range(1, 1_000_000)] = 9
    """Alternations; the ratio's quartiles are over these."""


@dataclass(frozen=True)
class ConvertArgs:
    """Hugging Face checkpoint to run folder, or run folder to Hugging Face checkpoint."""

    config: Overrides
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


@dataclass(frozen=True)
class TokenizeArgs:
    """Text (a file, a folder, or `stdlib`) to a .bin file of token ids."""

    tokenizer: str = "bytes"
    """bytes, chars, or the path of a tokenizer.json."""
    bos: Bos = "auto"
    """Whether each text begins with the tokenizer's begin of text; auto = where the tokenizer
    says so.
    """
    max_bytes: Annotated[int, Range(1, 2**40)] = 8_000_000
    """Size cap of the stdlib corpus."""


def train_command(words: list[str]) -> int:
    """jaxpar train CONFIG [--run DIR] [--on MESH] [--verify] [--section.key value ...]"""
    from jaxpar.launch.local import train_config

    name, args = config_args(train_command.__doc__, TrainArgs, words, training=True)
    folder = run_folder(name, args.run)
    result = train_config(args.config, folder, args.verify, began=process_began())
    return 130 if result.interrupted else 0


def watch_command(words: list[str]) -> int:
    """jaxpar watch RUN|FOLDER [--once] [--profile [--target T]]"""
    from jaxpar.train.runs.bucket_runs import copy_of, folder_here

    (name,) = positional(watch_command.__doc__, WatchArgs(), words, 1, urls=True)
    args = parse_words(watch_command.__doc__, WatchArgs(), words[1:])
    if args.target and not args.profile:
        raise UserError("--target has no effect: it is what --profile predicts for")
    folder = folder_here(name)
    if args.profile:
        from jaxpar.show.profile import profile_parts

        for part in profile_parts(folder, args.target, console().print):
            console().print(part)
    else:
        from jaxpar.show.watch import watch

        copy = copy_of(folder)
        watch(folder, args.once, copy.refresh_page if copy is not None else lambda: None)
    return 0


def verify_command(words: list[str]) -> int:
    """jaxpar verify CONFIG [--on MESH] [--json FILE] [--section.key value ...]"""
    from jaxpar.verify.of_config import verify
    from jaxpar.verify.report import table

    name, args = config_args(verify_command.__doc__, VerifyArgs, words)
    quiet = args.json == "-"
    file = "" if quiet else args.json
    check_folders(file)

    def say(part: RenderableType) -> None:
        if not quiet:
            console().print(part)

    found = verify(args.config, say=say)
    say(table(found.checks))
    say(str(found))
    written = found.as_json(
        Path(name).stem,
        " ".join(["jaxpar verify", *words]),
    )
    text = json.dumps(written, allow_nan=False)
    if quiet:
        print(text)
    elif file:
        try:
            write_whole(Path(file), text + "\n")
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from error
        say(f"wrote {file}")
    return 0 if found.equal else 1


def show_command(words: list[str]) -> int:
    """jaxpar show CONFIG [--on MESH] [--out|--layer|--masks|--memory PNG] [--schedule]
    [--section.key value ...]
    """
    from jaxpar.show.show import show, show_schedule

    name, args = config_args(show_command.__doc__, ShowArgs, words)
    config = check(args.config)
    picture = Path(args.out or Path(name).stem + ".png")
    others = {
        kind: Path(file)
        for kind, file in (("layer", args.layer), ("masks", args.masks), ("memory", args.memory))
        if file
    }
    if args.schedule and others:
        raise UserError(
            f"--{next(iter(others))} has no effect: --schedule draws the schedule alone"
        )
    if args.schedule:
        show_schedule(config, picture)
        return 0
    if args.on:
        has = load_mesh_preset(args.on)[1].hbm_bytes
    else:
        has = 0
    show(config, picture, has, **others)
    return 0


def convert_command(words: list[str]) -> int:
    """jaxpar convert HF_OR_PEFT RUN_FOLDER [--section.key value ...], or RUN_FOLDER OUT [--dtype D]
    [--adapter | --compressed]
    """
    from jaxpar.train.runs.bucket_runs import folder_here, run_here, send, writing_folder

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
    from jaxpar.train.runs.run_folder import read_run_config

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
    from jaxpar.data.special_tokens import TOKENIZER
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


def tokenize_command(words: list[str]) -> int:
    """jaxpar tokenize SOURCE OUT.bin [--tokenizer NAME]"""
    from jaxpar.data.corpus import unigram_entropy
    from jaxpar.data.token_files import tokenize

    path, out = positional(tokenize_command.__doc__, TokenizeArgs(), words, 2, urls=True)
    require_local(out)
    args = parse_words(tokenize_command.__doc__, TokenizeArgs(), words[2:])
    source = "stdlib" if path == "stdlib" else "text"
    if source == "text" and args.max_bytes != TokenizeArgs.max_bytes:
        raise UserError("--max-bytes has no effect: it caps the stdlib corpus alone")
    data = DataConfig(
        source=source, path=path, tokenizer=args.tokenizer, bos=args.bos, max_bytes=args.max_bytes
    )
    written = tokenize(data, out)
    dtype = written.tokens.dtype
    entropy = f"unigram entropy {unigram_entropy(written.sample):.3f} nats a token"
    console().print(f"{out}: {written.size:,} tokens ({dtype}), {entropy}{written.note}")
    return 0


def bench_command(words: list[str]) -> int:
    """jaxpar bench CONFIG [--rounds N] [--calls N] [--section.key value ...]"""
    if words[:1] == ["generate"]:
        return bench_generate_command(words[1:])
    from jaxpar.bench.measure import bench_step, table
    from jaxpar.train.plans import make_experiment
    from jaxpar.train.require_memory import require_memory

    _, args = config_args(bench_command.__doc__, BenchArgs, words)
    say = console().print
    experiment = make_experiment(args.config)
    require_memory(experiment, machine_memory())
    say(table(bench_step(experiment, args.rounds, args.calls, say=say)))
    return 0


def bench_generate_command(words: list[str]) -> int:
    """jaxpar bench generate CONFIG [--batch N] [--prompt-tokens N] [--new-tokens N] [--rounds N]
    [--section.key value ...]
    """
    from jaxpar.bench.generate import bench_generate
    from jaxpar.bench.measure import table
    from jaxpar.train.plans import make_experiment

    _, args = config_args(bench_generate_command.__doc__, BenchGenerateArgs, words)
    say = console().print
    experiment = make_experiment(args.config)
    rows = bench_generate(
        experiment, args.batch, args.prompt_tokens, args.new_tokens, args.rounds, say
    )
    say(table(rows))
    return 0


def doctor_command(_: list[str]) -> int:
    """jaxpar doctor"""
    from jaxpar.parallel.host_memory import memory_kinds
    from jaxpar.rehearse.targets import compilers

    found = versions(PACKAGES + OPTIONAL)
    devices = start(MeshSpec())
    first = devices[0]
    backend = jax.default_backend()
    hardware = hardware_of(first.device_kind)
    if has := memory_of(first):
        limit = f", {bytes_text(has)} usable"
    else:
        limit = ""
    for line in (
        f"python       {platform.python_version()} on {platform.platform()}",
        f"packages     {', '.join(f'{name} {number}' for name, number in found.items())}",
        f"backend      {backend}: {len(devices)} x {first.device_kind}{limit}",
        f"processes    {jax.process_count()}",
        f"memory kinds {', '.join(memory_kinds(first))}",
        *(f"compiler     for {name} targets: {what}" for name, what in compilers().items()),
        "hardware     "
        f"{hardware.chip if hardware else 'no preset knows this chip: MFU will not be shown'}",
        *(f"warning      {warning}" for warning in warnings_for(found, backend)),
    ):
        console().print(line)
    return 0


def warnings_for(versions: dict[str, str], backend: str) -> list[str]:
    """Say what is known to go wrong with these versions of packages on a backend.

    Args:
      versions: the installed versions, by package.
      backend: `cpu`, `gpu` or `tpu`.

    Returns:
      A line for each warning.
    """
    from jaxpar.parallel.host_memory import known_problem

    jax_version = versions.get("jax", "")
    jaxlib_version = versions.get("jaxlib", "")
    bad = known_problem(backend, jaxlib_version)
    found = [bad] if bad else []
    if jax_version.split(".")[:2] != jaxlib_version.split(".")[:2]:
        found.append("jax and jaxlib are of different releases: install both at the same version")
    if backend == "cpu" and any("cuda" in name for name in versions):
        found.append(
            "a CUDA plugin is installed and JAX runs on CPU: no driver or no GPU is visible "
            "(see `nvidia-smi`); "
            "all is well if it is there to rehearse"
        )
    if versions.get("orbax-checkpoint") == "0.12.8":
        found.append(
            "orbax-checkpoint 0.12.8 restores a flipped bit without a word: keep checkpoints on "
            "storage that checksums"
        )
    return found
