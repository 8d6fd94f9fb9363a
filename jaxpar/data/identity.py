"""Which data a run was trained on: a hash of samples of every file, by which a resumed run knows them again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.base.errors import reading
from jaxpar.data.chat import Examples
from jaxpar.data.corpus import Corpus, Mixture, Part
from jaxpar.data.documents import Documents

_WHOLE = 2**23
"""Bytes of a file that is hashed from its beginning to its end."""
_PIECE, _PIECES = 2**14, 64
"""Bytes of a sample of a longer file, and how many there are, evenly spread."""


class Piece(NamedTuple):
    """A file of the data, or data that have none: what it is called, how long it is, and a hash of what is in it.

    The length is in bytes of a file, and in tokens, documents or examples elsewhere; None = not known.
    """

    name: str
    length: int | None
    hash: str


def identify(corpus: Corpus) -> list[Piece]:
    """Return what a corpus is made of, in its order, each file once.

    Raises:
      UserError: a file cannot be read.
    """
    train = corpus.train
    parts = list(train.parts) if isinstance(train, Mixture) else [train]
    if corpus.val is not None:
        parts.append(corpus.val)
    files = dict.fromkeys(file for part in parts for file in part.files)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(_of_file, files))
    return found + [_of_part(part) for part in parts if not part.files]


def difference(before: Sequence[Piece], now: Sequence[Piece]) -> str:
    """Say what is other than before, and in which file; empty = nothing is. A file may have another name or place."""
    if [piece[1:] for piece in before] == [piece[1:] for piece in now]:
        return ""
    gone = Counter(piece[1:] for piece in before) - Counter(piece[1:] for piece in now)
    new = [piece for piece in now if piece[1:] not in {old[1:] for old in before}]
    if new:
        was = next((old for old in before if Path(old.name).name == Path(new[0].name).name), None)
        length = f", {was.length:,} long, now {new[0].length:,}" if was and was.length != new[0].length else ""
        return f"{new[0].name} has other content than before{length}" if was else f"{new[0].name} is new"
    if gone:
        return f"{next(old.name for old in before if old[1:] in gone)} is missing"
    return (
        f"{next(b.name for a, b in zip(before, now, strict=True) if a[1:] != b[1:])} has another place in their order"
    )


def _of_file(file: Path) -> Piece:
    made = hashlib.sha256()
    with reading(file), file.open("rb") as opened:
        size = file.stat().st_size
        if size <= _WHOLE:
            made.update(opened.read())
        else:
            for place in np.linspace(0, size - _PIECE, _PIECES).astype(int).tolist():
                opened.seek(place)
                made.update(opened.read(_PIECE))
    return Piece(str(file), size, made.hexdigest()[:16])


def _of_part(part: Part) -> Piece:
    """Identify data without files by ids: all of few, and samples of many."""
    ids = part.ids if isinstance(part, Examples) else part.sample
    length = part.size if isinstance(part, Documents) else len(ids)
    if ids.nbytes > _WHOLE:
        starts = np.linspace(0, len(ids) - _PIECE, _PIECES).astype(int).tolist()
        ids = np.concatenate([ids[start : start + _PIECE] for start in starts])
    return Piece(part.origin, length, hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()[:16])
