"""The help of a command, from the dataclass of its arguments: each flag with what it takes, what
its field's docstring says of it, its range, where it has no effect, and its value. That of a
command which takes a config has hundreds of settings, and shows the tables that they are in until
one is asked for.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from jaxpar.base.errors import UserError, suggest
from jaxpar.base.field_marks import Idle, SchemaField, schema_fields
from jaxpar.base.ranges import Range
from jaxpar.cli.flags import Flag, flags_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ALL = "all"
_COLUMNS = 80
_WIDEST = 120
_HELP = "  -h, --help\n      show this help message and exit"
_WORDS = {int: "INT", float: "FLOAT", str: "STR", bool: "{True,False}"}


class _Table(NamedTuple):
    """The flags of one table of a config, or those of the command itself, whose name is empty.

    Attributes:
      name: its dotted key.
      about: what it is for.
      idle: where all of it has no effect.
      flags: the text of each flag.
    """

    name: str
    about: str
    idle: str
    flags: list[str]


def command_help(usage: str | None, default: DataclassInstance, topics: Sequence[str]) -> str:
    """Write the help of a command.

    Args:
      usage: the command's docstring.
      default: its arguments, whose values are shown.
      topics: the words behind `--help`: names of tables of a config, or `all`. Without one, a
        command that takes a config lists its tables.

    Returns:
      The text.

    Raises:
      UserError: there is no table of a name.
    """
    own, *tables = _tables(default)
    about = "\n".join(_wrapped(own.about, ""))
    parts = [f"usage: {str(usage).partition(' [')[0]} [-h] [OPTIONS]", about]
    own_flags = "\n".join([_HELP, *own.flags])
    if not tables:
        parts.append(own_flags)
    elif not topics:
        parts += [own_flags, _list_text(tables)]
    elif ALL in topics:
        parts += [own_flags, *map(_table_text, tables)]
    else:
        for topic in topics:
            _require_topic(topic, tables)
        shown = [table for table in tables if any(_is_in(table, topic) for topic in topics)]
        parts += map(_table_text, shown)
    return "\n\n".join(parts) + "\n"


def _tables(default: DataclassInstance) -> Iterator[_Table]:
    """The flags of the command itself, and then those of each table."""
    schema = type(default)
    fields = schema_fields(schema)
    flags = {flag.key: (name, flag) for name, flag in flags_of(schema).items()}

    def table_of(instance: DataclassInstance, key: str, name: str) -> Iterator[_Table]:
        """The table of a part of the arguments, and those in it."""
        docs = field_docs(type(instance))
        values: dict[str, Any] = {
            one.name: getattr(instance, one.name) for one in dataclasses.fields(instance)
        }
        inner = [one for one, value in values.items() if dataclasses.is_dataclass(value)]
        leaves = [one for one in values if one not in inner]
        shared = _idle_in_all([fields[key + one] for one in leaves])
        texts = []
        for one in leaves:
            field = fields[key + one]
            marks = [mark for mark in field.marks if mark not in shared]
            shown, flag = flags[key + one]
            texts.append(_flag_text(shown, flag, marks, docs.get(one, ""), values[one]))
        if texts or not key:
            yield _Table(name, _summary(type(instance)), _idle_text(shared), texts)
        for one in inner:
            outer = "" if one == "config" and not key else f"{name}.{one}".removeprefix(".")
            yield from table_of(values[one], f"{key}{one}.", outer)

    yield from table_of(default, "", "")


def _idle_in_all(fields: Sequence[SchemaField]) -> list[object]:
    """Where a whole table has no effect."""
    marks = dict.fromkeys(mark for field in fields for mark in field.marks)
    return [
        mark
        for mark in marks
        if isinstance(mark, Idle) and all(mark in field.marks for field in fields)
    ]


def _flag_text(name: str, flag: Flag, marks: Sequence[object], doc: str, value: Any) -> str:
    """A flag with what it takes, and below it what is said of it."""
    words = f"  --{name.replace('_', '-')} {_value_words(flag)}".rstrip()
    if flag.takes == "one each time":
        notes = ["repeatable"]
    else:
        notes = [str(mark) for mark in marks if isinstance(mark, Range)]
        notes.append(f"default: {_written(value)}")
    about = [*doc.split(), _idle_text(marks), f"({'; '.join(notes)})"]
    return "\n".join([words, *_wrapped(" ".join(filter(None, about)), "      ")])


def _idle_text(marks: Sequence[object]) -> str:
    """Where a flag or a table has no effect."""
    return " ".join(f"No effect where {mark.reason}." for mark in marks if isinstance(mark, Idle))


def _value_words(flag: Flag) -> str:
    """What a flag takes: `INT`, `{auto,xla}` or `[STR [STR ...]]`."""
    if get_origin(flag.kind) is Literal:
        word = "{" + ",".join(map(str, get_args(flag.kind))) + "}"
    else:
        word = _WORDS[flag.kind]
    return {"nothing": "", "many": f"[{word} [{word} ...]]"}.get(flag.takes, word)


def _written(value: Any) -> str:
    """A value as a command line has it."""
    if isinstance(value, tuple):
        return " ".join(map(_written, value)) or "none"
    text = str(value)
    return quote(text) if not text or " " in text else text


@functools.cache
def field_docs(schema: type) -> Mapping[str, str]:
    """Read what stands under the fields of a dataclass.

    Args:
      schema: the dataclass. The fields of those that it is derived from are its own too.

    Returns:
      The text under each field that has one.
    """
    found = dict[str, str]()
    for one in reversed(schema.__mro__):
        found |= _docs_in(one.__module__).get(one.__qualname__, {})
    return found


@functools.cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """The texts under the fields of each class of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # built in, or its source is not there
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {one.name: dict(_field_texts(one.body)) for one in classes}


def _field_texts(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            yield field.target.id, str(below.value.value)


def _summary(schema: type) -> str:
    """The first paragraph of a class's docstring."""
    text = (schema.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split())


def _is_in(table: _Table, topic: str) -> bool:
    return f"{table.name}.".startswith(f"{topic}.")


def _require_topic(topic: str, tables: Sequence[_Table]) -> None:
    names = [table.name for table in tables]
    if topic not in names:
        hint = suggest(topic, [*names, ALL])
        known = ", ".join(name for name in names if "." not in name)
        raise UserError(f"no help on {topic!r}{hint}: --help {ALL}, or one of {known}")


def _table_text(table: _Table) -> str:
    return "\n".join(
        [*_wrapped(f"[{table.name}]  {table.about} {table.idle}", ""), "", *table.flags]
    )


def _list_text(tables: Sequence[_Table]) -> str:
    """The tables that are no part of another, each with what it is for."""
    outer = [table for table in tables if "." not in table.name]
    width = max(len(table.name) for table in outer)
    lines = ["Settings (--train.batch 8), by table; --help NAME lists one, --help all every one:"]
    for table in outer:
        first, *more = _wrapped(table.about, " " * (width + 4))
        lines += [f"  {table.name:<{width}}  {first.strip()}", *more]
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    columns = min(shutil.get_terminal_size((_COLUMNS, 24)).columns, _WIDEST)
    return textwrap.wrap(
        text,
        max(columns, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
