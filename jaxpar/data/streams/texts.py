"""Text sources: a file, a folder of texts, or the standard library of Python. Each file is a
document.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError, reading
from jaxpar.data.streams.tokens import Tokens
from jaxpar.data.vocabulary.tokenizer import (
    UTF16_MARKS,
    Tokenizer,
    encode_files,
    make_tokenizer,
    read_text,
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
    texts = (read_text(file) for files, _ in sources for file in files)
    tokenizer = make_tokenizer(data.tokenizer, texts, vocab_size, data.bos)
    streams = []
    for files, origin in sources:
        documents = [document for document in encode_files(files, tokenizer) if len(document)]
        if not documents:
            raise UserError(f"{origin} {NOTHING_IN_IT}")
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        note = left_out(len(files) - len(documents))
        stream = Tokens(
            tokens=np.concatenate(documents),
            document_starts=starts,
            origin=origin,
            files=tuple(files),
            note=note,
            begin_of_text=tokenizer.begin_of_text,
        )
        streams.append(stream)
    return streams, tokenizer


def left_out(empty: int, of: int = 0) -> str:
    """Return the note on so many documents without text, which may be those `of` the first that
    were read.
    """
    if not empty:
        return ""
    among = f" of the first {of:,}" if of else ""
    return f" (documents without text, left out: {empty:,}{among})"


def source_files(path: str, data: DataConfig) -> tuple[list[Path], str]:
    """Return the documents of a text source, and a name for it."""
    if path:
        return text_files(path), path
    name = f"the standard library of Python {platform.python_version()}"
    return stdlib_files(data.max_bytes), name


def stdlib_files(max_bytes: int) -> list[Path]:
    """Return as many of Python's own library sources, sorted by path, as fit in `max_bytes`; no
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


def text_files(path: str) -> list[Path]:
    """Return the file at `path`, or every text file in the folder, sorted by path.

    Hidden and empty files of a folder are left out, and so are files with a NUL byte in their first
    8 KiB (git's test for binary), so that a picture among the texts does no harm.
    """
    root = Path(path)
    if root.is_file():
        if root.stat().st_size == 0:
            raise UserError(f"{path} is empty: give a file with text in it")
        return [root]
    if not root.is_dir():
        raise UserError(f"no file or folder {path}: look at data.path and data.val_path")
    files = [file for file in files_below(root) if not _looks_binary(file)]
    if not files:
        raise UserError(
            f"folder {path} has no text in it: hidden, empty and binary files do not count"
        )
    return files


def files_below(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Return a folder's files, sorted by relative path, but no empty or hidden ones and none in
    `left_out` folders.
    """
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in left_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [file for file in found if file.is_file() and file.stat().st_size]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _looks_binary(file: Path) -> bool:
    with reading(file), file.open("rb") as opened:
        beginning = opened.read(8192)
    # text, which `read_text` says is to convert
    return b"\0" in beginning and not beginning.startswith(UTF16_MARKS)
