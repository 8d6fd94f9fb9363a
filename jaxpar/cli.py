"""`jaxpar`: each command parses its words, calls the library and prints; a mistake of the user is a line and exit 2."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxpar.config import Config, check, load_config, presets
from jaxpar.errors import UserError, nearest
from jaxpar.report import console, fail

FLAGS = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
Overrides = Annotated[Config, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class TrainArgs:
    """Train a config, or go on training its run."""

    config: Overrides
    run: str = ""
    """Run folder; empty = runs/NAME."""
    on: str = ""
    """Take the [mesh] table from this mesh preset or file instead."""


@dataclass(frozen=True)
class EvalArgs:
    """Validation loss of a run's checkpoint."""

    config: Overrides
    step: int = 0
    """Checkpoint to read; 0 = the best one, or the newest when none was evaluated."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ShowArgs:
    """The parameter table of a config, and a picture of its largest arrays on the mesh."""

    config: Overrides
    on: str = ""
    """Take the [mesh] table from this mesh preset or file instead."""
    out: str = ""
    """Where the picture goes; empty = NAME.png."""
    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True)
class ConvertArgs:
    """Hugging Face checkpoint to run folder, or run folder to Hugging Face checkpoint."""

    config: Overrides
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of an export."""
    step: int = 0
    """Checkpoint to export; 0 = the best one, or the newest when none was evaluated."""


@dataclass(frozen=True)
class TokenizeArgs:
    """Text to a .bin file of token ids."""

    source: tyro.conf.Positional[str]
    """Text file or folder, or `stdlib`."""
    out: tyro.conf.Positional[str]
    """The .bin file to write."""
    tokenizer: str = "bytes"
    """bytes, chars, or the path of a tokenizer.json."""
    max_bytes: int = 8_000_000
    """Size cap of the stdlib corpus."""


def train_command(words: list[str]) -> int:
    """jaxpar train CONFIG [--run DIR] [--on MESH] [--section.key value ...]"""
    from jaxpar.train import train

    name, args = _config_args("train", TrainArgs, words)
    config = _on(args.config, args.on, words) if args.on else args.config
    result = train(config, Path(args.run or Path("runs") / Path(name).stem))
    return 130 if result.interrupted and not config.train.stop_at else 0


def eval_command(words: list[str]) -> int:
    """jaxpar eval RUN_FOLDER [--step N] [--section.key value ...]"""
    from jaxpar.evaluate import evaluate_run

    name, args = _config_args("eval", EvalArgs, words, _run_config)
    result = evaluate_run(args.config, Path(name), args.step)
    text = json.dumps(result._asdict()) if args.json else (
        f"step {result.step}: validation loss {result.val_loss:.4f} nats a token, perplexity {result.perplexity:.3f}"
    )  # fmt: skip
    console().print(text)
    return 0


def show_command(words: list[str]) -> int:
    """jaxpar show CONFIG [--on MESH] [--out PNG] [--section.key value ...]"""
    from jaxpar.show import show

    name, args = _config_args("show", ShowArgs, words)
    config = _on(args.config, args.on, words) if args.on else args.config
    show(check(config), Path(args.out or Path(name).stem + ".png"), args.json)
    return 0


def convert_command(words: list[str]) -> int:
    """jaxpar convert HF_FOLDER RUN_FOLDER [--section.key value ...], or RUN_FOLDER HF_FOLDER [--dtype D]"""
    from jaxpar import convert

    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise UserError("usage: " + str(convert_command.__doc__))
    source, target = Path(words[0]), Path(words[1])
    exporting = (source / "config.toml").exists()
    base = _run_config(words[0]) if exporting else convert.config_of(source)
    args = _parse("convert", ConvertArgs, base, words[2:])
    if exporting:
        step = convert.export_run(args.config, source, target, args.step, args.dtype)
        console().print(f"exported step {step} of {source} to {target} ({args.dtype} safetensors)")
    else:
        convert.import_run(args.config, source, target)
        console().print(
            f"imported {source} as step 0 of {target}: `jaxpar train {target / 'config.toml'} --run {target}` goes on"
        )
    return 0


def tokenize_command(words: list[str]) -> int:
    """jaxpar tokenize SOURCE OUT.bin [--tokenizer NAME]"""
    from jaxpar.config import DataConfig
    from jaxpar.data import tokenize, unigram_entropy

    args = tyro.cli(TokenizeArgs, args=words, prog="jaxpar tokenize")
    source = "stdlib" if args.source == "stdlib" else "text"
    data = DataConfig(source=source, path=args.source, tokenizer=args.tokenizer, max_bytes=args.max_bytes)
    tokens = tokenize(data, args.out)
    console().print(
        f"{args.out}: {len(tokens.tokens):,} tokens ({tokens.tokens.dtype}), "
        f"unigram entropy {unigram_entropy(tokens.tokens):.3f} nats a token"
    )
    return 0


def configs_command(words: list[str]) -> int:
    """jaxpar configs"""
    return _list_presets("configs", "train", words)


def meshes_command(words: list[str]) -> int:
    """jaxpar meshes"""
    return _list_presets("meshes", "train CONFIG --on", words)


def doctor_command(words: list[str]) -> int:
    """jaxpar doctor"""
    from jaxpar.doctor import examine

    _no_words("doctor", words)
    facts, warnings = examine()
    for line in [*facts, *(f"warning      {warning}" for warning in warnings)]:
        console().print(line)
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train_command, "train a config; the same command resumes"),
    "eval": (eval_command, "validation loss of a run's checkpoint"),
    "convert": (convert_command, "to and from Hugging Face safetensors"),
    "tokenize": (tokenize_command, "text to a .bin file of token ids"),
    "configs": (configs_command, "list the config presets"),
    "meshes": (meshes_command, "list the mesh presets"),
    "show": (show_command, "parameter table and a picture of the sharding"),
    "doctor": (doctor_command, "versions, devices, known-bad combinations"),
}


def main(argv: list[str] | None = None) -> int:
    """The entry point: runs one command and returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print("usage: jaxpar COMMAND ...   (jaxpar COMMAND --help lists its flags)\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()))
        return 0
    name, rest = words[0], words[1:]
    try:
        if name == "--version":
            from importlib.metadata import version

            print(f"jaxpar {version('jaxpar')}")
            return 0
        if name not in COMMANDS:
            raise UserError(f"no command {name!r}{nearest(name, COMMANDS)}: jaxpar --help lists them")
        return COMMANDS[name][0](rest)
    except UserError as error:
        return fail(str(error))


def _config_args(
    command: str, schema: type, words: list[str], load: Callable[[str], Config] = load_config
) -> tuple[str, Any]:
    """The first word (a preset's name or a path), and the parsed flags with that config as their default."""
    if words and words[0] in ("-h", "--help"):
        return "", _parse(command, schema, Config(), ["--help"])
    if not words or words[0].startswith("-"):
        raise UserError("usage: " + str(COMMANDS[command][0].__doc__))
    return words[0], _parse(command, schema, load(words[0]), words[1:])


def _parse(command: str, schema: type, config: Config, words: list[str]) -> Any:
    return tyro.cli(schema, args=words, default=schema(config=config), prog=f"jaxpar {command}", config=FLAGS)


def _on(config: Config, preset: str, words: list[str]) -> Config:
    """The config with the mesh of a preset; `--mesh.` flags on top of it would be ambiguous."""
    from jaxpar.hardware import load_mesh_preset

    if any(word.startswith("--mesh.") for word in words):
        raise UserError("--on replaces the whole mesh: leave out the --mesh. flags, or leave out --on")
    return dataclasses.replace(config, mesh=load_mesh_preset(preset)[0])


def _run_config(folder: str) -> Config:
    from jaxpar.train import read_run_config

    return read_run_config(Path(folder))


def _no_words(command: str, words: list[str]) -> None:
    if words:
        raise UserError(f"jaxpar {command} takes no arguments, found {' '.join(words)}")


def _list_presets(package: str, use: str, words: list[str]) -> int:
    """Every preset with the first line of its opening comment."""
    _no_words(package, words)
    found = presets(f"jaxpar.{package}")
    width = max(map(len, found))
    for name, file in found.items():
        console().print(f"{name:<{width}}  {file.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
    console().print(f"\nuse: jaxpar {use} NAME")
    return 0


if __name__ == "__main__":
    sys.exit(main())
