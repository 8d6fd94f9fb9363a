"""The commands of `jaxpar` that have no module of their own: each parses its words, calls the
library and prints.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Bos, DataConfig
from jaxpar.base.config.checks import check
from jaxpar.base.console import check_folders, check_pictures, console
from jaxpar.base.durations import process_began
from jaxpar.base.errors import UserError, require_local
from jaxpar.base.field_marks import Trait
from jaxpar.base.hardware import load_chip
from jaxpar.base.ranges import Range
from jaxpar.cli.arguments import (
    MeshArgs,
    config_args,
    parse_words,
    positional,
    run_folder,
)


@dataclass(frozen=True)
class TrainArgs(MeshArgs):
    """Train a config, or resume its run."""

    run: Annotated[str, Trait.MAY_BE_URL] = ""
    """Run folder; empty = runs/NAME, or the folder that the config came from."""
    verify: bool = False
    """First compare the plan with one device on a small model; refuse it if it differs."""


@dataclass(frozen=True)
class WatchArgs:
    """Watch a run, or all runs in a folder, while they train or after: how far, how good, how fast,
    whether alive.
    """

    once: bool = False
    """Print the page and end."""
    profile: bool = False
    """Print the steps of `metrics.profile` by line of the model instead, beside what `rehearse`
    predicts.
    """
    target: str = ""
    """Predict for this system; empty = the system that the run was on."""


@dataclass(frozen=True)
class CompareArgs:
    """Compare two or more runs: what differs in their settings, how far each came, and their losses
    in one picture. A folder stands for the runs in it.
    """

    out: str = "compare.png"
    """The file of the picture: a .png or .svg."""


@dataclass(frozen=True)
class VerifyArgs(MeshArgs):
    """Compare the loss and every gradient of a config's plan with one device, on a small model of
    the same kind.
    """

    json: str = ""
    """Write every error with its limit as JSON; - = print it, and nothing else."""


@dataclass(frozen=True)
class ShowArgs(MeshArgs):
    """Show where the parameters of a config live, what its devices send, and pictures: of the mesh,
    a layer, masks and memory.
    """

    out: str = ""
    """The file of the mesh's picture; empty = NAME.png."""
    layer: str = ""
    """Draw one layer too: its matrices and activations, each with where it lies on the mesh. A .png
    or .svg.
    """
    masks: str = ""
    """Draw the attention masks too: which tiles are empty, partial and full, by kind of layer."""
    memory: str = ""
    """Draw a device's memory too, part by part, with what it has where --target or --chip says."""
    chip: str = ""
    """The chip whose memory the parts are compared with, `h100`; empty = the chip of --target."""
    schedule: bool = False
    """Show how microbatches go through the pipeline's stages instead, and draw that:
    NAME_schedule.png.
    """


@dataclass(frozen=True)
class TokenizeArgs:
    """Convert text (a file, a folder, or `stdlib`) to a .bin file of token ids."""

    tokenizer: Annotated[str, Trait.MAY_BE_URL] = "bytes"
    """bytes, chars, a tokenizer.json or its folder, or a model of the Hugging Face Hub, hf://gpt2
    (the extra hf)."""
    bos: Bos = "auto"
    """Whether each text begins with the tokenizer's begin-of-text token; auto = where the tokenizer
    says so.
    """
    max_bytes: Annotated[int, Range(1, 2**40)] = 8_000_000
    """Size cap of the stdlib corpus."""


def train_command(words: list[str]) -> int:
    """jaxpar train CONFIG [--run DIR] [--target T] [--verify] [--section.key value ...]"""
    from jaxpar.launch.local import train_config

    name, args = config_args(train_command.__doc__, TrainArgs, words, training=True)
    folder = run_folder(name, args.run)
    result = train_config(args.config, folder, args.verify, began=process_began())
    return 130 if result.interrupted else 0


def watch_command(words: list[str]) -> int:
    """jaxpar watch RUN|FOLDER [--once] [--profile [--target T]]"""
    from jaxpar.train.runs.bucket import copy_of, folder_here

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


def compare_command(words: list[str]) -> int:
    """jaxpar compare RUN|FOLDER ... [--out PNG]"""
    from jaxpar.show import compare
    from jaxpar.show.figures import save_figure
    from jaxpar.train.runs.bucket import folder_here

    count = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    names = positional(compare_command.__doc__, CompareArgs(), words, max(count, 1), urls=True)
    args = parse_words(compare_command.__doc__, CompareArgs(), words[count:])
    check_pictures(args.out)
    runs = compare.read_runs({name: folder_here(name) for name in names})
    for note in compare.notes(runs):
        console().print(f"note: {note}")
    console().print(compare.settings_table(runs))
    save_figure(compare.comparison_figure(runs), Path(args.out))
    console().print(f"wrote {args.out}")
    return 0


def verify_command(words: list[str]) -> int:
    """jaxpar verify CONFIG [--target T] [--json FILE] [--section.key value ...]"""
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
    """jaxpar show CONFIG [--target T] [--chip CHIP] [--out|--layer|--masks|--memory PNG]
    [--schedule] [--section.key value ...]
    """
    from jaxpar.rehearse.named_mesh import named_mesh
    from jaxpar.show.show import show, show_schedule

    name, args = config_args(show_command.__doc__, ShowArgs, words)
    config = check(args.config)
    picture = Path(args.out or Path(name).stem + ".png")
    others = {
        kind: Path(file)
        for kind, file in (("layer", args.layer), ("masks", args.masks), ("memory", args.memory))
        if file
    }
    idle = [*others, *(["chip"] if args.chip else [])]
    if args.schedule and idle:
        raise UserError(f"--{idle[0]} has no effect: --schedule draws the schedule alone")
    if args.schedule:
        show_schedule(config, picture)
        return 0
    if args.chip:
        has = load_chip(args.chip).hardware.hbm_bytes
    elif args.mesh_name:
        has = named_mesh(args.mesh_name)[1].hbm_bytes
    else:
        has = 0
    show(config, picture, has, **others)
    return 0


def _with_flags(message: str) -> str:
    """Rewrite a message about the data of a config for the flags of `tokenize`."""
    return re.sub(r"\bdata\.(tokenizer|bos|max_bytes)\b", _flag_of, message)


def _flag_of(key: re.Match[str]) -> str:
    return f"--{key[1]}".replace("_", "-")


def tokenize_command(words: list[str]) -> int:
    """jaxpar tokenize SOURCE OUT.bin [--tokenizer NAME]"""
    from jaxpar.data.corpus import unigram_entropy
    from jaxpar.data.streams.token_files import tokenize

    path, out = positional(tokenize_command.__doc__, TokenizeArgs(), words, 2, urls=True)
    require_local(out)
    args = parse_words(tokenize_command.__doc__, TokenizeArgs(), words[2:])
    source = "stdlib" if path == "stdlib" else "text"
    if source == "text" and args.max_bytes != TokenizeArgs.max_bytes:
        raise UserError("--max-bytes has no effect: it caps the stdlib corpus alone")
    data = DataConfig(
        source=source, path=path, tokenizer=args.tokenizer, bos=args.bos, max_bytes=args.max_bytes
    )
    try:
        written = tokenize(data, out)
    except UserError as error:
        raise UserError(_with_flags(str(error))) from error
    dtype = written.tokens.dtype
    entropy = f"unigram entropy {unigram_entropy(written.sample):.3f} nats a token"
    console().print(f"{out}: {written.size:,} tokens ({dtype}), {entropy}{written.note}")
    return 0
