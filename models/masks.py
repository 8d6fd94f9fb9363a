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

The last two are an encoder's; the others are causal. In packed documents windows, first tokens and
blocks count within each document, as if it were alone. `mask_words` has the base of a word, and
says how a word is read and how a program adds its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, short
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
from jaxpar.models.mask_words import (
    WORDS,
    MaskWord,
    MayBeZero,
    read_named_word,
    read_word,
    register_mask,
)

__all__ = [
    "WORDS",
    "MaskWord",
    "MayBeZero",
    "has_window",
    "layer_masks",
    "mean_keys",
    "reach",
    "read_word",
    "register_mask",
    "shrink_mask",
    "words_that_look_ahead",
]


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
    """The window and first tokens of Longformer (Beltagy et al. 2020, arXiv:2004.05150, section
    3.1).
    """

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
    """The blocks of BigBird (Zaheer et al. 2020, arXiv:2007.14062, section 2). The random blocks
    are drawn from the blocks before a query's own, the same for every `model.max_seq_len`.
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
    """Return a third of a sequence, in steps: a smaller window would show too little to compare."""
    return -(-seq_len // (3 * stride))


def layer_masks(config: ModelConfig) -> tuple[Mask, ...]:
    """Make the mask of each kind of layer, for sequences of `config.max_seq_len`; layer i has the
    mask number i % config.kinds.

    Raises:
      UserError: a word is unknown or has wrong numbers, or a mask shows a query keys after it.
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
    """List the words of a model's layers that may show a token the tokens after it, each once; none
    where the model is causal.

    Raises:
      UserError: a word is unknown, or has wrong numbers.
    """
    return [word for word in dict.fromkeys(config.masks) if read_word(word).looks_ahead]


def has_window(word: str) -> bool:
    """Return whether a word is a sliding window, whose layers may have a RoPE base of their own."""
    return read_word(word).slides


def reach(word: str, seq_len: int) -> int:
    """Count the keys that a query late in a sequence may see, blocks of the future included."""
    return min(seq_len, read_word(word).reach(seq_len))


def mean_keys(word: str, seq_len: int) -> float:
    """Estimate how many keys a query sees, in the mean over a sequence.

    A causal query sees no keys that come after it: the first query sees one key, and only queries
    further in than the word's reach see all of the reach.

    Args:
      word: a word of `model.masks`.
      seq_len: the length of the sequence, in tokens.

    Raises:
      UserError: the word is unknown, or has wrong numbers.
    """
    keys = reach(word, seq_len)
    if read_word(word).looks_ahead:
        return float(keys)
    return keys * (1 - keys / (2 * seq_len))


def shrink_mask(word: str, before: int, seq_len: int) -> str:
    """Turn a word into the word for another length of sequence. A window keeps its share of the
    sequence, and is at least a third of it.

    Args:
      word: a word of `model.masks`.
      before: the length that the word is for, in tokens.
      seq_len: the length that the result is for, in tokens.

    Returns:
      The word with other numbers, or the same word.

    Raises:
      UserError: the word is unknown, or has wrong numbers.
    """
    name, made = read_named_word(word)
    smaller = made.shrink(before, seq_len)
    numbers = vars(smaller)
    if smaller == made:
        return word
    if len(numbers) == 1:
        parts = [str(number) for number in numbers.values()]
    else:
        parts = [f"{key}={number}" for key, number in numbers.items()]
    return f"{name}({', '.join(parts)})"
