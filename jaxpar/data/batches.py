"""Batches of a corpus, the same on any number of processes.

Shapes: B rows of this process, S sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import grain
import grain.experimental
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.documents.blocks import UNREAD
from jaxpar.data.masking import Masking, corrupt
from jaxpar.data.mixture import Mixture, Stream
from jaxpar.data.part import Part
from jaxpar.data.streams.tokens import (
    HostBatch,
    Tokens,
    read_windows,
    window_count,
)

ReadBeside = Callable[[np.ndarray, np.ndarray], HostBatch]
"""A function that reads more arrays of a batch, for the numbers [B] of its parts and of their
windows.
"""


def train_batches(
    stream: Stream,
    data: DataConfig,
    batch: int,
    rows: Sequence[int],
    vocab_size: int,
    masking: Masking | None = None,
    beside: ReadBeside | None = None,
) -> grain.DatasetIterator[HostBatch]:
    """Return an endless iterator of this process's rows of the global batches, in a new order in
    every epoch.

    The order depends on `data.seed` alone, so the global batch is the same for any number of
    processes. `get_state()` is a small JSON-able dict; after `set_state` the next batch is the one
    that would have followed, no matter what had been read ahead. There must be at least
    data.seq_len + 1 tokens; an id of `Tokens` beyond `vocab_size` raises a UserError from `next`.

    Args:
      batch: the number of rows of the global batch.
      rows: the rows that this process reads (`placements.local_rows`).
      masking: what `make_masking` makes of the config.
      beside: reads more arrays into the batch; only `Tokens` have windows for it.

    Raises:
      UserError: the objective corrupts tokens, and no masking is given.
    """
    _require_masking(data, masking)
    if isinstance(stream, Mixture):
        parts = stream.parts
        weights = stream.weights
    else:
        parts = (stream,)
        weights = (1.0,)
    local = np.asarray(rows)
    windowed = [part for part in parts if isinstance(part, Tokens)]
    others = [part for part in parts if not isinstance(part, Tokens)]
    if others:
        return _batches_of_rows(others, weights, data, batch, local, masking)
    stride = data.stride or data.seq_len

    def fetch(number: int, windows: tuple[np.ndarray, np.ndarray]) -> HostBatch:
        part_B, window_B = (array[local] for array in windows)
        there = [(windowed[p], window_B[part_B == p] * stride) for p in np.unique(part_B)]
        found = [
            read_windows(part, starts, data.seq_len, data.pack, vocab_size)
            for part, starts in there
        ]
        back_B = np.argsort(np.argsort(part_B, kind="stable"), kind="stable")
        read = {name: np.concatenate([one[name] for one in found])[back_B] for name in found[0]}
        if beside is not None:
            read |= beside(part_B, window_B)
        return _corrupted(read, number * batch + local, data, masking, _TRAINING)

    # Indices are shuffled and batched before anything is read, so other processes' rows cost this
    # one nothing.
    ahead = grain.ReadOptions(num_threads=min(data.prefetch, 4), prefetch_buffer_size=data.prefetch)
    whole = _shuffled_windows(windowed, weights, data).batch(batch, drop_remainder=True)
    read: grain.IterDataset[HostBatch] = _numbered(whole, fetch, masking).to_iter_dataset(ahead)
    return iter(read)


def _batches_of_rows(
    parts: Sequence[Part],
    weights: Sequence[float],
    data: DataConfig,
    batch: int,
    local: np.ndarray,
    masking: Masking | None,
) -> grain.DatasetIterator[HostBatch]:
    """Make the batches of parts that give whole rows, as documents and conversations do."""
    rows = [part.rows(data, data.seed + i, endless=True) for i, part in enumerate(parts)]
    if len(rows) > 1:
        mixed = grain.IterDataset.mix(rows, weights)
    else:
        mixed = rows[0]

    def own_rows(number: int, found: dict[str, np.ndarray]) -> HostBatch:
        kept = _read_rows(found, local)
        return _corrupted(kept, number * batch + local, data, masking, _TRAINING)

    whole = mixed.batch(batch, drop_remainder=True)
    batches: grain.IterDataset[HostBatch] = _numbered(whole, own_rows, masking)
    if not data.prefetch:
        return iter(batches)
    ahead = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=data.prefetch
    )
    return iter(ahead)


def _shuffled_windows(
    parts: Sequence[Tokens], weights: Sequence[float], data: DataConfig
) -> grain.MapDataset[tuple[int, int]]:
    """Number windows by their part and place, endlessly, in a new order in every epoch."""
    stride = data.stride or data.seq_len
    counts = [window_count(part, data.seq_len, stride) for part in parts]
    orders = [
        grain.MapDataset.range(count).seed(data.seed + i).shuffle().repeat()
        for i, count in enumerate(counts)
    ]
    orders = [order.map(lambda window, i=i: (i, window)) for i, order in enumerate(orders)]
    if len(orders) > 1:
        return grain.MapDataset.mix(orders, weights)
    return orders[0]


def _read_rows(batch: dict[str, np.ndarray], rows_B: np.ndarray) -> HostBatch:
    """Return some rows of a global batch, and read those that are unread."""
    if UNREAD not in batch:
        return {name: array[rows_B] for name, array in batch.items()}
    unread = batch[UNREAD]
    read = [row.read() for row in unread[rows_B]]
    for row in unread:
        row.release()
    return {name: np.stack([row[name] for row in read]) for name in read[0]}


_TRAINING = 0
_VALIDATION = 1
"""The purposes for which rows are read; for each they are corrupted in another way."""


def _require_masking(data: DataConfig, masking: Masking | None) -> None:
    """Refuse to give the tokens that follow to a model that is asked for corrupted ones."""
    if data.objective == "masked" and masking is None:
        raise UserError(
            "data.objective=masked, and nothing says how to corrupt tokens: give what "
            "jaxpar.data.masking.make_masking makes of this config"
        )


def _numbered(dataset: Any, read: Callable[[int, Any], HostBatch], masking: Masking | None) -> Any:
    """Map batches, with their numbers where they are corrupted: otherwise no count is kept in the
    state.
    """
    if masking is None:
        return dataset.map(lambda found: read(0, found))
    return dataset.map_with_index(read)


def _corrupted(
    batch: HostBatch, numbers_B: np.ndarray, data: DataConfig, masking: Masking | None, what: int
) -> HostBatch:
    """Corrupt rows of these numbers, if there is a masking."""
    if masking is None:
        return batch
    return corrupt(batch, numbers_B, (data.seed, what), masking)


def val_batch_count(stream: Part, data: DataConfig, batch: int) -> int | None:
    """Count the batches of a whole validation set; None where only reading tells, for documents
    say.

    Args:
      data: the settings of the data, of which `seq_len` is read.
      batch: the windows of a batch.
    """
    if not isinstance(stream, Tokens):
        return None
    return -(-window_count(stream, data.seq_len, data.seq_len) // batch)


def val_batches(
    stream: Part,
    data: DataConfig,
    batch: int,
    rows: Sequence[int],
    vocab_size: int,
    limit: int = 0,
    masking: Masking | None = None,
) -> Iterator[HostBatch]:
    """Yield this process's rows of the validation batches: windows side by side, each once, in
    order.

    The last batch is filled up with rows whose labels are all -1, so that a mean over counted
    labels is exact. Tokens after the last whole window are not used, and a row is corrupted in the
    same way each time. The other arguments are those of `train_batches`.

    Args:
      limit: the largest number of batches; 0 = all. Windows of `Tokens` are then spread evenly over
        all of it, because its beginning alone may be easier or harder than the rest; of documents
        and examples, it is the first.
    """
    _require_masking(data, masking)
    local = np.asarray(rows)
    if not isinstance(stream, Tokens):
        found = islice(
            stream.rows(replace(data, prefetch=0), data.seed, endless=False), limit * batch or None
        )
        first = 0
        while group := list(islice(found, batch)):
            whole = {name: np.stack([row[name] for row in group]) for name in group[0]}
            there = local < len(group)
            kept = _read_rows(whole, np.where(there, local, 0))
            for name, array in kept.items():
                array[~there] = -1 if name == "labels" else 0
            yield _corrupted(kept, first + local, data, masking, _VALIDATION)
            first += batch
        return
    windows = window_count(stream, data.seq_len, data.seq_len)
    count = min(limit * batch or windows, windows)
    for first in range(0, count, batch):
        place_B = first + local
        window_B = np.minimum(place_B, count - 1) * windows // count
        rows_read = read_windows(
            stream, window_B * data.seq_len, data.seq_len, data.pack, vocab_size
        )
        rows_read["labels"][place_B >= count] = -1
        yield _corrupted(rows_read, window_B, data, masking, _VALIDATION)
