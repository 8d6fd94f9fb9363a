"""The aliases that a program states: results that lie in an argument's place, and which array of a
tuple is meant.

    pairs("{0}: (1, {}), {1}: (0, {2})")
        the result's part (0,) lies where argument 1 does, and its part (1,) where part (2,) of
        argument 0 does: ((0,), 1, ()) and ((1,), 0, (2,))
    leaf((f32[8], (f32[4], f32[2]), s32[]), (1, 1))
        f32[2] is the third of the four arrays in that tuple, so 2
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from jaxpar.hlo.program.module import Shape

_ALIASES = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
"""An alias, `{0}: (1, {})`: which part of a result lies where which part of an argument does."""


def pairs(text: str) -> Iterable[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Yield the result's part, the argument's number and the argument's part of every alias in a
    text.
    """
    for result, number, part in _ALIASES.findall(text):
        yield _numbers(result), int(number), _numbers(part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(",") if one.strip())


def leaf(shape: Shape, path: Sequence[int]) -> int:
    """Return the number, among all arrays of a tuple, of the first array in a part of it."""
    before = 0
    for index in path:
        before += sum(len(list(part.leaves())) for part in shape.parts[:index])
        shape = shape.parts[index]
    return before
