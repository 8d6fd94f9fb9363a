"""What is said of a setting beside its type, once, at its field in a schema:

    alpha: Annotated[float, Range(1e-3, 1e6), Idle(no_lora, "model.lora.rank is 0", "...")] = 16.0

Checks, messages, help and the table of docs/config.md read the marks of fields through
`schema_fields` and `marks_of`. A mark of a field that is a table of settings is one of each of
them. The range of a number (`jaxpar.base.ranges`) and the names that a text may have
(`jaxpar.base.registry`) are marks too.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from jaxpar.base.errors import UserError

WholeConfig: TypeAlias = Any
"""A `Config`, in the modules that its schema is made of."""
Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Idle:
    """Where a setting has no effect.

    Attributes:
      when: whether it has none in a config.
      reason: what is so there. Help and the table of settings say it behind "no effect where".
      advice: what makes the setting matter, with which a message ends, or what writes that when it
        is asked for, from what is registered by then.
    """

    when: Callable[[WholeConfig], bool]
    reason: str
    advice: str | Callable[[], str]

    @property
    def because(self) -> str:
        """Why a setting has no effect, and what would make it matter."""
        advice = self.advice() if callable(self.advice) else self.advice
        return f"{self.reason}: {advice}"


@dataclass(frozen=True)
class Rule:
    """What a setting contradicts.

    Attributes:
      broken: says of a config what is wrong and what to try; empty where nothing is. It may raise
        a UserError instead.
      also: the dotted keys of other settings that the contradiction is between. One that is said at
        several fields is between all of them.
      training: whether it is one for a training alone. Of a setting that only training reads each
        rule is.
    """

    broken: Callable[[WholeConfig], str]
    also: tuple[str, ...] = ()
    training: bool = False

    def message(self, config: WholeConfig) -> str:
        """What is wrong with a config; empty = nothing."""
        try:
            return self.broken(config)
        except UserError as error:
            return str(error)


@dataclass(frozen=True)
class Called:
    """What other trainers call a setting: words with spaces between."""

    words: str


class Trait(Enum):
    """What is true of some settings. Of a table and a field in it the field's own counts."""

    TRAINING_ONLY = "training alone reads it: an evaluation is the same whatever its value"
    EVALUATION_TOO = "an evaluation reads it too, unlike the rest of its table"
    MAY_CHANGE = "a run that goes on may have another value, since it never changes the answer"
    PATH = "it names one file or folder, which may be written in several ways"
    MAY_BE_URL = "it may name a file or folder in a bucket"
    REPEATED = "its flag takes one value, and may be given several times"


class SchemaField(NamedTuple):
    """A setting of a schema.

    Attributes:
      key: its dotted key.
      kind: its type without marks, which may be any.
      marks: those of the tables that it is in, from the outside in, and then its own.
    """

    key: str
    kind: Any
    marks: tuple[object, ...]


@functools.cache
def schema_fields(schema: type) -> Mapping[str, SchemaField]:
    """List the settings of a dataclass by dotted key.

    Args:
      schema: a dataclass, whose tables are dataclasses too.

    Returns:
      The settings in the order of the fields.
    """
    return {field.key: field for field in _fields_in(schema, "", ())}


def _fields_in(schema: type, table: str, marks: tuple[object, ...]) -> Iterator[SchemaField]:
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        kind, own = _unmarked(hint)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _fields_in(kind, f"{table}{name}.", marks + own)
        else:
            yield SchemaField(table + name, kind, marks + own)


def _unmarked(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """An annotation without its marks, and the marks. Those of a tuple's items are its own."""
    if typing.get_origin(hint) is Annotated:
        inner, *outer = typing.get_args(hint)
        kind, marks = _unmarked(inner)
        return kind, (*marks, *outer)
    if typing.get_origin(hint) is tuple:
        item, marks = _unmarked(typing.get_args(hint)[0])
        return tuple[item, ...], marks
    return hint, ()


@functools.cache
def marks_of(schema: type, kind: type[Mark]) -> Mapping[str, tuple[Mark, ...]]:
    """Find the marks of one kind, by the dotted keys of the settings that have any.

    Args:
      schema: a dataclass of settings, and of tables that are dataclasses.
      kind: the class of the marks.

    Returns:
      The marks of each, those of its tables first.
    """
    found = {
        key: tuple(mark for mark in field.marks if isinstance(mark, kind))
        for key, field in schema_fields(schema).items()
    }
    return {key: marks for key, marks in found.items() if marks}


@functools.cache
def keys_with(schema: type, trait: Trait) -> frozenset[str]:
    """Find the settings that have a trait.

    Args:
      schema: a dataclass of settings, and of tables that are dataclasses.
      trait: what is true of them.

    Returns:
      Their dotted keys.
    """
    return frozenset(key for key, traits in marks_of(schema, Trait).items() if trait in traits)
