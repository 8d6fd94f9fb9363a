"""Token files in a bucket, read by range: a block is fetched when one of its ids is first read, and
kept with its hash in a bounded cache on this machine.

A file is known by what the bucket says of it (its ETag, or what it has in its place) and its size.
A block of another file than the one that was opened is refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError
from jaxpar.base.machine import cache_folder
from jaxpar.base.storage import Bucket

BLOCK = 2**20
"""The bytes that are fetched at once."""
CACHE_BYTES = 64 * 2**30
"""The bytes that the blocks of all files may take on this machine."""
_IN_MEMORY = 64
"""The blocks of a file that a process keeps in memory."""
_HASH = 16
_LOOK_EVERY = 256
"""The blocks that are fetched between two looks at the size of the cache."""
_AT_ONCE = 8


class RangedFile:
    """An object of a bucket, whose blocks are fetched as they are needed.

    Attributes:
      size: its bytes.
    """

    def __init__(self, url: str):
        """Open an object by its URL.

        Raises:
          UserError: there is no such object, or the bucket cannot be asked.
        """
        self._bucket = Bucket(url)
        self.url = self._bucket.url
        found = self._bucket.find()
        if found is None:
            raise UserError(f"cannot read {self.url}: there is no such object")
        self.size = found.size
        self._identity = found.identity
        made = hashlib.sha256(f"{self.url} {found.identity}".encode()).hexdigest()[:24]
        self._folder = _blocks() / made
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._fetched = 0

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        """Return whether another file is the same object of the same bucket, with the same
        content.
        """
        if not isinstance(other, RangedFile):
            return NotImplemented
        return self.url == other.url and self._identity == other._identity

    def __hash__(self) -> int:
        return hash((self.url, self._identity))

    def read(self, start: int, stop: int) -> bytes:
        """Read the bytes from `start` up to, but without, `stop`, from any thread.

        Raises:
          UserError: they cannot be read, or the object is no longer the one that was opened.
        """
        if start >= stop:
            return b""
        numbers = range(start // BLOCK, (stop - 1) // BLOCK + 1)
        if len(numbers) == 1:
            found = [self._block(numbers[0])]
        else:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                found = list(pool.map(self._block, numbers))
        first = numbers[0] * BLOCK
        return b"".join(found)[start - first : stop - first]

    def _block(self, number: int) -> bytes:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number]
        block = self._kept(number)
        if block is None:
            block = self._fetch(number)
        with self._lock:
            self._blocks[number] = block
            while len(self._blocks) > _IN_MEMORY:
                self._blocks.popitem(last=False)
        return block

    def _kept(self, number: int) -> bytes | None:
        """Read a block from the cache; None = it is not there, or is damaged."""
        file = self._folder / str(number)
        try:
            content = file.read_bytes()
            os.utime(file)
        except OSError:
            return None
        if content[:_HASH] == _hash(content[_HASH:]):
            return content[_HASH:]
        return None

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK
        stop = min(start + BLOCK, self.size)
        block = self._bucket.read("", start, stop)
        # asked after, so that what was read is of the object that was opened
        found = self._bucket.find()
        if found is None or found.identity != self._identity or len(block) != stop - start:
            now = "is gone" if found is None else f"has changed ({found.size:,} bytes now)"
            raise UserError(
                f"{self.url} {now} since it was opened with {self.size:,} bytes: bring it back, "
                "and give the command again"
            )
        # without room for it on this machine the block is fetched again another time
        with suppress(UserError):
            write_whole(self._folder / str(number), _hash(block) + block)
        with self._lock:
            self._fetched += 1
            look = self._fetched % _LOOK_EVERY == 1
        if look:
            _remove_old_blocks()
        return block


class RangedIds:
    """A stretch of the ids of a `RangedFile`, which NumPy takes for an array: `np.asarray` reads
    it.
    """

    def __init__(self, file: RangedFile, dtype: np.dtype, offset: int, count: int):
        """Keep where ids are, and read none.

        Args:
          file: the file that has them.
          dtype: the dtype of an id.
          offset: the bytes before the first id.
          count: the number of ids.
        """
        self.file = file
        self.dtype = dtype
        self._offset = offset
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def shape(self) -> tuple[int]:
        return (self._count,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self._read(0, self._count)
        return found if dtype is None else found.astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, stride = key.indices(self._count)
            if stride != 1:
                return np.asarray(self)[key]
            before = self._offset + start * self.dtype.itemsize
            return RangedIds(self.file, self.dtype, before, max(stop - start, 0))
        place = range(self._count)[key]
        return self._read(place, place + 1)[0]

    def windows(self, starts_B: np.ndarray, length: int) -> np.ndarray:
        """Read windows of ids [B, length].

        Args:
          starts_B: where each window begins [B].
          length: the ids of each window.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return np.stack(list(pool.map(lambda at: self._read(at, at + length), starts_B)))

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        content = self.file.read(self._offset + int(start) * size, self._offset + int(stop) * size)
        return np.frombuffer(content, self.dtype)


def _blocks() -> Path:
    return cache_folder() / "buckets" / "blocks"


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_HASH).digest()


def _remove_old_blocks() -> None:
    """Remove the blocks that were read longest ago, until the others fit with room to spare."""
    found = sorted(_states())
    too_much = sum(size for _, size, _ in found) - CACHE_BYTES
    if too_much <= 0:
        return
    too_much += CACHE_BYTES // 10
    for _, size, file in found:
        if too_much <= 0:
            return
        with suppress(OSError):  # it may be another user's
            file.unlink(missing_ok=True)  # another thread or process makes room too
            too_much -= size


def _states() -> Iterator[tuple[float, int, Path]]:
    """Yield when each block was last read, its bytes and its file."""
    for folder in _inside(_blocks()):
        for file in _inside(folder):
            with suppress(OSError):
                found = file.stat()
                if stat.S_ISREG(found.st_mode):
                    yield found.st_mtime, found.st_size, file


def _inside(folder: Path) -> list[Path]:
    """List what is in a folder; nothing where it is missing or cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
