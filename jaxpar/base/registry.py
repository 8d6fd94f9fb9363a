"""Names that a setting may have, each with what it stands for; a program adds its own by a
decorator.

    @parallel.pipeline.register_schedule("mine")
    def mine(stages, microbatches, virtual): ...

    config = override(config, {"pipeline.schedule": "mine"})

What is registered is at once in what a config may say and in the messages that list it. Ours stand
in one module each, the registry's home, which is loaded when a name is first looked up: the schema
of a config lies below the code that it chooses from.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.field_marks import marks_of

T = TypeVar("T")
Kept = TypeVar("Kept")


class Registry(Generic[T]):
    """What may be named in one setting, or one argument, by its name."""

    def __init__(self, what: str, home: str = ""):
        """Make a registry.

        Args:
          what: what a message calls such a name: `pipeline.schedule`.
          home: the module that registers ours, which is loaded at the first look-up; empty = it is
            the one that makes the registry.
        """
        self.what = what
        self._home = home
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register an entry and return it. One that was defined at the same place replaces the one
        before it, so that a notebook's cell may be run again.

        Args:
          name: a word.
          entry: what it names.

        Returns:
          The entry.

        Raises:
          UserError: the name is not a word, or another entry has it.
        """
        self.require_word(name)
        before = self._entries.get(name)
        if before is not None and _place_of(before) != _place_of(entry):
            raise UserError(
                f"{self.what} {name!r} is registered already, as {_place_of(before)}: take "
                "another name"
            )
        self._entries[name] = entry
        return entry

    def require_word(self, name: object) -> None:
        """Require a word for a name. It is none where a decorator was written without its brackets.

        Args:
          name: what was given.

        Raises:
          UserError: it is no word.
        """
        if isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name):
            return
        raise UserError(
            f"{self.what} is registered by a word, and was given {short(name)}: give the decorator "
            'one, such as ("mine")'
        )

    def remove(self, name: str) -> None:
        """Take a name out again, as a test does at its end.

        Args:
          name: a registered name.
        """
        del self._entries[name]

    def names(self) -> tuple[str, ...]:
        """Every name, ours first, in the order in which they were registered.

        Returns:
          The names.
        """
        self._load_home()
        return tuple(self._entries)

    def items(self) -> Iterator[tuple[str, T]]:
        """Every name with its entry.

        Returns:
          Pairs of a name and its entry, as of now.
        """
        self._load_home()
        return iter(list(self._entries.items()))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> T:
        """The entry of a name; a UserError, which lists all names, for one that is not
        registered.
        """
        self._load_home()
        if name not in self._entries:
            raise UserError(f"{self.what} {unknown(name, self.names())}")
        return self._entries[name]

    def _load_home(self) -> None:
        if self._home:
            importlib.import_module(self._home)


def _place_of(entry: object) -> str:
    """Where an entry, or the function that it holds, was defined."""
    if dataclasses.is_dataclass(entry):
        functions = [entry, *vars(entry).values()]
    else:
        functions = [entry]
    for one in functions:
        if callable(one) and hasattr(one, "__qualname__"):
            return f"{one.__module__}.{one.__qualname__}"
    return repr(entry)


def unknown(name: object, known: tuple[str, ...]) -> str:
    """What a message says of a name that is none of those known: `is one of a, b, found 'c'`.

    Args:
      name: what was found.
      known: the names that there are.

    Returns:
      The end of a sentence, with the nearest name if one is near.
    """
    return f"is one of {', '.join(known)}, found {short(name)}{suggest(str(name), known)}"


SCHEDULES: Registry[Any] = Registry("pipeline.schedule", "jaxpar.parallel.pipeline.schedules")
"""How microbatches go through stages: see `register_schedule` there."""
FORMS: Registry[Any] = Registry("the form of a collective", "jaxpar.parallel.linear.ring_matmul")
"""How a linear gathers and scatters: see `register_form` there."""
RATES: Registry[Any] = Registry("train.schedule", "jaxpar.train.optimizer.learning_rate")
"""How the learning rate goes on after the warm-up: see `register_rate` there."""
OPTIMIZERS: Registry[Any] = Registry("optimizer.name", "jaxpar.train.optimizer.named_optimizers")
"""What makes a step of gradients: see `register_optimizer` there."""
KERNELS: Registry[Any] = Registry("kernels.attention", "jaxpar.kernels.attention.implementations")
"""What computes attention: see `register_kernel` in `jaxpar.kernels.attention.kernel`."""
SOURCES: Registry[Any] = Registry("data.source", "jaxpar.data.sources")
"""Where tokens come from: see `register_source` there."""
SINKS: Registry[Any] = Registry("metrics.sinks", "jaxpar.train.sinks")
"""Where rows of metrics go: see `register_sink` there."""


@dataclass(frozen=True)
class OneOf:
    """What a text in a schema may be, which stands beside its type: `Annotated[str,
    OneOf(SCHEDULES)]`.
    """

    registry: Registry[Any]
    also: tuple[str, ...] = ()
    """Words that have a meaning of their own, such as `auto`."""

    def require(self, key: str, value: object) -> None:
        """Raise a UserError, which names the key, where a value, or one of a tuple of values, is
        none of them.

        Args:
          key: the dotted key of the setting.
          value: its value.

        Raises:
          UserError: a name is not registered, and is none of `also`.
        """
        for name in value if isinstance(value, tuple) else (value,):
            known = (*self.registry.names(), *self.also)
            if name not in known:
                raise UserError(f"{key} {unknown(name, known)}")


def require_names(
    schema: type,
    values: Mapping[str, Any],
    inside: str = "",
) -> None:
    """Refuse a name that is not registered.

    Args:
      schema: the dataclass that the values are of.
      values: values by dotted key.
      inside: what a message leaves out at the front of a key, such as `config.`.

    Raises:
      UserError: the message names the key and the value, and lists what is registered.
    """
    for key, names in marks_of(schema, OneOf).items():
        if key in values:
            names[-1].require(key.removeprefix(inside), values[key])


def registering(
    registry: Registry[Any],
    name: str,
    entry_of: Callable[[Kept], Any],
    arguments: tuple[str, ...],
) -> Callable[[Kept], Kept]:
    """Make a decorator that registers the function that it is put on.

    Args:
      registry: where it is registered.
      name: by which word.
      entry_of: makes the entry of the function.
      arguments: what the function will be called with, by place.

    Returns:
      The decorator, which leaves the function as it is.

    Raises:
      UserError: the name is no word; and the decorator, where what it is put on cannot be called
        so, or the name is taken.
    """
    registry.require_word(name)

    def decorate(function: Kept) -> Kept:
        require_callable(f"{registry.what} {name!r}", function, arguments)
        registry.add(name, entry_of(function))
        return function

    return decorate


def require_callable(what: str, function: object, arguments: tuple[str, ...]) -> None:
    """Require a function that can be called with so many arguments by place.

    Args:
      what: what it is, with which a message begins.
      function: what was given.
      arguments: the names of the arguments.

    Raises:
      UserError: it cannot be called so.
    """
    called = f"{what} is called with ({', '.join(arguments)})"
    if not callable(function):
        raise UserError(f"{called}, and was given {short(function)}: give a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function says nothing of its arguments
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(f"{called}, and its function takes {signature}: {error}") from error
