"""The sources of tokens that a config's `data.source` may name, a registered function each.

    @register_source("lines", reads={"path"})
    def lines(paths, data, vocab_size):
        tokenizer = make_tokenizer(data.tokenizer, vocab_size=vocab_size)
        return [Tokens(ids_of(path), None, path) for path in paths], tokenizer

It opens what is at each path as a `part.Part`: `Tokens`, `Documents`, `Examples`, or a class of
one's own. The functions here load what they need when they are called, since a command that reads
no data checks a config by this table too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.registry import SOURCES, registering

if TYPE_CHECKING:
    from jaxpar.data.part import Part
    from jaxpar.data.vocabulary.tokenizer import Tokenizer

SOME_READ = (
    "path",
    "column",
    "streaming",
    "shuffle_window",
    "loss_on",
    "template_args",
    "template_date",
    "stride",
    "max_bytes",
)
"""The settings of [data] that some sources read and others do not."""
Loaded: TypeAlias = "tuple[Sequence[Part], Tokenizer | None]"
Load: TypeAlias = Callable[[Sequence[str], DataConfig, int], Loaded]
"""A function that opens the paths of a config. Its arguments are the paths, the config, and the
model's vocabulary size; it returns a part for each path, and the tokenizer, if there is one.
"""


@dataclass(frozen=True)
class Source:
    """The source that a name of `data.source` stands for."""

    load: Load
    reads: frozenset[str]
    """The settings among `SOME_READ` that this source reads."""
    holds_out: bool
    """Whether `data.val_fraction` may keep a part of it for validation."""
    has_tokenizer: bool
    """Whether it brings its own tokenizer, so that `data.tokenizer` is left out."""
    streams: Callable[[DataConfig], bool]
    """Whether it is read in order, so that `data.seed` shuffles only within a window."""


def register_source(
    name: str,
    *,
    reads: Collection[str] = ("path",),
    holds_out: bool = False,
    has_tokenizer: bool = False,
    streams: Callable[[DataConfig], bool] = lambda data: False,
) -> Callable[[Load], Load]:
    """Register a source under a name that `data.source` then takes; to be used as a decorator.

    Args:
      name: a word that no other source has.
      reads: the settings among `SOME_READ` that it reads; others are refused as having no effect.
        With `stride` it is one long text, of which a sequence is a window.
      holds_out: whether its parts have `split`, for `data.val_fraction`.
      has_tokenizer: whether it brings its own tokenizer.
      streams: whether it is read in order under a config.

    Raises:
      UserError: `reads` names no such setting, or the name is refused by `registering`.
    """
    for setting in reads:
        if setting not in SOME_READ:
            raise UserError(
                f"data.source {name!r} reads {short(setting)}, and a source may read "
                f"{', '.join(SOME_READ)}{suggest(str(setting), SOME_READ)}"
            )

    def entry_of(load: Load) -> Source:
        return Source(load, frozenset(reads), holds_out, has_tokenizer, streams)

    return registering(SOURCES, name, entry_of, ("paths", "data", "vocab_size"))


@register_source("stdlib", reads={"max_bytes", "stride"}, holds_out=True)
def stdlib(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Loaded:
    """Load the text of this Python's own standard library."""
    from jaxpar.data.streams.texts import load_texts

    return load_texts(paths, data, vocab_size)


@register_source("text", reads={"path", "stride"}, holds_out=True)
def text(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Loaded:
    """Load a text file, or a folder of them, of which each, or each of its rows, is a document."""
    from jaxpar.data.streams.texts import load_texts

    return load_texts(paths, data, vocab_size)


@register_source("tokens", reads={"path", "stride"}, holds_out=True, has_tokenizer=True)
def tokens(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Loaded:
    """Load a .bin file of ids, as `jaxpar tokenize`, nanoGPT and llm.c write it."""
    from jaxpar.data.streams.token_files import load_token_files

    return load_token_files(paths, data, vocab_size)


@register_source(
    "hf",
    reads={"path", "column", "streaming", "shuffle_window"},
    streams=lambda data: data.streaming,
)
def hf(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Loaded:
    """Open a data set of Hugging Face: of the hub, a folder or a file."""
    from jaxpar.data.documents.document_sources import open_hf
    from jaxpar.data.documents.tokenized import load_documents

    return load_documents(open_hf, paths, data, vocab_size)


@register_source("parquet", reads={"path", "column", "shuffle_window"}, streams=lambda data: True)
def parquet(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Loaded:
    """Open Parquet files as a stream."""
    from jaxpar.data.documents.document_sources import open_parquet
    from jaxpar.data.documents.tokenized import load_documents

    return load_documents(open_parquet, paths, data, vocab_size)


@register_source("arrayrecord")
def arrayrecord(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Loaded:
    """Open ArrayRecord files, each record of which is a document."""
    from jaxpar.data.documents.document_sources import open_arrayrecord
    from jaxpar.data.documents.tokenized import load_documents

    return load_documents(open_arrayrecord, paths, data, vocab_size)


@register_source(
    "chat", reads={"path", "loss_on", "template_args", "template_date"}, holds_out=True
)
def chat(paths: Sequence[str], data: DataConfig, vocab_size: int) -> Loaded:
    """Load conversations, or prompts with their completions, as JSON lines, a JSON array or
    Parquet.
    """
    from jaxpar.data.chat import load_examples

    return load_examples(paths, data, vocab_size)
