"""Reads documents from Hugging Face data sets, Parquet and ArrayRecord files; tokenizes and packs
them as they come.

Shapes: n tokens of a document, S sequence length, T = S + 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import grain
import grain.experimental
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import BYTE_ORDER_MARK, UTF8, UserError
from jaxpar.base.process.exchange import open_exchange
from jaxpar.data.blocks import UNREAD, Blocks, UnreadRow
from jaxpar.data.document_order import (
    DocumentStream,
    Packed,
    StreamTogether,
    reading_source,
    together,
)
from jaxpar.data.parts import PartDefaults
from jaxpar.data.ranged import RangedFile
from jaxpar.data.skipped import Skipped
from jaxpar.data.texts import NOTHING_IN_IT, files_below, left_out
from jaxpar.data.tokenizer import Tokenizer, encode_document, make_tokenizer
from jaxpar.data.tokens import HostBatch

SAMPLE = 2**20
_ENDLESS = 2**62
"""The number of documents of a stream that does not say it: more than any has."""
OpenedSource = grain.MapDataset | Callable[[], Any]
"""Documents in random access, or what opens a stream of them: an `IterableDataset` of Hugging
Face.
"""


@dataclass(frozen=True)
class Documents(PartDefaults):
    """Documents that are tokenized while they are read."""

    source: OpenedSource
    encode: Callable[[Any], np.ndarray]
    """Makes ids, int32 [n], of an element of the source; an error says why it is no text."""
    origin: str
    """The path or name that was given, for messages."""
    size: int | None
    """How many documents there are; None = not known."""
    sample: np.ndarray
    """Ids [N] of the first documents: of all, or at least SAMPLE tokens."""
    note: str = ""
    """What is left out, as far as the sample shows it."""
    files: tuple[Path | RangedFile, ...] = ()
    """The files that they are read from, as far as these are known."""
    skipped: Skipped | None = None
    """Counts the records that are no text, while they are read."""
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
        """Return every document as `{"tokens": ids}`, of which one without text has none.

        Args:
          data: the config.
          seed: shuffles them, if they are endless.
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
        """Return the ids of a record, and why it is no text, if it is none."""
        try:
            return self.encode(element), ""
        # half of a surrogate pair is a TypeError of tokenizers
        except (UserError, UnicodeError, TypeError) as error:
            return np.zeros(0, np.int32), str(error) or type(error).__name__

    def _count(self, reason: str) -> None:
        """Count a record, which is text where there is no reason why not."""
        if self.skipped is None:
            return
        if reason:
            self.skipped.add(reason)
        else:
            self.skipped.read_one()

    def _name_of_order(self, data: DataConfig, seed: int, endless: bool) -> str:
        """A name of the documents in an order, which no other documents and no other order have."""
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
        the T-th it took.

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
        return packed.map(lambda found: {UNREAD: UnreadRow(blocks, found, row)})


def load_documents(
    opened: Callable[[str, DataConfig], Opened],
    paths: Sequence[str],
    data: DataConfig,
    vocab_size: int,
) -> tuple[list[Documents], Tokenizer]:
    """Open the documents at `paths`, and read the beginning of each.

    Args:
      opened: opens one path: `open_hf`, `open_parquet`, `open_arrayrecord`, or one of the caller's.
      paths: the paths.
      data: the config.
      vocab_size: the model's vocabulary.

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
        if isinstance(element, _Unreadable):
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


class _Unreadable(NamedTuple):
    """In place of a record that could not be read: why."""

    reason: str


class _Records:
    """Records in random access, of which one that is damaged is `_Unreadable`."""

    def __init__(self, inner: Any, origin: str):
        self.inner = inner
        self.origin = origin

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, place: int) -> Any:
        try:
            return self.inner[place]
        except Exception as error:  # each library raises exceptions of its own
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            return _Unreadable(f"{self.origin}: record {place} cannot be read: {said}")


Opened = tuple[OpenedSource, int | None, tuple[Path, ...]]
"""What reads documents, how many there are, and the files, as far as these are known."""


def open_hf(name: str, data: DataConfig) -> Opened:
    """Open `path`, `path:split` or `path:config:split`: a data set of the hub, a folder or a file.

    The split may be a slice or a sum of some, as `datasets` writes them: `train[:50%]`,
    `train[:10]+test`.
    """
    path, config, split = _split_name(name)
    place = Path(path)

    def opened() -> Any:
        # from save_to_disk
        if (place / "dataset_dict.json").exists() or (place / "state.json").exists():
            found = _saved_slices(path, split)
            if data.streaming:
                found = found.to_iterable_dataset()
        else:
            folder, file = (
                (str(place.absolute().parent), place.name) if place.is_file() else (path, None)
            )
            found = _loaded_slices(
                partial(_load_split, folder, config, file), split, data.streaming
            )
        if data.column in (found.column_names or ()):
            return found.select_columns(data.column)
        return found

    if place.is_file():
        files = (place,)
    elif place.is_dir():
        files = tuple(files_below(place))
    else:
        files = ()
    if data.streaming:
        return opened, None, files
    found = opened()
    records: Any = _Records(found, name)
    return grain.MapDataset.source(records), len(found), files


def _split_name(name: str) -> tuple[str, list[str], str]:
    """Return the path, the config if there is one, and the split; a colon in a slice, or of a URL,
    parts nothing.
    """
    if Path(name).exists():
        return name, [], "train"
    path, *others = re.split(r":(?!//)(?![^\[]*\])", name)
    if len(others) > 2:
        raise UserError(
            f"{name} is not path, path:split or path:config:split: it has {len(others)} colons"
        )
    if others:
        split = re.sub(r"\s*\+\s*", "+", others[-1])
    else:
        split = "train"
    return path, others[:-1], split


def _load_split(
    folder: str, config: Sequence[str], file: str | None, split: str, streaming: bool
) -> Any:
    import datasets

    load: Any = datasets.load_dataset
    return load(folder, *config, data_files=file, split=split, streaming=streaming)


def _loaded_slices(load: Callable[[str, bool], Any], split: str, streaming: bool) -> Any:
    """Load a split, or slices of some; `datasets` itself takes no slice of a stream."""
    import datasets

    if not streaming or not re.search(r"[\[+]", split):
        return load(split, streaming)
    instruction = datasets.ReadInstruction.from_spec(split)
    names = [part.split("[")[0].strip() for part in split.split("+")]
    streams = {name: load(name, True) for name in names}
    known = {name: (stream.info.splits or {}).get(name) for name, stream in streams.items()}
    sizes = {name: info.num_examples if info else 0 for name, info in known.items()}
    if not all(sizes.values()):
        if re.search(r"%|\[-|:-", split):
            raise UserError(
                f"{split} counts from the end of a stream, whose length is not known: set "
                "data.streaming=false, or "
                "count in documents from its beginning, as in train[1000:]"
            )
        sizes = dict.fromkeys(sizes, _ENDLESS)
    slices = [
        streams[part.splitname].skip(part.from_).take(part.to - part.from_)
        for part in instruction.to_absolute(sizes)
    ]
    return datasets.concatenate_datasets(slices)


def _saved_slices(path: str, split: str) -> Any:
    """Open a split, or slices of some, of what `save_to_disk` wrote: several splits by name, or
    one.
    """
    import datasets

    found = datasets.load_from_disk(path)
    if not isinstance(found, datasets.DatasetDict):
        found = {str(found.split or split.split("[")[0]): found}
    instruction = datasets.ReadInstruction.from_spec(split)
    parts = instruction.to_absolute({name: len(part) for name, part in found.items()})
    slices = [found[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(slices)


def open_parquet(path: str, data: DataConfig) -> Opened:
    import datasets
    import pyarrow.parquet

    found = _files(path, ".parquet")
    counts = dict[str, int]()
    for file in found:
        about = pyarrow.parquet.read_metadata(file)
        counts[str(file)] = about.num_rows
        _require_text_column(about.schema.to_arrow_schema(), file, data.column)
    files = [file for file, rows in counts.items() if rows]
    if not files:
        raise UserError(f"{path} is empty: its files have no rows")
    opened = partial(
        datasets.load_dataset, "parquet", data_files=files, split="train", streaming=True
    )
    return opened, sum(counts.values()), tuple(found)


def _require_text_column(schema: Any, file: Path, column: str) -> None:
    """Refuse a Parquet file whose schema (of Arrow) has no such column, or one that is no text."""
    from pyarrow import types

    if column not in schema.names:
        raise UserError(
            f"{file} has no column {column!r}, set data.column: it has {', '.join(schema.names)}"
        )
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    text = (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_null(kind)
    )
    if not text:
        raise UserError(
            f"{file}: column {column!r} has a value that is no text: its type is {kind}"
        )


def open_arrayrecord(path: str, data: DataConfig) -> Opened:
    files = _files(path, ".array_record", ".arrayrecord")
    found: Any = grain.sources.ArrayRecordDataSource([str(file) for file in files])
    records: Any = _Records(found, path)
    return grain.MapDataset.source(records), len(records), tuple(files)


def _files(path: str, *endings: str) -> list[Path]:
    """Return the file at `path`, or the files below that folder, or those that match it as a
    pattern; sorted.
    """
    root = Path(path)
    if root.is_dir():
        found = [file for file in files_below(root) if file.suffix in endings]
    else:
        if root.is_file():
            found = [root]
        else:
            found = [Path(file) for file in sorted(glob(path, recursive=True))]
    if not found:
        pattern = f"a pattern like 'texts/*{endings[0]}'"
        raise UserError(f"no {endings[0]} file at {path}: give a file, a folder, or {pattern}")
    return found
