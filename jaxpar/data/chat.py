"""Conversations become the text that a model was taught to see, by its tokenizer's template, and examples to learn.

Shapes: N tokens of all examples, E examples, S sequence length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import grain
import grain.experimental
import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError, read_json
from jaxpar.data.special_tokens import TEMPLATE, TOKENIZER_CONFIG, beside, read_special_tokens
from jaxpar.data.tokenizer import HFTokenizer, Tokenizer, make_tokenizer, missing_begin, read_text
from jaxpar.data.tokens import HostBatch, text_files

Message = Mapping[str, Any]
"""At least `role` and `content`, as in OpenAI's and Hugging Face's chat formats."""
Span = tuple[int, int]


class ChatTemplate(NamedTuple):
    """A template in Jinja, the special tokens that it may write (`{"bos_token": "<s>"}`), and its file."""

    text: str
    special_tokens: dict[str, str]
    origin: str


def load_template(tokenizer: str | Path) -> ChatTemplate:
    """Load the chat template beside a tokenizer.json, or in tokenizer_config.json; a UserError where there is none."""
    found = find_template(tokenizer)
    if found is None:
        places = f"{TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}"
        raise UserError(f"{tokenizer} has no chat template beside it ({places}): take those of the model's own folder")
    return found


def find_template(tokenizer: str | Path) -> ChatTemplate | None:
    """Return the chat template beside a tokenizer.json, or None; a UserError where a file cannot be read."""
    file, own = (beside(tokenizer, name) for name in (TOKENIZER_CONFIG, TEMPLATE))
    special = special_tokens(tokenizer)
    if own.exists():
        return ChatTemplate(read_text(own), special, str(own))
    kinds = {"chat_template": str | list[dict[str, Any]] | None}
    template = read_json(file, kinds).get("chat_template") if file.exists() else None
    if isinstance(template, list):  # several by name
        template = next((item.get("template") for item in template if item.get("name") == "default"), None)
    return ChatTemplate(template, special, str(file)) if isinstance(template, str) else None


def special_tokens(tokenizer: str | Path) -> dict[str, str]:
    """Return the special tokens that lie beside a tokenizer.json: `{"bos_token": "<s>"}`; there may be none.

    Raises:
      UserError: a file that names them cannot be read.
    """
    return read_special_tokens(tokenizer).names


def render(
    messages: Sequence[Message], template: ChatTemplate, add_generation_prompt: bool = False, **more: Any
) -> str:
    """Write a conversation as the template does, as `transformers.apply_chat_template(tokenize=False)` would.

    `add_generation_prompt` also writes what comes before an answer, so that the model gives one. `more` are other names
    that the template may read, such as `tools`.

    Raises:
      UserError: the template refuses the messages or is not Jinja, or the `hf` extra is missing.
    """
    try:
        import jinja2
    except ImportError as error:
        raise UserError("a chat template needs the jinja2 package: pip install 'jaxpar[hf]'") from error
    turns = [{key: value for key, value in message.items() if value is not None} for message in messages]
    names = {"messages": turns, "add_generation_prompt": add_generation_prompt}
    try:
        return _compile(template.text).render(**names, **template.special_tokens, **more)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"the chat template {template.origin} refuses this conversation: {error}") from error


@lru_cache
def _compile(text: str) -> Any:
    """Compile a template in the sandbox and with the names that transformers gives it."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:  # Jinja's own escapes HTML
        return json.dumps(value, **{"ensure_ascii": False, **options})

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    # transformers marks the answers with a tag of its own, which writes what is inside.
    text = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", text)
    return made.from_string(re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", text))


def completion_spans(messages: Sequence[Message], template: ChatTemplate, **more: Any) -> tuple[str, list[Span]]:
    """Write a conversation, and say which characters [begin, end) of it the assistant has to write.

    An answer is what its turn adds to the conversation before it with the generation prompt, and so includes what
    closes the turn.

    Raises:
      UserError: the template writes earlier turns otherwise once later ones follow; or see `render`.
    """
    text, spans = render(messages, template, **more), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:i], template, add_generation_prompt=True, **more)
        after = render(messages[: i + 1], template, **more)
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"the chat template {template.origin} does not write turn {i + 1} as an addition to those before it, "
                "so which tokens are its answer cannot be told: end each conversation with its only assistant turn"
            )
        spans.append((len(before), len(after)))
    return text, spans


# Examples: a conversation, or a prompt with its completion, is one, and is never cut in two.

_ROLES = ("system", "developer", "user", "assistant", "tool")
_BINS = 64  # rows that are packed at a time
_GetTemplate = Callable[[], ChatTemplate]


@dataclass(frozen=True)
class Examples:
    """Examples to learn from, their ids int32 [N]."""

    ids: np.ndarray
    labels: np.ndarray
    """The next id [N], int32; -1 = not counted."""
    starts: np.ndarray
    """Where each example begins, and the end of the last: int64 [E + 1]."""
    origin: str
    """The file or folder, for messages."""
    note: str = ""
    """What was cut or left out."""
    files: tuple[Path, ...] = ()
    """The files that they were read from."""

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
        return f"{self.size:,} examples of {len(self.ids):,} tokens, {counted:,} of which count{self.note}"

    def split(self, val_fraction: float) -> tuple[Examples, Examples]:
        """Split off the last `val_fraction` of the examples, at least one; a UserError where there is a single one."""
        cut = min(int(self.size * (1 - val_fraction)), self.size - 1)
        if cut < 1:
            raise UserError(f"{self.origin} has a single example, which cannot be held out: set data.val_fraction=0")
        place = self.starts[cut]
        train = replace(self, ids=self.ids[:place], labels=self.labels[:place], starts=self.starts[: cut + 1])
        starts = self.starts[cut:] - place
        return train, replace(self, ids=self.ids[place:], labels=self.labels[place:], starts=starts, note="")

    def rows(self, data: DataConfig, seed: int, endless: bool) -> grain.IterDataset[HostBatch]:
        """Return rows [S] with whole examples, one in each or (`data.pack`) as many as fit, filled up with label -1.

        They are shuffled anew in each epoch if `endless`, and otherwise read once and in order.
        """

        def fetch(i: int) -> dict[str, np.ndarray]:
            place = slice(self.starts[i], self.starts[i + 1])
            return {"tokens": self.ids[place], "labels": self.labels[place]}

        def row(packed: dict[str, np.ndarray]) -> HostBatch:
            batch = {"tokens": packed["tokens"], "labels": packed["labels"]}
            apart = {"segments": packed["tokens_segment_ids"], "positions": packed["tokens_positions"]}
            return batch | apart if data.pack else batch

        order = grain.MapDataset.range(self.size)
        order = order.seed(seed).shuffle().repeat() if endless else order
        examples = order.map(fetch).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        packed = grain.experimental.FirstFitPackIterDataset(
            examples, length_struct={"tokens": data.seq_len, "labels": data.seq_len},
            padding_struct={"tokens": 0, "labels": -1}, num_packing_bins=_BINS if data.pack else 1,
            max_sequences_per_bin=None if data.pack else 1, shuffle_bins=False,
        )  # fmt: skip
        return packed.map(row)


def load_examples(paths: Sequence[str], data: DataConfig, vocab_size: int) -> tuple[list[Examples], Tokenizer]:
    """Load the examples in JSONL files or folders of them, with `data.tokenizer` and the chat template beside it.

    A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, with `tools` if the template reads them, or
    `{"prompt": text, "completion": text}`, which takes no template and is closed by the end-of-text token.

    Raises:
      UserError: a file is missing, or a line is broken; the message has its file and number.
    """
    tokenizer = make_tokenizer(data.tokenizer, vocab_size=vocab_size, bos=data.bos)
    template = cache(lambda: load_template(data.tokenizer))  # prompts and completions need none
    return [_load(path, data, tokenizer, template) for path in paths], tokenizer


def _load(path: str, data: DataConfig, tokenizer: Tokenizer, template: _GetTemplate) -> Examples:
    rows, cut, dropped = [], 0, 0
    files = text_files(path)
    for file in files:
        for number, line in enumerate(read_text(file).split("\n"), 1):
            if not line.strip():
                continue
            try:
                ids, counted = _encode(json.loads(line), data, tokenizer, template)
            except (json.JSONDecodeError, RecursionError) as error:
                raise UserError(f"{file}, line {number} is not JSON: {error}") from error
            except (UserError, UnicodeError) as error:
                raise UserError(f"{file}, line {number}: {error}") from error
            cut += len(ids) > data.seq_len + 1
            labels = np.where(counted, ids, -1).astype(np.int32)[1:][: data.seq_len]
            if (labels != -1).any():
                rows.append((ids[:-1][: data.seq_len], labels))
            else:
                dropped += 1
    if not rows:
        raise UserError(f"{path} has no example whose completion begins within data.seq_len={data.seq_len} tokens")
    ids, labels = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    note = f" ({cut} were longer than data.seq_len and cut, {dropped} of them left out as nothing that counts was left)"
    starts = np.cumsum([0, *(len(row) for row, _ in rows)])
    return Examples(ids, labels, starts, path, note if cut else "", tuple(files))


def _encode(row: Any, data: DataConfig, tokenizer: Tokenizer, template: _GetTemplate) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n] of an example, and which of them count [n]."""
    match row:
        case {"messages": [_, *_] as messages}:
            for i, message in enumerate(messages, 1):
                if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                    raise UserError(f"message {i} is no object with a role and a content that is text")
                if message.get("role") not in _ROLES:
                    raise UserError(f"message {i} has the role {message.get('role')!r}, not one of {', '.join(_ROLES)}")
            more = {"tools": row["tools"]} if row.get("tools") else {}
            text, spans = completion_spans(messages, template(), **more)
        case {"messages": _}:
            raise UserError("messages is no list with a message in it")
        case {"prompt": str(prompt), "completion": str(completion)}:
            text, spans = prompt + completion, [(len(prompt), len(prompt + completion))]
        case _:
            found = f"the keys {', '.join(row)}" if isinstance(row, dict) else str(row)[:40]
            raise UserError(f"found {found}, not messages, or prompt and completion as text")
    text.encode()  # half of a surrogate pair is no text
    ids, begins, ends = _with_places(text, tokenizer)
    counted = np.zeros(len(ids), bool)
    for begin, end in spans:
        counted |= (ends > begin) & (begins < end)
    empty = not counted.any()
    if "messages" not in row:  # a template writes its own
        begin = missing_begin(ids, tokenizer)
        ids, counted = np.append(begin, ids), np.append(np.zeros(len(begin), bool), counted)
    if "messages" not in row and tokenizer.end_of_text is not None:
        ids, counted = np.append(ids, np.int32(tokenizer.end_of_text)), np.append(counted, True)
    if empty or not counted[1:].any():
        raise UserError("there is nothing to learn: no assistant message, or an empty completion")
    return ids, counted | (data.loss_on == "all")


def _with_places(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids [n], and where in the text the characters of each begin and end [n]."""
    if isinstance(tokenizer, HFTokenizer):
        found = tokenizer.inner.encode(text, add_special_tokens=False)
        begins, ends = np.array(found.offsets, int).reshape(-1, 2).T
        # Byte-level tokenizers leave spaces out of a token's place: one of spaces alone begins where the last ended.
        begins = np.where(begins == ends, np.minimum(begins, np.append(0, ends[:-1])), begins)
        return tokenizer.known(found.ids), begins, ends
    begins = np.repeat(np.arange(len(text)), [len(tokenizer.encode(char)) for char in text])
    return tokenizer.encode(text), begins, begins + 1
