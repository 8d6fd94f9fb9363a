"""Copies of files in buckets, in a cache of this machine that is bounded and shared."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from filelock import FileLock

from jaxpar.base.atomic_write import write_whole, writing
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, is_url, name_by_url, read_json
from jaxpar.base.machine import cache_folder
from jaxpar.base.storage.bucket import Bucket, Found
from jaxpar.base.storage.outages import say

COPIES_BYTES = 64 * 2**30
"""The bytes that the copies of this machine may take before old ones are removed."""
_IN_USE_SECONDS = 24 * 3600
"""The time after a request for a copy in which it may still be open, and stays."""


def local_path(
    path: str | Path,
    belongs: Callable[[str], bool] = lambda name: True,
    part: str = "",
) -> Path:
    """Find a file or a folder on this machine; the objects that a URL names are copied here first.

    Objects that have not changed since an earlier copy are not fetched again.

    Args:
      path: a path of this machine, which is returned as it is, or a URL.
      belongs: returns whether an object of a folder is copied, by its name below the folder.
      part: a word that tells this choice of objects from others; empty = all objects.

    Returns:
      The file or the folder. A URL with nothing below it gives a path that does not exist.

    Raises:
      UserError: the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path)
    bucket = Bucket(path)
    folder = _copies() / hashlib.sha256(f"{bucket.url} {part}".encode()).hexdigest()[:16]
    target = folder / PurePosixPath(bucket.url.partition("://")[2]).name
    name_by_url(target, bucket.url)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        single = bucket.find()
        if single is not None:
            wanted = {"": single}
        else:
            wanted = {name: one for name, one in bucket.files().items() if belongs(name)}
        _refresh(bucket, target, folder / "index.json", wanted)
        os.utime(folder)
    _remove_old_copies(folder)
    return target


def _refresh(bucket: Bucket, target: Path, index: Path, wanted: dict[str, Found]) -> None:
    """Make a copy equal to the objects in the bucket; `index` lists the copy's objects until
    now.
    """
    there = read_json(index) if index.exists() else {}
    new = [
        name
        for name, found in wanted.items()
        if there.get(name) != found.identity or not (target / name).is_file()
    ]
    for name in there.keys() - wanted.keys():
        _remove_inside(target, name)
    if "" not in wanted and target.is_file():  # what was one object is a folder now
        target.unlink()
    if "" in wanted and target.is_dir():
        shutil.rmtree(target)
    size = sum(wanted[name].size for name in new)
    if size > 2**30:
        say(f"fetching {bytes_text(size)} of {bucket.url}")
    write_whole(index, json.dumps({name: there[name] for name in there if name not in new}))
    bucket.fetch_all((name, target / name) for name in new)
    for name in new:
        if (target / name).stat().st_size != wanted[name].size:
            raise UserError(
                f"{target / name} is no longer the object that was listed: something writes there, "
                "so give the command again"
            )
    write_whole(index, json.dumps({name: found.identity for name, found in wanted.items()}))


def _remove_inside(target: Path, name: str) -> None:
    """Remove a file of a copy. A damaged index may name a folder, or a file elsewhere: these
    stay.
    """
    path = target / name
    if ".." in path.parts or not path.is_relative_to(target) or not path.is_file():
        return
    path.unlink(missing_ok=True)


def _copies() -> Path:
    """Return the folder of the copies of this machine."""
    return cache_folder() / "buckets" / "copies"


def _remove_old_copies(but: Path) -> None:
    """Remove copies that were not asked for lately, the oldest first, until the others fit."""
    found = sorted(_states())
    too_much = sum(size for _, size, _ in found) - COPIES_BYTES
    for asked, size, folder in found:
        is_old = time.time() - asked > _IN_USE_SECONDS
        if too_much > 0 and is_old and folder != but:
            shutil.rmtree(folder, ignore_errors=True)
            too_much -= size


def _states() -> Iterator[tuple[float, int, Path]]:
    """Yield for each copy when it was last asked for, its bytes and its folder."""
    for folder in _copies().iterdir():
        with suppress(FileNotFoundError):  # another process may be removing it
            if (folder / "index.json").exists():
                files = (file for file in folder.rglob("*") if file.is_file())
                size = sum(file.stat().st_size for file in files)
                yield folder.stat().st_mtime, size, folder
