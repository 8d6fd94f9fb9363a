"""The table of docs/config.md is what the schema and the registries say of each setting.
`python tests/base/config/test_setting_table.py` writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from jaxpar.base import registry
from jaxpar.base.config import Config
from jaxpar.base.field_marks import Idle, SchemaField, schema_fields
from jaxpar.base.ranges import Range, number_text
from jaxpar.base.registry import OneOf
from jaxpar.base.toml import flatten

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "config.md"
HEAD = "| key | default | takes | no effect where |\n|---|---|---|---|\n"
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
        if isinstance(mark, Range | OneOf):
            return str(mark)
    if get_origin(kind) is Literal:
        return ", ".join(map(written, get_args(kind)))
    return KINDS[kind]


def row(field: SchemaField) -> str:
    idle = "; ".join(mark.reason for mark in field.marks if isinstance(mark, Idle))
    many = "any of: " if get_origin(field.kind) is tuple else ""
    cells = (f"`{field.key}`", written(DEFAULTS[field.key]), many + taken(field), idle)
    return f"| {' | '.join(cells)} |".replace("  |", " |")


def with_table(page: str) -> str:
    """The page with the rows of today below the head of its table."""
    rows = [row(field) for field in schema_fields(Config).values()]
    before, _, rest = page.partition(HEAD)
    _, _, after = rest.partition("\n\n")
    return "".join((before, HEAD, "\n".join(rows), "\n\n", after))


@pytest.fixture
def our_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registries without what other tests have registered in this process."""
    of_tests = tuple(
        f"{name}."
        for name, module in sys.modules.items()
        if (getattr(module, "__file__", None) or "").startswith(str(ROOT / "tests"))
    )
    for table in vars(registry).values():
        if isinstance(table, registry.Registry):
            ours = {
                name: entry
                for name, entry in table.items()
                if not registry._place_of(entry).startswith(of_tests)
            }
            monkeypatch.setattr(table, "_entries", ours)


@pytest.mark.usefixtures("our_names")
def test_the_page_has_every_setting() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), f"python {Path(__file__).relative_to(ROOT)} writes the table"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
