"""Tests that compile for hardware that is not here: slow, and skipped with the reason where its compiler is missing."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxpar.targets import compilers

MARKS = {
    platform: (pytest.mark.slow, pytest.mark.skipif("pip" in found, reason=found))
    for platform, found in compilers().items()
}


def needs_libtpu(test: Callable[..., Any]) -> Any:
    """Of a test that the TPU's compiler runs in."""
    return MARKS["tpu"][0](MARKS["tpu"][1](test))


def needs_cuda(test: Callable[..., Any]) -> Any:
    """Of a test that the GPU's compiler runs in."""
    return MARKS["cuda"][0](MARKS["cuda"][1](test))
