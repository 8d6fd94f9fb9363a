"""Which versions CI has seen stands in one place: pyproject.toml, the page, CI's own list and
`doctor` say the same.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from jaxpar.base.machine import versions
from jaxpar.base.tested_versions import DATE, ON_A_GPU, SEEN, TESTED, version_lines
from jaxpar.cli.doctor import doctor_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def next_release(version: str) -> str:
    """The first version of the next release of the kind that breaks: of 0.12.0.1, 0.13."""
    major, minor, *_ = version.split(".")
    return f"{major}.{int(minor) + 1}"


def test_the_bounds_of_the_package_are_what_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = dict(re.match(r"([\w-]+)(.*)", one).groups() for one in project["dependencies"])  # pyright: ignore[reportOptionalMemberAccess]
    for name in TESTED.keys() & bounds.keys():
        tested = TESTED[name]
        assert bounds[name] == f">={tested.oldest},<{next_release(tested.newest)}", name
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"} <= bounds.keys()


def test_the_page_and_cis_list_have_them() -> None:
    for name, tested in TESTED.items():
        (row,) = [
            line for line in PAGE.splitlines() if line.startswith("| `") and f"`{name}`" in line
        ]
        assert row.endswith(f"| {tested.oldest} | {tested.newest} |")
    assert DATE in PAGE and ON_A_GPU["jax"] in PAGE
    assert all(f"{seen.package} {seen.since}" in PAGE for seen in SEEN)
    listed = (ROOT / ".ci" / "newest.txt").read_text("utf-8").splitlines()
    wanted = [f"{name}=={tested.newest}" for name, tested in TESTED.items()]
    assert [line for line in listed if not line.startswith("#")] == wanted


def test_todays_are_tested() -> None:
    newest = {name: tested.newest for name, tested in TESTED.items()}
    tested, *seen = version_lines(newest)
    assert tested == f"tested       by CI on {DATE}: " + ", ".join(
        f"{name} {version}" for name, version in newest.items()
    )
    assert len(seen) == len(SEEN) and "150 ms" in seen[0]


def test_the_oldest_have_nothing_to_say() -> None:
    oldest = {name: tested.oldest for name, tested in TESTED.items()}
    assert len(version_lines(oldest)) == 1


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"jax": "0.13.0"}, "jax 0.13.0 (newer than 0.12.0.1)"),
        ({"libtpu": "0.0.52"}, "libtpu 0.0.52 (newer than 0.0.50.1)"),
        ({"flax": "0.12.4"}, "flax 0.12.4 (older than 0.12.8)"),
        ({"jax": "0.12.0"}, "jax 0.12.0 (between 0.10.2 and 0.12.0.1)"),
        ({"jax": "0.11.2"}, "jax 0.11.2 (`make gpu` has run with it)"),
        ({"jax": "0.13.0.dev20261128"}, "(newer than 0.12.0.1)"),
    ],
)
def test_what_ci_has_not_seen_is_said(installed: dict[str, str], said: str) -> None:
    (untested,) = [line for line in version_lines(installed) if line.startswith("untested")]
    assert said in untested and "make test-newest" in untested
    assert not version_lines({"numpy": "3.0"}), "nothing is known of others"


def test_doctor_says_it_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command([]) == 0
    said = capsys.readouterr().out.splitlines()
    for line in version_lines(versions(tuple(TESTED))):
        assert line in said
    assert not [line for line in said if line.startswith("missing")]
