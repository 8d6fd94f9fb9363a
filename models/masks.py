"""The masks of a model's layers, by the words of `model.masks`; all of them are causal.

    causal
        all tokens up to itself
    window(4096)
        that many tokens up to itself (arXiv:2310.06825)
    longformer(window=512, globals=1, stride=1)
        a window of every `stride`-th token, and the first tokens
    bigbird(window=3, globals=2, random=3, block=64, seed=0)
        blocks near, first and at random

`longformer` is Beltagy et al. 2020, arXiv:2004.05150, section 3.1; `bigbird` is Zaheer et al. 2020,
arXiv:2007.14062, section 2, whose random blocks are drawn from those before a query's own, the same
for every `model.max_seq_len`.

In packed documents windows, first tokens and blocks are those of each document, as if it were
alone.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, suggest
from jaxpar.kernels.masks import Causal, Dilated, First, Mask, Window, bigbird

_WORDS: dict[str, dict[str, int | None]] = {
    "causal": {},
    "window": {"tokens": None},
    "longformer": {"window": 512, "globals": 1, "stride": 1},
    "bigbird": {"window": 3, "globals": 2, "random": 3, "block": 64, "seed": 0},
}
"""The numbers of each word with their defaults; None = it must be given."""
_MAY_BE_ZERO = ("globals", "random", "seed")
_SHRINKS = {"window": "tokens", "longformer": "window", "bigbird": "block"}
"""The number of a word that follows the length of the sequence."""


def layer_masks(config: ModelConfig) -> tuple[Mask, ...]:
    """Return the mask of each kind of layer; layer i is of kind i % config.kinds. Words are checked
    as by `parse`.
    """
    return tuple(_mask(word, config.max_seq_len) for word in config.masks)


@lru_cache(maxsize=64)
def _mask(word: str, length: int) -> Mask:
    match parse(word):
        case "window", {"tokens": tokens}:
            return Causal() & Window(tokens - 1)
        case "longformer", {"window": window, "globals": count, "stride": stride}:
            if stride == 1:
                near = Window(window - 1)
            else:
                near = Dilated(window, stride)
            return Causal() & (near | First(count) if count else near)
        case "bigbird", numbers:
            return Causal() & bigbird(length, **numbers, causal=True)
    return Causal()


def parse(word: str) -> tuple[str, dict[str, int]]:
    """Return the name of a word and its numbers, those left out too: `("window", {"tokens":
    4096})`. A word that is unknown or has wrong numbers is refused with a UserError."""
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", word)
    name = found[1] if found else word
    if found is None or name not in _WORDS:
        known = ", ".join(map(_usage, _WORDS))
        raise UserError(f"model.masks has no {word!r}{suggest(name, _WORDS)}: try one of {known}")
    numbers: dict[str, Any] = {}
    wrong = UserError(f"model.masks: {word!r} has wrong numbers: write {_usage(name)}")
    try:
        for key, part in zip(
            [*_WORDS[name], ""], filter(str.strip, (found[2] or "").split(",")), strict=False
        ):
            named, equals, number = part.rpartition("=")
            numbers[named.strip() if equals else key] = int(number)
    except ValueError:
        raise wrong from None
    numbers = {key: numbers.get(key, default) for key, default in _WORDS[name].items()} | numbers
    if numbers.keys() != _WORDS[name].keys() or None in numbers.values():
        raise wrong
    for key, number in numbers.items():
        if number < (key not in _MAY_BE_ZERO):
            raise UserError(
                f"model.masks: {word!r} has {key}={number}: it is at least "
                f"{int(key not in _MAY_BE_ZERO)}"
            )
    if name == "bigbird" and numbers["window"] % 2 == 0:
        raise UserError(
            f"model.masks: {word!r} has window={numbers['window']}: blocks on both sides make "
            "it odd"
        )
    return name, numbers


def _usage(name: str) -> str:
    """How a word is written."""
    parts = [
        key if default is None else f"{key}={default}" for key, default in _WORDS[name].items()
    ]
    return f"{name}({', '.join(parts)})" if parts else name


def has_window(word: str) -> bool:
    """Whether a word is a sliding window, whose layers may have a RoPE base of their own."""
    return parse(word)[0] == "window"


def reach(word: str, seq_len: int) -> int:
    """Return how many keys a query late in a sequence may see, blocks of the future included."""
    name, n = parse(word)
    seen = {
        "window": lambda: n["tokens"],
        "longformer": lambda: n["window"] + n["globals"],
        "bigbird": lambda: (n["window"] + n["globals"] + n["random"]) * n["block"],
    }
    if name in seen:
        return min(seq_len, seen[name]())
    return seq_len


def shrink_mask(word: str, before: int, seq_len: int) -> str:
    """Return the same word for a sequence of `seq_len` tokens in place of `before`; a window keeps
    a third of it.
    """
    name, numbers = parse(word)
    if name not in _SHRINKS:
        return word
    key = _SHRINKS[name]
    if name == "bigbird":
        least = 1
    else:
        least = -(-seq_len // (3 * numbers.get("stride", 1)))
    numbers[key] = max(least, round(numbers[key] * seq_len / before))
    parts = [
        f"{key}={number}" if len(numbers) > 1 else str(number) for key, number in numbers.items()
    ]
    return f"{name}({', '.join(parts)})"
