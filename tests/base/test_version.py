"""Which jaxpar runs, where nothing has installed it: its source is on the path, as on a cluster
that builds no packages.
"""

from __future__ import annotations

import importlib.metadata

import jax
import pytest

import jaxpar
from jaxpar.base import version
from jaxpar.base.config import Config
from jaxpar.base.console import banner
from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.launch import staging
from jaxpar.train.experiments import make_plan


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", nothing)


@pytest.mark.usefixtures("not_installed")
def test_a_source_on_the_path_has_no_version_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert jaxpar.__version__ == "0+unknown"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "jaxpar 0+unknown\n"
    assert "jaxpar 0+unknown, jax " in banner(make_plan(Config(), jax.devices()[:1]), {})[0]


@pytest.mark.usefixtures("not_installed")
def test_a_script_asks_which_version_it_is_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_git", lambda *given: "")
    monkeypatch.setattr(staging, "_installed_commit", lambda: "")
    with pytest.raises(UserError, match=r"version is not known: .* --package=jaxpar\[cuda\]"):
        staging._package_here("cuda")


def test_what_is_installed_has_its_own() -> None:
    assert jaxpar.__version__ == importlib.metadata.version("jaxpar")
