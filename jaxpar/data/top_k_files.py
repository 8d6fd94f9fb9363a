"""A teacher's most likely entries on disk, for every token of the training data.

A folder has `ids.bin` and `log_probs.bin`, arrays [windows, S, k] that are memory-mapped, and
`top_k.json`, which describes the data that they answer. A window has the number that
`train_batches` gives it, so that a row is found whatever the batch, the order and the step.
`top_k.json` is written last: a folder without it is not finished.

Shapes: B rows of a batch, S sequence, k entries of a token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.base.atomic_write import replacing, write_whole
from jaxpar.base.batch_arrays import TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError, is_kind, read_json, reading
from jaxpar.data.corpus import Corpus
from jaxpar.data.identity import Piece, difference, identify
from jaxpar.data.mixture import Mixture
from jaxpar.data.streams.tokens import HostBatch, Tokens, read_windows, window_count
from jaxpar.data.vocabulary.tokenizer import Tokenizer, token_dtype

HEADER = "top_k.json"
_IDS = "ids.bin"
_LOG_PROBS = "log_probs.bin"
_VERSION = 1
_SAMPLES = 64
"""The number of windows by which answers are told from others."""


class Header(NamedTuple):
    """The content of `top_k.json`.

    Attributes:
      version: the version of the folder's form.
      teacher: the folder of the teacher.
      step: the step of the teacher's checkpoint.
      k: the entries of a token.
      vocab_size: the vocabulary that the entries are of.
      tokenizer: a hash of the tokenizer; empty = the data came without one.
      seq_len: the tokens of a window.
      stride: the distance of the windows' starts.
      pack: whether documents were kept apart.
      begins: what windows of each part of the data begin with; -1 = as they were cut.
      tokens: the tokens of each part.
      windows: the windows of each part. They stand part after part, in the order of their starts.
      data: the name, length and hash of each file of the data.
    """

    version: int
    teacher: str
    step: int
    k: int
    vocab_size: int
    tokenizer: str
    seq_len: int
    stride: int
    pack: bool
    begins: list[int]
    tokens: list[int]
    windows: list[int]
    data: list[list[Any]]


_KINDS = {
    "version": int,
    "teacher": str,
    "step": int,
    "k": int,
    "vocab_size": int,
    "tokenizer": str,
    "seq_len": int,
    "stride": int,
    "pack": bool,
    "begins": list[int],
    "tokens": list[int],
    "windows": list[int],
    "data": list[list[Any]],
}


def is_top_k_folder(folder: Path) -> bool:
    """Return whether a folder has a teacher's answers."""
    return (folder / HEADER).is_file()


def describe(corpus: Corpus, data: DataConfig, vocab_size: int, k: int) -> Header:
    """Describe a teacher's answers to training data, in a header that names no teacher yet.

    Args:
      corpus: the data, whose training part is read in windows.
      data: how sequences are made of them.
      k: the entries of a token.

    Raises:
      UserError: the data are read in an order of their own, in which a sequence has no number; or a
        file cannot be read.
    """
    parts = _parts(corpus)
    stride = data.stride or data.seq_len
    begins = [part.begin_of_text for part in parts]
    return Header(
        version=_VERSION,
        teacher="",
        step=0,
        k=k,
        vocab_size=vocab_size,
        tokenizer=tokenizer_hash(corpus.tokenizer),
        seq_len=data.seq_len,
        stride=stride,
        pack=data.pack,
        begins=[-1 if begin is None else begin for begin in begins],
        tokens=[part.size for part in parts],
        windows=[window_count(part, data.seq_len, stride) for part in parts],
        data=[list(piece) for piece in identify(corpus._replace(val=None))],
    )


def tokenizer_hash(tokenizer: Tokenizer | None) -> str:
    """Hash a tokenizer, to tell it from another; empty for None."""
    if tokenizer is None:
        return ""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]


def windows_in_order(corpus: Corpus, header: Header, batch: int) -> Iterator[HostBatch]:
    """Yield the windows of the training data in the order of a folder.

    Args:
      header: the result of `describe`.
      batch: the rows of each batch; the last is filled up with rows that were there before.
    """
    for part, count in zip(_parts(corpus), header.windows, strict=True):
        for first in range(0, count, batch):
            window_B = np.minimum(first + np.arange(batch), count - 1)
            starts_B = window_B * header.stride
            yield read_windows(part, starts_B, header.seq_len, header.pack, header.vocab_size)


def _parts(corpus: Corpus) -> list[Tokens]:
    """List the parts of the training data, of which sequences are windows."""
    train = corpus.train
    found = list(train.parts) if isinstance(train, Mixture) else [train]
    parts = [part for part in found if isinstance(part, Tokens)]
    if len(parts) == len(found):
        return parts
    raise UserError(
        f"a teacher's answers are kept by windows, and {train.origin} is read in documents or "
        "examples: name the teacher's run folder in distill.teacher, so that it runs beside, or "
        "write the data as tokens (jaxpar tokenize)"
    )


class Writer:
    """A writer of the arrays, batch after batch, in the order of `windows_in_order`."""

    def __init__(self, header: Header, ids: Any, log_probs: Any):
        self._ids = ids
        self._log_probs = log_probs
        self._dtype = token_dtype(header.vocab_size)

    def write(self, ids_BSk: np.ndarray, log_probs_BSk: np.ndarray, rows: int) -> None:
        """Write the first rows of a batch."""
        self._ids.write(ids_BSk[:rows].astype(self._dtype).tobytes())
        self._log_probs.write(log_probs_BSk[:rows].astype("<f4").tobytes())


def require_no_answers(folder: Path) -> None:
    """Refuse to write into a folder that has answers already.

    Raises:
      UserError: it has answers.
    """
    if is_top_k_folder(folder):
        raise UserError(f"{folder} has a teacher's answers already: name another --out")


@contextmanager
def writing_answers(folder: Path, header: Header) -> Iterator[Writer]:
    """Give a writer of a folder; its header is written once all else is.

    Args:
      folder: a folder without answers yet.
      header: the description of the data and the teacher.

    Raises:
      UserError: the folder has answers already, or cannot be written.
    """
    require_no_answers(folder)
    with replacing(folder / _IDS) as ids, replacing(folder / _LOG_PROBS) as log_probs:
        yield Writer(header, ids, log_probs)
    write_whole(folder / HEADER, json.dumps(header._asdict(), indent=1) + "\n")


@dataclass(frozen=True)
class Answers:
    """The answers of a teacher in a folder, memory-mapped."""

    folder: Path
    header: Header
    ids_NSk: np.ndarray
    log_probs_NSk: np.ndarray

    def read(self, part_B: np.ndarray, window_B: np.ndarray, k: int) -> HostBatch:
        """Return the first k entries for windows of parts of the data, each by its number."""
        first = np.concatenate([[0], np.cumsum(self.header.windows)])
        row_B = first[part_B] + window_B
        return {
            TEACHER_IDS: self.ids_NSk[row_B, :, :k].astype(np.int32),
            TEACHER_LOG_PROBS: self.log_probs_NSk[row_B, :, :k].astype(np.float32),
        }

    @property
    def identity(self) -> str:
        """A hash of the header and of samples of all arrays, which tells these answers from
        others.
        """
        made = hashlib.sha256(json.dumps(self.header._asdict()).encode())
        for array in (self.ids_NSk, self.log_probs_NSk):
            apart = max(len(array) // _SAMPLES, 1)
            made.update(np.ascontiguousarray(array[::apart]).tobytes())
        return made.hexdigest()[:16]

    def require(self, wanted: Header) -> None:
        """Refuse answers to other data, or fewer of them, than training asks for.

        Args:
          wanted: the result of `describe` for the training, whose `k` may be smaller.

        Raises:
          UserError: the message names what differs.
        """
        there = self.header
        refuse = f"distill.teacher={self.folder} has answers"
        if there.k < wanted.k:
            raise UserError(
                f"{refuse} of {there.k} entries a token, and distill.top_k={wanted.k}: try "
                f"distill.top_k={there.k}"
            )
        if there.vocab_size != wanted.vocab_size:
            raise UserError(
                f"{refuse} of a vocabulary of {there.vocab_size}, and "
                f"model.vocab_size={wanted.vocab_size}: a student has its teacher's vocabulary"
            )
        if there.tokenizer != wanted.tokenizer:
            raise UserError(
                f"{refuse} in another tokenizer's tokens: take the teacher's data.tokenizer, or "
                "write them again"
            )
        pieces = ([Piece(*row) for row in one.data] for one in (there, wanted))
        if what := difference(*pieces):
            raise UserError(
                f"{refuse} to other data: {what}; write them again with `jaxpar eval --top-k`"
            )
        for name in ("seq_len", "stride", "pack", "tokens", "begins"):
            before = getattr(there, name)
            now = getattr(wanted, name)
            if before != now:
                raise UserError(
                    f"{refuse} to other sequences of the same data: {_SAYS[name]} was {before}, "
                    f"and is {now} here"
                )


_SAYS = {
    "seq_len": "data.seq_len",
    "stride": "data.stride",
    "pack": "data.pack",
    "tokens": "the number of training tokens (data.val_fraction, data.max_bytes)",
    "begins": "the begin of text (data.bos)",
}


def open_answers(folder: Path) -> Answers:
    """Open a teacher's answers that `writing_answers` wrote; arrays are read when they are asked
    for.

    Raises:
      UserError: the folder is damaged, cut short, or of another version.
    """
    file = folder / HEADER
    found = read_json(file, _KINDS)
    missing = [name for name in Header._fields if name not in found]
    if missing or not all(_is_piece(row) for row in found["data"]):
        raise UserError(
            f"{file} does not say what the answers in {folder} are of: write them again with "
            "`jaxpar eval --top-k`"
        )
    header = Header(**{name: found[name] for name in Header._fields})
    if header.version != _VERSION:
        raise UserError(
            f"{file} is of version {header.version}, and this jaxpar reads version {_VERSION}: "
            "write the answers again with `jaxpar eval --top-k`"
        )
    shape = (sum(header.windows), header.seq_len, header.k)
    ids = _memory_map(folder / _IDS, token_dtype(header.vocab_size), shape)
    return Answers(folder, header, ids, _memory_map(folder / _LOG_PROBS, np.dtype("f4"), shape))


def _memory_map(file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map an array of a folder, whose size says whether all of it is there."""
    dtype = dtype.newbyteorder("<")
    wanted = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    with reading(file):
        size = file.stat().st_size
        if size != wanted or not size:
            raise UserError(
                f"{file} has {size} bytes, and its {HEADER} says {wanted}: it was cut short or is "
                "another folder's, so write it again with `jaxpar eval --top-k`"
            )
        return np.memmap(file, dtype, mode="r", shape=shape)


def _is_piece(row: object) -> bool:
    """Return whether a row can be a `Piece` of the data."""
    if not isinstance(row, list) or len(row) != 3:
        return False
    name, length, digest = row
    return is_kind(name, str) and is_kind(length, int | None) and is_kind(digest, str)
