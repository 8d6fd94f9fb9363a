"""Functions that read the words of a command line into typed arguments, and refuse other words by a
`UserError` of one line.

A `usage` is a command's docstring (hence `str | None`), such as `jaxpar train CONFIG [--run DIR]`:
the lower-case words in front are the command's name in messages.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from jaxpar.base.config import Config, fit_schedule, load_config, override
from jaxpar.base.config.unused_settings import require_effects
from jaxpar.base.errors import UserError, is_url, require_local, visible
from jaxpar.base.field_marks import Trait, keys_with
from jaxpar.base.key_aliases import suggest_key
from jaxpar.base.old_keys import FLOOR, OLD_FLOOR, RENAMED, same_thing
from jaxpar.base.ranges import require_ranges
from jaxpar.base.registry import RATES, require_names
from jaxpar.base.storage import as_url, local_path
from jaxpar.base.toml import flatten, presets
from jaxpar.cli.flags import Flag, flags_of, key_of, read_flags, replace_fields
from jaxpar.cli.help import command_help

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Args = TypeVar("Args", bound="DataclassInstance")
"""The dataclass of a command's arguments."""


@dataclasses.dataclass(frozen=True)
class ConfigArgs:
    """The arguments of a command that takes a config."""

    config: Config
    on: str = ""
    """Take the [mesh] table from this mesh instead: a target, v5p-64 or h100x16, or a mesh preset
    or file.
    """


@dataclasses.dataclass(frozen=True)
class MeshArgs(ConfigArgs):
    """The arguments of a command that takes a config and its hardware by name."""

    target: str = ""
    """The hardware, as --on: v5p-64 (chips), v5e-8, h100x16, ...: docs/targets.md lists them."""

    @property
    def mesh_name(self) -> str:
        """The mesh that was named; empty = none was."""
        return self.on or self.target


def config_args(
    usage: str | None,
    schema: Callable[[Config], Args],
    words: list[str],
    load: Callable[[str], Config] = load_config,
    training: bool = False,
    urls: bool = True,
) -> tuple[str, Args]:
    """Read the first word (a preset's name or a path), and the flags, with the config that it names
    as their default.

    A setting may be written as messages write it, `mesh.tensor=2`, in place of its flag.

    Args:
      usage: the command's docstring.
      schema: the dataclass of the command's arguments; if it has a field `on`, the command takes a
        mesh by name.
      words: the words behind the command.
      load: reads the config of a name.
      training: whether the command trains the run in the folder of the arguments' `run`, and so
        takes the run's schedule where there is one.
      urls: whether the first word and the run folder may be URLs.

    Returns:
      The first word, and the arguments. Where help is asked for, it is printed and the command
      ends.

    Raises:
      UserError: words cannot be parsed, a config cannot be read, `--on` stands beside flags of a
        mesh, a setting can have no effect, or a `train.steps` leaves no room for the schedule of a
        run.
    """
    words = [*words[:1], *flag_words(words[1:])]
    (name,) = positional(usage, schema(Config()), words, 1, urls)
    # a type variable's fields are not known
    args: Any = parse_words(usage, schema(_load(load, name)), words[1:])
    if not urls:
        require_local(getattr(args, "run", ""))
    keys = given_keys(words)
    if named := _mesh_name(args):
        if any(key.startswith("mesh.") for key in keys):
            flag = "--on" if args.on else "--target"
            raise UserError(
                f"{flag} replaces the whole mesh: leave out the --mesh. flags, or leave out {flag}"
            )
        from jaxpar.rehearse.named_mesh import named_mesh  # the cost model, which few need

        mesh, _ = named_mesh(named)
        args = dataclasses.replace(args, config=dataclasses.replace(args.config, mesh=mesh))
    if training:
        args = _schedule_of_run(name, args, keys)
    elif load is load_config:
        args = shorten_schedule(args, keys)
        _say_what_was_given(name)
    require_effects(_name_here(name) if load is load_config else "", args.config, keys)
    return name, args


def _mesh_name(args: object) -> str:
    """Return the mesh that was named; empty = none was."""
    named = getattr(args, "on", "")
    if not isinstance(args, MeshArgs):
        return named
    if named and args.target:
        raise UserError("--on and --target both name the mesh: leave one of them out")
    return args.mesh_name


def _load(load: Callable[[str], Config], name: str) -> Config:
    """Read the config of a name, which may be the URL of a run folder or of a config.toml."""
    return load(name if load is not load_config else _name_here(name))


def _name_here(name: str) -> str:
    """Return the name of a config on this machine; the URL of a run folder or of a config.toml is
    copied here first.
    """
    if not is_url(name):
        return name
    if name.endswith(".toml"):
        return str(local_path(name))
    from jaxpar.train.runs.bucket import folder_here  # Orbax, which only a run needs

    folder = folder_here(name)
    if not (folder / "config.toml").exists():
        raise UserError(f"{as_url(name)} is no run folder: it has no config.toml")
    return str(folder)


def given_keys(words: list[str]) -> set[str]:
    """List the dotted keys of the flags among some words, and the names of a command's own flags.

    Returns:
      The keys, such as `train.batch` and `json`. The key of an earlier version is translated to
      today's.
    """
    found = {key_of(word) for word in words} - {""}
    return {_today(key) for key in found}


def _schedule_of_run(name: str, args: Any, keys: set[str]) -> Any:
    """Give a training command's arguments the schedule that its run began with, which a run keeps.
    A run that has not trained yet has none: `train.steps` alone shortens the schedule, as
    everywhere.

    Raises:
      UserError: `train.steps` leaves no room for the schedule of the run.
    """
    # Orbax, which only training needs
    from jaxpar.train.runs.folder.run_folder import finished_steps, is_run, read_run_config

    folder = run_folder(name, args.run)
    if not is_run(folder) or not any(finished_steps(folder)):
        return shorten_schedule(args, keys)
    run = read_run_config(folder).train
    config = args.config
    kept = {f"train.{key}": getattr(run, key) for key in ("warmup_steps", "decay_steps")}
    changes = {
        key: value
        for key, value in kept.items()
        if key not in keys and value != flatten(config)[key]
    }
    if changes:
        said = ", ".join(f"{key}={value}" for key, value in changes.items())
        print(f"jaxpar: note: the run in {folder} keeps its {said}", file=sys.stderr)
        config = override(config, changes)
    train = config.train
    least = max(
        train.warmup_steps + 1,
        train.warmup_steps + train.decay_steps if RATES[train.schedule].decays else 0,
    )
    if "train.steps" in keys and 0 < train.steps < least and not keys & kept.keys():
        raise UserError(
            f"train.steps={train.steps} leaves no room for the schedule of the run in {folder}, "
            f"which takes {least} "
            f"(train.warmup_steps={train.warmup_steps}, train.decay_steps={train.decay_steps}) "
            "and is kept: try "
            f"train.steps={least} or more, or train.stop_at={train.steps} to stop there"
        )
    return dataclasses.replace(args, config=config)


def _say_what_was_given(name: str) -> None:
    """Print on standard error what a program gave, as Python objects, to the run whose folder a
    config's name is, and what a command takes in its place.
    """
    folder = run_folder(name)
    is_of_run = folder in (Path(name), Path(name).parent)
    if not is_of_run or not os.path.isdir(folder / "checkpoints"):
        return
    # Orbax, which only a run needs
    from jaxpar.train.restore import given_notes

    for note in given_notes(folder):
        print(f"jaxpar: note: {visible(note)}", file=sys.stderr)


def shorten_schedule(args: Any, keys: set[str]) -> Any:
    """Fit the schedule of a command's arguments to its steps by `fit_schedule`, and print on
    standard error if it was changed.

    Args:
      args: the arguments, a dataclass with a field `config`.
      keys: the dotted keys that the user gave, which are kept.
    """
    config, note = fit_schedule(args.config, keys)
    if note:
        print(f"jaxpar: note: {note}", file=sys.stderr)
    return dataclasses.replace(args, config=config)


def flag_words(words: list[str]) -> list[str]:
    """Write every setting among some words as its flag: `mesh.tensor=2` is `--mesh.tensor 2`, and
    `rules.mlp=[fsdp, tensor]` has two values.

    Returns:
      The words; those that are no setting stay as they are.
    """
    found = list[str]()
    sections = {field.name for field in dataclasses.fields(Config)}
    for word in words:
        key, equals, value = word.partition("=")
        section, dot, _ = key.partition(".")
        if not (equals and dot and section in sections):
            found.append(word)
        elif value.startswith("[") and value.endswith("]"):
            values = re.split(r",(?![^(]*\))", value[1:-1])  # not at the commas of `bigbird(3, 1)`
            found += [f"--{key}", *filter(None, (one.strip(" '\"") for one in values))]
        else:
            found += [f"--{key}", value]
    return found


def take_words(flag: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Take the words of a flag, `--over`, out of others.

    Returns:
      The words that follow each such flag, or its `=`, up to the next flag, and all others.
    """
    taken: list[str] = []
    rest: list[str] = []
    inside = False
    for word in words:
        if word == flag:
            inside = True
        elif word.startswith(f"{flag}="):
            inside = True
            taken.append(word.removeprefix(f"{flag}="))
        elif inside and not word.startswith("-"):
            taken.append(word)
        else:
            inside = False
            rest.append(word)
    return taken, rest


def plain_name(target: str) -> str:
    """Write the name of a target, `v5p:4x4x8`, without the characters that the name of a folder may
    not have.
    """
    return re.sub(r"[^\w.-]+", "_", target)


def positional(
    usage: str | None,
    default: DataclassInstance,
    words: list[str],
    count: int,
    urls: bool = False,
) -> list[str]:
    """Read the words before the flags: the names and paths that the command cannot do without.

    Where help is asked for in their place, help is printed and the command ends.

    Args:
      usage: the command's docstring.
      default: the command's arguments, whose values help shows.
      words: the words behind the command.
      count: the number of names that the command takes.
      urls: whether these words may be URLs.

    Returns:
      The first `count` words.

    Raises:
      UserError: there are fewer words than `count`, or one of them is a URL and may be none.
    """
    if {"-h", "--help"}.intersection(words[:count]):
        _print_help(usage, default, words)
    if len(words) < count or any(word.startswith("-") for word in words[:count]):
        raise UserError(f"usage: {usage}")
    if not urls:
        require_local(*words[:count])
    return words[:count]


def parse_words(usage: str | None, default: Args, words: list[str]) -> Args:
    """Replace the values of a command's arguments by those that flags give.

    Args:
      usage: the command's docstring.
      default: the command's arguments as they are without a flag.
      words: the words behind the names that the command takes.

    Returns:
      The arguments. Where help is asked for, help is printed and the command ends.

    Raises:
      UserError: no flag has such a name, a flag has a value that it does not take, or a path is a
        URL.
    """
    if {"-h", "--help"}.intersection(words):
        _print_help(usage, default, words)
    flags = flags_of(type(default))
    older = _older_flags() if hasattr(default, "config") else {}
    values, left = read_flags({**flags, **older}, words)
    if left:
        raise UserError(_unknown_flag(usage, left, list(flags)))
    given = {key_of(word) for word in words}
    for old in older:
        if old in given and _today(old) in given:
            raise UserError(same_thing(old))
    floor = values.pop(_OLD_FLOOR_FIELD, None)
    args = replace_fields(default, values)
    if floor is not None:
        settings: Any = args  # a type variable's fields are not known
        config = override(settings.config, {OLD_FLOOR: floor})
        args = dataclasses.replace(args, config=config)
    _require_local_flags(args)
    before = flatten(default)
    after = flatten(args)
    # a run may have older values
    changed = {key: value for key, value in after.items() if value != before[key]}
    require_ranges(type(args), changed, inside="config.")
    require_names(type(args), changed, inside="config.")
    return args


def _print_help(usage: str | None, default: DataclassInstance, words: list[str]) -> NoReturn:
    """Print the flags with their values in `default`, or the flags of the tables that are named
    behind `--help`, and end the command.
    """
    at = min(words.index(word) for word in ("-h", "--help") if word in words)
    topics = itertools.takewhile(lambda word: not word.startswith("-"), words[at + 1 :])
    print(command_help(usage, default, list(topics)), end="")
    raise SystemExit(0)


_OLD_FLOOR_FIELD = f"config.{OLD_FLOOR}"


def _older_flags() -> dict[str, Flag]:
    """Return the flags of earlier versions, which are read as today's."""
    today = flags_of(ConfigArgs)
    renamed = {old: today[new] for old, new in RENAMED.items()}
    return {**renamed, OLD_FLOOR: Flag(_OLD_FLOOR_FIELD, float, "one")}


def _today(key: str) -> str:
    """Translate the key of an earlier version to today's; any other key stays as it is."""
    return FLOOR if key == OLD_FLOOR else RENAMED.get(key, key)


def _unknown_flag(usage: str | None, left: list[str], known: list[str]) -> str:
    """Write the message about words that no flag took, with what the first of them may have
    meant.
    """
    parts = str(usage).partition(" [")[0].split()
    command = " ".join(itertools.takewhile(lambda part: part.isalpha() and part.islower(), parts))
    word = left[0].partition("=")[0] or "''"
    hint = _flag_hint(left, known)
    return f"{command} takes no {word}{hint}: {command} --help lists its flags"


def _flag_hint(left: list[str], known: list[str]) -> str:
    """Guess what the first of some words that no flag takes may have meant, among the known dotted
    keys.
    """
    word, equals, value = left[0].partition("=")
    key = word.lstrip("-").replace("-", "_")
    tables = {name.rpartition(".")[0] for name in known} - {""}
    if key in tables and not equals:  # --mesh tensor=2
        inner, equals, value = left[1].partition("=") if len(left) > 1 else ("", "", "")
        if f"{key}.{inner}" not in known:
            return f" (it is a table: write --{key}.NAME VALUE)"
        flag = f"--{key}.{inner}".replace("_", "-")
        return f" (did you mean '{flag} {value}'?)" if equals else f" (did you mean '{flag}'?)"
    if word.startswith("-") or equals:
        hint = suggest_key(key, known, Config)
    else:
        hint = ""
    name = hint.partition("'")[2].partition("'")[0]
    return hint.replace(f"'{name}'", f"'--{name.replace('_', '-')}'")


def _require_local_flags(args: DataclassInstance) -> None:
    """Refuse a flag whose value is a URL and may not be one. Prompts, which are text, are tuples,
    and not looked at.
    """
    values = {key: value for key, value in flatten(args).items() if isinstance(value, str)}
    may_be_urls = keys_with(type(args), Trait.MAY_BE_URL)
    require_local(*(value for key, value in values.items() if key not in may_be_urls))


def run_folder(name: str, given: str = "") -> Path:
    """Find the folder of a run.

    Args:
      name: the name of a config or a path. A run folder, or the config.toml in a run folder, stands
        for that run, and anything else for runs/NAME.
      given: the folder that the user gave; empty = none.

    Returns:
      The folder, which need not exist; `given` where it is not empty.
    """
    if is_url(given):
        from jaxpar.train.runs.bucket import run_here  # Orbax, which only a run needs

        return run_here(given)
    if is_url(name):
        from jaxpar.train.runs.bucket import run_here

        url = as_url(name)
        is_run = not url.endswith(".toml") or url.endswith("/config.toml")
        folder = url.removesuffix("/config.toml")
        return run_here(folder) if is_run else Path("runs") / PurePosixPath(url).stem
    path = Path(name)
    if path.name == "config.toml":
        folder = path.parent
    else:
        folder = path
    holds_run = os.path.exists(folder / "config.toml") and (
        path.is_dir() or (folder / "checkpoints").is_dir()
    )
    if holds_run and name not in presets("jaxpar.configs"):
        found = folder
    else:
        found = Path("runs") / path.stem
    return Path(given) if given else found
