"""Rows of a CSV file with a header, each with the place that messages name."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from jaxpar.base.errors import UTF8, UserError, reading, suggest


class CsvRow(NamedTuple):
    """One line of a file.

    Attributes:
      cells: the texts by column; a cell that the line leaves out is empty.
      place: the file and the line.
    """

    cells: dict[str, str]
    place: str


def read_csv(file: Path, required: Sequence[str]) -> list[CsvRow]:
    """Read the rows of a CSV file.

    Raises:
      UserError: the file cannot be read, or `parse_csv` refuses it.
    """
    with reading(file):
        text = file.read_text(encoding=UTF8)
    return parse_csv(text, str(file), required)


def installed_text(package: str, name: str) -> str:
    """Read the text of a file that comes with a package."""
    return files(package).joinpath(name).read_text(UTF8)


def parse_csv(text: str, origin: str, required: Sequence[str]) -> list[CsvRow]:
    """Read the rows of a CSV text; empty lines are none.

    Args:
      origin: the name of the file in messages.
      required: the columns that it must have.

    Raises:
      UserError: it is no CSV, has no row, or a column is missing.
    """
    try:
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise UserError(f"{origin} is no CSV file: {error}") from error
    if not any(lines[1:]):
        raise UserError(f"{origin} has no rows: a header line and a line for each row are needed")
    header = lines[0]
    for column in required:
        if column not in header:
            near = suggest(column, header)
            raise UserError(
                f"{origin} has no column {column}{near}: it needs {', '.join(required)}"
            )
    empty = dict.fromkeys(header, "")
    return [
        CsvRow(empty | dict(zip(header, line, strict=False)), f"{origin}, line {number}")
        for number, line in enumerate(lines[1:], 2)
        if line
    ]
