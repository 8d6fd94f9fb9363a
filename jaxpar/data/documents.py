"""Reads documents from Hugging Face data sets, Parquet and ArrayRecord files; tokenizes and packs them as they come.

Shapes: n tokens of a document, S sequence length, T = S + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import grain
import grain.experimental
import jax
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.data.tokenizer import Tokenizer, encode_document, make_tokenizer
from jaxpar.data.tokens import HostBatch, files_below

SAMPLE = 2**20
Source = grain.MapDataset | Callable[[], Any]
"""Documents in random access, or what opens a stream of them: an `IterableDataset` of Hugging Face."""


@dataclass(frozen=True)
class Documents:
    """Documents that are tokenized while they are read."""

    source: Source
    encode: Callable[[Any], dict[str, np.ndarray]]
    """Makes `{"tokens": int32 [n]}` of an element of the source."""
    origin: str
    """The path or name that was given, for messages."""
    size: int | None
    """How many documents there are; None = not known."""
    sample: np.ndarray
    """Ids [N] of the first documents: of all, or at least SAMPLE tokens."""

    @property
    def amount(self) -> str:
        return "a stream of documents" if self.size is None else f"{self.size:,} documents"

    def encoded(self, data: DataConfig, seed: int, endless: bool) -> grain.IterDataset:
        """Return the documents as ids; see `rows`. Those without any are left out."""
        source = self.source
        if isinstance(source, grain.MapDataset):
            ordered = source.seed(seed).shuffle().repeat() if endless else source
            ahead = grain.ReadOptions(num_threads=min(data.prefetch, 4), prefetch_buffer_size=16 * data.prefetch)
            encoded = ordered.map(self.encode).to_iter_dataset(ahead)
        else:
            stream = _Stream(source, self.origin, data.source, endless)
            if endless and data.shuffle_window:
                window = {"window_size": data.shuffle_window, "seed": seed}
                stream = grain.experimental.WindowShuffleIterDataset(stream, **window)
            encoded = stream.map(self.encode)
        return encoded.filter(lambda document: len(document["tokens"]) > 0)

    def rows(self, data: DataConfig, seed: int, endless: bool) -> grain.IterDataset[HostBatch]:
        """Return the rows [S] of documents that lie end to end; the label of a row's last token is the T-th it took.

        They are read again and again if `endless`, shuffled by `seed`: anew in each epoch in random access, the same in
        a stream. Otherwise they are read once and in order, and the last row is filled up.
        """

        def row(packed: dict[str, np.ndarray]) -> HostBatch:
            ids_T, segments_T = packed["tokens"], packed["tokens_segment_ids"]
            ends_S = segments_T[1:] == 0
            if data.pack:
                ends_S = ends_S | (segments_T[1:] != segments_T[:-1])
            batch = {"tokens": ids_T[:-1], "labels": np.where(ends_S, -1, ids_T[1:]).astype(np.int32)}
            if data.pack:
                batch |= {"segments": segments_T[:-1], "positions": packed["tokens_positions"][:-1]}
            return batch

        return _Packed(self.encoded(data, seed, endless), length_struct={"tokens": data.seq_len + 1}).map(row)


def load_documents(paths: Sequence[str], data: DataConfig, vocab_size: int) -> tuple[list[Documents], Tokenizer]:
    """Open the sources of documents at `paths`, and read the beginning of each.

    Raises:
      UserError: a path is missing or of another kind, has no documents or not the column, or a package is missing.
    """
    tokenizer = make_tokenizer(data.tokenizer, vocab_size=vocab_size)
    return [_load(path, data, tokenizer) for path in paths], tokenizer


def _load(path: str, data: DataConfig, tokenizer: Tokenizer) -> Documents:
    def encode(element: Any) -> dict[str, np.ndarray]:
        if isinstance(element, bytes):  # a record
            element = {data.column: element.decode("utf-8", "replace")}
        if data.column not in element:
            raise UserError(f"{path} has no column {data.column!r}, set data.column: it has {', '.join(element)}")
        text = element[data.column]
        if not isinstance(text, str):
            raise UserError(f"{path}: column {data.column!r} has a value that is no text: {str(text)[:40]!r}")
        return {"tokens": encode_document(text, tokenizer)}

    with _reading(path, data.source):
        source, size = _OPEN[data.source](path, data)
        documents = Documents(source, encode, path, size, np.zeros(0, np.int32))
        first, count = [], 0
        for document in documents.encoded(replace(data, prefetch=0), 0, endless=False):
            first.append(document["tokens"])
            count += len(first[-1])
            if count > max(SAMPLE, data.seq_len):
                break
    if not count:
        raise UserError(f"{path} is empty: there is no document with text in it")
    return replace(documents, sample=np.concatenate(first))


@contextmanager
def _reading(path: str, source: str) -> Iterator[None]:
    """Say in one line what kept documents from being read; each library raises exceptions of its own."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"data.source={source} needs the {error.name} package: pip install 'jaxpar[data]'") from error
    except (UserError, StopIteration):
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot read {path} as data.source={source}: {said}") from error


def _open_hf(name: str, data: DataConfig) -> tuple[Source, int | None]:
    """Open `path`, `path:split` or `path:config:split`: a data set of the hub, a folder or a file."""
    import datasets

    path, *config, split = name.split(":") if ":" in name and not Path(name).exists() else (name, "train")
    place = Path(path)

    def opened() -> Any:
        load: Any = datasets.load_dataset
        if (place / "dataset_dict.json").exists() or (place / "state.json").exists():  # from save_to_disk
            found = datasets.load_from_disk(path)
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
            found = found.to_iterable_dataset() if data.streaming else found
        else:
            where, files = (str(place.absolute().parent), place.name) if place.is_file() else (path, None)
            found = load(where, *config, data_files=files, split=split, streaming=data.streaming)
        return found.select_columns(data.column) if data.column in (found.column_names or ()) else found

    if data.streaming:
        return opened, None
    found = opened()
    return grain.MapDataset.source(found), len(found)


def _open_parquet(path: str, data: DataConfig) -> tuple[Source, int]:
    import datasets
    import pyarrow.parquet

    counts = {str(file): pyarrow.parquet.read_metadata(file).num_rows for file in _files(path, ".parquet")}
    files = [file for file, rows in counts.items() if rows]
    if not files:
        raise UserError(f"{path} is empty: its files have no rows")
    opened = partial(datasets.load_dataset, "parquet", data_files=files, split="train", streaming=True)
    return opened, sum(counts.values())


def _open_arrayrecord(path: str, data: DataConfig) -> tuple[Source, int]:
    files = [str(file) for file in _files(path, ".array_record", ".arrayrecord")]
    records: Any = grain.sources.ArrayRecordDataSource(files)
    return grain.MapDataset.source(records), len(records)


_OPEN = {"hf": _open_hf, "parquet": _open_parquet, "arrayrecord": _open_arrayrecord}


def _files(path: str, *endings: str) -> list[Path]:
    """Return the file at `path`, or the files below that folder, or those that match it as a pattern; sorted."""
    root = Path(path)
    if root.is_dir():
        found = [file for file in files_below(root) if file.suffix in endings]
    else:
        found = [root] if root.is_file() else [Path(file) for file in sorted(glob(path, recursive=True))]
    if not found:
        pattern = f"a pattern like 'texts/*{endings[0]}'"
        raise UserError(f"no {endings[0]} file at {path}: give a file, a folder, or {pattern}")
    return found


class _Stream(grain.IterDataset):
    """A streaming data set of Hugging Face, once or in endless epochs; it keeps its position itself."""

    def __init__(self, opened: Callable[[], Any], origin: str, kind: str, endless: bool):
        super().__init__()
        self.opened, self.origin, self.kind, self.endless = opened, origin, kind, endless

    def __iter__(self) -> grain.DatasetIterator:
        return _StreamIterator(self)


class _StreamIterator(grain.DatasetIterator):
    def __init__(self, stream: _Stream):
        super().__init__()
        self._stream = stream
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._source, self._running = epoch, self._stream.opened(), None

    def __next__(self) -> Any:
        stream = self._stream
        with _reading(stream.origin, stream.kind):
            while True:
                try:
                    self._running = self._running or iter(self._source)
                    return next(self._running)
                except StopIteration:
                    if not stream.endless:
                        raise
                    self._begin(self._epoch + 1)
                    if jax.process_index() == 0:
                        console().print(f"{stream.origin} is read to its end: epoch {self._epoch + 1} begins")

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "source": self._source.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"])
        self._source.load_state_dict(state["source"])


class _Packed(grain.experimental.ConcatThenSplitIterDataset):
    """Grain's packing, whose state survives JSON: it compares tuples, and JSON gives lists (seen in 0.2.18)."""

    def __iter__(self) -> grain.DatasetIterator:
        made = super().__iter__()
        restore = made.set_state

        def set_state(state: dict[str, Any]) -> None:
            slices = {name: tuple(place) for name, place in state["remainder_slices"].items()}
            restore(state | {"remainder_slices": slices})

        made.set_state = set_state
        return made
