"""A tokenizer.json of a stranger: what the tokenizers package raises over it, and how long a text
may become in it.

The package loads files that it fails in later, at a text without a token for it or at a pattern
that takes too long, and it panics over some. A few steps that each double a text fill any memory,
so a text that would become much longer is refused before it is.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.base.errors import UserError, short

if TYPE_CHECKING:
    import tokenizers  # from the hf extra

_PANIC = "PanicException"
"""The class of a panic of Rust, which is no Exception, and which no module gives."""
_TIMES = 32
"""The factor by which a text may become longer: normal forms of Unicode make 18 characters of
some.
"""
_ALWAYS = 2**20
"""The characters that any text may become: tens of MiB in the package."""
_LONGEST_MAPPED = 256
"""The bytes that a table of SentencePiece may put in place of a character; its own have 33."""
_MOST_BYTE_LEVELS = 4
"""The most steps that write a byte as a character, each of two bytes where it is not ASCII."""
_MOST_ADDED = 2**16
"""The most tokens that a post-processor may put around a text."""
_ALONE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
}
"""A tokenizer.json of nothing but a normalizer."""


@contextmanager
def asking(origin: object, what: str) -> Iterator[None]:
    """Turn all that the tokenizers package raises inside into a UserError.

    Args:
      origin: the tokenizer's file.
      what: what is asked of the package: `decode ids`.

    Raises:
      UserError: the package raised something, be it a panic.
    """
    try:
        yield
    except BaseException as error:  # the package raises no narrower exception
        panics = type(error).__name__ == _PANIC
        if isinstance(error, UserError) or not (panics or isinstance(error, Exception)):
            raise
        why = str(error) or type(error).__name__
        raise UserError(
            f"tokenizers cannot {what} with {origin}: {why}: correct the file, or take another"
        ) from error


class Steps(NamedTuple):
    """The steps that change a text one after the other, each the JSON of a normalizer."""

    normalizer: tuple[str, ...] = ()
    """The steps before the text is cut into tokens; empty = none makes a text longer."""
    decoder: tuple[str, ...] = ()
    """The steps for each token of a text that is made of tokens."""


def read_steps(inner: tokenizers.Tokenizer, origin: object) -> Steps:
    """Read the steps of a tokenizer that change the length of a text.

    Args:
      origin: its file, for messages.

    Raises:
      UserError: a part of it repeats a text, or makes it longer than any needs to.
    """
    normalizers = _parts(inner.normalizer)
    byte_levels = [one for one in _parts(inner.pre_tokenizer) if one["type"] == "ByteLevel"]
    if len(byte_levels) > _MOST_BYTE_LEVELS:
        raise UserError(
            f"{origin}: its pre_tokenizer writes bytes as characters {len(byte_levels)} times, "
            f"one after the other, and {_MOST_BYTE_LEVELS} at most are read: leave one of them"
        )
    for part in _parts(inner.post_processor):
        if part["type"] == "TemplateProcessing":
            _require_one_text(part, origin)
    for part in normalizers:
        if _longest_mapped(part) > _LONGEST_MAPPED:
            raise UserError(
                f"{origin}: precompiled_charsmap of its normalizer puts {_longest_mapped(part)} "
                f"bytes in place of a character, and {_LONGEST_MAPPED} at most are read: is the "
                "file damaged?"
            )
    replaced = [part for part in _parts(inner.decoder) if part["type"] == "Replace"]
    return Steps(_lengthening(normalizers), _lengthening(replaced))


def require_room(steps: Sequence[str], texts: Sequence[str], origin: object) -> None:
    """Refuse texts that some steps would make much longer; where they cannot, nothing is done.

    Args:
      steps: a field of `Steps`.
      texts: each is changed by itself.
      origin: the tokenizer's file.

    Raises:
      UserError: the texts would become too long.
    """
    whole = sum(map(len, texts))
    room = max(_ALWAYS, _TIMES * whole)
    most = float(whole)
    for step in steps:
        most = _most(json.loads(step), most, len(texts))
    if most <= room:
        return
    with asking(origin, f"normalize {short(texts[0] if len(texts) == 1 else texts)}"):
        for step in steps:
            length = sum(_length(step, text) for text in texts)
            if length <= room:
                texts = [_normalized(step, text) for text in texts]
                length = sum(map(len, texts))
            if length > room:
                raise UserError(
                    f"{origin} makes {length:,} characters of a text of {whole:,}, by "
                    f"{short(json.loads(step))}, and at most {room:,} are taken: correct the file, "
                    "or take another"
                )


def _parts(whole: Any) -> list[dict[str, Any]]:
    """List the parts of a normalizer or its like, and of sequences in it, in their order.

    They are in the form in which the package writes them: a file may have older ones.
    """
    if whole is None:
        return []
    found = list[dict[str, Any]]()
    left = [json.loads(whole.__getstate__())]
    while left:
        part = left.pop()
        if part["type"] == "Sequence":
            (parts,) = (value for value in part.values() if isinstance(value, list))
            left += reversed(parts)
        else:
            found.append(part)
    return found


def _lengthening(parts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the steps, or none where no text becomes longer by any of them."""
    if all(_most(part, 1, 1) <= 1 for part in parts):
        return ()
    return tuple(map(json.dumps, parts))


def _require_one_text(part: Mapping[str, Any], origin: object) -> None:
    """Refuse a template that writes a text twice, or a great many tokens around it."""
    pieces = part.get("single") or []
    if sum("Sequence" in piece for piece in pieces) > 1:
        raise UserError(
            f"{origin}: its post_processor writes a text more than once: correct `single` there"
        )
    special = part.get("special_tokens") or {}
    names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    added = sum(len(special.get(name, {}).get("ids", [])) for name in names)
    if added > _MOST_ADDED:
        raise UserError(
            f"{origin}: its post_processor writes {added:,} tokens around a text, and "
            f"{_MOST_ADDED:,} at most are taken: correct `single` there"
        )


def _longest_mapped(part: Mapping[str, Any]) -> int:
    """Return the most bytes that a table of SentencePiece puts in place of a character.

    The table is the length of a trie, the trie, and texts that each end with a zero.
    """
    if part["type"] != "Precompiled":
        return 0
    try:
        table = base64.b64decode(part.get("precompiled_charsmap") or "")
        (trie,) = struct.unpack("<I", table[:4])
    except (binascii.Error, struct.error):
        return 0
    return max(map(len, table[4 + trie :].split(b"\0")))


def _most(step: Mapping[str, Any], length: float, texts: int) -> float:
    """Return the most characters that texts of a total length may become by a step."""
    match step:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(pattern)}} if (
            pattern
        ):
            return length * max(1, math.ceil(len(content) / len(pattern)))
        case {"type": "Replace", "content": str(content)}:  # of what may be empty
            return length + (length + texts) * len(content)
        case {"type": "Prepend", "prepend": str(prepend)}:
            return length + texts * len(prepend)
        case {"type": "ByteLevel"}:
            return length * 4
        case {"type": "Precompiled"}:
            return length * max(1, _longest_mapped(step))
    return length


def _length(step: str, text: str) -> int:
    """Return how long a text becomes by a step that may make it a few times as long; else its
    length.
    """
    part = json.loads(step)
    match part:
        case {"type": "Replace", "content": str(content)}:
            without, marked = (
                len(_normalized(json.dumps({**part, "content": one}), text)) for one in ("", "x")
            )
            return without + (marked - without) * len(content)
        case {"type": "Prepend", "prepend": str(prepend)}:
            return len(text) + len(prepend)
    return len(text)


def _normalized(step: str, text: str) -> str:
    return _alone(step).normalizer.normalize_str(text)


@lru_cache(64)
def _alone(step: str) -> tokenizers.Tokenizer:
    """Make the tokenizer that has one step alone."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(_ALONE | {"normalizer": json.loads(step)}))
