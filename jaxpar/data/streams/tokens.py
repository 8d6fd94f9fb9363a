"""One long stream of tokens, and the windows that are cut from it.

Shapes: N tokens of a stream, B rows of this process, S sequence length, T = S + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.part import PartDefaults
from jaxpar.data.range_cache import RangedFile, RangedIds
from jaxpar.data.streams.id_files import unknown_id
from jaxpar.data.streams.mapped import require_uncut

HostBatch = dict[str, np.ndarray]
"""A batch: `tokens` and `labels` (the next token; -1 = not counted), and if packed `segments` and
`positions`; int32 [B, S].
"""

_SAMPLE = 2**24
"""The ids of a file in a bucket that are read for their frequencies."""


@dataclass(frozen=True)
class Tokens(PartDefaults):
    """A stream of tokens, unsigned ids [N], in memory, memory-mapped, or in a bucket."""

    tokens: np.ndarray | RangedIds
    document_starts: np.ndarray | None
    """The place where each document begins, sorted int64 [documents], the first at 0; None = not
    known.
    """
    origin: str
    """The name of the file, folder or corpus, for messages."""
    offset: int = 0
    """The number of tokens of `origin` that come before these."""
    files: tuple[Path | RangedFile, ...] = ()
    """The files that the tokens were read from, if any."""
    note: str = ""
    """The note on what was left out."""
    begin_of_text: int | None = None
    """The id that each window begins with, in place of its first; None = windows begin as they were
    cut.
    """

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def sample(self) -> np.ndarray:
        if isinstance(self.tokens, RangedIds):
            return np.asarray(self.tokens[:_SAMPLE])
        return self.tokens

    @property
    def amount(self) -> str:
        return f"{self.size:,} tokens{self.note}"

    def split(self, val_fraction: float) -> tuple[Tokens, Tokens]:
        """Split off the last `val_fraction`; a document may be cut in two, as in nanoGPT's
        split.
        """
        cut = int(self.size * (1 - val_fraction))
        starts = train_starts = val_starts = self.document_starts
        if starts is not None:
            running = np.searchsorted(starts, cut, side="right") - 1
            train_starts = starts[: np.searchsorted(starts, cut)]
            val_starts = np.maximum(starts[running:] - cut, 0)
        train = replace(self, tokens=self.tokens[:cut], document_starts=train_starts)
        held_out = self.tokens[cut:]
        return train, replace(
            self, tokens=held_out, document_starts=val_starts, offset=cut, note=""
        )

    def require_enough(self, data: DataConfig, what: str, fix: str) -> None:
        """Refuse too few tokens, and `data.pack` where it is not known at which tokens documents
        begin.
        """
        super().require_enough(data, what, fix)
        if data.pack and self.document_starts is None:
            raise UserError(
                f"{self.origin} has no document offsets (.bin.docs) beside it, which data.pack "
                "needs: write it with `jaxpar tokenize`, or leave data.pack off"
            )


def window_count(stream: Tokens, seq_len: int, stride: int) -> int:
    """Count the windows of seq_len tokens, plus the last token's label, that begin at multiples of
    `stride`.
    """
    return max((len(stream.tokens) - seq_len - 1) // stride + 1, 0)


def read_windows(
    stream: Tokens, starts_B: np.ndarray, seq_len: int, pack: bool, vocab_size: int
) -> HostBatch:
    """Read the windows that begin at `starts_B` as a batch.

    Where texts begin with an id of their own (`begin_of_text`), so does each window, in place of
    its first token. That token is still the last label of the window before, so none is lost.

    If packed, `segments` numbers the documents of a window from 1, `positions` counts from the
    start of the document or, where it began earlier, of the window, and the last token of a
    document has label -1.

    Raises:
      UserError: the vocabulary does not have an id that was read, or the file was cut meanwhile.
    """
    if isinstance(stream.tokens, RangedIds):
        ids_BT = stream.tokens.windows(starts_B, seq_len + 1)
    else:
        require_uncut(stream.tokens, stream.origin)
        ids_BT = sliding_window_view(stream.tokens, seq_len + 1)[starts_B]
    if ids_BT.max() >= vocab_size:
        row, place = np.unravel_index(ids_BT.argmax(), ids_BT.shape)
        at = stream.offset + starts_B[row] + place
        raise unknown_id(int(ids_BT[row, place]), stream.origin, at, vocab_size)
    batch = {
        "tokens": ids_BT[:, :-1].astype(np.int32),
        "labels": ids_BT[:, 1:].astype(np.int32),
    }
    begin = stream.begin_of_text
    if begin is not None:
        batch["tokens"][:, 0] = begin
    if not pack and (begin is None or stream.document_starts is None):
        return batch
    assert stream.document_starts is not None, (
        "load_corpus refuses data.pack without document starts"
    )
    require_uncut(stream.document_starts, f"{stream.origin}.docs")
    where_BT = starts_B[:, None] + np.arange(seq_len + 1)
    document_BT = np.searchsorted(stream.document_starts, where_BT, side="right") - 1
    # nor is a begin of text, which is given, a label
    batch["labels"][document_BT[:, 1:] != document_BT[:, :-1]] = -1
    if not pack:
        return batch
    begin_BT = np.maximum(stream.document_starts[document_BT], starts_B[:, None])
    batch["segments"] = (document_BT - document_BT[:, :1] + 1)[:, :-1].astype(np.int32)
    batch["positions"] = (where_BT - begin_BT)[:, :-1].astype(np.int32)
    return batch
