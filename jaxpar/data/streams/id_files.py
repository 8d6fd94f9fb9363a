"""Files of raw token ids: the header of llm.c, the guess of a dtype, and a look at every id."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.progress import track

from jaxpar.base.console import PlainConsole
from jaxpar.base.errors import UserError, reading
from jaxpar.data.range_cache import RangedFile, RangedIds

_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""The magic numbers of llm.c's token files, for GPT-2 and for LLaMA 3, each with its version and
dtype.
"""
_LLM_C_BYTES = 1024
_FOREIGN = {
    b"\x93NUMPY": "an array of NumPy's (.npy): write its ids alone, with `.tofile`",
    b"MMIDIDX": "an index of Megatron's: its ids are in the .bin beside it",
    b"PK\x03\x04": "an archive (of torch.save or zip): write the ids alone, with NumPy's `.tofile`",
    b"\x1f\x8b": "compressed (gzip): unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed (zstd): unpack it first",
    b"PAR1": "a Parquet file: read it with data.source=parquet",
}
_LLM_C_QUESTIONS = 20240522
_CHUNK = 2**24
_LARGE = 2**30
"""The number of ids from which on the reading of a file shows its progress."""


class IdFile(NamedTuple):
    """The byte at which the ids of a file begin, and their dtype, as far as the file itself says
    it.
    """

    offset: int
    dtype: str
    says: bool
    """Whether a header of the file states both."""


def look_at(path: Path) -> IdFile:
    """Look at the beginning of a .bin file: llm.c's, or ids alone, which are taken for uint16.

    Raises:
      UserError: the file is of another kind, its header is of a version that is not known, or it
        has another length than its header says.
    """
    with reading(path), path.open("rb") as file:
        beginning = file.read(_LLM_C_BYTES)
        size = path.stat().st_size
    return look_at_beginning(beginning, size, str(path))


def look_at_ranged(file: RangedFile) -> IdFile:
    """Look at the beginning of a .bin file in a bucket, as `look_at` does.

    Raises:
      UserError: `look_at` would refuse the file, or the bucket cannot be read.
    """
    beginning = file.read(0, min(_LLM_C_BYTES, file.size))
    return look_at_beginning(beginning, file.size, file.url)


def look_at_beginning(beginning: bytes, size: int, path: str) -> IdFile:
    """Look at the first bytes of a .bin file, as `look_at` does.

    Args:
      beginning: the first 1,024 bytes, or all of a shorter file.
      size: the bytes of the file.
      path: the name of the file in messages.

    Raises:
      UserError: `look_at` would refuse the file.
    """
    for magic, what in _FOREIGN.items():
        if beginning.startswith(magic):
            raise UserError(f"{path} holds no raw token ids, it is {what}")
    if len(beginning) < _LLM_C_BYTES:
        return IdFile(0, "uint16", False)
    magic, version, count = (int(number) for number in np.frombuffer(beginning, "<i4")[:3])
    if magic == _LLM_C_QUESTIONS:
        raise UserError(
            f"{path} holds llm.c's questions with several answers, and no text to train on"
        )
    if magic not in _LLM_C:
        return IdFile(0, "uint16", False)
    known, dtype = _LLM_C[magic]
    if version != known:
        raise UserError(
            f"{path} has llm.c's header of version {version}, and version {known} is the one "
            "that is read"
        )
    found = (size - _LLM_C_BYTES) / np.dtype(dtype).itemsize
    if found != count:
        raise UserError(
            f"{path} has {found:,g} ids and its header says {count:,}: it was cut short, so "
            "fetch it again"
        )
    return IdFile(_LLM_C_BYTES, dtype, True)


def require_guess(ids: np.ndarray | RangedIds, path: str) -> None:
    """Refuse ids that nobody said to be uint16, where each second is nearly 0: they have 32 or 64
    bits.

    Raises:
      UserError: the file has to say what its dtype is.
    """
    sample = np.asarray(ids[: 2**16])
    if len(ids) % 2 or len(sample) < 64:
        return
    low = sample[0::2]
    high = sample[1::2]
    if high.max() > 15 or low.max() <= 15:  # no vocabulary has 2^20 ids
        return
    upper_half = sample[2::4].any() or sample[3::4].any()
    is_64 = len(ids) % 4 == 0 and not upper_half
    bits, fix = (
        (64, "write them as uint32") if is_64 else (32, 'if so, write {"dtype": "uint32"} into it')
    )
    raise UserError(
        f"{path} looks like ids of {bits} bits, and no {Path(path).name}.json beside it says their "
        f"dtype: {fix} "
        '({"dtype": "uint16"} takes it as it is)'
    )


def require_ids(ids: np.ndarray | RangedIds, vocab_size: int, origin: str) -> None:
    """Look at every id of a file, before a training begins that would end at a bad one; processes
    share the work. Of a file in a bucket only the first ids are read: the others are looked at as
    they are trained on.

    Raises:
      UserError: the vocabulary does not have an id.
    """
    if np.iinfo(ids.dtype).max < vocab_size:
        return
    count = 1
    index = 0
    if jax.distributed.is_initialized():  # without it, asking JAX would start it
        count = jax.process_count()
        index = jax.process_index()
    chunks = list(range(0, len(ids), _CHUNK))[index::count]
    if isinstance(ids, RangedIds):
        chunks = [0]
    quiet = len(ids) < _LARGE or index > 0
    said = PlainConsole(stderr=True, quiet=quiet)
    for first in track(chunks, f"looking at the ids of {origin}", console=said, disable=quiet):
        part = np.asarray(ids[first : first + _CHUNK])
        if part.max() >= vocab_size:
            place = int(part.argmax())
            raise unknown_id(int(part[place]), origin, first + place, vocab_size)


def unknown_id(found: int, origin: str, place: int, vocab_size: int) -> UserError:
    """Make the error on an id that is not in the vocabulary."""
    return UserError(
        f"{origin} has id {found} at token {place}, model.vocab_size={vocab_size}: raise it to "
        f"at least {found + 1}, "
        "use another tokenizer, or look whether the file is what it is taken for"
    )
