"""Frozen dataclasses from TOML, and back: presets and files found, every key and type checked,
values by dotted key.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxpar.base.errors import UTF8, UserError, reading, require_local, short, suggest
from jaxpar.base.key_aliases import key_of_alias, suggest_preset

T = TypeVar("T")
TABLE = {"table": True}
"""The metadata of a field that holds words `name=value`: a TOML file may write them as a table of
names and values.
"""
TABLE_OF_LISTS = {"table": True, "lists": True}
"""The metadata of a field as `TABLE`, where a value of the table may be a list of words, which
stand with commas.
"""


def presets(package: str) -> dict[str, Traversable]:
    """The TOML files of a data package (`jaxpar.configs`, `jaxpar.meshes`), sorted by name.

    Args:
      package: the package's name.

    Returns:
      Each file by its name without `.toml`.
    """
    files = [file for file in resources.files(package).iterdir() if file.name.endswith(".toml")]
    return {
        file.name.removesuffix(".toml"): file for file in sorted(files, key=lambda file: file.name)
    }


def find_toml(name: str, package: str) -> tuple[str, str]:
    """The text of a preset of a data package or of a file, and the name that messages give it.

    Args:
      name: the preset's name, or the path of a file or a run folder.
      package: the data package.

    Returns:
      The text, and its name.

    Raises:
      UserError: there is no such preset or file, it is a URL, or it cannot be read.
    """
    known = presets(package)
    if name in known:
        return known[name].read_text(encoding=UTF8), name
    require_local(name)
    path = Path(name)
    if path.is_dir() and (path / "config.toml").exists():
        path = path / "config.toml"
    if path.suffix != ".toml":
        listed = f"`jaxpar {package.removeprefix('jaxpar.')}` lists them"
        wanted = f"{listed}; a path ends in .toml, or is that of a run folder"
        raise UserError(f"no preset {name!r}{suggest_preset(name, known)}: {wanted}")
    with reading(path):
        return path.read_text(encoding=UTF8), str(path)


def read_tables(text: str, origin: str) -> dict[str, Any]:
    """The tables of TOML text, as nested dicts; a UserError, in which `origin` names the text,
    where it is no TOML.

    Args:
      text: the TOML.
      origin: what a message calls it.

    Raises:
      UserError: it is no TOML.
    """
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise UserError(f"{origin} is not valid TOML: its lists and tables are too deep") from error
    # of TOML, or of Python, which reads no number of thousands of digits
    except ValueError as error:
        raise UserError(f"{origin} is not valid TOML: {error}") from error


def from_toml(schema: type[T], text: str, origin: str) -> T:
    """An instance of the dataclass `schema` from TOML text; see `from_dict`.

    Args:
      schema: a frozen dataclass.
      text: the TOML.
      origin: what a message calls it.

    Raises:
      UserError: the text is no TOML, a key is not known, or a value has the wrong type.
    """
    return from_dict(schema, read_tables(text, origin), origin)


def from_dict(
    schema: type[T],
    value: Mapping[str, Any],
    origin: str,
    prefix: str = "",
    root: type | None = None,
) -> T:
    """An instance of the dataclass `schema` from nested dicts, as a TOML file gives them.

    Args:
      schema: a frozen dataclass.
      value: tables of tables, by key.
      origin: what a message calls their source.
      prefix: what a message has before a key: `mesh.`.
      root: the schema whose table it is; None = it is the whole.

    Returns:
      The instance; what is not given has its default.

    Raises:
      UserError: a key is not known (the message has the nearest one), or a value has the wrong
        type.
    """
    hints = _type_hints(schema)
    root = root or schema
    for key in value:
        if key not in hints:
            near = _hint(prefix, key, hints, root)
            raise UserError(f"{origin}: unknown key {prefix}{key}{near}")
    tables = {
        one.name: bool(one.metadata.get("lists"))
        for one in dataclasses.fields(schema)  # pyright: ignore[reportArgumentType]
        if one.metadata.get("table")
    }
    given = {
        key: _words_of(item, origin, prefix + key, tables[key])
        if key in tables and isinstance(item, dict)
        else item
        for key, item in value.items()
    }
    return schema(
        **{
            key: _coerce(hints[key], item, origin, prefix + key, root)
            for key, item in given.items()
        }
    )


@functools.cache
def _type_hints(schema: type) -> dict[str, Any]:
    """The types of a schema's fields, which are written as text and take long to read."""
    return typing.get_type_hints(schema)


def _hint(prefix: str, key: str, hints: Mapping[str, Any], root: type) -> str:
    """The key that was meant: one of this table, by its letters or its meaning, or of another table
    of a config.
    """
    meant = key_of_alias(key, root)
    if meant and meant.startswith(prefix) and (prefix or meant.partition(".")[0] in hints):
        return f" (did you mean {meant.removeprefix(prefix)!r}?)"
    # where its meaning is known, a key of this table must be a misspelling of it
    near = suggest(key, hints, alike=0.75 if meant else 0.5)
    if prefix == "rules.":
        return f"{near}: a logical axis of your own is named in [rules.own]"
    if near or not (meant and prefix):
        return near
    return f" (did you mean {meant!r}?)"


# a hint may be any type, and so may the value
def _coerce(hint: Any, value: Any, origin: str, key: str, root: type) -> Any:
    """The value as the annotated type, or a UserError that names the key."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, dict):
            return from_dict(hint, value, origin, key + ".", root)
        raise UserError(
            f"{origin}: {key} is a table of settings, found {short(value)}: write [{key}] or "
            f"{key}.name = value"
        )
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        # 1 is no True
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        names = [
            json.dumps(choice) if isinstance(choice, bool) else str(choice) for choice in choices
        ]
        near = suggest(str(value), names)
        raise UserError(f"{origin}: {key} is one of {', '.join(names)}, found {short(value)}{near}")
    if typing.get_origin(hint) is tuple:
        (item_hint, *_), items = typing.get_args(hint), [value] if isinstance(value, str) else value
        if isinstance(items, list):
            return tuple(_coerce(item_hint, item, origin, key, root) for item in items)
        if item_hint is int:
            what = "whole numbers"
        else:
            what = "names"
        raise UserError(f"{origin}: {key} is a list of {what}, found {short(value)}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        beyond = math.inf if value > 0 else -math.inf
        if value.bit_length() < 1024:
            return float(value)
        return beyond
    if type(value) is hint:
        return value
    if hint is float and isinstance(value, float):  # a number of numpy's that is a Python float too
        return float(value)
    if hint is str and isinstance(value, str):
        return str(value)
    wanted = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string in quotes",
    }[hint]
    raise UserError(f"{origin}: {key} is {wanted}, found {short(value)}")


def _words_of(
    table: Mapping[str, Any],
    origin: str,
    key: str,
    lists: bool,
) -> list[str]:
    """The words `name=value` of a table; with `lists` a value may be a list of words."""
    words = []
    for name, item in table.items():
        if lists and isinstance(item, list) and all(isinstance(one, str) for one in item):
            item = ",".join(item)
        if not isinstance(item, str | bool | int | float):
            raise UserError(f"{origin}: {key}.{name} is one value, found {item!r}")
        words.append(f"{name}={item if isinstance(item, str) else _toml_value(item)}")
    return words


def to_toml(config: object, header: str = "") -> str:
    """A config, or a section of one, as TOML with every key written out; `parse` reads back an
    equal one.

    Args:
      config: the dataclass.
      header: a comment above it; empty = none.
    """
    tables = {"": [f"# {line}" for line in header.splitlines()]}
    for key, value in flatten(config).items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, [f"\n[{table}]"]).append(f"{name} = {_toml_value(value)}")
    return "\n".join(line for lines in tables.values() for line in lines).lstrip("\n") + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are TOML's too, but for the control character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Every value of a config by its dotted key: `{"mesh.dcn.data": 1, ...}`.

    Args:
      config: a dataclass, or one of its sections.
      prefix: what stands before each key: `mesh.`.

    Returns:
      The values, in the order of the schema.
    """
    leaves: dict[str, Any] = {}
    for name, value in vars(config).items():
        leaves |= (
            flatten(value, f"{prefix}{name}.")
            if dataclasses.is_dataclass(value)
            else {prefix + name: value}
        )
    return leaves


def flat_text(config: object) -> dict[str, str]:
    """Every value of a config as TOML writes it, by its dotted key: `{"mesh.data": "1", ...}`."""
    return {key: _toml_value(value) for key, value in flatten(config).items()}


def as_tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as nested tables, as a TOML file gives them: `flatten` undone.

    Args:
      values: each value by its dotted key: `{"mesh.dcn.data": 1, ...}`.

    Returns:
      Tables of tables, in which a tuple is a list, for `from_dict`.
    """
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        if isinstance(value, tuple):
            table[last] = list(value)
        else:
            table[last] = value
    return tables
