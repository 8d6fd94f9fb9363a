"""The Dockerfile, without a Docker: its instructions, what it copies, and its installation, run in a
folder that has only what it copies.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTRUCTION = re.compile(r"(FROM|ARG|ENV|WORKDIR|COPY|RUN|ENTRYPOINT|CMD) (.+)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """What the Dockerfile does, line by line; each is on one."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [INSTRUCTION.fullmatch(line) for line in lines]
    assert all(found), lines
    return [(line[1], line[2]) for line in found if line]


def copied() -> list[str]:
    return [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]


def test_the_image_is_pinned_and_has_the_extra_that_is_asked_for() -> None:
    steps = instructions()
    assert steps[0][0] == "FROM" and re.fullmatch(r"[\w./-]+:[\w.-]+", steps[0][1])
    python = re.search(r"python:(\d+)\.(\d+)", steps[0][1])
    least = re.search(r">=\s*(\d+)\.(\d+)", PROJECT["project"]["requires-python"])
    assert python and least
    assert tuple(map(int, python.groups())) >= tuple(map(int, least.groups()))
    (extra,) = [rest.partition("=")[2] for name, rest in steps if name == "ARG"]
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name in (extra, *re.findall(r"EXTRA=(\w+)", text)):
        assert name in PROJECT["project"]["optional-dependencies"]


def test_all_that_is_installed_is_copied_and_not_ignored() -> None:
    listed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert listed[0] == "*"
    for word in copied():
        assert (ROOT / word).exists() and f"!{word}" in listed
    tops = {"jaxpar", *PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert {top.partition("/")[0] for top in tops} <= set(copied())
    assert PROJECT["project"]["readme"] in copied()


@pytest.mark.slow
def test_what_is_copied_installs_and_runs(tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("building a wheel needs setuptools 77 or later: pip install 'jaxpar[dev]'")
    for word in copied():
        if (ROOT / word).is_dir():
            shutil.copytree(ROOT / word, tmp_path / "src" / word)
        else:
            (tmp_path / "src").mkdir(exist_ok=True)
            shutil.copy(ROOT / word, tmp_path / "src")
    (run,) = [rest for name, rest in instructions() if name == "RUN"]
    assert run == 'pip install ".[$EXTRA]" && jaxpar --version'
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--no-build-isolation", "--target", str(tmp_path / "there"), "."]
    done = subprocess.run(
        install, cwd=tmp_path / "src", capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    said = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "there" / "bin" / "jaxpar"), "--version"],
        env={"PYTHONPATH": str(tmp_path / "there"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == f"jaxpar {version('jaxpar')}\n", said.stderr
