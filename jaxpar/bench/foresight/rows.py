"""Published measurements of training steps, a row of a CSV file each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.base.errors import UserError, short
from jaxpar.bench.csv_rows import CsvRow, installed_text, parse_csv, read_csv

MOST = 2**40
"""The largest number that a row may have."""
NUMBERS = (
    "chips",
    "slices",
    "layers",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "vocab",
    "seq_len",
    "global_batch_seqs",
)
"""The columns of whole numbers. One that is empty is 0: not stated."""
WORDS = (
    "model",
    "config",
    "remat_policy",
    "remat_tensors",
    "attention",
    "quantization",
    "optimizer_keys",
    "ici",
    "dcn",
    "topology_shape",
    "machine",
    "maxtext_keys",
    "caveat",
    "source",
)
"""The columns of text."""
REQUIRED = ("name", "chip", "chips", "measured_step_seconds")
"""The columns that a file must have."""


@dataclass(frozen=True)
class PublishedRow:
    """One measured step: the model, the batch, the mesh and what was recomputed, as the source has
    them.
    """

    name: str
    chip: str
    measured: float
    """The seconds of a step."""
    batch: float
    """The sequences of one JAX device, which may be a part of one; 0 = not stated."""
    numbers: Mapping[str, int]
    words: Mapping[str, str]
    place: str
    """The file and the line, for messages."""
    stated_memory: int = 0
    """The bytes that a device took; 0 = not stated."""

    @property
    def keys(self) -> dict[str, str]:
        """The settings of the run by name, as its command line had them; the meshes' columns and
        the optimizer's stand in for what the command line leaves out.
        """
        found = dict[str, str]()
        for column in ("optimizer_keys", "ici", "dcn", "remat_tensors", "maxtext_keys"):
            for word in self.words[column].split():
                name, equals, value = word.removeprefix(f"{column}:").partition("=")
                if column in ("ici", "dcn") and equals and not name.startswith(column):
                    name = f"{column}_{name}_parallelism"
                if equals and name.isidentifier():
                    found[name] = value.strip("'\"")
        return found

    def refuse(self, column: str, found: object, wanted: str) -> UserError:
        """Make the error of a value that cannot be used."""
        return UserError(f"{self.place}, {self.name}: {column} is {short(found)}: {wanted}")


def published_rows() -> list[PublishedRow]:
    """Read the published measurements that are installed with the package."""
    text = installed_text("jaxpar.bench.foresight", "published/steps.csv")
    return parse_rows(text, "the published rows")


def read_rows(file: Path) -> list[PublishedRow]:
    """Read measurements from a CSV file of the same columns, of which a few are required and those
    of other names are ignored: docs/foresight.md.

    Raises:
      UserError: the file cannot be read, a column is missing, two rows have one name, or a row has
        a bad number; the message names the row and the column.
    """
    return _rows(read_csv(file, REQUIRED))


def parse_rows(text: str, origin: str) -> list[PublishedRow]:
    """Read measurements from the text of a CSV file.

    Args:
      origin: the name of the file in messages.

    Raises:
      UserError: `read_rows` refuses it.
    """
    return _rows(parse_csv(text, origin, REQUIRED))


def _rows(table: Sequence[CsvRow]) -> list[PublishedRow]:
    rows = [_row(line.cells, line.place) for line in table]
    names = [row.name for row in rows]
    for row in rows:
        if names.count(row.name) > 1:
            raise UserError(f"{row.place}: the name {short(row.name)} stands twice")
    return rows


def _row(cells: Mapping[str, str], place: str) -> PublishedRow:
    words = {column: cells.get(column, "").strip() for column in WORDS}
    name = cells["name"].strip()
    if not name:
        raise UserError(f"{place}: the column name is empty: each row has a name of its own")
    row = PublishedRow(name, cells["chip"].strip(), 0.0, 0.0, {}, words, place)
    numbers = {column: _whole(row, column, cells.get(column, "")) for column in NUMBERS}
    if not numbers["chips"]:
        raise row.refuse("chips", cells.get("chips"), "write how many chips the run had")
    batch = _number(row, "per_device_batch_size", cells.get("per_device_batch_size", ""))
    measured = _number(row, "measured_step_seconds", cells.get("measured_step_seconds", ""))
    if not measured:
        raise row.refuse(
            "measured_step_seconds", cells.get("measured_step_seconds"), "write the seconds"
        )
    gib = _number(row, "memory_gib", cells.get("memory_gib", ""))
    return PublishedRow(
        name, row.chip, measured, batch, numbers, words, place, stated_memory=int(2**30 * gib)
    )


def _number(row: PublishedRow, column: str, text: str) -> float:
    """Read a number of at least 0; an empty cell is 0."""
    if not text.strip():
        return 0.0
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MOST:  # NaN is in no range
        raise row.refuse(column, text, f"write a number from 0 to {MOST:.0e}")
    return number


def _whole(row: PublishedRow, column: str, text: str) -> int:
    number = _number(row, column, text)
    if number != int(number):
        raise row.refuse(column, text, "write a whole number")
    return int(number)
