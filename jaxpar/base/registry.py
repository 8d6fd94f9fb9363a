"""Registries of the names that a setting may have, each with what it stands for; a program adds its
own by a decorator.

    @parallel.pipeline.register_schedule("mine")
    def mine(stages, microbatches, virtual): ...

    config = override(config, {"pipeline.schedule": "mine"})

A registered name is at once among those that a config may use and that messages list. The library's
own entries stand in one module each, the registry's home, which is loaded when a name is first
looked up: the schema of a config lies below the code that it chooses from.
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
    """The entries that one setting, or one argument, may name."""

    def __init__(self, what: str, home: str = ""):
        """Make a registry.

        Args:
          what: the name of the setting in messages, such as `pipeline.schedule`.
          home: the module that registers the library's own entries, which is loaded at the first
            look-up; empty = the module that makes the registry.
        """
        self.what = what
        self._home = home
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register an entry and return it. An entry that was defined at the same place replaces the
        one before it, so that a notebook's cell may be run again.

        Args:
          name: a word.
          entry: the value that the name stands for.

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
        """Refuse a name that is not a word, as where a decorator was written without its brackets.

        Raises:
          UserError: the name is not a word.
        """
        if isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name):
            return
        raise UserError(
            f"{self.what} is registered by a word, and was given {short(name)}: give the decorator "
            'one, such as ("mine")'
        )

    def remove(self, name: str) -> None:
        """Take a name out again, as a test does at its end."""
        del self._entries[name]

    def names(self) -> tuple[str, ...]:
        """List every name, the library's own first, in the order in which they were registered."""
        self._load_home()
        return tuple(self._entries)

    def items(self) -> Iterator[tuple[str, T]]:
        """Iterate over the names with their entries, as of now."""
        self._load_home()
        return iter(list(self._entries.items()))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> T:
        """Return the entry of a name; a UserError, which lists all names, for one that is not
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
    """Say where an entry, or the function that it holds, was defined."""
    if dataclasses.is_dataclass(entry):
        functions = [entry, *vars(entry).values()]
    else:
        functions = [entry]
    for one in functions:
        if callable(one) and hasattr(one, "__qualname__"):
            return f"{one.__module__}.{one.__qualname__}"
    return repr(entry)


def unknown(name: object, known: tuple[str, ...]) -> str:
    """Write what a message says of a name that is not known: `is one of a, b, found 'c'`.

    Returns:
      The end of a sentence, with the nearest name if one is near.
    """
    return f"is one of {', '.join(known)}, found {short(name)}{suggest(str(name), known)}"


SCHEDULES: Registry[Any] = Registry("pipeline.schedule", "jaxpar.parallel.pipeline.schedules")
"""The orders in which microbatches pass through pipeline stages
(`jaxpar.parallel.pipeline.schedules.register_schedule`).
"""
FORMS: Registry[Any] = Registry("the form of a collective", "jaxpar.parallel.linear.ring_matmul")
"""The ways in which a linear layer gathers and scatters
(`jaxpar.parallel.linear.ring_matmul.register_form`).
"""
RATES: Registry[Any] = Registry("train.schedule", "jaxpar.train.optimizer.learning_rate")
"""The courses of the learning rate after the warm-up
(`jaxpar.train.optimizer.learning_rate.register_rate`).
"""
OPTIMIZERS: Registry[Any] = Registry("optimizer.name", "jaxpar.train.optimizer.named_optimizers")
"""The optimizers, which make an update of gradients
(`jaxpar.train.optimizer.named_optimizers.register_optimizer`).
"""
KERNELS: Registry[Any] = Registry("kernels.attention", "jaxpar.kernels.attention.implementations")
"""The implementations of attention (`jaxpar.kernels.attention.kernel.register_kernel`)."""
SOURCES: Registry[Any] = Registry("data.source", "jaxpar.data.sources")
"""The sources of tokens (`jaxpar.data.sources.register_source`)."""
SINKS: Registry[Any] = Registry("metrics.sinks", "jaxpar.train.sinks")
"""The places that rows of metrics are sent to (`jaxpar.train.sinks.register_sink`)."""


@dataclass(frozen=True)
class OneOf:
    """A mark beside the type of a setting, of the registry that has its values: `Annotated[str,
    OneOf(SCHEDULES)]`.
    """

    registry: Registry[Any]
    also: tuple[str, ...] = ()
    """Further words with a meaning of their own, such as `auto`."""

    def __str__(self) -> str:
        """Write every word as a table and a help have it: `auto, cudnn, reference`."""
        return ", ".join((*self.also, *self.registry.names()))

    def require(self, key: str, value: object) -> None:
        """Refuse a value, or one of a tuple of values, that is not registered, with a message that
        names the key.

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
    """Refuse a value of a schema that is not among the registered names of its setting.

    Args:
      schema: the dataclass that the values are of.
      values: values by dotted key.
      inside: the front of a key that a message leaves out, such as `config.`.

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
      registry: the registry that takes the function.
      name: the word for the function.
      entry_of: makes the entry of the function.
      arguments: the names of the arguments that the function will be called with, by position.

    Returns:
      The decorator, which leaves the function as it is.

    Raises:
      UserError: the name is no word. The decorator raises it where the function cannot be called
        with those arguments, or the name is taken.
    """
    registry.require_word(name)

    def decorate(function: Kept) -> Kept:
        require_callable(f"{registry.what} {name!r}", function, arguments)
        registry.add(name, entry_of(function))
        return function

    return decorate


def require_callable(what: str, function: object, arguments: tuple[str, ...]) -> None:
    """Refuse a function that cannot be called with so many arguments by position.

    Args:
      what: the name of the function, with which a message begins.

    Raises:
      UserError: the function cannot be called so.
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
