"""The identity of a run's data: a hash of samples of every file, by which a resumed run knows them
again, and by which each process knows that it has those of the others.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.base.errors import UserError, reading, with_urls
from jaxpar.base.process.multihost import numbers_from_first, run_together
from jaxpar.data.corpus import Corpus
from jaxpar.data.mixture import Mixture
from jaxpar.data.part import Part
from jaxpar.data.range_cache import RangedFile

_WHOLE = 2**23
"""The bytes of the longest file that is hashed from its beginning to its end."""
_PIECE = 2**14
_PIECES = 64
"""The number of samples of a longer file, evenly spread, of `_PIECE` bytes each."""


class Piece(NamedTuple):
    """A file of the data, or data that have none: a name, a length, and a hash of the content.

    The length is in bytes of a file, and in tokens, documents or examples elsewhere; None = not
    known.
    """

    name: str
    length: int | None
    hash: str


def identify(corpus: Corpus) -> list[Piece]:
    """List the pieces that a corpus is made of, in its order, each file once.

    Raises:
      UserError: a file cannot be read.
    """
    train = corpus.train
    if isinstance(train, Mixture):
        parts = list(train.parts)
    else:
        parts = [train]
    if corpus.val is not None:
        parts.append(corpus.val)
    files = dict.fromkeys(file for part in parts for file in part.files)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(_of_file, files))
    return found + [_of_part(part) for part in parts if not part.files]


def require_same_everywhere(corpus: Corpus) -> None:
    """Refuse data that are others on this machine than on that of the first process: batches of
    several machines are rows of one order.

    All processes must call this.

    Raises:
      UserError: they are, here or on another process, or a file cannot be read.
    """
    if jax.process_count() == 1:
        return
    pieces = run_together(lambda: identify(corpus))
    here = [zlib.crc32(f"{piece.length} {piece.hash}".encode()) >> 1 for piece in pieces]
    first = numbers_from_first(here)

    def require() -> None:
        same = "all machines must see the same data"
        if len(here) != len(first):
            raise UserError(
                f"the data are {len(here)} files here and {len(first)} on the first process: {same}"
            )
        for piece, content, other in zip(pieces, here, first, strict=True):
            if content != other:
                raise UserError(f"{piece.name} is another here than on the first process: {same}")

    run_together(require)


def difference(before: Sequence[Piece], now: Sequence[Piece]) -> str:
    """Say what differs from before, and in which file; empty = nothing does.

    A file may have another name or place, and the same content may be there several times.
    """
    was = [_content(piece) for piece in before]
    contents = [_content(piece) for piece in now]
    if was == contents:
        return ""
    new = Counter(contents) - Counter(was)
    gone = Counter(was) - Counter(contents)
    if new:
        return _say_new(
            _one_of(new, now, before),
            [old for old in before if _content(old) in gone],
        )
    if gone:
        return f"{_one_of(gone, before, now).name} is missing"
    moved = next(piece for piece, old in zip(now, was, strict=True) if _content(piece) != old)
    return f"{moved.name} has another place in their order"


def _content(piece: Piece) -> tuple[int | None, str]:
    return piece.length, piece.hash


def _one_of(
    contents: Collection[tuple[int | None, str]], pieces: Sequence[Piece], others: Sequence[Piece]
) -> Piece:
    """Find a piece with one of some contents that the others lack under its name; of copies, the
    copy.
    """
    found = [piece for piece in pieces if _content(piece) in contents]
    in_place = {(other.name, _content(other)) for other in others}
    by_name = {(Path(other.name).name, _content(other)) for other in others}
    elsewhere = [piece for piece in found if (piece.name, _content(piece)) not in in_place]
    renamed = [
        piece for piece in elsewhere if (Path(piece.name).name, _content(piece)) not in by_name
    ]
    return (renamed or elsewhere or found)[0]


def _say_new(piece: Piece, gone: Sequence[Piece]) -> str:
    """Say that a piece is new, or has other content, where a piece of its name is among those
    gone.
    """
    same_name = [old for old in gone if Path(old.name).name == Path(piece.name).name]
    was = next(
        (old for old in same_name if old.name == piece.name), same_name[0] if same_name else None
    )
    if was is None:
        return f"{piece.name} is new"
    length = ""
    if was.length is not None and piece.length is not None and was.length != piece.length:
        length = f", {was.length:,} long, now {piece.length:,}"
    return f"{piece.name} has other content than before{length}"


def _of_file(file: Path | RangedFile) -> Piece:
    made = hashlib.sha256()
    if isinstance(file, RangedFile):
        size = file.size
        for start, stop in _sampled(size):
            made.update(file.read(start, stop))
    else:
        with reading(file), file.open("rb") as opened:
            size = file.stat().st_size
            for start, stop in _sampled(size):
                opened.seek(start)
                made.update(opened.read(stop - start))
    return Piece(with_urls(str(file)), size, made.hexdigest()[:16])


def _sampled(size: int) -> list[tuple[int, int]]:
    """List where the samples of a file begin and end; a short one is sampled whole."""
    if size <= _WHOLE:
        return [(0, size)]
    places = np.linspace(0, size - _PIECE, _PIECES).astype(int).tolist()
    return [(place, place + _PIECE) for place in places]


def _of_part(part: Part) -> Piece:
    """Identify data without files by ids: all of few, and samples of many."""
    ids, length = part.identifying()
    if ids.nbytes > _WHOLE:
        starts = np.linspace(0, len(ids) - _PIECE, _PIECES).astype(int).tolist()
        ids = np.concatenate([ids[start : start + _PIECE] for start in starts])
    return Piece(
        part.origin, length, hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()[:16]
    )
