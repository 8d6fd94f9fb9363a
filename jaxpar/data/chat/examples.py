"""Examples to learn, made of conversations, and of prompts with their completions: each is one
example, and is never cut in two.

Shapes: N tokens of all examples, E examples, S sequence length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import grain
import grain.experimental
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.chat.answers import ConversationWriter, missing_names, open_writer
from jaxpar.data.chat.conversations import read_conversation
from jaxpar.data.chat.template.render import Span
from jaxpar.data.part import PartDefaults
from jaxpar.data.range_cache import RangedFile
from jaxpar.data.rows import kind_of_file, read_rows
from jaxpar.data.streams.texts import data_files, is_text, name_files
from jaxpar.data.streams.tokens import HostBatch
from jaxpar.data.vocabulary.tokenizer import (
    CharsTokenizer,
    HFTokenizer,
    Tokenizer,
    make_tokenizer,
    missing_begin,
)

_BINS = 64  # rows that are packed at a time
_GetWriter = Callable[[], ConversationWriter]


@dataclass(frozen=True)
class Examples(PartDefaults):
    """Examples to learn from, their ids int32 [N]."""

    ids: np.ndarray
    labels: np.ndarray
    """The next id [N], int32; -1 = not counted."""
    starts: np.ndarray
    """The places where examples begin, and the end of the last: int64 [E + 1]."""
    origin: str
    """The file or folder, for messages."""
    note: str = ""
    """The note on what was cut or left out."""
    files: tuple[Path | RangedFile, ...] = ()
    """The files that the examples were read from."""

    @property
    def size(self) -> int:
        return len(self.starts) - 1

    @property
    def sample(self) -> np.ndarray:
        """The ids that are to be predicted."""
        return self.labels[self.labels != -1]

    @property
    def amount(self) -> str:
        counted = np.count_nonzero(self.labels != -1)
        return (
            f"{self.size:,} examples of {len(self.ids):,} tokens, {counted:,} of which "
            f"count{self.note}"
        )

    def split(self, val_fraction: float) -> tuple[Examples, Examples]:
        """Split off the last `val_fraction` of the examples, at least one; a UserError where there
        is a single one.
        """
        cut = min(int(self.size * (1 - val_fraction)), self.size - 1)
        if cut < 1:
            raise UserError(
                f"{self.origin} has a single example, which cannot be held out: set "
                "data.val_fraction=0"
            )
        place = self.starts[cut]
        train = replace(
            self, ids=self.ids[:place], labels=self.labels[:place], starts=self.starts[: cut + 1]
        )
        starts = self.starts[cut:] - place
        return train, replace(
            self, ids=self.ids[place:], labels=self.labels[place:], starts=starts, note=""
        )

    def identifying(self) -> tuple[np.ndarray, int | None]:
        """Return all ids, of the prompts too, which a sample leaves out, and their number."""
        return self.ids, len(self.ids)

    def require_enough(self, data: DataConfig, what: str, fix: str) -> None:
        """Accept any examples: each is filled up to a sequence, so that one is enough."""

    def rows(
        self,
        data: DataConfig,
        seed: int,
        endless: bool,
    ) -> grain.IterDataset[HostBatch]:
        """Return rows [S] with whole examples, one in each or (`data.pack`) as many as fit, filled
        up with label -1.

        They are shuffled anew in each epoch if `endless`, and otherwise read once and in order.
        """

        def fetch(i: int) -> dict[str, np.ndarray]:
            place = slice(self.starts[i], self.starts[i + 1])
            return {"tokens": self.ids[place], "labels": self.labels[place]}

        def row(packed: dict[str, np.ndarray]) -> HostBatch:
            batch = {"tokens": packed["tokens"], "labels": packed["labels"]}
            apart = {
                "segments": packed["tokens_segment_ids"],
                "positions": packed["tokens_positions"],
            }
            return batch | apart if data.pack else batch

        order = grain.MapDataset.range(self.size)
        if endless:
            order = order.seed(seed).shuffle().repeat()
        examples = order.map(fetch).to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )
        packed = grain.experimental.FirstFitPackIterDataset(
            examples,
            length_struct={"tokens": data.seq_len, "labels": data.seq_len},
            padding_struct={"tokens": 0, "labels": -1},
            num_packing_bins=_BINS if data.pack else 1,
            max_sequences_per_bin=None if data.pack else 1,
            shuffle_bins=False,
        )
        return packed.map(row)


def load_examples(
    paths: Sequence[str], data: DataConfig, vocab_size: int
) -> tuple[list[Examples], Tokenizer]:
    """Load the examples in files of JSON or Parquet (`read_rows`), or folders of them, with
    `data.tokenizer` and the chat template beside it.

    A row is a conversation (`conversations.read_conversation`), with `tools` and other names if the
    template reads them, or `{"prompt": text, "completion": text}`, which takes no template and is
    closed by the end-of-text token.

    Raises:
      UserError: a file is missing, or a line is broken; the message has its file and number.
    """
    tokenizer = make_tokenizer(data.tokenizer, vocab_size=vocab_size, bos=data.bos)
    # Prompts and completions need no template.
    writer = cache(lambda: open_writer(data.tokenizer, data.template_args, data.template_date))
    return [_load(path, data, tokenizer, writer) for path in paths], tokenizer


def _load(path: str, data: DataConfig, tokenizer: Tokenizer, writer: _GetWriter) -> Examples:
    rows = []
    cut = 0
    dropped = 0
    undefined = set[str]()
    notes = Counter[str]()
    files, others = data_files(path, _may_have_rows)
    for file in files:
        for row in read_rows(file):
            try:
                written = _write(row.value, data, writer)
                ids, counted = _encode(written, data, tokenizer)
            except (UserError, UnicodeError) as error:
                raise UserError(f"{row.where}: {error}") from error
            undefined.update(written.undefined)
            notes.update(written.notes)
            cut += len(ids) > data.seq_len + 1
            labels = np.where(counted, ids, -1).astype(np.int32)[1:][: data.seq_len]
            if (labels != -1).any():
                rows.append((ids[:-1][: data.seq_len], labels))
            else:
                dropped += 1
    if not rows:
        raise UserError(
            f"{path} has no example whose completion begins within data.seq_len={data.seq_len} "
            "tokens"
        )
    ids, labels = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    note = (
        f" ({cut} were longer than data.seq_len and cut, {dropped} of them left out as "
        "nothing that counts was left)"
    )
    if not cut:
        note = ""
    note += name_files("files that are neither JSON nor Parquet, left out", path, others)
    if undefined:
        note += f" ({missing_names(undefined)})"
    for said, count in sorted(notes.items()):
        note += f" ({said}: {count} of {len(rows) + dropped} examples)"
    starts = np.cumsum([0, *(len(row) for row, _ in rows)])
    return Examples(ids, labels, starts, path, note, tuple(files))


def _may_have_rows(file: Path) -> bool:
    return is_text(file) or kind_of_file(file) == "Parquet"


class _Written(NamedTuple):
    """An example as text."""

    text: str
    spans: Sequence[Span]
    """The characters that are to be learned."""
    closed: bool
    """Whether the end-of-text token follows, as no template has closed the example."""
    undefined: Sequence[str] = ()
    """Names that a template wrote and that nothing defines."""
    notes: Collection[str] = ()
    """Other things the template did that a user should know."""


def _write(row: Any, data: DataConfig, writer: _GetWriter) -> _Written:
    """Write the example of a line as text.

    Raises:
      UserError: the line is of no known form, its conversation is broken, or the template refuses
        it.
    """
    if not isinstance(row, dict):
        raise UserError(f"found {str(row)[:40]}, not messages, or prompt and completion as text")
    conversation = read_conversation(row)
    if conversation is not None:
        found = writer().answers(conversation, find=data.loss_on != "all")
        return _Written(
            found.text, found.spans, closed=False, undefined=found.undefined, notes=found.notes
        )
    match row:
        case {"prompt": str(prompt), "completion": str(completion)}:
            text = prompt + completion
            return _Written(text, [(len(prompt), len(text))], closed=True)
    keys = ", ".join(key for key, value in row.items() if value is not None) or "with no value"
    raise UserError(f"found the keys {keys}, not messages, or prompt and completion as text")


def _encode(
    written: _Written, data: DataConfig, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Encode an example: its ids [n], and which of them count [n]."""
    written.text.encode()  # half of a surrogate pair is no text
    ids, begins, ends = _with_places(written.text, tokenizer)
    counted = np.zeros(len(ids), bool)
    for begin, end in written.spans:
        counted |= (ends > begin) & (begins < end)
    empty = not counted.any()
    if written.closed:  # a template writes its own begin of text, and closes itself
        begin = missing_begin(ids, tokenizer)
        ids = np.append(begin, ids)
        counted = np.append(np.zeros(len(begin), bool), counted)
    if written.closed and tokenizer.end_of_text is not None:
        ids = np.append(ids, np.int32(tokenizer.end_of_text))
        counted = np.append(counted, True)
    if empty or not counted[1:].any():
        raise UserError(
            "there is nothing to learn: no assistant message whose weight is not 0, or an empty "
            "completion"
        )
    return ids, counted | (data.loss_on == "all")


def _with_places(
    text: str,
    tokenizer: Tokenizer,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encode a text: its ids [n], and where in the text the characters of each begin and end
    [n].
    """
    if isinstance(tokenizer, HFTokenizer):
        found = tokenizer.encoding(text)
        begins, ends = np.array(found.offsets, int).reshape(-1, 2).T
        # Byte-level tokenizers leave spaces out of a token's place: one of spaces alone begins
        # where the last ended.
        begins = np.where(
            begins == ends,
            np.minimum(begins, np.append(0, ends[:-1])),
            begins,
        )
        return tokenizer.known(found.ids), begins, ends
    by_character = isinstance(tokenizer, CharsTokenizer)
    begins = np.repeat(
        np.arange(len(text)), [1 if by_character else len(char.encode()) for char in text]
    )
    return tokenizer.encode(text), begins, begins + 1
