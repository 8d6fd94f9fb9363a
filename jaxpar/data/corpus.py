"""Loads the data of a run and makes batches of them, the same on any number of processes.

Shapes: B rows of this process, S sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import grain
import grain.experimental
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError, short
from jaxpar.base.registry import SOURCES
from jaxpar.data.blocks import UNREAD
from jaxpar.data.masking import Masking, corrupt, make_masking
from jaxpar.data.parts import Part
from jaxpar.data.skipped import Skipped
from jaxpar.data.sources import Source
from jaxpar.data.tokenizer import Tokenizer
from jaxpar.data.tokens import (
    HostBatch,
    Tokens,
    read_windows,
    window_count,
)
from jaxpar.data.urls import data_here


@dataclass(frozen=True)
class Mixture:
    """Parts of one kind, mixed in each batch so that each has its share of the sequences."""

    parts: tuple[Part, ...]
    weights: tuple[float, ...]
    """Their shares, which add up to 1."""

    @property
    def origin(self) -> str:
        return " + ".join(
            f"{part.origin} {weight:.3g}"
            for part, weight in zip(self.parts, self.weights, strict=True)
        )

    @property
    def size(self) -> int | None:
        sizes = [part.size for part in self.parts if part.size is not None]
        if len(sizes) == len(self.parts):
            return sum(sizes)
        return None

    @property
    def sample(self) -> np.ndarray:
        samples = [part.sample for part in self.parts]
        fit = min(
            len(sample) / weight for sample, weight in zip(samples, self.weights, strict=True)
        )
        return np.concatenate(
            [s[: max(int(fit * w), 1)] for s, w in zip(samples, self.weights, strict=True)]
        )

    @property
    def amount(self) -> str:
        return " + ".join(part.amount for part in self.parts)


def skipped_records(stream: Part | Mixture) -> list[Skipped]:
    """Return the counts of records that are no text, of those parts that read theirs while a run
    goes on.
    """
    if isinstance(stream, Mixture):
        parts = stream.parts
    else:
        parts = (stream,)
    counts = [part.skipped for part in parts]
    return [count for count in counts if count is not None]


Stream = Part | Mixture
"""What a run reads. Each has an `origin` and an `amount` for messages, a `size` that a resumed run
must find again (None = not known), and a `sample` of ids for their frequencies."""


class Corpus(NamedTuple):
    """The data of a run; `val` is None if nothing is held out, and `tokenizer` if a .bin file came
    without one.
    """

    train: Stream
    val: Part | None
    tokenizer: Tokenizer | None


def load_corpus(data: DataConfig, vocab_size: int) -> Corpus:
    """Load the training and validation data of a config, and check them against the vocabulary and
    `data.seq_len`.

    Raises:
      UserError: the source is missing, empty, broken or too short for one window, lacks the
        document offsets that `data.pack` needs, has more tokens in its vocabulary than the
        model, or cannot be corrupted as `data.objective` asks.
    """
    data = data_here(data)
    shares = [_share(entry) for entry in data.mixture] or [(data.path, 1.0)]
    paths = [path for path, _ in shares] + [data.val_path] * bool(data.val_path)
    source: Source = SOURCES[data.source]
    if data.objective == "masked" and "loss_on" in source.reads:
        raise UserError(
            f"data.objective=masked, and data.source={data.source} says which tokens count by who "
            "wrote them: take data.source=text or another of documents"
        )
    if "path" not in source.reads:
        paths[0] = ""
    elif not all(paths):
        raise UserError(f"data.source={data.source} needs data.path: the file or folder to read")
    # a source of which a sequence is a window is read as a whole before training
    if data.tokenizer == "chars" and "stride" not in source.reads:
        raise UserError(
            "data.tokenizer=chars knows the characters of a whole text, which "
            f"data.source={data.source} does not read "
            "before it starts: take bytes, or a tokenizer.json"
        )
    parts, tokenizer = _loaded(source, paths, data, vocab_size)
    val = parts.pop() if data.val_path else None
    may_hold_out = source.holds_out and not (data.val_path or data.mixture)
    if may_hold_out and data.val_fraction > 0:
        parts[0], val = parts[0].split(data.val_fraction)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer of {parts[0].origin} has {tokenizer.vocab_size} tokens, "
            f"model.vocab_size={vocab_size}: "
            f"try model.vocab_size={tokenizer.vocab_size}, or another tokenizer"
        )
    make_masking(data, vocab_size, tokenizer)  # refused before anything is read
    for part in parts:
        part.require_enough(data, "training", "add text")
    if val is not None:
        fix = "raise data.val_fraction, or give data.val_path"
        val.require_enough(data, "validation", fix)
    if not data.mixture:
        return Corpus(parts[0], val, tokenizer)
    total = sum(weight for _, weight in shares)
    return Corpus(
        Mixture(tuple(parts), tuple(weight / total for _, weight in shares)), val, tokenizer
    )


def _loaded(
    source: Source, paths: Sequence[str], data: DataConfig, vocab_size: int
) -> tuple[list[Part], Tokenizer | None]:
    """Open a source.

    Raises:
      UserError: a registered source returns something else than a part for each path and a
        tokenizer.
    """
    found = source.load(paths, data, vocab_size)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        parts, tokenizer = found
        if len(parts) == len(paths) and all(hasattr(part, "require_enough") for part in parts):
            return list(parts), tokenizer
    raise UserError(
        f"data.source={data.source} returns a pair, a list with a jaxpar.data.parts.Part for each "
        f"of its {len(paths)} paths, and a tokenizer or None: it returned {short(found)}"
    )


def _share(entry: str) -> tuple[str, float]:
    """Split "PATH WEIGHT"."""
    path, _, weight = entry.rpartition(" ")
    try:
        if path.strip() and 0 < float(weight) < float("inf"):
            return path.strip(), float(weight)
    except ValueError:
        pass
    raise UserError(
        f"data.mixture has {entry!r}, where it takes a path and a weight above 0, such as "
        "'books.bin 0.7'"
    )


def unigram_entropy(tokens: np.ndarray, sample: int = 2**24) -> float:
    """Return the entropy of the first `sample` tokens' frequencies in nats per token: the best loss
    without context.
    """
    counts = np.bincount(tokens[:sample])
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


ReadBeside = Callable[[np.ndarray, np.ndarray], HostBatch]
"""Reads more arrays of a batch, for the numbers [B] of its parts and of their windows."""


def train_batches(
    stream: Stream,
    data: DataConfig,
    batch: int,
    rows: Sequence[int],
    vocab_size: int,
    masking: Masking | None = None,
    beside: ReadBeside | None = None,
) -> grain.DatasetIterator[HostBatch]:
    """Return an endless iterator of this process's rows of the global batches; a new order in every
    epoch.

    The order depends on `data.seed` alone, so the global batch is the same for any number of
    processes. `get_state()` is a small JSON-able dict; after `set_state` the next batch is the one
    that would have followed, no matter what had been read ahead. `batch` is the number of rows of
    the global batch, and `rows` are those to read (see `placements.local_rows`). There must be at
    least data.seq_len + 1 tokens; an id of `Tokens` beyond `vocab_size` raises a UserError from
    `next`. `masking` is what `make_masking` makes of the config. What `beside` reads is in the
    batch too; only `Tokens` have windows for it.

    Raises:
      UserError: the objective corrupts tokens, and no masking is given.
    """
    _require_masking(data, masking)
    parts, weights = (
        (stream.parts, stream.weights) if isinstance(stream, Mixture) else ((stream,), (1.0,))
    )
    local = np.asarray(rows)
    windowed = [part for part in parts if isinstance(part, Tokens)]
    if others := [part for part in parts if not isinstance(part, Tokens)]:
        made = [part.rows(data, data.seed + i, endless=True) for i, part in enumerate(others)]
        if len(made) > 1:
            mixed = grain.IterDataset.mix(made, weights)
        else:
            mixed = made[0]

        def own_rows(number: int, found: dict[str, np.ndarray]) -> HostBatch:
            kept = _read_rows(found, local)
            return _corrupted(kept, number * batch + local, data, masking, _TRAINING)

        whole = mixed.batch(batch, drop_remainder=True)
        batches = _numbered(whole, own_rows, masking)
        ahead = grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=data.prefetch
        )
        return iter(ahead if data.prefetch else batches)

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
    counts = [window_count(part, data.seq_len, stride) for part in windowed]
    orders = [
        grain.MapDataset.range(count).seed(data.seed + i).shuffle().repeat()
        for i, count in enumerate(counts)
    ]
    orders = [order.map(lambda window, i=i: (i, window)) for i, order in enumerate(orders)]
    if len(orders) > 1:
        mixed = grain.MapDataset.mix(orders, weights)
    else:
        mixed = orders[0]
    ahead = grain.ReadOptions(num_threads=min(data.prefetch, 4), prefetch_buffer_size=data.prefetch)
    whole = mixed.batch(batch, drop_remainder=True)
    read: grain.IterDataset[HostBatch] = _numbered(whole, fetch, masking).to_iter_dataset(ahead)
    return iter(read)


def _read_rows(batch: dict[str, np.ndarray], rows_B: np.ndarray) -> HostBatch:
    """Return some rows of a global batch, of which those that are unread are read."""
    if UNREAD not in batch:
        return {name: array[rows_B] for name, array in batch.items()}
    unread = batch[UNREAD]
    read = [row.read() for row in unread[rows_B]]
    for row in unread:
        row.release()
    return {name: np.stack([row[name] for row in read]) for name in read[0]}


_TRAINING = 0
_VALIDATION = 1
"""What rows are read for, which are corrupted otherwise."""


def _require_masking(data: DataConfig, masking: Masking | None) -> None:
    """Refuse to give the tokens that follow to a model that is asked for corrupted ones."""
    if data.objective == "masked" and masking is None:
        raise UserError(
            "data.objective=masked, and nothing says how to corrupt tokens: give what "
            "jaxpar.data.masking.make_masking makes of this config"
        )


def _numbered(dataset: Any, read: Callable[[int, Any], HostBatch], masking: Masking | None) -> Any:
    """Map batches, by their numbers where these matter: others keep no count in their state."""
    if masking is None:
        return dataset.map(lambda found: read(0, found))
    return dataset.map_with_index(read)


def _corrupted(
    batch: HostBatch, numbers_B: np.ndarray, data: DataConfig, masking: Masking | None, what: int
) -> HostBatch:
    """Corrupt rows of these numbers, if the objective does."""
    if masking is None:
        return batch
    return corrupt(batch, numbers_B, (data.seed, what), masking)


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

    A `limit` other than 0 is the largest number of batches. Windows of `Tokens` are then spread
    evenly over all of it, because its beginning alone may be easier or harder than the rest; of
    documents and examples, it is the first.

    The last batch is filled up with rows whose labels are all -1, so that a mean over counted
    labels is exact. Tokens after the last whole window are not used, and a row is corrupted in the
    same way each time. For the other arguments see `train_batches`.
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
