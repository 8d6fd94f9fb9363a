"""Warnings about known-bad combinations: when they are due, and only then."""

import pytest

from jaxpar.base.console import PACKAGES
from jaxpar.base.machine import versions
from jaxpar.cli.doctor import OPTIONAL, doctor_command, warnings_for

HEALTHY = {
    "jax": "0.11.1",
    "jaxlib": "0.11.1",
    "jax-cuda12-plugin": "0.11.1",
}
OFFLOAD = "openxla/xla#46231"
RELEASES = "different releases"
NO_GPU = "nvidia-smi"


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
    ],
)
def test_a_warning_is_given_when_it_is_due(changes, backend, expected):
    found = warnings_for(HEALTHY | changes, backend)
    assert len(found) == len(expected)
    assert all(word in warning for word, warning in zip(expected, found, strict=True))


def test_no_gpu_is_missed_where_no_plugin_is_installed():
    assert (
        warnings_for(
            {name: version for name, version in HEALTHY.items() if "cuda" not in name}, "cpu"
        )
        == []
    )


def test_the_facts_are_those_of_this_process(capsys):
    assert doctor_command([]) == 0
    text = capsys.readouterr().out
    assert "8 x cpu" in text
    assert f"jax {versions()['jax']}" in text
    assert "pinned_host" in text
    for platform in ("tpu", "cuda"):
        (line,) = [fact for fact in text.splitlines() if f"for {platform} targets" in fact]
        assert "pip install" in line or any(
            package in line for package in versions(PACKAGES + OPTIONAL)
        )
    warnings = [
        line.removeprefix("warning      ")
        for line in text.splitlines()
        if line.startswith("warning ")
    ]
    assert warnings == warnings_for(versions(PACKAGES + OPTIONAL), "cpu")


def test_what_is_not_installed_is_not_listed():
    assert list(versions(("surely-not-installed", "jax"))) == ["jax"]
