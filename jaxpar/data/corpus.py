"""The data of a run: what is trained on, what is held out, and their tokenizer.
`jaxpar.data.batches` makes batches of them; this module gives its functions too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError, short
from jaxpar.base.registry import SOURCES
from jaxpar.data.batches import train_batches as train_batches
from jaxpar.data.batches import val_batch_count as val_batch_count
from jaxpar.data.batches import val_batches as val_batches
from jaxpar.data.masking import make_masking
from jaxpar.data.mixture import SAMPLED, Mixture, Stream
from jaxpar.data.part import Part
from jaxpar.data.sources import Source
from jaxpar.data.streams.urls import data_here
from jaxpar.data.vocabulary.tokenizer import HFTokenizer, Tokenizer


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
        count = tokenizer.vocab_size
        if isinstance(tokenizer, HFTokenizer):
            count = tokenizer.whole_vocab_size
        raise UserError(
            f"the tokenizer of {parts[0].origin} has {count} tokens, "
            f"model.vocab_size={vocab_size}: try model.vocab_size={count}, or another tokenizer"
        )
    make_masking(data, vocab_size, tokenizer)  # refused before a training begins
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
        f"data.source={data.source} returns a pair, a list with a jaxpar.data.part.Part for each "
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


def unigram_entropy(tokens: np.ndarray, sample: int = SAMPLED) -> float:
    """Compute the entropy of the first `sample` tokens' frequencies in nats per token: the best
    loss without context.
    """
    counts = np.bincount(tokens[:sample])
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())
