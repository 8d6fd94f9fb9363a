"""Documents of an opened source, tokenized and packed as they come.

Shapes: n tokens of a document, S sequence length, T = S + 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grain
import grain.experimental
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import BYTE_ORDER_MARK, UTF8, UserError
from jaxpar.base.process.kv_store import open_exchange
from jaxpar.data.documents.blocks import UNREAD, Blocks, UnreadRow
from jaxpar.data.documents.document_order import (
    DocumentStream,
    Packed,
    StreamTogether,
    reading_source,
    together,
)
from jaxpar.data.documents.document_sources import Opened, OpenedSource, Unreadable
from jaxpar.data.part import PartDefaults
from jaxpar.data.range_cache import RangedFile
from jaxpar.data.skipped import Skipped
from jaxpar.data.streams.texts import NOTHING_IN_IT, left_out
from jaxpar.data.streams.tokens import HostBatch
from jaxpar.data.vocabulary.tokenizer import Tokenizer, encode_document, make_tokenizer

SAMPLE = 2**20


@dataclass(frozen=True)
class Documents(PartDefaults):
    """Documents that are tokenized while they are read."""

    source: OpenedSource
    encode: Callable[[Any], np.ndarray]
    """Makes ids, int32 [n], of an element of the source; an error says why it is no text."""
    origin: str
    """The path or name that was given, for messages."""
    size: int | None
    """The number of documents; None = not known."""
    sample: np.ndarray
    """Ids [N] of the first documents: of all, or at least SAMPLE tokens."""
    note: str = ""
    """The note on what is left out, as far as the sample shows it."""
    files: tuple[Path | RangedFile, ...] = ()
    """The files that the documents are read from, as far as these are known."""
    skipped: Skipped | None = None
    """The count of the records that are no text, kept while they are read."""
    begin_of_text: int | None = None
    """The id that each row begins with, in place of its first; None = rows begin as they were
    cut.
    """

    @property
    def amount(self) -> str:
        if self.size is None:
            what = "a stream of documents"
        else:
            what = f"{self.size:,} documents"
        return what + self.note

    def encoded(
        self, data: DataConfig, seed: int, endless: bool, blocks: Blocks | None = None
    ) -> grain.IterDataset:
        """Encode every document as `{"tokens": ids}`; one without text has no ids.

        Args:
          seed: shuffles the documents, if they are endless.
          endless: whether they are read again and again.
          blocks: what several processes tokenize together; `tokens` are then addresses in it.
        """
        source = self.source
        name = ""
        if blocks is not None:
            name = self._name_of_order(data, seed, endless)
        if isinstance(source, grain.MapDataset):
            if endless:
                ordered = source.seed(seed).shuffle().repeat()
            else:
                ordered = source
            if blocks is None:
                tokenized = ordered.map(self.tokens_of)
            else:
                tokenized = together(ordered, blocks, name, self._count)
            ahead = grain.ReadOptions(
                num_threads=min(data.prefetch, 4), prefetch_buffer_size=16 * data.prefetch
            )
            return tokenized.to_iter_dataset(ahead)
        stream = DocumentStream(source, self.origin, data.source, endless)
        if endless and data.shuffle_window:
            window = {"window_size": data.shuffle_window, "seed": seed}
            stream = grain.experimental.WindowShuffleIterDataset(stream, **window)
        if blocks is None:
            return stream.map(self.tokens_of)
        return StreamTogether(stream, blocks, name, self._count)

    def tokens_of(self, element: Any) -> dict[str, np.ndarray]:
        """Tokenize a record; one that is no text becomes no tokens, so that it does not end a run
        in its middle.
        """
        ids, reason = self._try(element)
        self._count(reason)
        return {"tokens": ids}

    def _try(self, element: Any) -> tuple[np.ndarray, str]:
        """Encode a record: its ids, and why it is no text, if it is none."""
        try:
            return self.encode(element), ""
        except (UserError, UnicodeError) as error:
            return np.zeros(0, np.int32), str(error) or type(error).__name__

    def _count(self, reason: str) -> None:
        """Count a record as text, or as left out for a reason."""
        if self.skipped is None:
            return
        if reason:
            self.skipped.add(reason)
        else:
            self.skipped.read_one()

    def _name_of_order(self, data: DataConfig, seed: int, endless: bool) -> str:
        """Name the documents in an order; no other documents and no other order have the name."""
        told = (self.size, seed, endless, data.shuffle_window, data.column)
        content = hashlib.blake2b(self.sample.tobytes(), digest_size=8)
        content.update(repr(told).encode())
        return content.hexdigest()

    def rows(
        self,
        data: DataConfig,
        seed: int,
        endless: bool,
    ) -> grain.IterDataset[HostBatch]:
        """Return the rows [S] of documents that lie end to end; the label of a row's last token is
        the T-th token it took.

        They are read again and again if `endless`, shuffled by `seed`: anew in each epoch in random
        access, the same in a stream. Otherwise they are read once and in order, and the last row is
        filled up.

        Of several processes each tokenizes its share, and a row is an `UnreadRow`.
        """

        def row(packed: dict[str, np.ndarray]) -> HostBatch:
            ids_T = packed["tokens"]
            segments_T = packed["tokens_segment_ids"]
            ends_S = segments_T[1:] == 0
            tokens_S = ids_T[:-1]
            # what begins a text is given, and no label
            if data.pack or self.begin_of_text is not None:
                ends_S = ends_S | (segments_T[1:] != segments_T[:-1])
            if self.begin_of_text is not None:
                tokens_S = np.append(np.int32(self.begin_of_text), tokens_S[1:])
            batch = {
                "tokens": tokens_S,
                "labels": np.where(ends_S, -1, ids_T[1:]).astype(np.int32),
            }
            if data.pack:
                batch |= {"segments": segments_T[:-1], "positions": packed["tokens_positions"][:-1]}
            return batch

        exchange = open_exchange()
        blocks = None
        if exchange is not None:
            blocks = Blocks(exchange, self._try, threads=max(min(data.prefetch, 4), 1))
        documents = self.encoded(data, seed, endless, blocks).filter(
            lambda document: len(document["tokens"]) > 0
        )
        packed = Packed(documents, length_struct={"tokens": data.seq_len + 1})
        if blocks is None:
            return packed.map(row)
        unread: Any = packed.map(lambda found: {UNREAD: UnreadRow(blocks, found, row)})
        return unread


def load_documents(
    opened: Callable[[str, DataConfig], Opened],
    paths: Sequence[str],
    data: DataConfig,
    vocab_size: int,
) -> tuple[list[Documents], Tokenizer]:
    """Open the documents at `paths`, and read the beginning of each.

    Args:
      opened: opens one path: `open_hf`, `open_parquet`, `open_arrayrecord`, or the caller's
        function.

    Raises:
      UserError: a path is missing or of another kind, has no documents or not the column, or a
        package is missing.
    """
    tokenizer = make_tokenizer(data.tokenizer, vocab_size=vocab_size, bos=data.bos)
    return [_load(opened, path, data, tokenizer) for path in paths], tokenizer


def _load(
    opened: Callable[[str, DataConfig], Opened], path: str, data: DataConfig, tokenizer: Tokenizer
) -> Documents:
    skipped = Skipped(path)

    def encode(element: Any) -> np.ndarray:
        if isinstance(element, Unreadable):
            raise UserError(element.reason)
        return encode_document(_text_of(element, path, data.column), tokenizer)

    with reading_source(path, data.source):
        source, size, files = opened(path, data)
        nothing = np.zeros(0, np.int32)
        begin = tokenizer.begin_of_text
        documents = Documents(
            source, encode, path, size, nothing, files=files, skipped=skipped, begin_of_text=begin
        )
        first = []
        count = 0
        for document in documents.encoded(replace(data, prefetch=0), 0, endless=False):
            first.append(document["tokens"])
            count += len(first[-1])
            if count > max(SAMPLE, data.seq_len):
                break
    if not count:
        raise UserError(skipped.reason or f"{path} {NOTHING_IN_IT}")
    skipped.forget()
    empty = sum(not len(ids) for ids in first)
    return replace(
        documents,
        sample=np.concatenate(first),
        note=left_out(empty, of=len(first)),
    )


def _text_of(element: Any, path: str, column: str) -> str:
    if isinstance(element, bytes):  # a record
        return element.decode(UTF8, "replace").removeprefix(BYTE_ORDER_MARK)
    if column not in element:
        raise UserError(
            f"{path} has no column {column!r}, set data.column: it has {', '.join(element)}"
        )
    text = element[column]
    if not isinstance(text, str):
        raise UserError(f"{path}: column {column!r} has a value that is no text: {repr(text)[:40]}")
    return text.removeprefix(BYTE_ORDER_MARK)
