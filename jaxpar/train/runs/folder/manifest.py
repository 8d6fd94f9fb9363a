"""The manifest of a checkpoint: which step it is, what it was made with, and the size and hashes of
all its files. By it damage is found before anything is read.

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
"""What lies in the folder of a step and is written after the rest: its manifest, its loss, and when
it was finished.
"""
_PIECE = 2**26
"""Bytes of a file that have a hash of their own: what is read of a large file is some of these."""
SAMPLED = 2**32
"""Bytes that a check by sample reads at most, besides the first piece of each file."""
_BLOCK = 2**21
"""Bytes that are read at once, which stay in a processor's cache while they are hashed."""
_SETTLE = 0.5
"""Seconds after which a file is read again that the file system did not give."""
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
"""How much of a step is compared: the sizes of its files alone; all that is small and a sample of
what is large; or every byte.
"""


class DamagedCheckpoint(UserError):
    """A checkpoint is not as it was saved, or cannot be read.

    Attributes:
      place: the folder of its step; None = it is not known here.
    """

    def __init__(self, message: object = "", place: Path | None = None):
        super().__init__(message)
        self.place = place


class UnreadCheckpoint(DamagedCheckpoint):
    """The file system does not give a file that is there: whether it is damaged is not known."""


class Manifest(NamedTuple):
    """What a step was when it was saved.

    Attributes:
      step: its number.
      sizes: bytes of each file, by its path inside the folder of the step.
      hashes: one for each `piece` of a file.
      piece: bytes.
      identity: what tells the data and the tokenizer of the run from others.
    """

    step: int
    sizes: dict[str, int]
    hashes: dict[str, list[str]]
    piece: int
    identity: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())


class _Piece(NamedTuple):
    """Some bytes of a file: the `number`-th of its pieces."""

    name: str
    number: int


def write_manifest(folder: Path, step: int, identity: Mapping[str, Any]) -> None:
    """Write the manifest of a step, all of whose other files are there.

    Args:
      folder: the folder of the step, which may still have its temporary name.
      step: its number.
      identity: what tells the data and the tokenizer of the run from others, as JSON has it.

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

    Args:
      folder: the folder of the step.

    Returns:
      The manifest; None = there is none, as in a run of an earlier version.

    Raises:
      DamagedCheckpoint: it is there and damaged.
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
    """Whether a row of a manifest is the size of a file, and a hash for each of its pieces."""
    if not is_kind(row, list[Any]) or not row:
        return False
    size, *hashes = row
    if not is_kind(size, int) or size < 0 or not is_kind(hashes, list[str]):
        return False
    return len(hashes) == len(_numbers(size, piece))


def require_whole(folder: Path, step: int, depth: Depth = "sample") -> Manifest | None:
    """Compare a step with its manifest.

    Args:
      folder: the folder of the step.
      step: the number that the folder's name says.
      depth: how much is compared.

    Returns:
      The manifest; None = there is none, and nothing was compared.

    Raises:
      DamagedCheckpoint: it is another step, or a file is missing, of another size or of another
        content. The message has no name of the step in it.
      UnreadCheckpoint: the file system does not give a file, also a moment later.
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
    pieces = [_Piece(name, number) for name in manifest.sizes for number in _all_of(manifest, name)]
    if depth == "sample":
        first = [piece for piece in pieces if piece.number == 0]
        rest = [piece for piece in pieces if piece.number]
        most = SAMPLED // manifest.piece
        # another sample each time, so that what is damaged is found in the end
        pieces = first + random.SystemRandom().sample(rest, min(most, len(rest)))
    for piece, found in _hash_pieces(folder, pieces, manifest.piece, _hash_read).items():
        if found != manifest.hashes[piece.name][piece.number]:
            raise DamagedCheckpoint(f"{piece.name} has other bytes than were saved")


def _all_of(manifest: Manifest, name: str) -> range:
    """The numbers of the pieces of a file."""
    return range(len(manifest.hashes[name]))


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of a step, but of those that are written later, by path."""
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
    """Return the bytes of the files of a step, but of those that are written later.

    Args:
      folder: the folder of the step.
    """
    return sum(_sizes(folder).values())


def _numbers(size: int, piece: int) -> range:
    """The numbers of the pieces of a file of so many bytes; an empty file has one."""
    return range(max(-(-size // piece), 1))


_Hash = Callable[[Path, int, int], str]
"""Hashes the bytes of a file from a place on, at most so many."""


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
    """Hash by reading, which survives that the file is cut meanwhile."""
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
    """The hash of what a manifest says, whatever its order and white space."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
