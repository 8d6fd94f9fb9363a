"""Text sources: a file, a folder of texts, or the standard library of Python. Each file is a
document, or has one in each of its rows.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.rows import (
    COMPRESSED,
    UTF16,
    has_column,
    is_json_lines,
    kind_of_file,
    read_unpacked,
    row_texts,
)
from jaxpar.data.streams.tokens import Tokens
from jaxpar.data.vocabulary.tokenizer import (
    Tokenizer,
    decode_text,
    encode_files,
    make_tokenizer,
)

_COLUMN = "text"
_ADVICE = (
    "of which each row would be a document (take data.source=chat for conversations, and "
    "data.source=hf with data.column for another column)"
)
NOTHING_IN_IT = "is empty: there is no document with text in it"
_STDLIB_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "idlelib",
    "lib2to3",
    "turtledemo",
}
"""Folders of the standard library that hold other packages, tests or generated tables, or are often
not installed.
"""


def load_texts(
    paths: Sequence[str], data: DataConfig, vocab_size: int
) -> tuple[list[Tokens], Tokenizer]:
    """Load text sources; an empty path is the standard library's. The tokenizer `chars` knows the
    characters of all.
    """
    sources = [source_files(path, data) for path in paths]
    texts = (text for source in sources for file in source.files for text in document_texts(file))
    tokenizer = make_tokenizer(data.tokenizer, texts, vocab_size, data.bos)
    streams = []
    for source in sources:
        found = list(encode_files(source.files, tokenizer, document_texts))
        documents = [document for document in found if len(document)]
        if not documents:
            raise UserError(f"{source.name} {NOTHING_IN_IT}")
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        stream = Tokens(
            tokens=np.concatenate(documents),
            document_starts=starts,
            origin=source.name,
            files=tuple(source.files),
            note=left_out(len(found) - len(documents)) + source.note,
            begin_of_text=tokenizer.begin_of_text,
        )
        streams.append(stream)
    return streams, tokenizer


class TextSource(NamedTuple):
    """Files of documents."""

    files: list[Path]
    name: str
    """The name of the source in messages."""
    note: str = ""
    """The note on files that were left out."""


def document_texts(file: Path) -> Iterator[str]:
    """Yield the documents of a file: its text, which may be compressed, or the `text` of each row
    of JSON lines or Parquet. A row without one is a document without text.

    Raises:
      UserError: the file cannot be read, or none of its first rows has a `text`.
    """
    if not (_is_parquet(file) or _has_texts_in_lines(file)):
        yield decode_text(read_unpacked(file), file)
        return
    for texts in row_texts(file, _COLUMN, _ADVICE):
        yield from (text or "" for text in texts)


def _is_parquet(file: Path) -> bool:
    return kind_of_file(file) == "Parquet"


def _has_texts_in_lines(file: Path) -> bool:
    return is_json_lines(file) and has_column(file, _COLUMN)


def left_out(empty: int, of: int = 0) -> str:
    """Write the note on documents without text; `of` = they are among so many first ones."""
    if not empty:
        return ""
    among = f" of the first {of:,}" if of else ""
    return f" (documents without text, left out: {empty:,}{among})"


def source_files(path: str, data: DataConfig) -> TextSource:
    """List the documents of a text source, with a name for it."""
    if path:
        files, others = data_files(path, _has_documents)
        note = name_files("files that are no text, left out", path, others)
        as_they_are = [
            file for file in files if is_json_lines(file) and not _has_texts_in_lines(file)
        ]
        if as_they_are and Path(path).is_file():
            next(row_texts(as_they_are[0], _COLUMN, _ADVICE), None)  # says what it has
        note += name_files("rows without a `text`, taken as they are", path, as_they_are)
        return TextSource(files, path, note)
    name = f"the standard library of Python {platform.python_version()}"
    return TextSource(stdlib_files(data.max_bytes), name)


def _has_documents(file: Path) -> bool:
    return is_text(file) or (_is_parquet(file) and has_column(file, _COLUMN))


def stdlib_files(max_bytes: int) -> list[Path]:
    """List as many of Python's own library sources, sorted by path, as fit in `max_bytes`; no
    tests, no tables.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # The build of Python writes _sysconfigdata, which has paths of that machine.
    sources = [file for file in files_below(root, _STDLIB_LEFT_OUT) if file.match("*.py")]
    files = [file for file in sources if not file.name.startswith("_sysconfigdata")]
    total = np.cumsum([file.stat().st_size for file in files])
    files = files[: np.searchsorted(total, max_bytes, side="right")]
    if not files:
        raise UserError(
            f"no standard library source in {root} fits in data.max_bytes={max_bytes}: raise it"
        )
    return files


def data_files(path: str, is_read: Callable[[Path], bool]) -> tuple[list[Path], list[Path]]:
    """List the file at `path`, or the files of the folder that are read and those that are not,
    sorted by path, so that a picture among the texts does no harm. Hidden and empty files of a
    folder are neither.

    Args:
      path: the file or the folder.
      is_read: whether a file of a folder is read.

    Raises:
      UserError: there is none, or it is empty.
    """
    root = Path(path)
    if root.is_file():
        if root.stat().st_size == 0:
            raise UserError(f"{path} is empty: give a file with text in it")
        return [root], []
    if not root.is_dir():
        raise UserError(
            f"no file or folder {path}: give the path of a text, or of a folder of them"
        )
    found = files_below(root)
    files = [file for file in found if is_read(file)]
    if not files:
        raise UserError(
            f"folder {path} has no text in it: hidden, empty and binary files do not count"
        )
    return files, sorted(set(found) - set(files))


def name_files(what: str, path: str, files: Sequence[Path]) -> str:
    """Write a note on some files of a folder."""
    if not files:
        return ""
    names = ", ".join(str(file.relative_to(path)) for file in files[:3])
    more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
    return f" ({what}: {names}{more})"


def files_below(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """List a folder's files, sorted by relative path, without empty or hidden ones and those in
    `left_out` folders.
    """
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in left_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [file for file in found if file.is_file() and file.stat().st_size]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def is_text(file: Path) -> bool:
    """Return whether a file has no NUL byte in the first 8 KiB of its content, which may be
    compressed (git's test for binary).
    """
    kind = kind_of_file(file)
    if kind and kind not in COMPRESSED:
        return kind == UTF16  # text, which `decode_text` says is to convert
    return b"\0" not in read_unpacked(file, 8192)
