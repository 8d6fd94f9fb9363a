"""Rows of files of JSON and Parquet, which may be compressed: what a user has as "a data set".

A file is known by its first bytes, not by its name: a line is then read as what it is, and what
cannot be read is called by its kind.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.errors import UTF8, UserError, parse_json, reading, short

UTF16 = "UTF-16 text"
_KINDS = {
    b"\x1f\x8b": "gzip",
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    codecs.BOM_UTF16_LE: UTF16,
    codecs.BOM_UTF16_BE: UTF16,
    b"PAR1\x15": "Parquet",
    b"ARROW1\0": "Arrow",
    b"\x89HDF": "HDF5",
    b"SQLite format 3\0": "SQLite",
}
"""The kinds of files, by the bytes with which they begin."""
COMPRESSED = ("gzip", "bzip2", "xz", "zstd")
"""The kinds that are read as what they hold."""
_COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_LONGEST_BEGINNING = max(map(len, _KINDS))
_BATCH = 1024
"""The rows that are in memory at once."""


class Row(NamedTuple):
    """A row, and where it stands, for messages."""

    where: str
    value: Any


def kind_of(content: bytes) -> str:
    """Tell the kind of a file by its first bytes, as `gzip` or `Parquet`; empty = it may be
    text.
    """
    return next((kind for start, kind in _KINDS.items() if content.startswith(start)), "")


def kind_of_file(file: Path) -> str:
    """Tell the kind of a file by its first bytes.

    Raises:
      UserError: it cannot be read.
    """
    with reading(file), file.open("rb") as opened:
        return kind_of(opened.read(_LONGEST_BEGINNING))


def read_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a file: JSON lines or one JSON array, which may be compressed, or Parquet.

    Raises:
      UserError: the file cannot be read, is of another kind, or a row is no JSON.
    """
    kind = kind_of_file(file)
    if kind == "Parquet":
        yield from _parquet_rows(file)
    elif not kind or kind in COMPRESSED:
        yield from _json_rows(file, kind)
    elif kind == UTF16:
        raise UserError(
            f"{file} is UTF-16 text, as some programs of Windows write it: save it as UTF-8"
        )
    else:
        raise UserError(
            f"{file} is a {kind} file: give lines of JSON, which may be compressed with "
            f"{', '.join(COMPRESSED)}, a JSON array, or Parquet"
        )


def _json_rows(file: Path, kind: str) -> Iterator[Row]:
    """Yield the values of JSON lines, or of one JSON text: an array's elements, or an object on
    many lines.
    """
    with _text_of(file, kind) as text:
        beginning = True
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            if beginning and _is_part(line):
                yield from _one_text(file, number, line, text.read())
                return
            beginning = False
            where = f"{file}, line {number}"
            if "\0" in line:
                raise UserError(f"{where} has a NUL byte: the file is cut or binary, not JSON")
            yield Row(where, parse_json(line, where))


def _is_part(line: str) -> bool:
    """Return whether a file's first line is an array, or a part of a text of many lines."""
    if line.lstrip().startswith("["):
        return True
    try:
        parse_json(line, "")
    except UserError:
        return line.lstrip().startswith("{")
    return False


def _one_text(file: Path, number: int, line: str, rest: str) -> Iterator[Row]:
    """Yield the rows of a JSON text that begins in a line, and may go on after it."""
    try:
        found = parse_json(line + rest, str(file))
    except UserError:
        if line.lstrip().startswith("{"):
            parse_json(line, f"{file}, line {number}")  # of lines, the first is broken
        raise
    if not isinstance(found, list):
        yield Row(str(file), found)
        return
    for place, value in enumerate(found, 1):
        yield Row(f"{file}, element {place}", value)


@contextmanager
def _text_of(file: Path, kind: str) -> Iterator[io.TextIOWrapper]:
    with _unpacking(file, kind) as content:
        yield io.TextIOWrapper(content, encoding=UTF8, newline="\n")


def read_unpacked(file: Path, most: int = -1) -> bytes:
    """Read the content of a file, which may be compressed.

    Args:
      most: how many bytes are wanted of its beginning; -1 = all.

    Raises:
      UserError: it cannot be read.
    """
    kind = kind_of_file(file)
    with _unpacking(file, kind if kind in COMPRESSED else "") as content:
        return content.read(most)


@contextmanager
def _unpacking(file: Path, kind: str) -> Iterator[Any]:
    """Open the content of a file; what fails inside is an error of the file."""
    try:
        with reading(file), _unpacked(file, kind) as content:
            yield content
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"cannot read {file}: its {kind} stream is damaged ({error})") from error


def _unpacked(file: Path, kind: str) -> Any:
    if kind == "gzip":
        return gzip.open(file)
    if kind == "bzip2":
        return bz2.open(file)
    if kind == "xz":
        return lzma.open(file)
    if kind == "zstd":
        return _pyarrow(file).input_stream(file, compression="zstd")
    return file.open("rb")


def _parquet_rows(file: Path) -> Iterator[Row]:
    _pyarrow(file)
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{file}, row {number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {file} as Parquet: {str(error).splitlines()[0]}") from error


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{file} is a {kind_of_file(file)} file, which needs the pyarrow package: "
            "pip install 'jaxpar[data]'"
        ) from error
    return pyarrow


def row_texts(file: Path, column: str, advice: str) -> Iterator[list[str | None]]:
    """Yield the texts of a column, some rows at a time; None = a row has none.

    Args:
      file: a file of any kind that `read_rows` reads.
      column: the name of the column; a row that is a text counts as having it.
      advice: what to do where there is no such column, for the message.

    Raises:
      UserError: the file cannot be read, or none of its first rows has text in the column.
    """
    rows = read_rows(file)
    first = True
    while batch := list(islice(rows, _BATCH)):
        if first:
            _require_text(file, batch, column, advice)
        first = False
        yield [_text_of_value(row.value, column) for row in batch]


def has_column(file: Path, column: str) -> bool:
    """Return whether one of the first rows of a file has a column, or is a text itself."""
    try:
        for row in islice(read_rows(file), _BATCH):
            if isinstance(row.value, str) or (isinstance(row.value, dict) and column in row.value):
                return True
    except UserError:  # told by who reads the file
        return False
    return False


def _text_of_value(value: Any, column: str) -> str | None:
    """Return the text of a row; a row may be the text itself."""
    if isinstance(value, str):
        return value
    text = value.get(column) if isinstance(value, dict) else None
    if not isinstance(text, str):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which Arrow cannot hold
        return None
    return text


def _require_text(file: Path, rows: Sequence[Row], column: str, advice: str) -> None:
    """Refuse a file of which none of the first rows has text in the column."""
    if any(_text_of_value(row.value, column) is not None for row in rows):
        return
    objects = [row for row in rows if isinstance(row.value, dict)]
    if not objects:
        raise UserError(f"{rows[0].where}: found {short(rows[0].value)}, where a row is an object")
    having = [row for row in objects if row.value.get(column) is not None]
    if having:
        found = short(having[0].value[column])
        raise UserError(
            f"{having[0].where}: column {column!r} has a value that is no text: {found}"
        )
    if any(column in row.value for row in objects):
        return  # they are null
    keys = ", ".join(dict.fromkeys(key for row in objects[:20] for key in row.value))
    raise UserError(f"{file} has no column {column!r}, {advice}: it has {keys or 'none'}")


def is_json(file: Path) -> bool:
    """Return whether a file's name ends as that of JSON, perhaps compressed."""
    return is_json_lines(file) or _unpacked_name(file).endswith(".json")


def is_json_lines(file: Path) -> bool:
    """Return whether a file's name ends as that of JSON lines, perhaps compressed."""
    return _unpacked_name(file).endswith((".jsonl", ".ndjson"))


def _unpacked_name(file: Path) -> str:
    if file.suffix in _COMPRESSED_ENDINGS:
        return file.stem
    return file.name
