"""Words of a command line to typed arguments; what cannot be one is a `UserError` of one line.

A `usage` is a command's docstring (hence `str | None`), such as `jaxpar train CONFIG [--run DIR]`: the lower-case words
in front are the command's name in messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from jaxpar.base.config import Config, flatten, load_config
from jaxpar.base.errors import UserError, nearest
from jaxpar.base.hardware import load_mesh_preset
from jaxpar.base.unused_settings import require_effects

FLAGS = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
_PLAINLY = {  # what Python says of a value that is no number, and what its flag needs
    ": invalid literal for int() with base 10: ": " is a whole number, found ",
    ": could not convert string to float: ": " is a number, found ",
}
# A command's own switches stand alone (`--json`); those of a config take their value (`--data.pack True`).
Overrides = Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]


def config_args(
    usage: str | None, schema: type, words: list[str], load: Callable[[str], Config] = load_config
) -> tuple[str, Any]:
    """The first word (a preset's name or a path), and the parsed flags with that config as their default.

    Where `--on` names a mesh, the config is on that one.

    Raises:
      UserError: words that cannot be parsed, `--on` beside flags of a mesh, or a setting that can have no effect.
    """
    if words[:1] in (["-h"], ["--help"]):
        parse(usage, schema(Config()), ["--help"])
    (name,) = places(usage, words, 1)
    args, flags = parse(usage, schema(load(name)), words[1:]), {word for word in words if word.startswith("--")}
    if getattr(args, "on", ""):
        if any(flag.startswith("--mesh.") for flag in flags):
            raise UserError("--on replaces the whole mesh: leave out the --mesh. flags, or leave out --on")
        mesh, _ = load_mesh_preset(args.on)
        args = dataclasses.replace(args, config=dataclasses.replace(args.config, mesh=mesh))
    require_effects(name, args.config, {flag[2:].partition("=")[0].replace("-", "_") for flag in flags})
    return name, args


def places(usage: str | None, words: list[str], count: int) -> list[str]:
    """The words before the flags: names and paths that the command cannot do without."""
    if len(words) < count or any(word.startswith("-") for word in words[:count]):
        raise UserError("usage: " + _line(usage))
    return words[:count]


def asks_help(words: list[str]) -> bool:
    """Whether help is among the flags."""
    return "-h" in words or "--help" in words


def parse(usage: str | None, default: Any, words: list[str]) -> Any:
    """`default` with the flags' values, typed by tyro; what it refuses becomes a UserError in place of its box."""
    said, prog = io.StringIO(), _line(usage).partition(" [")[0]
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
        name = " ".join(itertools.takewhile(lambda part: part.isalpha() and part.islower(), prog.split()))
        raise UserError(f"{name} takes no {word}{hint}: {name} --help lists its flags")
    return args


def _line(usage: str | None) -> str:
    """The docstring as one line."""
    return " ".join(str(usage).split())


def _boxed_text(box: str) -> str:
    """The text of a tyro error box above its first rule."""
    rows = [line.strip("\u2502 ") for line in box.splitlines()[1:]]
    text = " ".join(itertools.takewhile(lambda row: not row.startswith(("\u2500", "\u2570")), rows))
    text = text.removeprefix("Error parsing ").removesuffix(".")
    return functools.reduce(lambda text, words: text.replace(*words), _PLAINLY.items(), text)
