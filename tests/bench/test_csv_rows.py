"""Rows of a CSV file, each with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpar.base.errors import UserError
from jaxpar.bench.csv_rows import parse_csv, read_csv


def test_each_row_has_its_cells_and_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('name,seconds,note\na,1.5,"one, two"\n\nb,2\n')
    first, second = read_csv(file, ("name", "seconds"))
    assert first.cells == {"name": "a", "seconds": "1.5", "note": "one, two"}
    assert second.cells == {"name": "b", "seconds": "2", "note": ""}
    assert second.place == f"{file}, line 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("name,seconds\n\n", "has no rows"),
        ("name,second\na,1\n", "no column seconds"),
        ('name,seconds\n"a,1\n', "is no CSV file"),
    ],
)
def test_what_is_no_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_csv(text, "the file", ("name", "seconds"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent"):
        read_csv(tmp_path / "absent.csv", ("name",))
