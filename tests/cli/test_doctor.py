"""Warnings about known-bad combinations: when they are due, and only then."""

import pytest

from jaxpar.cli.doctor import KNOWN_BAD, examine, installed

pytestmark = pytest.mark.quick

HEALTHY = {"jax": "0.11.1", "jaxlib": "0.11.1", "orbax-checkpoint": "0.12.9", "jax-cuda12-plugin": "0.11.1"}
OFFLOAD, RELEASES, NO_GPU, FLIPPED = range(4)


def warned(changes: dict[str, str], backend: str) -> list[int]:
    """The places in KNOWN_BAD of those that apply to a healthy machine with these changes."""
    return [i for i, bad in enumerate(KNOWN_BAD) if bad.applies(HEALTHY | changes, backend)]


@pytest.mark.parametrize(
    ("changes", "backend", "expected"),
    [
        ({}, "gpu", []),
        ({"jax": "0.11.0", "jaxlib": "0.11.0"}, "gpu", [OFFLOAD]),
        ({"jax": "0.11.0", "jaxlib": "0.11.0"}, "tpu", []),
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, "gpu", []),
        ({"jax": "0.12.0"}, "gpu", [RELEASES]),
        ({"jax": "0.11.2"}, "gpu", []),
        ({}, "cpu", [NO_GPU]),
        ({"orbax-checkpoint": "0.12.8"}, "gpu", [FLIPPED]),
    ],
)
def test_a_warning_is_given_when_it_is_due(changes, backend, expected):
    assert warned(changes, backend) == expected


def test_no_gpu_is_missed_where_no_plugin_is_installed():
    versions = {name: version for name, version in HEALTHY.items() if "cuda" not in name}
    assert not KNOWN_BAD[NO_GPU].applies(versions, "cpu")


@pytest.mark.parametrize(
    ("place", "word"), [(OFFLOAD, "46231"), (RELEASES, "releases"), (NO_GPU, "nvidia-smi"), (FLIPPED, "flipped")]
)
def test_a_warning_says_what_it_is_about(place, word):
    assert word in KNOWN_BAD[place].what


def test_the_facts_are_those_of_this_process():
    facts, warnings = examine()
    text = "\n".join(facts)
    assert "8 x cpu" in text
    assert f"jax {installed()['jax']}" in text
    assert "pinned_host" in text
    for platform in ("tpu", "cuda"):
        (line,) = [fact for fact in facts if f"for {platform} targets" in fact]
        assert "pip install" in line or any(package in line for package in installed())
    assert set(warnings) <= {bad.what for bad in KNOWN_BAD}


def test_what_is_not_installed_is_not_listed(monkeypatch):
    monkeypatch.setattr("jaxpar.cli.doctor.OPTIONAL", ("surely-not-installed",))
    assert "surely-not-installed" not in installed()
