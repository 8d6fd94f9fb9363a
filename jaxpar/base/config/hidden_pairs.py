"""Which layers of a model learn the hidden states of which layers of its teacher."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxpar.base.errors import UserError, short

LAST = "last"
"""The word for the last layers of both."""
_PAIR = re.compile(r"([1-9]\d{0,5}):([1-9]\d{0,5})")


class HiddenPair(NamedTuple):
    """Two layers, of which the first learns what the second hands on.

    Attributes:
      name: the name of its projection among the parameters.
      student: after how many layers of the model; 0 = after all of them.
      teacher: after how many layers of its teacher; 0 = after all of them.
    """

    name: str
    student: int
    teacher: int

    def after(self, layers: int) -> int:
        """After how many layers of the model, which has `layers`, at most all of them."""
        return min(self.student or layers, layers)


def read_pairs(words: tuple[str, ...]) -> tuple[HiddenPair, ...]:
    """Read `distill.hidden`.

    Args:
      words: `last`, or two numbers as `2:4`, each.

    Returns:
      The pairs, in their order.

    Raises:
      UserError: a word is none of these, or stands there twice.
    """
    pairs = []
    for word in words:
        found = _PAIR.fullmatch(word)
        if word == LAST:
            pair = HiddenPair(LAST, 0, 0)
        elif found is None:
            raise UserError(
                f"distill.hidden has {short(word)}: a pair of layers is written 2:4, after the "
                "model's second layer and its teacher's fourth, and the last of both is `last`"
            )
        else:
            student = int(found[1])
            teacher = int(found[2])
            pair = HiddenPair(f"{student}_to_{teacher}", student, teacher)
        if pair in pairs:
            raise UserError(f"distill.hidden has {short(word)} twice: leave one out")
        pairs.append(pair)
    return tuple(pairs)


def require_layers(words: tuple[str, ...], layers: int) -> None:
    """Refuse pairs of `distill.hidden` that name a layer that a model has not.

    Args:
      words: as for `read_pairs`.
      layers: how many layers the model has.

    Raises:
      UserError: one does, or a word is no pair.
    """
    for pair in read_pairs(words):
        if pair.student > layers:
            raise UserError(
                f"distill.hidden has {pair.student}:{pair.teacher}, and the model has "
                f"{layers} layers (model.layers): the first number is at most {layers}"
            )
