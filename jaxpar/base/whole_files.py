"""Files that are written whole or not at all, and errors of a disk in one sentence."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxpar.base.errors import UserError, require_local


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the name `path` once all of it is written, and is removed
    if that fails.

    Readers see the file whole or not at all, also while others write it; its folder is made.

    Args:
      path: the file.

    Yields:
      The open file.

    Raises:
      UserError: the file cannot be written, as on a disk that is full, or the path is a URL.
    """
    require_local(path)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                yield file
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system that keeps a file from being written into a UserError.

    Args:
      path: the file that is written inside.

    Raises:
      UserError: it cannot be written.
      OSError: something else failed that was read meanwhile.
    """
    try:
        yield
    except OSError as error:
        names = {str(name) for name in (error.filename, error.filename2) if name is not None}
        elsewhere = [
            name for name in names if Path(name).parent not in (path.parent, *path.parent.parents)
        ]
        if elsewhere:  # something that is read while the file is written
            raise
        why = "look at its folder, and at the space that is left there"
        raise UserError(f"cannot write {path}: {error.strerror or error}: {why}") from error


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file by `replacing`.

    Args:
      path: the file.
      text: its content; a text is written in UTF-8.

    Raises:
      UserError: as for `replacing`.
    """
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)
