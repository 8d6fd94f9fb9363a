"""The range of every number of a schema, which stands beside its type: `Annotated[int, Range(1,
4096)]`.

NaN and infinity are in no range.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from jaxpar.base.errors import UserError

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
    return dict(_ranges(schema, ""))


def _ranges(schema: type, prefix: str) -> Iterator[tuple[str, Range]]:
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        yield from _ranges_of(hint, prefix + name)


def _ranges_of(hint: Any, key: str) -> Iterator[tuple[str, Range]]:
    """The ranges of one annotation, which may be any type."""
    if typing.get_origin(hint) is Annotated:
        inner, *marks = typing.get_args(hint)
        yield from ((key, mark) for mark in marks if isinstance(mark, Range))
        yield from _ranges_of(inner, key)
    elif typing.get_origin(hint) is tuple:
        yield from _ranges_of(typing.get_args(hint)[0], key)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield from _ranges(hint, f"{key}.")


def require_ranges(
    schema: type,
    values: typing.Mapping[str, Any],
    inside: str = "",
) -> None:
    """Refuse a number that is not in its range.

    Args:
      schema: the dataclass that the values are of.
      values: values of the right types by dotted key, as `flatten` returns them.
      inside: what a message leaves out at the front of a key, such as `config.`.

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
                raise UserError(out_of_range(key.removeprefix(inside), number, allowed))


def range_rows(schema: type, defaults: typing.Mapping[str, Any]) -> list[str]:
    """Write the rows of a table in Markdown about the numbers of a schema.

    Args:
      schema: the dataclass.
      defaults: the defaults by dotted key.

    Returns:
      A row for each number, with the key, the default and the range.
    """
    return [
        f"| `{key}` | {_default_text(defaults[key])} | {allowed} |"
        for key, allowed in ranges(schema).items()
    ]


def _default_text(value: Any) -> str:
    return "none" if value == () else number_text(value)


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
