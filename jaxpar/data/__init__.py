"""Data: text, token files, data sets and conversations as batches that are the same on any number
of processes.

    corpus = data.load_corpus(config.data, config.model.vocab_size)
    batches = data.train_batches(corpus.train, config.data, batch, rows, config.model.vocab_size)

The iterator's state is a small dict, from which a resumed run reads on exactly where it was. A
source of one's own is registered by `register_source`.

Its rooms, in the order in which they are read: `sources` names what may be read, `rows` reads files
of JSON and Parquet, `patterns` tells a name from a pattern, `range_cache` reads files of a bucket
by range, `skipped` counts records that are no text, and `part` says what is asked of each part of a
corpus. Then the folders: `vocabulary` turns text into ids, `streams` has one long stream of them,
`documents` whole ones, and `chat` conversations. `mixture` reads several parts as one, `masking`
corrupts tokens for encoders, `batches` are made of all that, and `corpus` puts it together.
`identity` tells other data from those of a run, and `top_k_files` keep a teacher's answers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxpar.data.sources import register_source

if TYPE_CHECKING:
    from jaxpar.data.corpus import Corpus, load_corpus, train_batches, val_batches
    from jaxpar.data.vocabulary.tokenizer import load_tokenizer

__all__ = [
    "Corpus",
    "load_corpus",
    "load_tokenizer",
    "register_source",
    "train_batches",
    "val_batches",
]


def __getattr__(name: str) -> Any:
    """Load a name of `__all__` when it is first asked for: the table of sources, by which a config
    is checked, needs no grain.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load_tokenizer":
        room = "vocabulary.tokenizer"
    else:
        room = "corpus"
    return getattr(importlib.import_module(f"jaxpar.data.{room}"), name)
