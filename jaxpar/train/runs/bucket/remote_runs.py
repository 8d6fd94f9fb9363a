"""Run folders in a bucket: each process has a copy of its own on this machine, in which everything
works as in a local run, and what changes there is sent to the bucket.

An object store has no rename and cannot append, and Orbax writes to no S3 server but Amazon's. So a
checkpoint is written into the copy, and then sent, by each process its own files. Its last object,
`uploaded.json`, has the size and the hash of every other: a step without it is no step. The small
files of a run (config.toml, metrics.jsonl, loss.png, ...) are sent whole where they have changed:
before each step's last object, every half minute, and at the end.

The arrays of the steps in a bucket are fetched when they are first read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxpar.base.errors import UserError, is_url, name_by_url
from jaxpar.base.storage import Bucket, as_url, local_path
from jaxpar.base.storage.hub import hub_folder, is_hub
from jaxpar.train.runs.bucket.copy import RunCopy, new_folder
from jaxpar.train.runs.bucket.layout import names_below

_COPIES: dict[str, RunCopy] = {}
"""The copies that this process has, by URL."""


def run_here(path: str | Path) -> Path:
    """Find the folder of a run, which need not exist yet, on this machine.

    Args:
      path: a folder of this machine, which is returned as it is, or a URL.

    Returns:
      The folder; for a URL, this process's copy, with what has changed in the bucket since the last
      look.

    Raises:
      UserError: the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path)
    url = as_url(path)
    copy = _COPIES.get(url)
    if copy is None:
        copy = _COPIES[url] = RunCopy(url)
    elif copy.is_stale:
        copy.refresh()
    return copy.folder


def folder_here(path: str | Path) -> Path:
    """Find a folder to read, a run's or one of Hugging Face, on this machine.

    Args:
      path: a folder of this machine, which is returned as it is, a URL, or a model of the Hugging
        Face Hub, `hf://org/name`.

    Returns:
      The folder; for a URL, a copy.

    Raises:
      UserError: the bucket or the Hub cannot be read.
    """
    if not is_url(path):
        return Path(path)
    if is_hub(path):
        return hub_folder(path)
    url = as_url(path)
    if url in _COPIES or Bucket(url).find("config.toml") is not None:
        return run_here(url)
    return local_path(url)


@contextmanager
def writing_folder(path: str | Path) -> Iterator[Path]:
    """Give a folder of this machine to write into; for a URL, send it once all of it is written.

    Args:
      path: a folder of this machine, which is given as it is, or a URL.

    Yields:
      The folder, which need not exist yet.

    Raises:
      UserError: there is something under the URL already, or the bucket cannot be written.
    """
    if not is_url(path):
        yield Path(path)
        return
    bucket = Bucket(path)
    if bucket.files():
        raise UserError(f"{bucket.url} has objects already: give another URL, or remove them")
    folder = new_folder(bucket.url)
    folder.rmdir()
    name_by_url(folder, bucket.url)
    yield folder
    if jax.process_index() == 0:
        bucket.send_all((folder / name, name) for name in names_below(folder))


def copy_of(folder: Path) -> RunCopy | None:
    """Find the copy of a run that a folder is; None = the folder is no copy."""
    return next((copy for copy in _COPIES.values() if copy.folder == folder.absolute()), None)


def send(folder: Path) -> None:
    """Send the changes in a run folder that is a copy; all processes may call this.

    Raises:
      UserError: the bucket cannot be written.
    """
    copy = copy_of(folder)
    if copy is not None and copy.sender is not None:
        copy.sender.send()
