"""Which tests are quick: the first of many alike; none that compiles for hardware that is not
here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jaxpar.base.errors import UserError
from jaxpar.rehearse.topologies import compilers

WHY_REFUSED = (
    "XLA:CPU of jax 0.12 may run two loops of these gradients at once, so the library refuses the "
    "program"
)
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


def third_quick(cases: Iterable[Any]) -> list[Any]:
    """For parametrize: the cases of `a_third` as they are, the others slow."""
    cases = list(cases)
    quick = a_third(cases)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@contextmanager
def refused_by_newest_cpu() -> Iterator[None]:
    """What XLA:CPU of jax 0.12 may not run is refused by name, and the test is an expected
    failure there.
    """
    try:
        yield
    except UserError as error:
        if jax.__version_info__ >= (0, 11) and "mix up their collectives" in str(error):
            pytest.xfail(WHY_REFUSED)
        raise


def needs_libtpu(test: Callable[..., Any]) -> Any:
    """Of a test that runs the TPU's compiler: slow, and skipped with the reason where it is
    missing.
    """
    return MARKS["tpu"][0](MARKS["tpu"][1](test))


def needs_cuda(test: Callable[..., Any]) -> Any:
    """Of a test that runs the GPU's compiler: likewise."""
    return MARKS["cuda"][0](MARKS["cuda"][1](test))
