"""The table of docs/config.md is what the schema says of each setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jaxpar.base.config import Config
from jaxpar.base.field_marks import Idle, SchemaField, schema_fields
from jaxpar.base.ranges import Range, number_text
from jaxpar.base.registry import OneOf
from jaxpar.base.toml import flatten

PAGE = Path(__file__).parent.parent.parent / "docs" / "config.md"
DEFAULTS = flatten(Config())
KINDS = {bool: "true, false", str: "text", int: "whole numbers", float: "numbers"}


def written(value: Any) -> str:
    """A default as the table has it."""
    if isinstance(value, tuple):
        return ", ".join(map(written, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return number_text(value) if isinstance(value, int | float) else value or "none"


def taken(field: SchemaField) -> str:
    """What a setting may be."""
    kind = get_args(field.kind)[0] if get_origin(field.kind) is tuple else field.kind
    for mark in reversed(field.marks):
        if isinstance(mark, Range):
            return str(mark)
        if isinstance(mark, OneOf):
            return ", ".join((*mark.also, *mark.registry.names()))
    if get_origin(kind) is Literal:
        return ", ".join(map(written, get_args(kind)))
    return KINDS[kind]


def row(field: SchemaField) -> str:
    idle = "; ".join(mark.reason for mark in field.marks if isinstance(mark, Idle))
    many = "any of: " if get_origin(field.kind) is tuple else ""
    cells = (f"`{field.key}`", written(DEFAULTS[field.key]), many + taken(field), idle)
    return f"| {' | '.join(cells)} |".replace("  |", " |")


def test_the_page_has_every_setting() -> None:
    """If this fails, put these rows in place of those of the page."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [row(field) for field in schema_fields(Config).values()]
    starts = tuple(f"| `{key}` |" for key in DEFAULTS)
    assert [line for line in page if line.startswith(starts)] == rows, "\n".join(rows)
