"""The versions of packages that CI has seen, at both ends, and what was seen to go wrong with some.

The bounds of pyproject.toml and the table of docs/install.md are these: a test compares them. A new
version is tried by `make test-newest`, and then written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tested(NamedTuple):
    """The versions of one package that CI runs with."""

    oldest: str
    """On Python 3.11."""
    newest: str
    """On Python 3.13."""


DATE = "2026-11-28"
TESTED = {
    "jax": Tested("0.10.2", "0.12.0.1"),
    "jaxlib": Tested("0.10.2", "0.12.0.1"),
    "libtpu": Tested("0.0.42.1", "0.0.50.1"),
    "jax-cuda12-plugin": Tested("0.10.2", "0.12.0.1"),
    "flax": Tested("0.12.8", "0.12.12"),
    "optax": Tested("0.2.8", "0.2.8"),
    "orbax-checkpoint": Tested("0.12.8", "0.12.8"),
    "grain": Tested("0.2.18", "0.2.18"),
}
ON_A_GPU = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2"}
"""What `make gpu` has run with."""


class Seen(NamedTuple):
    """Something that goes wrong, or is lost, from a version of a package on."""

    package: str
    since: str
    what: str


SEEN = (
    Seen(
        "libtpu",
        "0.0.50",
        "refuses to fuse all-gathers on all TPUs but v5e, as unsafe: a step of LLaMA-3 8B on 64 "
        "v5p waits 150 ms for collectives where it waited 110, and the library asks for it on v5e "
        "alone",
    ),
    Seen(
        "jax",
        "0.12",
        "says that a later version has no Pallas Triton: attention by pallas_gpu and block-sparse "
        "matmuls on GPUs need it",
    ),
    Seen(
        "jaxlib",
        "0.12",
        "may run two loops of a program at once on CPU, so that some plans are refused on "
        "simulated devices",
    ),
)


def version_lines(installed: Mapping[str, str]) -> list[str]:
    """Say which of the installed packages CI has seen.

    Args:
      installed: versions by package; those that nothing is known of are passed over.

    Returns:
      A line of those that were tested, one of those that were not, and one for each thing that was
      seen to go wrong with them.
    """
    known = {name: installed[name] for name in TESTED if name in installed}
    others = {name: version for name, version in known.items() if version not in TESTED[name]}
    tested = [f"{name} {version}" for name, version in known.items() if name not in others]
    lines = list[str]()
    if tested:
        lines.append(f"tested       by CI on {DATE}: {', '.join(tested)}")
    if others:
        said = [f"{name} {version} ({_place(name, version)})" for name, version in others.items()]
        lines.append(
            f"untested     {', '.join(said)}: `make test-newest` of a clone tries what is newest"
        )
    for seen in SEEN:
        version = installed.get(seen.package, "")
        if version and _numbers(version) >= _numbers(seen.since):
            lines.append(f"seen         {seen.package} {version} {seen.what}")
    return lines


def _place(name: str, version: str) -> str:
    """Where a version lies beside those that were tested."""
    tested = TESTED[name]
    if ON_A_GPU.get(name) == version:
        return "`make gpu` has run with it"
    if _numbers(version) > _numbers(tested.newest):
        return f"newer than {tested.newest}"
    if _numbers(version) < _numbers(tested.oldest):
        return f"older than {tested.oldest}"
    return f"between {tested.oldest} and {tested.newest}"


def _numbers(version: str) -> tuple[int, ...]:
    """A version's leading numbers, to be compared."""
    found = list[int]()
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
