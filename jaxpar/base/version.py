"""Which jaxpar this is. It has no use for JAX, so that `jaxpar --version` needs none."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"
"""Of a jaxpar whose source is on the path, and that nothing installed."""


def jaxpar_version() -> str:
    """Return the version that was installed; `0+unknown` where nothing was."""
    try:
        return version("jaxpar")
    except PackageNotFoundError:
        return UNKNOWN
