"""The flags of a dataclass: which there are, and the words of a command line as their values.

A field is the flag of its dotted key, `--train.learning-rate`, with hyphens or underscores; the
fields of a field `config` stand at the top. The values of a flag are the words up to the next one,
or follow an equals sign. `jaxpar.cli.help` writes the help from the same dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jaxpar.base.errors import UserError, short
from jaxpar.base.field_marks import SchemaField, Trait, schema_fields
from jaxpar.base.registry import unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schema = TypeVar("Schema", bound="DataclassInstance")
_TRUTHS = {"True": True, "False": False, "true": True, "false": False}
"""As Python writes them, and as TOML and messages do."""
_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a name, a path or other text",
}


@dataclass(frozen=True)
class Flag:
    """What one field takes on a command line."""

    key: str
    """The dotted key of the field: `config.train.steps`."""
    kind: Any
    """The type of one value: bool, int, float, str or a Literal."""
    takes: Literal["nothing", "one", "many", "one each time"]
    """The words after the flag. A command's own switch takes none, and a setting that is true or
    false takes its value; what takes one each time may be given several times.
    """


@functools.cache
def flags_of(schema: type[DataclassInstance]) -> Mapping[str, Flag]:
    """Find the flags of a dataclass, by their dotted keys as a user writes them: `train.steps`.

    Args:
      schema: the dataclass of a command's arguments. Its fields are bool, int, float, str, a
        Literal, a tuple of these, or a dataclass of such fields. One that would be a word of
        Python's ends in an underscore, which its flag has not.

    Returns:
      The flags in the order of the fields.
    """
    flags = [_flag_of(field) for field in schema_fields(schema).values()]
    return {flag.key.removeprefix("config.").removesuffix("_"): flag for flag in flags}


def _flag_of(field: SchemaField) -> Flag:
    if typing.get_origin(field.kind) is tuple:
        (kind, *_) = typing.get_args(field.kind)
        repeated = Trait.REPEATED in field.marks
        return Flag(field.key, kind, "one each time" if repeated else "many")
    is_switch = field.kind is bool and "." not in field.key
    return Flag(field.key, field.kind, "nothing" if is_switch else "one")


def key_of(word: str) -> str:
    """The dotted key of a flag, `--train.batch=3`, as a user writes it; empty where a word is no
    flag.
    """
    if not word.startswith("--"):
        return ""
    return word[2:].partition("=")[0].replace("-", "_")


def read_flags(
    flags: Mapping[str, Flag],
    words: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """Read words as the values of flags.

    Args:
      flags: the flags by their dotted keys, see `flags_of`.
      words: the words of a command line, without the command and its names.

    Returns:
      The values by the dotted keys of the fields, and the words that no flag took, in order. Of a
      flag that is given twice the last value counts.

    Raises:
      UserError: a flag lacks its value, or the value is not of the flag's type.
    """
    values: dict[str, Any] = {}
    left = list[str]()
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        flag = flags.get(key_of(word))
        if flag is None:
            left.append(word)
            continue
        name, equals, after = word.partition("=")
        if equals:
            given = [after]
        else:
            given = _values_from(flag, words[at:])
            at += len(given)
        value = _value(flag, name, given, following=words[at : at + 1])
        if flag.takes == "one each time":
            value = values.get(flag.key, ()) + value
        values[flag.key] = value
    return values, left


def _values_from(flag: Flag, words: Sequence[str]) -> list[str]:
    """The words at the front that are values of a flag."""
    most = {"nothing": 0, "many": len(words)}.get(flag.takes, 1)
    found = list[str]()
    for word in words[:most]:
        if not _may_be_value(word):
            break
        found.append(word)
    return found


def _may_be_value(word: str) -> bool:
    """Whether a word is no flag: a hyphen alone and a negative number are none."""
    return not word.startswith("-") or word == "-" or _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value(
    flag: Flag,
    name: str,
    words: Sequence[str],
    following: Sequence[str],
) -> Any:
    """The words of a flag as the value of its field.

    Args:
      flag: the flag.
      name: as the user wrote it: `--train.learning_rate`.
      words: its own words.
      following: the word behind them, if there is one.

    Raises:
      UserError: there are too few or too many words, or one is not of the flag's type.
    """
    if flag.takes == "nothing":
        if words:
            raise UserError(f"{name} stands alone: leave out '={words[0]}'")
        return True
    if not words and flag.takes != "many":
        if following and not following[0].startswith("--"):
            hint = f": one that begins with a hyphen is written {name}={quote(following[0])}"
        else:
            hint = f", and none follows: give {_wanted(flag.kind)}"
        raise UserError(f"{name} takes a value{hint}")
    items = tuple(_item(flag.kind, name, word) for word in words)
    return items[0] if flag.takes == "one" else items


def _item(kind: Any, name: str, word: str) -> Any:
    """One word as a value of a type, which is any that `Flag.kind` may be."""
    if typing.get_origin(kind) is Literal:
        return _choice(typing.get_args(kind), name, word)
    try:
        return _TRUTHS[word] if kind is bool else kind(word)
    except (KeyError, ValueError) as error:
        raise UserError(f"{name} is {_wanted(kind)}, found {short(word)}") from error


def _choice(choices: Sequence[str | bool], name: str, word: str) -> str | bool:
    """The one of some choices that a word writes."""
    written = {_written(choice): choice for choice in choices}
    if word in written:
        return written[word]
    if word in _TRUTHS and _TRUTHS[word] in choices:
        return _TRUTHS[word]
    raise UserError(f"{name} {unknown(word, tuple(written))}")


def _wanted(kind: Any) -> str:
    """What a value of a type is, as a message says it."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(_written, typing.get_args(kind)))
    return _WANTED[kind]


def _written(choice: str | bool) -> str:
    """A choice as TOML and messages write it, without quotes."""
    return choice if isinstance(choice, str) else str(choice).lower()


def replace_fields(instance: Schema, values: Mapping[str, Any]) -> Schema:
    """Replace fields of a dataclass and of the dataclasses in it.

    Args:
      instance: the dataclass, which stays as it is.
      values: values of the right types, by the dotted keys of the fields.

    Returns:
      A dataclass of the same type.
    """
    changes: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        field, dot, inner = key.partition(".")
        if dot:
            tables.setdefault(field, {})[inner] = value
        else:
            changes[field] = value
    for field, inside in tables.items():
        changes[field] = replace_fields(getattr(instance, field), inside)
    return dataclasses.replace(instance, **changes)
