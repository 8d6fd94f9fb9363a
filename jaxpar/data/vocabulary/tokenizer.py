"""The tokenizers that turn text into token ids and back: by bytes, by the characters of a text, or
with a Hugging Face tokenizer.json.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from jaxpar.base.config import Bos
from jaxpar.base.errors import UTF8, UserError, read_json, reading, short, suggest
from jaxpar.base.ranges import MOST_WORDS
from jaxpar.data.rows import kind_of
from jaxpar.data.vocabulary.added_tokens import add_declared
from jaxpar.data.vocabulary.special_tokens import find_ends, read_special_tokens
from jaxpar.data.vocabulary.stranger import Steps, asking, read_steps, require_room

if TYPE_CHECKING:
    import tokenizers  # from the hf extra


_SHOWN = 100
"""The characters of a text from which a message takes those that it shows."""
OLDER_FORMS = ("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt")
"""The files in which older programs keep a tokenizer."""
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class BytesTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8: it encodes any text with 256 ids."""

    vocab_size: ClassVar[int] = 256
    """The largest id plus one."""
    end_of_text: ClassVar[None] = None
    """The id that closes a document; there is none, as no id is free for this."""
    begin_of_text: ClassVar[None] = None
    """The id that is put before each text."""
    notes: ClassVar[tuple[str, ...]] = ()
    """The notes on what begins and ends a text."""
    file: Path | None = field(default=None, compare=False)
    """The file that names this tokenizer, beside which a chat template may lie."""

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as ids [N], int32."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of some ids; what is not text, or not an id of this vocabulary, becomes
        U+FFFD.
        """
        # The byte 255, which a larger id becomes, never occurs in UTF-8.
        return (
            np.minimum(ids, 255)
            .astype(np.uint8)
            .tobytes()
            .decode(
                "utf-8",
                errors="replace",
            )
        )

    def to_json(self) -> str:
        """Write all that `load_tokenizer` needs; a Hugging Face tokenizer stays a file that its own
        library reads.
        """
        return json.dumps({"tokenizer": "bytes"})


@dataclass(frozen=True)
class CharsTokenizer:
    """A tokenizer with one id per character of a fixed set, in code point order, like nanoGPT's
    character-level data.
    """

    chars: str
    file: Path | None = field(default=None, compare=False)
    end_of_text: ClassVar[None] = None
    begin_of_text: ClassVar[None] = None
    notes: ClassVar[tuple[str, ...]] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.chars)

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as ids [N], int32; a UserError for a character outside the set."""
        ids = {char: i for i, char in enumerate(self.chars)}
        try:
            return np.fromiter(
                (ids[char] for char in text),
                np.int32,
                len(text),
            )
        except KeyError as error:
            char = error.args[0]
            raise UserError(
                f"character {char!r} at position {text.index(char)} is not one of the "
                f"{len(self.chars)} characters "
                "of the chars tokenizer, which are those of its training text: leave it out, or "
                "use the bytes tokenizer"
            ) from error

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(self.chars[i] if i < len(self.chars) else "\ufffd" for i in ids)

    def to_json(self) -> str:
        return json.dumps({"tokenizer": "chars", "chars": self.chars})


@dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer.json of Hugging Face; it adds no special token to a text, and hides none."""

    inner: tokenizers.Tokenizer
    vocab_size: int
    end_of_text: int | None
    """The id that closes a document, by what the files beside it say
    (`jaxpar.data.vocabulary.special_tokens`).
    """
    begin_of_text: int | None = None
    """The id that is put before each text; None = none is (`data.bos`)."""
    file: Path | None = None
    notes: tuple[str, ...] = ()
    """The notes on what begins and ends a text: what was guessed, or could not be used."""
    steps: Steps = field(default=Steps(), compare=False)
    """The steps that may make a text longer."""

    @property
    def whole_vocab_size(self) -> int:
        """The largest id plus one, with the special tokens that the model lacks."""
        return max(self.inner.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> np.ndarray:
        return self.known(self.encoding(text).ids)

    def encoding(self, text: str) -> tokenizers.Encoding:
        """Encode a text, with where in it each id stands; a UserError where the tokenizer fails in
        it.
        """
        try:
            require_room(self.steps.normalizer, [text], self.file)
            with asking(self.file, f"encode {short(text[:_SHOWN])}"):
                return self.inner.encode(text, add_special_tokens=False)
        except UserError:
            _require_unicode(text)
            raise

    def known(self, ids: Sequence[int]) -> np.ndarray:
        """Return the ids [N], int32, and refuse with a UserError special tokens that the model
        lacks.
        """
        found = np.array(ids, np.int32)
        if found.max(initial=-1) >= self.vocab_size:
            token = self.inner.id_to_token(int(found.max()))
            raise UserError(
                f"the text has {token!r}, id {found.max()}, and the model only "
                f"{self.vocab_size} tokens"
            )
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.decode_all([ids])[0]

    def decode_all(self, rows: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Return the text of each row of ids; a UserError where the tokenizer fails in one."""
        listed = [[int(id) for id in row] for row in rows]
        with asking(self.file, "decode ids"):
            if self.steps.decoder:
                tokens = [self.inner.id_to_token(id) or "" for row in listed for id in row]
                require_room(self.steps.decoder, tokens, self.file)
            return self.inner.decode_batch(listed, skip_special_tokens=False)

    def to_json(self) -> str:
        with asking(self.file, "write a tokenizer"):
            return self.inner.to_str()


def _require_unicode(text: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer of Hugging Face takes for a text."""
    try:
        text.encode()
    except UnicodeError as error:
        raise UserError(f"it is not Unicode text: {error}") from error


Tokenizer = BytesTokenizer | CharsTokenizer | HFTokenizer


def make_tokenizer(
    name: str, texts: Iterable[str] = (), vocab_size: int = 0, bos: Bos = "auto"
) -> Tokenizer:
    """Make the tokenizer of `data.tokenizer`: `bytes`, `chars` (of `texts`), or a JSON file
    (`load_tokenizer`).

    Raises:
      UserError: there is no such tokenizer, the file is not one, or `bos` asks for a begin of text
        that it lacks.
    """
    if bos is True and name in ("bytes", "chars"):
        raise _no_begin(name)
    if name == "bytes":
        return BytesTokenizer()
    if name == "chars":
        return CharsTokenizer("".join(sorted(set().union(*texts))))
    if not name.endswith(".json"):
        hint = suggest(name, ("bytes", "chars"))
        raise UserError(
            f"no tokenizer {name!r}{hint}: bytes, chars, a tokenizer.json or its folder, or a "
            "model of the Hugging Face Hub, hf://org/name"
        )
    return load_tokenizer(name, vocab_size, bos)


def _no_begin(kind: str) -> UserError:
    return UserError(
        f"data.bos=true: the tokenizer {kind} has no token that begins a text: leave data.bos out"
    )


def load_tokenizer(path: str | Path, vocab_size: int = 0, bos: Bos = "auto") -> Tokenizer:
    """Load a tokenizer from a file that holds its `to_json`, or from a Hugging Face tokenizer.json.

    What begins and ends its texts is read from the files beside it; `bos` is `data.bos`.

    Special tokens beyond a `vocab_size` other than 0 do not count, and a text that has one is
    refused: Gemma 3 has one for images, for which its models of text alone have no row.

    Raises:
      UserError: the file cannot be read or is not a tokenizer, the `hf` extra is missing, or `bos`
        asks for a begin of text that it lacks.
    """
    path = Path(path)
    if not path.exists():
        _require_this_form(path)
    match read_json(path):
        case {"tokenizer": "bytes" | "chars" as kind} if bos is True:
            raise _no_begin(kind)
        case {"tokenizer": "bytes"}:
            return BytesTokenizer(path)
        case {"tokenizer": "chars", "chars": str(chars)}:
            return CharsTokenizer(chars, path)
        case {"model": dict()}:
            return _hf_tokenizer(path, vocab_size, bos)
    raise UserError(
        f"{path} is no tokenizer: expected a tokenizer.json of Hugging Face, or one that jaxpar "
        "saved"
    )


def _require_this_form(path: Path) -> None:
    """Refuse a tokenizer of which only an older form is there, and say how to make this one."""
    older = [name for name in OLDER_FORMS if (path.parent / name).exists()]
    if older:
        raise UserError(
            f"{path} is not there, and {' and '.join(older)} beside it are an older form of a "
            "tokenizer, which is not read: transformers writes the newer one, by "
            f"AutoTokenizer.from_pretrained('{path.parent}').save_pretrained('{path.parent}')"
        )


def _hf_tokenizer(path: Path, vocab_size: int, bos: Bos) -> HFTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"tokenizer {path} needs the tokenizers package: pip install 'jaxpar[hf]'"
        ) from error
    text = read_text(path)  # `from_file` refuses a byte order mark
    with asking(path, "load a tokenizer"):
        inner = tokenizers.Tokenizer.from_str(text)
    # Files made for a classifier cut and pad a text to its length, which would lose the rest of a
    # document.
    inner.no_truncation()
    inner.no_padding()
    added = add_declared(inner, path)
    beyond = {
        id
        for id, token in inner.get_added_tokens_decoder().items()
        if token.special and id >= vocab_size > 0
    }
    vocab = {token: id for token, id in inner.get_vocab().items() if id not in beyond}
    largest = max(vocab, key=lambda token: vocab[token], default="")
    if vocab.get(largest, 0) >= MOST_WORDS:
        # the package would write a line for each id below it
        raise UserError(
            f"{path} has the id {vocab[largest]} for {largest!r}, and a vocabulary has at most "
            f"{MOST_WORDS} ids: the file is damaged"
        )
    steps = read_steps(inner, path)
    require_room(steps.normalizer, ["a"], path)  # which the next line encodes
    ends = find_ends(inner, read_special_tokens(path), vocab_size, str(path), bos)
    return HFTokenizer(
        inner,
        max(vocab.values(), default=-1) + 1,
        end_of_text=ends.end_of_text,
        begin_of_text=ends.begin_of_text,
        file=Path(path),
        notes=added + ends.notes,
        steps=steps,
    )


def encode_document(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Encode a text as ids [N], int32, between the ids that begin and end one, as far as the
    tokenizer has them.

    A text without anything but white space, or of which the tokenizer leaves nothing, has no ids:
    to learn that one document's end follows another's is to learn to write nothing.
    """
    if text.strip():
        ids = tokenizer.encode(text)
    else:
        ids = np.zeros(0, np.int32)
    if not len(ids):
        return ids
    if tokenizer.end_of_text is None:
        closing = []
    else:
        closing = [tokenizer.end_of_text]
    return np.concatenate(
        [
            missing_begin(ids, tokenizer),
            ids,
            np.array(closing, np.int32),
        ]
    )


def encode_prompt(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Encode a text that is to be continued as ids [N], int32: a document's without its end."""
    ids = tokenizer.encode(text)
    return np.concatenate([missing_begin(ids, tokenizer), ids])


def missing_begin(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the begin of text, int32 [1], if a text's ids lack it, else [0].

    A text may be written with it, as by a chat template, and it never stands there twice.
    """
    begin = tokenizer.begin_of_text
    there = begin is None or (len(ids) > 0 and ids[0] == begin)
    return np.array([] if there else [begin], np.int32)


def encode_files(
    files: Iterable[Path],
    tokenizer: Tokenizer,
    texts_of: Callable[[Path], Iterable[str]] = lambda file: [read_text(file)],
) -> Iterator[np.ndarray]:
    """Encode each document by `encode_document`, in the dtype of `token_dtype`; an error names the
    file.

    A document without text yields no ids. A file is a document, or what `texts_of` finds in it.
    """
    for file in files:
        for text in texts_of(file):
            try:
                yield encode_document(text, tokenizer).astype(token_dtype(tokenizer.vocab_size))
            except UserError as error:
                raise UserError(f"{file}: {error}") from error


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which ids are stored: little-endian uint16, or uint32 for a larger
    vocabulary.
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def read_text(file: Path) -> str:
    """Read the text of a UTF-8 file, with its line ends as they are and without a byte order mark.

    Raises:
      UserError: it cannot be read as text.
    """
    with reading(file):
        content = file.read_bytes()
    return decode_text(content, file)


def decode_text(content: bytes, file: Path) -> str:
    """Decode the bytes of a text file, or a part of them.

    Raises:
      UserError: they are no text in UTF-8.
    """
    if content.startswith(UTF16_MARKS):
        raise UserError(
            f"{file} is UTF-16 text, as some programs of Windows write it: save it as UTF-8"
        )
    kind = kind_of(content)
    if kind:
        raise UserError(f"{file} is a {kind} file, not text")
    if b"\0" in content:
        raise UserError(
            f"{file} is binary (NUL at byte {content.index(0)}), not text: ids of tokens are "
            "read with --data.source tokens"
        )
    try:
        return content.decode(UTF8)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first"
        ) from error
