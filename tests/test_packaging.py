"""What is installed: packages, data, and nothing at the top level but jaxpar."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from importlib.resources import files
from pathlib import Path

import pytest

import jaxpar
from jaxpar.base.tested_versions import TESTED
from jaxpar.base.toml import presets

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
INSIDE = ("models", "meshes", "configs")


def folder_of(package: str) -> str:
    """The folder a package is installed from."""
    return SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))


def test_every_folder_of_modules_is_installed():
    found = [
        init.parent.relative_to(ROOT).as_posix()
        for top in ("jaxpar", *INSIDE)
        for init in (ROOT / top).rglob("__init__.py")
    ]
    assert sorted(map(folder_of, SETUPTOOLS["packages"])) == sorted(found)


@pytest.mark.parametrize("folder", ["meshes", "meshes/chips", "configs"])
def test_every_preset_can_be_read_from_the_installed_package(folder):
    found = presets(f"jaxpar.{folder.replace('/', '.')}")
    assert set(found) == {file.stem for file in (ROOT / folder).glob("*.toml")}
    assert found
    for file in found.values():
        assert tomllib.loads(file.read_text(encoding="utf-8"))


def test_the_types_are_public():
    assert files("jaxpar").joinpath("py.typed").is_file()


@pytest.mark.parametrize("module", ["models", "models.transformer"])
def test_models_cannot_be_imported_a_second_time_from_the_repository(module):
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: imported as 'models': that makes a second copy of the models; use `import "
        "jaxpar.models`"
    )


def test_the_version_is_one():
    stated = PYPROJECT["project"]["version"]
    assert (
        re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
        == stated
    )
    (newest, *_) = re.findall(
        r"^## \[(.+)",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    assert stated in newest
    assert jaxpar.__version__ == stated == metadata("jaxpar")["Version"]


def test_jax_is_not_pinned_so_that_a_notebook_keeps_its_own():
    needed = metadata("jaxpar").get_all("Requires-Dist") or []
    always = {re.match(r"[\w-]+", line)[0]: line for line in needed if "extra ==" not in line}
    for name, line in always.items():
        # Of a package that has broken us the upper bound is the first release that nobody has seen.
        upper = r"<[\d.]+," if name in TESTED else ""
        assert re.fullmatch(rf"[\w-]+(\[\w+\])?{upper}>=[\d.]+", line), (
            f"{line}: a range, and no pin"
        )


def test_a_wheel_holds_the_presets_and_no_other_top_level_package(tmp_path):
    if (
        importlib.util.find_spec("setuptools") is None
        or int(metadata("setuptools")["Version"].split(".")[0]) < 77
    ):
        pytest.skip("building a wheel needs setuptools 77 or later: pip install 'jaxpar[dev]'")
    for folder in ("jaxpar", *INSIDE):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ROOT.iterdir():
        if file.suffix in (".toml", ".md") or file.name == "LICENSE":
            shutil.copy(file, tmp_path)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run(
        [sys.executable, "-c", build],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"jaxpar"}
    data = {
        f"jaxpar/{file.relative_to(ROOT)}"
        for folder in INSIDE
        for file in (ROOT / folder).rglob("*.toml")
    }
    data |= {f"{file.relative_to(ROOT)}" for file in (ROOT / "jaxpar/launch/templates").iterdir()}
    data |= {"jaxpar/bench/plans/measured.csv"}
    assert {"jaxpar/py.typed", "jaxpar/models/transformer.py", *data} <= set(names)
