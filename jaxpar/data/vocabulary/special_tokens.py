"""The special tokens that a tokenizer's folder declares: which begin a text, and which end one.

This is the one place that knows them, for data, prompts, the end of what is generated, evaluation
and export. An id that is declared by its token stands in tokenizer_config.json and
special_tokens_map.json, one that is declared as a number in generation_config.json and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Bos
from jaxpar.base.errors import UserError, read_json, reading
from jaxpar.data.vocabulary.stranger import asking

if TYPE_CHECKING:
    import tokenizers  # from the hf extra

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
GENERATION = "generation_config.json"
MODEL_CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
"""The folders of more chat templates, each by the name of its file."""
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKEN_IDS = "token_ids.json"
"""The file of a run folder with the token ids of the config.json of the Hugging Face folder that it
came from.
"""

_ID_KINDS = {
    "bos_token_id": int | list[int] | None,
    "eos_token_id": int | list[int] | None,
}
END_OF_TEXT = (
    "<|endoftext|>",  # GPT-2, Qwen
    "<|end_of_text|>",  # LLaMA 3
    "</s>",  # LLaMA 2, Mistral
    "<eos>",  # Gemma
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<|eos|>",
    "[EOS]",
)
"""The usual names of the token that ends a text. One of them is guessed where no file says which,
and only a special token.
"""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that the files beside a tokenizer.json declare; ids are in the order in
    which they are to be believed.
    """

    names: dict[str, str]
    """The tokens by their name in `transformers`: `{"bos_token": "<s>"}`."""
    add_bos: bool | None
    """Whether the tokenizer is to put its begin of text before a text; None = its own
    post-processor decides.
    """
    begins: tuple[int, ...]
    """The ids that are said to begin a text."""
    ends: tuple[int, ...]
    """The ids that are said to end a text."""


@dataclass(frozen=True)
class TextEnds:
    """The ids that a tokenizer's texts begin and end with, each None where there is none."""

    begin_of_text: int | None
    """The id that is put before each text."""
    end_of_text: int | None
    """The id that closes a document."""
    notes: tuple[str, ...]
    """The notes on what was guessed, or could not be used, a sentence each."""


def beside(tokenizer: str | Path, name: str) -> Path:
    """Return the path of the file `name` beside a tokenizer.

    Beside `train.bin.tokenizer.json`, which a token file brings, `tokenizer_config.json` is
    `train.bin.tokenizer_config.json`; beside any other it has its own name.
    """
    path = Path(tokenizer)
    prefix = path.name.removesuffix(TOKENIZER)
    return path.with_name(prefix + name if prefix.endswith(".bin.") else name)


def read_special_tokens(tokenizer: str | Path) -> SpecialTokens:
    """Read what the files beside a tokenizer.json say of its special tokens; any of them may be
    missing.

    Raises:
      UserError: one of them cannot be read, or is no JSON object.
    """
    config = _read(beside(tokenizer, TOKENIZER_CONFIG))
    names = _names(config)
    also = _names(_read(beside(tokenizer, TOKENS_MAP)))
    # As in transformers: a config that lists its added tokens was written whole, beside an older
    # one the map counts.
    if "added_tokens_decoder" in config:
        names = also | names
    else:
        names = names | also
    add_bos = config.get("add_bos_token")
    files = [
        _read(beside(tokenizer, name), _ID_KINDS) for name in (GENERATION, TOKEN_IDS, MODEL_CONFIG)
    ]
    return SpecialTokens(
        names=names,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        begins=_ids(files, "bos_token_id"),
        ends=_ids(files, "eos_token_id"),
    )


def _read(
    file: Path,
    kinds: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    if file.exists():
        return read_json(file, kinds)
    return {}


def _names(config: dict[str, Any]) -> dict[str, str]:
    """Read the tokens that a file names; each is its text, or an object that has it as
    `content`.
    """
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    # those of one model by name: image_token
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(more := config.get(key), dict):
            named |= more
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _ids(
    files: Iterable[dict[str, Any]],
    key: str,
) -> tuple[int, ...]:
    """Read the ids that some files give a key, one or a list, each once; Gemma 3 has them in its
    `text_config`.
    """
    found: dict[int, None] = {}
    for file in files:
        value = _given(file, key)
        if isinstance(value, list):
            values = value
        else:
            values = [value]
        found |= dict.fromkeys(
            id for id in values if isinstance(id, int) and not isinstance(id, bool)
        )
    return tuple(found)


def _given(config: dict[str, Any], key: str) -> Any:
    """Return the value of a key, which a model of more than text has in its `text_config`."""
    inner = config.get("text_config")
    value = config.get(key)
    if value is None and isinstance(inner, dict):
        return inner.get(key)
    return value


def carry_declared(source: Path | None, target: Path, keep: bool = False) -> None:
    """Copy what the files beside one tokenizer declare of it to another tokenizer, and nothing
    else.

    Args:
      source: the tokenizer.json that the files lie beside; None = nothing is declared.
      target: another tokenizer.json, perhaps of a token file (`beside`).
      keep: whether what the target has besides stays; otherwise the files that the source lacks are
        removed.

    Raises:
      OSError: a file cannot be written.
      UserError: a file cannot be read.
    """
    if source is None:
        declared = {}
    else:
        declared = read_declared(source)
    for name, content in declared.items():
        copy = _place(target, name)
        if not copy.exists() or copy.read_bytes() != content:
            write_whole(copy, content)
    for name in () if keep else declaring_files(target):
        if name not in declared:
            _place(target, name).unlink()


def read_declared(tokenizer: Path) -> dict[str, bytes]:
    """Read the content of each file that says something of a tokenizer, by name; of a config.json
    the ids alone.

    Raises:
      UserError: one of them cannot be read.
    """
    found: dict[str, bytes] = {}
    for name in declaring_files(tokenizer):
        file = _place(tokenizer, name)
        with reading(file):
            found[name] = file.read_bytes()
    config = _read(beside(tokenizer, MODEL_CONFIG))
    ids = {key: value for key in ID_KEYS if (value := _given(config, key)) is not None}
    if ids:
        found[TOKEN_IDS] = json.dumps(ids).encode()
    return found


def declaring_files(tokenizer: Path) -> list[str]:
    """List the names of the files beside a tokenizer that say something of it, but for the model's
    config.json.

    Args:
      tokenizer: the tokenizer.json, which may be absent.
    """
    names = (TOKENIZER_CONFIG, TOKENS_MAP, TEMPLATE, PROCESSOR_TEMPLATE, GENERATION, TOKEN_IDS)
    found = [name for name in names if beside(tokenizer, name).exists()]
    for folder in TEMPLATE_FOLDERS:
        found += [
            f"{folder}/{file.name}" for file in sorted(beside(tokenizer, folder).glob("*.jinja"))
        ]
    return found


def _place(tokenizer: Path, name: str) -> Path:
    """Return the path of a file beside a tokenizer, also of one in a folder of templates."""
    first, *rest = name.split("/")
    return beside(tokenizer, first).joinpath(*rest)


def carried_token_ids(tokenizer: Path) -> dict[str, Any]:
    """Read the ids of the config.json that a tokenizer came with (`carry_declared`):
    `{"eos_token_id": 2}`.

    Raises:
      UserError: the file that has them cannot be read.
    """
    there = _read(beside(tokenizer, TOKEN_IDS))
    return {key: there[key] for key in ID_KEYS if key in there}


def find_ends(
    inner: tokenizers.Tokenizer, declared: SpecialTokens, vocab_size: int, origin: str, bos: Bos
) -> TextEnds:
    """Find which ids a tokenizer's texts begin and end with.

    The end is the tokenizer's `eos_token`, as in `transformers`. Where no file names one that the
    model has, it is the first of the ids that end what is generated, and where there is none
    either, a special token of a usual name.

    Args:
      declared: what the files beside it say.
      vocab_size: the model has the ids below this; 0 = all of the tokenizer's.
      origin: the tokenizer's file, for messages.
      bos: whether a text begins with the tokenizer's begin of text.

    Raises:
      UserError: `bos` is True, and the tokenizer has no begin of text.
    """
    known = _Known(inner, vocab_size)
    notes = [
        f"{origin}: its {name} {declared.names[name]!r} is no token of the model, and is not used"
        for name in ("bos_token", "eos_token")
        if name in declared.names and known.id_of(declared.names[name]) is None
    ]
    end = known.first(
        known.id_of(declared.names.get("eos_token")),
        *declared.ends,
    )
    if end is None:
        end = _guess_end(known)
        what = "none of its special tokens has a usual name for it, so documents are not closed"
        if end is not None:
            what = f"its special token {inner.id_to_token(end)!r} (id {end}) is taken"
        notes.append(f"{origin}: no file beside it says what ends a text; {what}")
    put = known.first(
        find_put(
            inner,
            known.id_of(declared.names.get("bos_token")),
            origin,
        )
    )
    begin = _find_begin(known, declared, put, bos)
    if begin is None and bos is True:
        raise UserError(
            f"data.bos=true: no file beside {origin} names a bos_token that it has: leave "
            "data.bos out"
        )
    if bos == "auto" and begin != put:
        notes.append(_disagreement(inner, begin, put, origin))
    return TextEnds(begin, end, tuple(notes))


class _Known(NamedTuple):
    """The tokens of a tokenizer that its model has."""

    inner: tokenizers.Tokenizer
    vocab_size: int

    def first(self, *ids: int | None) -> int | None:
        """Return the first id that the model has."""
        return next(
            (id for id in ids if id is not None and self._has(id)),
            None,
        )

    def id_of(self, token: str | None) -> int | None:
        if token is None:
            return None
        return self.first(self.inner.token_to_id(token))

    def _has(self, id: int) -> bool:
        below = id < self.vocab_size or not self.vocab_size
        return id >= 0 and below and self.inner.id_to_token(id) is not None


def put_before(inner: tokenizers.Tokenizer, begin: int | None) -> str:
    """Write the tokenizer.json of a tokenizer that puts an id before each text, or none, and
    nothing else.
    """
    from tokenizers.processors import TemplateProcessing

    if begin is None:
        token = None
    else:
        token = inner.id_to_token(begin)
    before = "" if token is None else f"{token}:0 "
    named = [] if token is None else [(token, begin)]
    inner.post_processor = TemplateProcessing(f"{before}$A:0", f"{before}$A:0 $B:1", named)
    return inner.to_str(pretty=True)


def _guess_end(known: _Known) -> int | None:
    """Find the special token that has a usual name of an end of text; a plain word, as `</s>` of
    HTML, is none.
    """
    added = known.inner.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    return known.first(*(known.id_of(name) for name in END_OF_TEXT if name in special))


def _find_begin(
    known: _Known,
    declared: SpecialTokens,
    put: int | None,
    bos: Bos,
) -> int | None:
    """Find the id that is put before each text, given the one that the post-processor puts there,
    if any.

    By default `add_bos_token` of the tokenizer's config comes before the post-processor. So it does
    in `transformers` 4.57 for the tokenizers of LLaMA, Gemma and Cohere; for others, and for all in
    5.24, the post-processor decides alone. Where `transformers` wrote the folder the two agree.
    """
    if bos is False or (bos == "auto" and declared.add_bos is False):
        return None
    named = known.id_of(declared.names.get("bos_token"))
    if bos == "auto" and declared.add_bos is None:
        return put
    return known.first(named, put, *(declared.begins if bos is True else ()))


def _disagreement(
    inner: tokenizers.Tokenizer, begin: int | None, put: int | None, origin: str
) -> str:
    """Write the note on a config that disagrees with the post-processor on which id begins a
    text.
    """
    if begin is None:
        token = inner.id_to_token(put or 0)
        what = "begin without"
        other = "true"
    else:
        token = inner.id_to_token(begin)
        what = "begin with"
        other = "false"
    return (
        f"{origin}: texts {what} {token!r}, as add_bos_token of tokenizer_config.json says; its "
        "post-processor, which "
        f"transformers 5 obeys, does otherwise, as data.bos={other} does"
    )


def find_put(inner: tokenizers.Tokenizer, named: int | None, origin: object) -> int | None:
    """Find the id that a tokenizer's post-processor puts before a text; None where it puts none, or
    several.

    Args:
      named: the id that is said to begin a text, if one is.
      origin: the tokenizer's file, for messages.

    Raises:
      UserError: the post-processor fails.
    """
    try:
        with asking(origin, "encode 'a'"):
            found = inner.encode("a")
    except UserError:  # a tokenizer of words may not know this one
        with asking(origin, "encode an empty text"):
            found = inner.encode("")
    before = [
        id
        for id, _ in takewhile(
            lambda pair: pair[1], zip(found.ids, found.special_tokens_mask, strict=True)
        )
    ]
    # nothing is left of the text, so what follows it may stand here as well
    if len(before) == len(found.ids):
        before = [id for id in before[:1] if id == named]
    return before[0] if len(before) == 1 else None
