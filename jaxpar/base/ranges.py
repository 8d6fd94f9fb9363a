"""The range of every number of a schema, which stands beside its type: `Annotated[int, Range(1,
4096)]`.

NaN and infinity are in no range.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from typing import Any

from jaxpar.base.errors import UserError
from jaxpar.base.field_marks import marks_of

MOST_WORDS = 2**24
"""Ids of a vocabulary. The largest in use are of some 260,000."""
MOST_STEPS = 2**31 - 1
"""A step is counted in an int32."""
MOST_SEED = 2**32 - 1
"""JAX, numpy and Grain take seeds of 32 bits."""


@dataclass(frozen=True)
class Range:
    """What a number may be, both ends included."""

    least: float
    most: float
    also: tuple[float, ...] = ()
    """Values outside that have a meaning of their own, such as 0 for `no limit`."""
    why: str = ""
    """What a message adds about the bounds."""

    def holds(self, value: float) -> bool:
        """Whether a number is in the range; NaN never is."""
        return self.least <= value <= self.most or value in self.also

    def holds_all(self, value: object) -> bool:
        """Whether a number, or each of a tuple of numbers, is in the range."""
        items: Any = value if isinstance(value, tuple) else (value,)
        return all(self.holds(item) for item in items)

    def __str__(self) -> str:
        """`1 to 4,096`, or `0, or 0.5 to 1`."""
        alone = "".join(f"{number_text(value)}, or " for value in self.also)
        return f"{alone}{number_text(self.least)} to {number_text(self.most)}"


def number_text(value: float) -> str:
    """A number as a table and a message write it: `4,096`, `0.02`, `1e-08`."""
    whole = isinstance(value, int) and abs(value) >= 10_000
    return f"{value:,}" if whole else f"{value:g}"


@functools.cache
def ranges(schema: type) -> dict[str, Range]:
    """The range of each number of a dataclass by its dotted key, `{"train.steps": Range(1, ...),
    ...}`.

    A tuple's range is that of its items.
    """
    return {key: marks[-1] for key, marks in marks_of(schema, Range).items()}


def require_ranges(
    schema: type,
    values: typing.Mapping[str, Any],
    inside: str = "",
    table: str = "",
) -> None:
    """Refuse a number that is not in its range.

    Args:
      schema: the dataclass that the values are of.
      values: values of the right types by dotted key, as `flatten` returns them.
      inside: what a message leaves out at the front of a key, such as `config.`.
      table: what it puts there.

    Raises:
      UserError: the message names the key, the value and the range.
    """
    known = ranges(schema)
    for key, value in values.items():
        allowed = known.get(key)
        if allowed is None:
            continue
        if isinstance(value, tuple):
            items = value
        else:
            items = (value,)
        for number in items:
            if not allowed.holds(number):
                raise UserError(out_of_range(table + key.removeprefix(inside), number, allowed))


def out_of_range(key: str, value: float, allowed: Range) -> str:
    """Write the sentence about a number that is not in its range.

    Args:
      key: its dotted key.
      value: the number.
      allowed: its range.

    Returns:
      The sentence, without a full stop.
    """
    huge = isinstance(value, int) and value.bit_length() > 64
    if huge:
        said = f"(a number of {int(value).bit_length()} bits)"
    else:
        said = value
    why = f": {allowed.why}" if allowed.why else ""
    if isinstance(value, int) and value < allowed.least and not allowed.also:
        return f"{key}={said} is below {allowed.least}, which is the least that it can be{why}"
    alone = "".join(f", nor {number_text(other)}" for other in allowed.also)
    return (
        f"{key}={said} is not in [{number_text(allowed.least)}, "
        f"{number_text(allowed.most)}]{alone}{why}"
    )
