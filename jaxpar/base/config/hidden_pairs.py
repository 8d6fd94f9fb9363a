"""The layers of a model that learn hidden states of its teacher, each with the teacher's layer."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxpar.base.errors import UserError, short

LAST = "last"
"""The word for the last layers of model and teacher."""
_PAIR = re.compile(r"([1-9]\d{0,5}):([1-9]\d{0,5})")


class HiddenPair(NamedTuple):
    """A layer of a model that learns what a layer of its teacher hands on.

    Attributes:
      name: the name of the pair's projection among the parameters.
      student: the number of layers of the model before the learned state; 0 = all of them.
      teacher: the number of layers of the teacher before its state; 0 = all of them.
    """

    name: str
    student: int
    teacher: int

    def after(self, layers: int) -> int:
        """Count the layers of the model before the state that learns, if the model has `layers`
        layers.
        """
        return min(self.student or layers, layers)


def read_pairs(words: tuple[str, ...]) -> tuple[HiddenPair, ...]:
    """Read `distill.hidden` into pairs of layers, in their order.

    Args:
      words: each is `last`, or two numbers such as `2:4`.

    Raises:
      UserError: a word is neither, or is given twice.
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
    """Refuse pairs of `distill.hidden` that name a layer that a model does not have.

    Args:
      words: the words of `distill.hidden`, such as `2:4` and `last`.
      layers: the number of layers of the model.

    Raises:
      UserError: a pair names such a layer, or a word is no pair.
    """
    for pair in read_pairs(words):
        if pair.student > layers:
            raise UserError(
                f"distill.hidden has {pair.student}:{pair.teacher}, and the model has "
                f"{layers} layers (model.layers): the first number is at most {layers}"
            )
