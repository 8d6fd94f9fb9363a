"""The masks of a model's layers, by the words of `model.masks`.

    causal
        all tokens up to itself
    window(4096)
        that many tokens up to itself (arXiv:2310.06825)
    longformer(window=512, globals=1, stride=1)
        a window of every `stride`-th token, and the first tokens
    bigbird(window=3, globals=2, random=3, block=64, seed=0)
        blocks near, first and at random
    full
        all tokens, those after it too
    local(64)
        itself, and that many tokens before it and after it (arXiv:2412.13663, section 2.1.2)

The last two are an encoder's; the others are causal. A word is a frozen dataclass whose fields are
its numbers, registered by its name; a program adds its own in the same way:

    @register_mask("even")
    @dataclass(frozen=True)
    class Even(MaskWord):
        apart: int = 2

        def mask(self, length):
            return Causal() & Dilated(length, self.apart)

In packed documents windows, first tokens and blocks are those of each document, as if it were
alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeVar

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.ranges import Range, ranges
from jaxpar.base.registry import Registry, require_callable
from jaxpar.kernels.masks import (
    Causal,
    Dilated,
    First,
    Full,
    Mask,
    Window,
    bigbird,
    looks_back,
)

MayBeZero = Annotated[int, Range(0, 2**31 - 1)]
"""A number of a word that may be 0. Others are at least 1, unless their type has a range."""
_AT_LEAST_ONE = Range(1, 2**31 - 1)
Word = TypeVar("Word", bound="type[MaskWord]")


class MaskWord:
    """The base of what a word of `model.masks` stands for: a frozen dataclass, whose fields are the
    word's numbers. A field without a default must be given.
    """

    slides: ClassVar[bool] = False
    """Whether it is a sliding window, whose layers may have a RoPE base of their own."""
    looks_ahead: ClassVar[bool] = False
    """Whether it is for encoders, and may show a token those after it. Of another word such a mask
    is refused, as a mistake."""

    def mask(self, length: int) -> Mask:
        """Make the mask of a sequence. It is causal, by an `&` with `Causal()`, unless the word
        `looks_ahead`; that of a shorter sequence is the beginning of that of a longer one.

        Args:
          length: the number of places.

        Returns:
          The mask.

        Raises:
          UserError: the class of the word does not define it.
        """
        raise UserError(f"the word of {type(self).__name__} makes no mask: give it a method `mask`")

    def reach(self, seq_len: int) -> int:
        """Count the keys that a query late in a sequence may see, by which costs are counted.

        Args:
          seq_len: the length of the sequence, in tokens.

        Returns:
          The number of keys, with those of blocks of the future; all keys, unless the class says
          otherwise.
        """
        return seq_len

    def shrink(self, before: int, seq_len: int) -> MaskWord:
        """The same word for a sequence of `seq_len` tokens in place of `before`, for `verify`."""
        return self

    def wrong(self) -> str:
        """What is wrong with the numbers together, to be said after the word; empty = nothing."""
        return ""


WORDS: Registry[type[MaskWord]] = Registry("a word of model.masks")


def register_mask(name: str) -> Callable[[Word], Word]:
    """A decorator that makes a `MaskWord` known by its name in `model.masks`.

    Args:
      name: the word.

    Returns:
      A decorator, which leaves the class as it is.

    Raises:
      UserError: the name is no word; and the decorator, where the class is no dataclass of
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


@register_mask("causal")
@dataclass(frozen=True)
class _CausalWord(MaskWord):
    def mask(self, length: int) -> Mask:
        return Causal()


@register_mask("window")
@dataclass(frozen=True)
class _WindowWord(MaskWord):
    tokens: int
    slides: ClassVar[bool] = True

    def mask(self, length: int) -> Mask:
        return Causal() & Window(self.tokens - 1)

    def reach(self, seq_len: int) -> int:
        return self.tokens

    def shrink(self, before: int, seq_len: int) -> MaskWord:
        return _WindowWord(_in_proportion(self.tokens, before, seq_len, least=_third(seq_len)))


@register_mask("longformer")
@dataclass(frozen=True)
class _LongformerWord(MaskWord):
    """Beltagy et al. 2020, arXiv:2004.05150, section 3.1."""

    window: int = 512
    globals: MayBeZero = 1
    stride: int = 1

    def mask(self, length: int) -> Mask:
        if self.stride == 1:
            near = Window(self.window - 1)
        else:
            near = Dilated(self.window, self.stride)
        return Causal() & (near | First(self.globals) if self.globals else near)

    def reach(self, seq_len: int) -> int:
        return self.window + self.globals

    def shrink(self, before: int, seq_len: int) -> MaskWord:
        least = _third(seq_len, self.stride)
        return replace(self, window=_in_proportion(self.window, before, seq_len, least))


@register_mask("bigbird")
@dataclass(frozen=True)
class _BigbirdWord(MaskWord):
    """Zaheer et al. 2020, arXiv:2007.14062, section 2. The random blocks are drawn from those
    before a query's own, the same for every `model.max_seq_len`.
    """

    window: int = 3
    globals: MayBeZero = 2
    random: MayBeZero = 3
    block: int = 64
    seed: MayBeZero = 0

    def mask(self, length: int) -> Mask:
        return Causal() & bigbird(length, **dataclasses.asdict(self), causal=True)

    def reach(self, seq_len: int) -> int:
        return (self.window + self.globals + self.random) * self.block

    def shrink(self, before: int, seq_len: int) -> MaskWord:
        return replace(self, block=_in_proportion(self.block, before, seq_len, least=1))

    def wrong(self) -> str:
        if self.window % 2 == 0:
            return f"has window={self.window}: blocks on both sides make it odd"
        return ""


@register_mask("full")
@dataclass(frozen=True)
class _FullWord(MaskWord):
    looks_ahead: ClassVar[bool] = True

    def mask(self, length: int) -> Mask:
        return Full()


@register_mask("local")
@dataclass(frozen=True)
class _LocalWord(MaskWord):
    """The local layers of ModernBERT (Warner et al. 2024, arXiv:2412.13663, section 2.1.2)."""

    tokens: int
    slides: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True

    def mask(self, length: int) -> Mask:
        return Window(self.tokens, self.tokens)

    def reach(self, seq_len: int) -> int:
        return 2 * self.tokens + 1

    def shrink(self, before: int, seq_len: int) -> MaskWord:
        return _LocalWord(_in_proportion(self.tokens, before, seq_len, least=_third(seq_len, 2)))


def _in_proportion(number: int, before: int, seq_len: int, least: int) -> int:
    return max(least, round(number * seq_len / before))


def _third(seq_len: int, stride: int = 1) -> int:
    """A third of a sequence, in steps: a smaller window would leave too little to compare."""
    return -(-seq_len // (3 * stride))


def layer_masks(config: ModelConfig) -> tuple[Mask, ...]:
    """Make the mask of each kind of layer.

    Args:
      config: the sizes of the model.

    Returns:
      The masks, for sequences of `config.max_seq_len`; layer i has number i % config.kinds.

    Raises:
      UserError: as `read_word`, or a mask shows a query what comes after it.
    """
    return tuple(_mask(word, config.max_seq_len) for word in config.masks)


@lru_cache(maxsize=64)
def _mask(word: str, length: int) -> Mask:
    made = read_word(word)
    mask = made.mask(length)
    if not isinstance(mask, Mask):
        raise UserError(
            f"model.masks: {word!r} makes {short(mask)}, which is no mask: make one of "
            "jaxpar.kernels.masks"
        )
    if not (made.looks_ahead or looks_back(mask)):
        raise UserError(
            f"model.masks: {word!r} makes {mask}, which may show a token those after it, so that "
            "the loss would know its answers: join it to Causal() by &, or say looks_ahead = True "
            f"in {type(made).__name__} if it is for an encoder"
        )
    return mask


def words_that_look_ahead(config: ModelConfig) -> list[str]:
    """The words of a model's layers that may show a token those after it, each once.

    Args:
      config: the sizes of the model.

    Returns:
      The words; none where the model is causal.

    Raises:
      UserError: as `read_word`.
    """
    return [word for word in dict.fromkeys(config.masks) if read_word(word).looks_ahead]


def read_word(word: str) -> MaskWord:
    """Return what a word of `model.masks` stands for, with its numbers.

    Raises:
      UserError: the word is unknown, or has wrong numbers.
    """
    return _read(word)[1]


def _read(word: str) -> tuple[str, MaskWord]:
    """Return the name of a word, and what it stands for; see `read_word`."""
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
    """The numbers in the brackets of a word by their names, which may be left out; a name that no
    word has where there are too many, or one is no number.
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
    """How a word is written."""
    parts = [
        field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default}"
        for field in _fields(name)
    ]
    if parts:
        return f"{name}({', '.join(parts)})"
    return name


def has_window(word: str) -> bool:
    """Whether a word is a sliding window, whose layers may have a RoPE base of their own."""
    return read_word(word).slides


def reach(word: str, seq_len: int) -> int:
    """Return how many keys a query late in a sequence may see, blocks of the future included."""
    return min(seq_len, read_word(word).reach(seq_len))


def shrink_mask(word: str, before: int, seq_len: int) -> str:
    """Turn a word into that for another length of sequence. A window keeps its share of it, and is
    at least a third of it.

    Args:
      word: a word of `model.masks`.
      before: the length that it is for, in tokens.
      seq_len: the length that it shall be for, in tokens.

    Returns:
      The word with other numbers, or the same word.

    Raises:
      UserError: as `read_word`.
    """
    name, made = _read(word)
    smaller = made.shrink(before, seq_len)
    numbers = vars(smaller)
    if smaller == made:
        return word
    if len(numbers) == 1:
        parts = [str(number) for number in numbers.values()]
    else:
        parts = [f"{key}={number}" for key, number in numbers.items()]
    return f"{name}({', '.join(parts)})"
