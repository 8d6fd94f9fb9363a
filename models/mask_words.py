"""The base of the words of `model.masks`, their registration, and the reading of a word.

A word is a frozen dataclass whose fields are its numbers, registered by its name; a program adds
its own in the same way as `jaxpar.models.masks` adds ours:

    @register_mask("even")
    @dataclass(frozen=True)
    class Even(MaskWord):
        apart: int = 2

        def mask(self, length):
            return Causal() & Dilated(length, self.apart)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from jaxpar.base.errors import UserError, suggest
from jaxpar.base.ranges import Range, ranges
from jaxpar.base.registry import Registry, require_callable
from jaxpar.kernels.masks import Mask

MayBeZero = Annotated[int, Range(0, 2**31 - 1)]
"""The type of a number that may be 0. Other numbers are at least 1, unless their type has a range.
"""
_AT_LEAST_ONE = Range(1, 2**31 - 1)
Word = TypeVar("Word", bound="type[MaskWord]")


class MaskWord:
    """The base of the words of `model.masks`: a word is a frozen dataclass, whose fields are the
    word's numbers. A field without a default must be given.
    """

    slides: ClassVar[bool] = False
    """Whether it is a sliding window, whose layers may have a RoPE base of their own."""
    looks_ahead: ClassVar[bool] = False
    """Whether it is for encoders, and may show a token the tokens after it. Of another word such a
    mask is refused, as a mistake."""

    def mask(self, length: int) -> Mask:
        """Make the mask of a sequence of so many places. It is causal, by an `&` with `Causal()`,
        unless the word `looks_ahead`, and a shorter sequence's mask is the beginning of a longer
        one's.

        Raises:
          UserError: the class of the word does not define it.
        """
        raise UserError(f"the word of {type(self).__name__} makes no mask: give it a method `mask`")

    def reach(self, seq_len: int) -> int:
        """Count the keys that a query late in a sequence may see, by which costs are counted.

        Args:
          seq_len: the length of the sequence, in tokens.

        Returns:
          The number of keys, with the keys of blocks of the future; all keys, unless the class says
          otherwise.
        """
        return seq_len

    def shrink(self, before: int, seq_len: int) -> MaskWord:
        """Return the word for a sequence of `seq_len` tokens in place of `before`, for `verify`."""
        return self

    def wrong(self) -> str:
        """Say what is wrong with the numbers together, after the word; empty = nothing is."""
        return ""


WORDS: Registry[type[MaskWord]] = Registry("a word of model.masks")


def register_mask(name: str) -> Callable[[Word], Word]:
    """Make a `MaskWord` known by its name in `model.masks`. The decorator that this returns leaves
    the class as it is.

    Raises:
      UserError: the name is no word. The decorator raises it where the class is no dataclass of
        MaskWord, its `mask` cannot be called with a length, or the name is taken.
    """

    WORDS.require_word(name)

    def decorate(word: Word) -> Word:
        if not dataclasses.is_dataclass(word) or not issubclass(word, MaskWord):
            raise UserError(
                f"model.masks takes words that are frozen dataclasses of MaskWord, and was given "
                f"{word.__name__} for {name!r}: write @dataclass(frozen=True) above it"
            )
        require_callable(f"mask of model.masks {name!r}", word.mask, ("self", "length"))
        WORDS.add(name, word)
        return word

    return decorate


def read_word(word: str) -> MaskWord:
    """Read a word of `model.masks` with its numbers.

    Raises:
      UserError: the word is unknown, or has wrong numbers.
    """
    return read_named_word(word)[1]


def read_named_word(word: str) -> tuple[str, MaskWord]:
    """Read a word of `model.masks`, and return its name too.

    Raises:
      UserError: the word is unknown, or has wrong numbers.
    """
    found = re.fullmatch(r"\s*(\w[\w-]*)\s*(?:\((.*)\))?\s*", word)
    name = found[1] if found else word
    if found is None or name not in WORDS:
        known = ", ".join(map(_usage, WORDS.names()))
        raise UserError(
            f"model.masks has no {word!r}{suggest(name, WORDS.names())}: try one of {known}"
        )
    numbers = _numbers(found[2] or "", [field.name for field in _fields(name)])
    try:
        made = WORDS[name](**numbers)
    except TypeError:
        made = None
    if made is None:
        raise UserError(f"model.masks: {word!r} has wrong numbers: write {_usage(name)}")
    _require_numbers(word, made)
    return name, made


def _fields(name: str) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(WORDS[name])  # pyright: ignore[reportArgumentType]


def _numbers(text: str, names: list[str]) -> Mapping[str, Any]:
    """Read the numbers in the brackets of a word, by their names, which may be left out. Where
    there are too many, or one is no number, the result has a name that no word has.
    """
    numbers: dict[str, Any] = {}
    parts = [part for part in text.split(",") if part.strip()]
    for place, part in enumerate(parts):
        named, equals, number = part.rpartition("=")
        if not equals and place >= len(names):
            return {"": None}
        try:
            numbers[named.strip() if equals else names[place]] = int(number)
        except ValueError:
            return {"": None}
    return numbers


def _require_numbers(word: str, made: MaskWord) -> None:
    """Refuse a number of a word that is too small, and numbers that do not go together."""
    known = ranges(type(made))
    for key, number in vars(made).items():
        allowed = known.get(key, _AT_LEAST_ONE)
        if not allowed.holds(number):
            raise UserError(
                f"model.masks: {word!r} has {key}={number}: it is at least {allowed.least}"
            )
    if why := made.wrong():
        raise UserError(f"model.masks: {word!r} {why}")


def _usage(name: str) -> str:
    """Show how a word is written."""
    parts = [
        field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default}"
        for field in _fields(name)
    ]
    if parts:
        return f"{name}({', '.join(parts)})"
    return name
