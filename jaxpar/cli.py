"""`jaxpar`: each command parses its words, calls the library and prints; a mistake of the user is a line and exit 2."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxpar.config import Config, check, flatten, load_config, presets
from jaxpar.errors import UserError, nearest
from jaxpar.report import console, fail

FLAGS = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
# A command's own switches stand alone (`--json`); those of a config take their value (`--data.pack True`).
Overrides = Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]


@dataclass(frozen=True)
class TrainArgs:
    """Train a config, or go on training its run."""

    config: Overrides
    run: str = ""
    """Run folder; empty = runs/NAME."""
    verify: bool = False
    """First compare the plan with one device on a small model (once: it is remembered); refuse it if it differs."""
    on: str = ""
    """Take the [mesh] table from this mesh preset or file instead."""


@dataclass(frozen=True)
class VerifyArgs:
    """Loss and every gradient of a config's plan against one device, on a small model of the same kind."""

    config: Overrides
    on: str = ""
    """Take the [mesh] table from this mesh preset or file instead."""
    json: bool = False
    """Print one JSON object."""


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
    """Where the parameters of a config live, what its devices send, and pictures of the mesh and of one layer."""

    config: Overrides
    on: str = ""
    """Take the [mesh] table from this mesh preset or file instead."""
    out: str = ""
    """Where the picture of the mesh goes; empty = NAME.png. That of a layer goes beside it: NAME_layer.svg."""
    schedule: bool = False
    """Show how microbatches go through the pipeline's stages instead, and draw that: NAME_schedule.png."""
    json: bool = False
    """Print the parameter table, or the schedule, as JSON."""


@dataclass(frozen=True)
class BenchArgs:
    """The training step against another implementation of it, alternating in one run."""

    config: Overrides
    rounds: int = 15
    """Alternations; the ratio's quartiles are over these."""
    calls: int = 10
    """Steps of each in a round."""
    picture: str = ""
    """`bench rehearse`: where to draw predicted against measured (PNG)."""
    target: str = ""
    """`bench overlap` and `bench pipeline`: the hardware, as for rehearse."""
    step: bool = False
    """`bench overlap`: rehearse the whole step too, not a block alone."""


@dataclass(frozen=True)
class RehearseArgs:
    """The training step compiled for hardware that is not here: does it fit, what takes the time, what is exposed."""

    config: Overrides
    target: str = ""
    """v5p-64 (chips), v5e-8, v5p-128x4 (four slices), v5p:4x4x8 (a shape), h100x64, ... or here."""
    on: str = ""
    """Take the [mesh] table from this mesh preset or file instead."""
    html: str = ""
    """Write the report as one self-contained page."""
    json: str = ""
    """Write the report as JSON; - = print it, and nothing else."""
    against: str = ""
    """Compare with this: a stored JSON, or a config that is rehearsed on the same target."""
    fail_on: str = ""
    """Conditions that exit with 1: unplanned-collective,does-not-fit,memory+5%,time+3% (growth against --against)."""
    tokens: float = 1e12
    """Length of a training, for its days."""
    no_timeline: bool = False
    """Leave the timeline out of the JSON: it is most of the bytes."""


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
    """Text (a file, a folder, or `stdlib`) to a .bin file of token ids."""

    tokenizer: str = "bytes"
    """bytes, chars, or the path of a tokenizer.json."""
    max_bytes: int = 8_000_000
    """Size cap of the stdlib corpus."""


def train_command(words: list[str]) -> int:
    """jaxpar train CONFIG [--run DIR] [--on MESH] [--verify] [--section.key value ...]"""
    from jaxpar.train import train

    name, args = _config_args("train", TrainArgs, words)
    config = _on(args.config, args.on, words) if args.on else args.config
    result = train(config, Path(args.run or Path("runs") / Path(name).stem), args.verify)
    return 130 if result.interrupted and not config.train.stop_at else 0


def verify_command(words: list[str]) -> int:
    """jaxpar verify CONFIG [--on MESH] [--json] [--section.key value ...]"""
    from jaxpar.verdict import as_json, table, verdict
    from jaxpar.verify import verify

    _, args = _config_args("verify", VerifyArgs, words)
    config, out = _on(args.config, args.on, words) if args.on else args.config, console()
    found = verify(config, say=(lambda line: None) if args.json else out.print)
    if args.json:
        out.print(json.dumps(as_json(found)))
    else:
        out.print(table(found))
        out.print(verdict(found))
    return 0 if found.equal else 1


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
    """jaxpar show CONFIG [--on MESH] [--out PNG] [--schedule] [--section.key value ...]"""
    from jaxpar.show import show, show_schedule

    name, args = _config_args("show", ShowArgs, words)
    config = _on(args.config, args.on, words) if args.on else args.config
    draw = show_schedule if args.schedule else show
    draw(check(config), Path(args.out or Path(name).stem + ".png"), args.json)
    return 0


def rehearse_command(words: list[str]) -> int:
    """jaxpar rehearse CONFIG --target T [--html FILE] [--json FILE] [--against OTHER] [--section.key value ...]"""
    from jaxpar.rehearse import rehearse_words

    name, args = _config_args("rehearse", RehearseArgs, words)
    config = _on(args.config, args.on, words) if args.on else args.config
    return rehearse_words(name, config, args, "jaxpar rehearse " + " ".join(words))


def convert_command(words: list[str]) -> int:
    """jaxpar convert HF_FOLDER RUN_FOLDER [--section.key value ...], or RUN_FOLDER HF_FOLDER [--dtype D]"""
    from jaxpar import convert

    if _asks_help(words):
        _parse("convert", ConvertArgs(Config()), ["--help"])
    source, target = map(Path, _places("convert", words, 2))
    exporting = (source / "config.toml").exists()
    base = _run_config(words[0]) if exporting else convert.config_of(source)
    args = _parse("convert", ConvertArgs(base), words[2:])
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

    if _asks_help(words):
        _parse("tokenize", TokenizeArgs(), ["--help"])
    path, out = _places("tokenize", words, 2)
    args = _parse("tokenize", TokenizeArgs(), words[2:])
    source = "stdlib" if path == "stdlib" else "text"
    data = DataConfig(source=source, path=path, tokenizer=args.tokenizer, max_bytes=args.max_bytes)
    tokens = tokenize(data, out)
    console().print(
        f"{out}: {len(tokens.tokens):,} tokens ({tokens.tokens.dtype}), "
        f"unigram entropy {unigram_entropy(tokens.tokens):.3f} nats a token"
    )
    return 0


def configs_command(words: list[str]) -> int:
    """jaxpar configs"""
    return _list_presets("configs", "train", words)


def meshes_command(words: list[str]) -> int:
    """jaxpar meshes"""
    return _list_presets("meshes", "train CONFIG --on", words)


def bench_command(words: list[str]) -> int:
    """jaxpar bench step CONFIG [--rounds N] [--calls N] [--section.key value ...], bench rehearse [--picture FILE],
    bench overlap CONFIG --target T [--step] [--section.key value ...],
    bench pipeline CONFIG --target T [--section.key value ...], bench attention or bench fusions (each has
    --help)"""
    from jaxpar.bench import bench_step, table

    if words[:1] == ["rehearse"]:
        from jaxpar.bench_rehearse import compare, configs, prediction_figure, prediction_table
        from jaxpar.calibrate import calibrated
        from jaxpar.mesh import MeshSpec
        from jaxpar.picture import save_figure
        from jaxpar.runtime import start

        args = _parse("bench", BenchArgs(Config()), words[1:])
        start(MeshSpec())
        say = console().print
        rows = compare(configs(), calibrated(say), say=say)
        say(prediction_table(rows))
        if args.picture:
            save_figure(prediction_figure(rows, "predicted and measured steps, one device here"), Path(args.picture))
        return 0
    if words[:1] == ["overlap"]:
        from jaxpar.bench_overlap import compare_forms, overlap_table
        from jaxpar.targets import load_target

        _, args = _config_args("bench", BenchArgs, words[1:])
        if not args.target:
            raise UserError("bench overlap needs --target: v5p-64, v5e-8, h100x64, ...: docs/targets.md lists them")
        say = console().print
        say(overlap_table(compare_forms(check(args.config), load_target(args.target), args.step, say)))
        return 0
    if words[:1] == ["pipeline"]:
        from jaxpar.bench_pipeline import compare_schedules, schedules_table
        from jaxpar.targets import load_target

        _, args = _config_args("bench", BenchArgs, words[1:])
        if not args.target:
            raise UserError("bench pipeline needs --target: v5p-64, v5e-8, h100x64, ...: docs/targets.md lists them")
        say = console().print
        say(schedules_table(compare_schedules(check(args.config), load_target(args.target), say)))
        return 0
    if words[:1] == ["attention"]:
        return _bench_attention(words[1:])
    if words[:1] == ["fusions"]:
        from jaxpar.bench_fusions import FusionBenchArgs, bench_fusions, fusion_table

        say = console().print
        say(fusion_table(bench_fusions(_parse("bench", FusionBenchArgs(), words[1:]), say)))
        return 0
    if not words or words[0] not in ("step", "-h", "--help"):
        raise UserError("usage: " + " ".join(str(bench_command.__doc__).split()))
    _, args = _config_args("bench", BenchArgs, words[1:] if words[0] == "step" else words)
    console().print(table([bench_step(check(args.config), args.rounds, args.calls)]))
    return 0


def _bench_attention(words: list[str]) -> int:
    from jaxpar import bench_attention as bench
    from jaxpar.mesh import MeshSpec
    from jaxpar.picture import save_figure
    from jaxpar.runtime import start

    args = _parse("bench", bench.AttentionBenchArgs(), words)
    start(MeshSpec())
    if args.tune:
        bench.tune_first(args, say=console().print)
    rows = bench.bench_attention(args, say=console().print)
    found = bench.attention_json(args, rows)
    console().print(bench.attention_table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if args.picture:
        save_figure(bench.attention_figure(rows, f"attention on {found['device']}"), Path(args.picture))
    return 0


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
    "verify": (verify_command, "compare a plan's loss and gradients with one device"),
    "eval": (eval_command, "validation loss of a run's checkpoint"),
    "convert": (convert_command, "to and from Hugging Face safetensors"),
    "tokenize": (tokenize_command, "text to a .bin file of token ids"),
    "configs": (configs_command, "list the config presets"),
    "meshes": (meshes_command, "list the mesh presets"),
    "show": (show_command, "parameter table and a picture of the sharding, or of the pipeline's schedule"),
    "rehearse": (rehearse_command, "compile the step for absent hardware: memory, time, exposed communication"),
    "bench": (bench_command, "the training step against PyTorch, or rehearsals against this machine"),
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
    if words[:1] in (["-h"], ["--help"]):
        _parse(command, schema(Config()), ["--help"])
    (name,) = _places(command, words, 1)
    return name, _parse(command, schema(load(name)), words[1:])


def _usage(command: str) -> str:
    """What the command takes, from its docstring."""
    return "usage: " + str(COMMANDS[command][0].__doc__)


def _asks_help(words: list[str]) -> bool:
    return "-h" in words or "--help" in words


def _places(command: str, words: list[str], count: int) -> list[str]:
    """The words before the flags: names and paths that the command cannot do without."""
    if len(words) < count or any(word.startswith("-") for word in words[:count]):
        raise UserError(_usage(command))
    return words[:count]


def _parse(command: str, default: Any, words: list[str]) -> Any:
    """`default` with the flags' values, typed by tyro; what it refuses becomes a UserError in place of its box."""
    said, prog = io.StringIO(), _usage(command).removeprefix("usage: ").partition(" [")[0]
    try:
        with contextlib.redirect_stderr(said):
            args, unknown = tyro.cli(
                type(default), args=words, default=default, prog=prog, config=FLAGS, return_unknown_args=True
            )
    except SystemExit as stop:
        if stop.code:
            raise UserError(_boxed_text(said.getvalue())) from stop
        raise
    if unknown:
        known = ["--" + key.removeprefix("config.").replace("_", "-") for key in flatten(default)]
        word = unknown[0].partition("=")[0]
        hint = nearest(word, known) if word.startswith("--") else ""
        raise UserError(f"jaxpar {command} takes no {word}{hint}: jaxpar {command} --help lists its flags")
    return args


def _boxed_text(box: str) -> str:
    """The text of a tyro error box above its first rule."""
    rows = [line.strip("\u2502 ") for line in box.splitlines()[1:]]
    text = " ".join(itertools.takewhile(lambda row: not row.startswith(("\u2500", "\u2570")), rows))
    return text.removeprefix("Error parsing ").removesuffix(".")


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
    """Refuse whatever follows a command that stands alone, but for --help."""
    if _asks_help(words):
        print(f"{_usage(command)}\n\n{COMMANDS[command][1]}; takes no flags")
        sys.exit(0)
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
