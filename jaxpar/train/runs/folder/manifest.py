"""The manifest of a checkpoint: its step, the data and tokenizer that it was trained with, and the
size and hashes of all its files. By it damage is found before anything is read.

Orbax and TensorStore check nothing: a flipped bit is restored without a word. A manifest is written
into the folder of its step while that has its temporary name, so a step is there only with it.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError, is_kind, parse_json, require_kinds
from jaxpar.base.machine import versions
from jaxpar.train.runs.folder.orbax_names import METRICS, OF_ZARR, STEP_METADATA

MANIFEST = "manifest.json"
LOSS = "val_loss.json"
_LATER = (MANIFEST, LOSS, STEP_METADATA, METRICS)
"""The files in the folder of a step that are written after the rest: its manifest, its loss, and
when it was finished.
"""
_PIECE = 2**26
"""The bytes of a file that have a hash of their own; a sample of a large file is some of these
pieces.
"""
SAMPLED = 2**32
"""The most bytes that a check by sample reads, besides the first piece of each file."""
_BLOCK = 2**21
"""The bytes that are read at once, which stay in a processor's cache while they are hashed."""
_SETTLE = 0.5
"""The seconds after which a file is read again that the file system did not give."""
_PACKAGES = ("jaxpar", "jax", "jaxlib", "orbax-checkpoint")
_KINDS = {
    "check": str,
    "step": int,
    "piece": int,
    "files": dict[str, Any],
    "versions": dict[str, str],
    "identity": dict[str, Any],
}

Depth = Literal["sizes", "sample", "whole"]
"""The part of a step that is compared: the sizes of its files alone; all small files and a sample
of the large ones; or every byte.
"""


class DamagedCheckpoint(UserError):
    """A checkpoint differs from what was saved, or cannot be read.

    Attributes:
      place: the folder of its step; None = the folder is not known.
    """

    def __init__(self, message: object = "", place: Path | None = None):
        super().__init__(message)
        self.place = place


class UnreadCheckpoint(DamagedCheckpoint):
    """The file system does not give a file that is there: it is not known whether it is damaged."""


class Manifest(NamedTuple):
    """The record of a step when it was saved.

    Attributes:
      step: the step's number.
      sizes: the bytes of each file, by its path inside the folder of the step.
      hashes: a hash of each `piece` of a file.
      piece: the number of bytes of a piece.
      identity: the hashes by which the data and the tokenizer of the run are told from others.
    """

    step: int
    sizes: dict[str, int]
    hashes: dict[str, list[str]]
    piece: int
    identity: dict[str, Any]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(self.sizes.values())


class _Piece(NamedTuple):
    """A piece of a file, the `number`-th."""

    name: str
    number: int


def write_manifest(folder: Path, step: int, identity: Mapping[str, Any]) -> None:
    """Write the manifest of a step, once all of its other files are there.

    Args:
      folder: the folder of the step, which may still have its temporary name.
      identity: the hashes by which the data and the tokenizer of the run are told from others, as
        JSON has them.

    Raises:
      OSError: a file cannot be read.
      UserError: the manifest cannot be written.
    """
    sizes = _sizes(folder)
    pieces = [_Piece(name, number) for name in sizes for number in _numbers(sizes[name], _PIECE)]
    # Nobody else knows these files yet, so none is cut while it is mapped.
    hashes = _hash_pieces(folder, pieces, _PIECE, _hash_mapped)
    files = {
        name: [size, *(hashes[_Piece(name, number)] for number in _numbers(size, _PIECE))]
        for name, size in sizes.items()
    }
    content = {
        "step": step,
        "hash": "xxh3_128",
        "piece": _PIECE,
        "files": files,
        "versions": versions(_PACKAGES),
        "identity": dict(identity),
    }
    written = {"check": _check(content), **content}
    write_whole(folder / MANIFEST, json.dumps(written, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a step.

    Returns:
      The manifest; None = there is none, as in a run of an earlier version.

    Raises:
      DamagedCheckpoint: the manifest is damaged.
    """
    file = folder / MANIFEST
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadCheckpoint(f"{MANIFEST} cannot be read ({error.strerror})") from error
    try:
        written = require_kinds(parse_json(text, MANIFEST), _KINDS, MANIFEST)
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from error
    check = written.pop("check", "")
    if check != _check(written):
        raise DamagedCheckpoint(f"{MANIFEST} is not as it was written")
    missing = _KINDS.keys() - written.keys() - {"check"}
    rows = written.get("files", {})
    piece = written.get("piece", 0)
    if missing or piece < 1 or not all(_says_file(row, piece) for row in rows.values()):
        raise DamagedCheckpoint(f"{MANIFEST} does not say what was saved")
    return Manifest(
        step=written["step"],
        sizes={name: row[0] for name, row in rows.items()},
        hashes={name: row[1:] for name, row in rows.items()},
        piece=piece,
        identity=written["identity"],
    )


def _says_file(row: Any, piece: int) -> bool:
    """Return whether a row of a manifest has the size of a file, and a hash for each of its
    pieces.
    """
    if not is_kind(row, list[Any]) or not row:
        return False
    size, *hashes = row
    if not is_kind(size, int) or size < 0 or not is_kind(hashes, list[str]):
        return False
    return len(hashes) == len(_numbers(size, piece))


def require_whole(folder: Path, step: int, depth: Depth = "sample") -> Manifest | None:
    """Compare a step with its manifest, and return the manifest.

    Args:
      step: the number in the folder's name.

    Returns:
      The manifest; None = there is none, and nothing was compared.

    Raises:
      DamagedCheckpoint: the folder has another step, or a file is missing, of another size or of
        another content. The message does not name the step.
      UnreadCheckpoint: the file system does not give a file, not even a moment later.
    """
    try:
        return _require_whole(folder, step, depth)
    except UnreadCheckpoint:
        time.sleep(_SETTLE)
        return _require_whole(folder, step, depth)


def _require_whole(folder: Path, step: int, depth: Depth) -> Manifest | None:
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if manifest.step != step:
        raise DamagedCheckpoint(f"it is step {manifest.step} under another name")
    try:
        found = _sizes(folder)
        for name, size in manifest.sizes.items():
            if name not in found:
                raise DamagedCheckpoint(f"{name} is missing")
            if found[name] != size:
                raise DamagedCheckpoint(f"{name} has {found[name]:,} of {size:,} bytes")
        if depth != "sizes":
            _require_content(folder, manifest, depth)
    # a run beside removes the step meanwhile
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"a file cannot be read ({error.strerror or error})") from error
    except OSError as error:
        raise UnreadCheckpoint(f"a file cannot be read ({error.strerror or error})") from error
    return manifest


def _require_content(folder: Path, manifest: Manifest, depth: Depth) -> None:
    """Compare hashes: of every piece, or of the first of each file and of a sample of the rest."""
    pieces = [
        _Piece(name, number)
        for name, hashes in manifest.hashes.items()
        for number in range(len(hashes))
    ]
    if depth == "sample":
        first = [piece for piece in pieces if piece.number == 0]
        rest = [piece for piece in pieces if piece.number]
        most = SAMPLED // manifest.piece
        # another sample each time, so that what is damaged is found in the end
        pieces = first + random.SystemRandom().sample(rest, min(most, len(rest)))
    for piece, found in _hash_pieces(folder, pieces, manifest.piece, _hash_read).items():
        if found != manifest.hashes[piece.name][piece.number]:
            raise DamagedCheckpoint(f"{piece.name} has other bytes than were saved")


def _sizes(folder: Path) -> dict[str, int]:
    """Find the bytes of each file of a step, but of those that are written later, by path."""
    return dict(_sizes_below(folder, ""))


def _sizes_below(folder: Path, inside: str) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.iterdir()):
        name = inside + path.name
        if path.is_dir():
            if name not in _LATER:
                yield from _sizes_below(path, name + "/")
        # any other hidden one is a file on its way to its name
        elif path.name in OF_ZARR or (name not in _LATER and not path.name.startswith(".")):
            yield name, path.stat().st_size


def bytes_of(folder: Path) -> int:
    """Count the bytes of the files of a step, but of those that are written later."""
    return sum(_sizes(folder).values())


def _numbers(size: int, piece: int) -> range:
    """Return the numbers of the pieces of a file of so many bytes; an empty file has one."""
    return range(max(-(-size // piece), 1))


_Hash = Callable[[Path, int, int], str]
"""A function that hashes the bytes of a file from a place on, at most so many."""


def _hash_pieces(
    folder: Path, pieces: Sequence[_Piece], size: int, hash_bytes: _Hash
) -> dict[_Piece, str]:
    """Hash pieces of files, on as many threads as there are processors: hashing frees Python."""
    threads = min(os.cpu_count() or 1, 16)

    def hash_piece(piece: _Piece) -> str:
        return hash_bytes(folder / piece.name, piece.number * size, size)

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(pieces, pool.map(hash_piece, pieces), strict=True))


def _hash_read(file: Path, start: int, most: int) -> str:
    """Hash by reading, which survives a file that is cut meanwhile."""
    made = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_BLOCK, most)))
    left = most
    with file.open("rb") as opened:
        opened.seek(start)
        while left and (count := opened.readinto(buffer[:left])):
            made.update(buffer[:count])
            left -= count
    return made.hexdigest()


def _hash_mapped(file: Path, start: int, most: int) -> str:
    """Hash by mapping into memory, which copies nothing and takes half the time."""
    with file.open("rb") as opened:
        left = os.fstat(opened.fileno()).st_size - start
        if not left:
            return xxhash.xxh3_128().hexdigest()
        length = min(left, most)
        with mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_READ, offset=start) as mapped:
            return xxhash.xxh3_128(mapped).hexdigest()


def _check(content: Mapping[str, Any]) -> str:
    """Hash the content of a manifest, whatever its order and white space."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
