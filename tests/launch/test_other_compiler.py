"""A compiler of another version: how it is asked for, and rehearsals with one that pip installs."""

from __future__ import annotations

import json
import urllib.request

import pytest

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.launch.other_compiler import environment, read_packages, rehearse_with, requirements
from jaxpar.rehearse.targets import load_target

OLDER = "0.0.43.2"
"""A libtpu that jax 0.10.2 works with, beside the one that it brings."""


@pytest.mark.parametrize(
    ("packages", "platform", "asked"),
    [
        ({"libtpu": "1.2"}, "tpu", ["libtpu==1.2"]),
        ({"jax": "1.2"}, "tpu", ["jax[tpu]==1.2"]),
        ({"jax": "1.2", "libtpu": "3"}, "tpu", ["jax==1.2", "libtpu==3"]),
    ],
)
def test_what_is_installed(packages, platform, asked):
    assert requirements(packages, platform) == asked


def test_a_gpus_compiler_is_jaxs_plugin():
    jax, *plugin = requirements({"jax": "1.2"}, "cuda")
    assert jax == "jax==1.2" and len(plugin) == 2
    assert all(word.startswith("jax-cuda") and word.endswith("==1.2") for word in plugin)
    with pytest.raises(UserError, match="no effect on a GPU"):
        requirements({"libtpu": "1.2"}, "cuda")


def test_words_are_read():
    assert read_packages("--compiler", "jax==0.10.1, libtpu==0.0.41") == {
        "jax": "0.10.1",
        "libtpu": "0.0.41",
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("libtpu", "write jax==VERSION or libtpu==VERSION"),
        ("numpy==2", "write jax==VERSION or libtpu==VERSION"),
        ("libtpu>=2", "write jax==VERSION or libtpu==VERSION"),
        ("libtpu==1 libtpu==2", "write jax==VERSION or libtpu==VERSION"),
        ("libtpu==1,libtpu==2", "names libtpu twice"),
        (",", "names no version"),
    ],
)
def test_mistakes_are_told(words, says):
    with pytest.raises(UserError, match=says):
        read_packages("--compiler", words)


def test_flags_that_another_compiler_cannot_serve_are_refused(capsys, tmp_path):
    words = ["rehearse", "tiny", "--target", "v5e-8", "--compiler", "libtpu==0.0.41"]
    assert main([*words, "--graph", str(tmp_path / "graph.json")]) == 2
    assert "--graph has no effect with --compiler" in capsys.readouterr().err
    assert main([*words, "--against", "libtpu=0.0.40=="]) == 2
    assert "--against libtpu=0.0.40==: write" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder in which the other compiler is installed once for all tests."""
    try:
        with urllib.request.urlopen("https://pypi.org/simple/libtpu/", timeout=20) as answer:
            found = answer.read().decode()
    except OSError as error:
        pytest.skip(f"no index of packages is reached: {error}")
    if f"libtpu-{OLDER}-" not in found:
        pytest.skip(f"the index has no libtpu {OLDER}")
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_a_config_by_two_compilers(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    report = tmp_path / "report.json"
    words = ["rehearse", "tiny", "--target", "v5e-8", "--compiler", f"libtpu=={OLDER}"]
    assert main([*words, "--json", str(report), "--fail-on", "memory>1KiB"]) == 1
    said = capsys.readouterr()
    assert "pip: Successfully installed" in said.out
    assert said.err.startswith("jaxpar: failed: memory>1KiB: ")
    found = json.loads(report.read_text())
    assert found["versions"]["libtpu"] == OLDER
    assert main(["rehearse", "tiny", "--target", "v5e-8", "--against", f"libtpu=={OLDER}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "pip: " not in said, "what is installed once is kept"
    assert f"libtpu {OLDER} -> " in said
    config = override(load_config("tiny"), {"mesh.data": 3})
    with pytest.raises(UserError, match="needs 12 devices"):  # the other process's own line
        rehearse_with({"libtpu": OLDER}, config, "tiny", load_target("v5e-8"))


@pytest.mark.slow
def test_what_pip_refuses_is_one_line(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"no libtpu==9\.9\.9 for Python"):
        environment(["libtpu==9.9.9"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UserError, match="no index of packages"):
        environment([f"libtpu=={OLDER}"])
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://localhost:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    with pytest.raises(UserError, match="no index of packages"):
        environment([f"libtpu=={OLDER}"])
