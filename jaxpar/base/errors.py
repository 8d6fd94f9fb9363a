"""Mistakes of the user: the exception that the CLI prints as a line before it exits with 2, and how files are read."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UTF8 = "utf-8-sig"
"""The encoding of every text that is read: UTF-8, with or without the byte order mark that Windows puts in front."""
BYTE_ORDER_MARK = "\ufeff"
"""That mark as a character, in a text that another library has read."""


class UserError(Exception):
    """A mistake in a config, a file, or a request, in one sentence: what was wrong, what was found, what to try."""


def suggest(word: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest choice, or the empty string when nothing is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


# `Path` makes one slash of two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def require_local(*paths: str | Path) -> None:
    """Refuse a URL where a path of this machine is wanted: `Path("s3://bucket/run")` is a local folder named `s3:`.

    Args:
      paths: files and folders that are about to be read or written; an empty one is none.

    Raises:
      UserError: one of them begins with a scheme, such as `gs://`, `s3://`, `az://`, `hf://` or `https://`.
    """
    for path in paths:
        if _URL.match(str(path)):
            scheme, _, rest = str(path).partition(":/")
            raise UserError(
                f"{scheme}://{rest.lstrip('/')} is a URL, and only paths of this machine are read and written: copy "
                "the files here, or mount the bucket as a folder (gcsfuse, s3fs, blobfuse2) and give that"
            )


@contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Turn an error of the system inside into a UserError that names the file."""
    require_local(file)
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, whose values may be anything; a UserError if it cannot be read or holds no object."""
    try:
        with reading(file):
            value = json.loads(file.read_text(encoding=UTF8))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object")
    return value
