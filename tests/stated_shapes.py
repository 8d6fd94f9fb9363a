"""Shapes and dtypes that signatures of the library state are checked at each call, which is at each
tracing; nothing else of a signature is. A constructor refuses wrong values in words of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook
from slow_tier import PACKAGES, ROOT

DTYPES = ("Bool", "Complex", "Float", "Inexact", "Int", "Num", "Shaped", "UInt")
SIGNATURES = set[str]()
"""The functions of which the shapes have been checked since the start, by module and name."""


def check_stated_shapes() -> None:
    """Check them in each module of the library that is imported from now on."""
    install_import_hook(modules_that_state_shapes(), f"{__name__}.only_shapes")


def modules_that_state_shapes() -> list[str]:
    """The names of the library's modules that may state a shape or a dtype."""
    folders = {"jaxpar": ROOT / "jaxpar"}
    folders |= {f"jaxpar.{name}": ROOT / folder for name, folder in PACKAGES.items()}
    found = list[str]()
    for package, folder in folders.items():
        for file in sorted(folder.rglob("*.py")):
            if "from jaxtyping import" in file.read_text(encoding="utf-8"):
                found.append(".".join((package, *_inside(file, folder))))
    return found


def _inside(file: Path, folder: Path) -> tuple[str, ...]:
    parts = file.relative_to(folder).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def only_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with those of its annotations checked that state a shape."""
    stated = {
        name: annotation
        for name, annotation in inspect.get_annotations(function).items()
        if _states_a_shape(annotation)
    }
    if not stated or function.__name__ == "__init__":
        return function
    SIGNATURES.add(f"{function.__module__}.{function.__qualname__}")
    function.__annotations__ = stated
    return beartype(function)


def _states_a_shape(annotation: Any) -> bool:
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    return any(map(_states_a_shape, get_args(annotation)))
