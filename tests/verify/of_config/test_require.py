"""`train --verify`: what it says, and that it refuses a plan that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.launch import local as train_module
from jaxpar.verify.mistakes import Finding
from jaxpar.verify.of_config import Setup, Verification, checks, require
from jaxpar.verify.report import GradientRow, Verdict

CONFIG = load_config("tiny")


def required(
    monkeypatch: pytest.MonkeyPatch, equal: bool, config: Config = CONFIG, devices: Any = None
) -> list[str]:
    """What is said where a verification, which is not run, ends so."""

    def run(setup: Setup, gradients: Any, say: Any) -> Verification:
        for note in setup.notes:
            say(f"note: {note}")
        if equal:
            finding = None
        else:
            finding = Finding("sign", "minus the reference", 0.0)
        row = GradientRow("blocks.q", (2, 3), 0.0 if equal else 2.0, 1e-5, finding)
        verdict = Verdict("float32", 0.0, 1e-6, (row,), origin="blocks.q of layer 1")
        return Verification(setup, (verdict,), 12.3)

    said: list[str] = []
    monkeypatch.setattr(checks, "run", run)
    require(config, devices or jax.devices(), said.append)
    return said


def test_an_equal_plan_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "verified: EQUAL: loss and 1 gradients on data=2 x fsdp=2 x tensor=2 (8 x cpu)"
        in required(monkeypatch, True)[-1]
    )


def test_a_difference_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"DIFFERS .* blocks\.q .*minus"):
        required(monkeypatch, False)


def test_a_smaller_mesh_is_said_before_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    larger = override(CONFIG, {"mesh.data": 1, "mesh.fsdp": 16, "mesh.tensor": 4})
    said = required(monkeypatch, True, larger, jax.devices()[:4])
    assert said[0].startswith(
        "note: SMALLER MESH: fsdp=16 x tensor=4 needs 64 devices and 4 are here"
    )
    with pytest.raises(UserError, match="2 devices are here"):
        required(monkeypatch, True, devices=jax.devices()[:2])


def test_train_asks_before_it_makes_a_run_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def refuse(config: Config, devices: Any, say: Any) -> None:
        asked.append(config)
        raise UserError("refused")

    monkeypatch.setattr(train_module, "require", refuse)
    words = ["train", "tiny", "--run", str(tmp_path / "run"), "--verify"]
    assert main(words) == 2
    assert len(asked) == 1
    assert not (tmp_path / "run").exists()
