"""Files that are written whole or not at all, also where the power fails, and errors of a disk in
one sentence.

A write returns once the kernel has its bytes, and these reach the disk many seconds later; a new
name of a file may be there before its bytes. What must outlive a power cut is synced: the file,
then the folder that has its name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxpar.base.errors import UserError, require_local

log = logging.getLogger(__name__)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the name `path` once all of it is written, and is removed
    if that fails.

    Readers see the file whole or not at all, also while others write it and after a power cut; its
    folder is made. The old content is there until the new one has reached the disk.

    Yields:
      The open file.

    Raises:
      UserError: the file cannot be written, as on a disk that is full, or the path is a URL.
    """
    require_local(path)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    with writing(path):
        make_folder(path.parent)
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                _sync_open(file.fileno())
            unfinished.replace(path)
            sync(path.parent)
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
      text: its content; a text is written in UTF-8.

    Raises:
      UserError: `replacing` cannot write the file.
    """
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it, unless it is there; a power cut does not take it away.

    Raises:
      OSError: it cannot be made.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, have reached the disk.

    Args:
      path: the file or the folder.

    Raises:
      OSError: it is not there, or the disk fails.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        _sync_open(opened)
    finally:
        os.close(opened)


def sync_below(folder: Path) -> None:
    """Wait until all that is in a folder has reached the disk, and the folder itself.

    Raises:
      OSError: `sync` fails for a file or a folder.
    """
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(place, name))
        sync(Path(place))


def _sync_open(opened: int) -> None:
    try:
        os.fsync(opened)
    except OSError as error:
        # some network file systems know no sync of a folder, or of what is open for reading
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
        _say_unsynced(error.strerror)


@functools.cache
def _say_unsynced(why: str) -> None:
    """Say once that a file system does not sync."""
    log.warning("a file system does not sync files (%s): a power cut may lose what is there", why)
