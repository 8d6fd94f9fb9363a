"""`train --verify` remembers a plan that was equal, forgets it when anything changes, and refuses one that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.base.runtime import cache_folder
from jaxpar.cli import train as train_module
from jaxpar.cli.main import main
from jaxpar.verify.mistakes import Finding
from jaxpar.verify.of_config import Setup, Verification
from jaxpar.verify.of_config import remember as verified
from jaxpar.verify.report import GradientRow, Verdict

pytestmark = pytest.mark.quick

CONFIG = load_config("tiny")


class Runs:
    """Counts the verifications in place of running them; `equal` says how they end."""

    def __init__(self) -> None:
        self.equal, self.setups = True, []

    def __call__(self, setup: Setup) -> Verification:
        self.setups.append(setup)
        finding = None if self.equal else Finding("sign", "minus the reference", 0.0)
        row = GradientRow("blocks.q", (2, 3), 0.0 if self.equal else 2.0, 1e-5, finding)
        return Verification(
            setup, (Verdict("float32", 1.0, 1.0, 0.0, 1e-6, (row,), origin="blocks.q of layer 1"),), 12.3
        )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    found = Runs()
    monkeypatch.setattr(verified, "run", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def required(config: Config = CONFIG, devices: Any = None) -> list[str]:
    said: list[str] = []
    verified.require(config, devices or jax.devices(), said.append)
    return said


def the_file() -> Path:
    (file,) = (cache_folder() / "verify").iterdir()
    return file


def test_an_equal_plan_is_verified_once(runs: Runs) -> None:
    assert "verified: EQUAL: loss and 1 gradients on data=2 x fsdp=2 x tensor=2 (8 x cpu)" in required()[-1]
    (again,) = required()
    assert again.startswith("verified before: EQUAL: ")
    assert "12 s" in again
    assert len(runs.setups) == 1
    facts = json.loads(the_file().read_text().partition("\n")[2])
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["config"].startswith("[model]\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.data": 1, "mesh.tensor": 4},
        {"rules.mlp": ()},
        {"memory.policy": "full"},
        {"precision.compute": "bfloat16"},
        {"train.accumulation": 2},
        {"train.z_loss": 1e-4},
        {"data.pack": True},
        {"model.tied_head": False},
        {"model.mlp": 1024},
        {"model.scan_layers": True},
    ],
)
def test_another_plan_is_another_verification(runs: Runs, changes: dict[str, Any]) -> None:
    required()
    required(override(CONFIG, changes))
    assert len(runs.setups) == 2
    required(override(CONFIG, changes))
    assert len(runs.setups) == 2


def test_what_has_no_part_in_a_gradient_is_no_other_plan(runs: Runs) -> None:
    required()
    required(override(CONFIG, {"train.steps": 77, "train.learning_rate": 0.1, "data.source": "text", "data.path": "x"}))
    assert len(runs.setups) == 1


@pytest.mark.parametrize("fact", ["versions", "platform", "platform_version", "device_kind", "flags", "source"])
def test_another_version_or_platform_is_verified_again(runs: Runs, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    required()
    own = verified.facts_of
    monkeypatch.setattr(verified, "facts_of", lambda setup: own(setup) | {fact: "another"})
    required()
    assert len(runs.setups) == 2


def test_the_source_of_library_and_models_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("jaxpar", "jaxpar.models"):
        (tmp_path / package / "inner").mkdir(parents=True)
        (tmp_path / package / "inner" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(verified.resources, "files", lambda package: tmp_path / package)
    before = verified.source_hash()
    (tmp_path / "jaxpar" / "notes.txt").write_text("of no account")
    assert verified.source_hash() == before
    (tmp_path / "jaxpar.models" / "inner" / "a.py").write_text("x = 2\n")
    assert verified.source_hash() != before


def test_a_difference_is_refused_and_not_remembered(runs: Runs) -> None:
    runs.equal = False
    for _ in range(2):
        with pytest.raises(UserError, match=r"refuses to train this plan: DIFFERS .* blocks\.q .* sign, it is minus"):
            required()
    assert len(runs.setups) == 2
    assert not (cache_folder() / "verify").exists()


@pytest.mark.parametrize("content", ["", "{", "DIFFERS: the loss", "EQUA", '"\ud800"'])
def test_a_damaged_memory_is_verified_again(runs: Runs, content: str) -> None:
    required()
    the_file().write_bytes(content.encode("utf-8", "surrogatepass"))
    assert required()[-1].startswith("verified: ")
    assert len(runs.setups) == 2
    assert required()[0].startswith("verified before: ")


def test_a_folder_that_cannot_be_written_is_said(runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    *_, verdict, line = required()
    assert verdict.startswith("verified: ")
    assert line.startswith("cannot remember this in ")


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == Path.home() / ".cache" / "jaxpar"


def test_a_smaller_mesh_is_said_before_the_verdict(runs: Runs) -> None:
    said = required(override(CONFIG, {"mesh.data": 1, "mesh.fsdp": 16, "mesh.tensor": 4}), jax.devices()[:4])
    assert said[0].startswith("verify: SMALLER MESH: fsdp=16 x tensor=4 needs 64 devices and 4 are here")
    with pytest.raises(UserError, match="2 devices are here, too few to keep 2 along each axis"):
        required(CONFIG, jax.devices()[:2])


def test_train_asks_before_it_makes_a_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def refuse(config: Config, devices: Any, say: Any) -> None:
        asked.append(config)
        raise UserError("refused")

    monkeypatch.setattr(train_module, "require", refuse)
    words = ["train", "tiny", "--run", str(tmp_path / "run"), "--verify"]
    assert main(words) == 2
    assert len(asked) == 1
    assert not (tmp_path / "run").exists()
