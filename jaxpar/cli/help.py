"""The help of a command, as tyro writes it; that of a command which takes a config has hundreds of
settings, and shows the tables that they are in until one is asked for.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import tyro

from jaxpar.base.errors import UserError, suggest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
ALL = "all"
_OWN = "options"
"""How tyro calls the flags that are in no table."""
_COLUMNS = 80
"""The width that tyro is given: in a wider one it puts tables side by side."""
_WIDEST = 120


class _Table(NamedTuple):
    """The flags of one table of a config: what it is for, and of each flag its name and value, and
    its help.
    """

    name: str
    about: list[str]
    flags: list[tuple[str, list[str]]]


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
    text = _of_tyro(usage, default)
    tables = list(_tables(text))
    head = text.partition(f"\n {_OWN}")[0].rstrip()
    if len(tables) < 2:
        return "\n\n".join([head, *map(_table_text, tables)]) + "\n"
    if not topics:
        shown = [table for table in tables if table.name == _OWN]
        return "\n\n".join([head, *map(_table_text, shown), _list_text(tables)]) + "\n"
    shown = tables
    if ALL not in topics:
        for topic in topics:
            _require_topic(topic, tables)
        shown = [table for table in tables if any(_is_in(table, topic) for topic in topics)]
    return "\n\n".join([head, *map(_table_text, shown)]) + "\n"


def _of_tyro(usage: str | None, default: DataclassInstance) -> str:
    """The help of all flags, as tyro prints it."""
    prog = str(usage).partition(" [")[0]
    said = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_COLUMNS)
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            tyro.cli(type(default), args=["--help"], default=default, prog=prog, config=STYLE)
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return said.getvalue()


def _tables(text: str) -> Iterator[_Table]:
    """Read the tables of tyro's help, each of which begins with its name and `options`."""
    for part in re.split(r"^ (?=[\w.-]* ?options\s*$)", text, flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        table = _Table(title.split()[0], [], [])
        for line in lines:
            content = line.strip()
            flag, about = _flag_in(line)
            if set(content) == {"-"}:
                continue
            if table.flags and table.flags[-1][0].count("{") > table.flags[-1][0].count("}"):
                name, rest = table.flags.pop()  # its values go on in the next line
                table.flags.append((name + content, rest))
            elif flag:
                table.flags.append((flag, [about] if about else []))
            elif table.flags:
                table.flags[-1][1].append(content)
            else:
                table.about.append(content)
        yield table


def _flag_in(line: str) -> tuple[str, str]:
    """A flag with its value, and the help behind it where it is so short that it stands there."""
    found = re.match(r"  (-\S.*?)(?:\s{2,}(.*?))?\s*$", line)
    return (found[1], found[2] or "") if found else ("", "")


def _is_in(table: _Table, topic: str) -> bool:
    return f"{table.name}.".startswith(f"{topic}.")


def _require_topic(topic: str, tables: Sequence[_Table]) -> None:
    names = [table.name for table in tables if table.name != _OWN]
    if topic not in names:
        hint = suggest(topic, [*names, ALL])
        known = ", ".join(name for name in names if "." not in name)
        raise UserError(f"no help on {topic!r}{hint}: --help {ALL}, or one of {known}")


def _table_text(table: _Table) -> str:
    lines = list[str]()
    if table.name != _OWN:
        lines = [*_wrapped(f"[{table.name}]  {_sentence(table.about)}", ""), ""]
    for flag, about in table.flags:
        lines.append(f"  {flag}")
        lines += _wrapped(" ".join(about), "      ")
    return "\n".join(lines)


def _list_text(tables: Sequence[_Table]) -> str:
    """The tables that are no part of another, each with what it is for."""
    outer = [table for table in tables if "." not in table.name and table.name != _OWN]
    width = max(len(table.name) for table in outer)
    lines = ["Settings (--train.batch 8), by table; --help NAME lists one, --help all every one:"]
    for table in outer:
        first, *more = _wrapped(_sentence(table.about), " " * (width + 4))
        lines += [f"  {table.name:<{width}}  {first.strip()}", *more]
    return "\n".join(lines)


def _sentence(about: Sequence[str]) -> str:
    """The first paragraph."""
    text = "\n".join(about).partition("\n\n")[0]
    return " ".join(text.split())


def _wrapped(text: str, indent: str) -> list[str]:
    columns = min(shutil.get_terminal_size((_COLUMNS, 24)).columns, _WIDEST)
    return textwrap.wrap(
        text,
        max(columns, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
