"""Which jaxpar this is. It has no use for JAX, so that `jaxpar --version` needs none."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0+unknown"
"""Of a jaxpar whose source is on the path, and that nothing installed."""


def jaxpar_version() -> str:
    """Return the version that was installed; `0+unknown` where nothing was."""
    return installed_version("jaxpar", UNKNOWN)


def installed_version(package: str, absent: str = "unknown") -> str:
    """Return the version of a package that can be imported.

    Args:
      package: its name where it is installed from.
      absent: what to return where nothing installed it, as where its source is on the path.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return absent
