"""Which tests are quick: the first of many alike; none that compiles for hardware that is not
here.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jaxpar.rehearse.targets import compilers

MARKS = {
    platform: (pytest.mark.slow, pytest.mark.skipif("pip" in found, reason=found))
    for platform, found in compilers().items()
}


def some(
    cases: Iterable[Any],
    every: int,
    others: Any = pytest.mark.slow,
) -> list[Any]:
    """For parametrize: the first of so many cases as they are, the others marked."""
    return [
        case if i % every == 0 else pytest.param(case, marks=others) for i, case in enumerate(cases)
    ]


def a_third(cases: Iterable[Any]) -> list[Any]:
    """A third of the cases, another one of each three in turn: of a row for each of three models
    all come up.
    """
    return [case for i, case in enumerate(cases) if (i + i // 3) % 3 == 0]


def needs_libtpu(test: Callable[..., Any]) -> Any:
    """Of a test that runs the TPU's compiler: slow, and skipped with the reason where it is
    missing.
    """
    return MARKS["tpu"][0](MARKS["tpu"][1](test))


def needs_cuda(test: Callable[..., Any]) -> Any:
    """Of a test that runs the GPU's compiler: likewise."""
    return MARKS["cuda"][0](MARKS["cuda"][1](test))
