"""`jaxpar bench presets`: which presets, what is written, and how two versions stand side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiers import needs_libtpu

from jaxpar.base.errors import UserError
from jaxpar.base.toml import presets
from jaxpar.bench import presets as subject
from jaxpar.bench.presets import (
    PRESET_TARGETS,
    PresetRow,
    PresetTable,
    preset_rows,
    read_presets,
    rehearse_presets,
)
from jaxpar.cli.main import main
from jaxpar.rehearse.targets import load_target


def row(preset: str, seconds: float, refused: str = "") -> PresetRow:
    return {
        "preset": preset,
        "target": PRESET_TARGETS[preset],
        "seconds": seconds,
        "exposed": seconds / 4,
        "bytes": 2**31,
        "fits": True,
        "compiling": 3.2,
        "refused": refused,
    }


def table(*rows: PresetRow) -> PresetTable:
    return {"versions": {"jax": "0.12.0.1"}, "rows": list(rows)}


def test_every_preset_has_a_target_and_every_chip_a_preset() -> None:
    assert set(PRESET_TARGETS) == set(presets("jaxpar.configs"))
    chips = {load_target(name).chip for name in PRESET_TARGETS.values()}
    assert chips == set(presets("jaxpar.meshes.chips"))


def test_two_versions_stand_side_by_side() -> None:
    before = table(row("tiny", 1e-3), row("llama3_8b", 0.489))
    now = table(row("tiny", 2e-3), row("llama3_8b", 0.0, "XLA knows no option"), row("tiny_moe", 1))
    first, second, third = preset_rows(now, before)
    assert (first["ms, before"], first["ms"], first["ratio"]) == (1.0, 2.0, 2.0)
    assert first["exposed, ms"] == 0.5 and first["GiB"] == 2.0
    assert second["ms"] is None and second["ratio"] is None
    assert second["ms, before"] == 489 and second["refused"] == "XLA knows no option"
    assert third["ms, before"] is None and third["ms"] == 1000
    assert "ratio" not in preset_rows(now)[0]


def test_a_preset_that_is_refused_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rehearse(config: Any, target: str, name: str) -> Any:
        if name == "tiny":
            raise UserError("the compiler refuses this step: as a test")
        memory = {"total": 2**30, "fits": True}
        return {"time": {"step": 0.25, "exposed_communication": 0.1}, "memory": memory}

    monkeypatch.setattr(subject, "rehearse", rehearse)
    file = tmp_path / "now.json"
    assert main(["bench", "presets", "--only", "tiny", "tiny_moe", "--json", str(file)]) == 1
    assert "as a test" in capsys.readouterr().out
    found = read_presets(file)
    assert [one["seconds"] for one in found["rows"]] == [0, 0.25]
    assert main(["bench", "presets", "--only", "tiny_moe", "--against", str(file)]) == 0
    said = capsys.readouterr().out
    assert "| 250 |" in said and "| 1 |" in said.replace("1.0", "1")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": [{"preset": "tiny"}], "versions": {}}'])
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(text)
    with pytest.raises(UserError, match="no table of jaxpar"):
        read_presets(file)
    with pytest.raises(UserError, match=r"cannot read .*none\.json"):
        read_presets(tmp_path / "none.json")


def test_a_preset_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "presets", "--only", "lama3_8b"]) == 2
    assert "did you mean 'llama3_8b'" in capsys.readouterr().err


@needs_libtpu
def test_a_preset_on_its_target() -> None:
    said: list[str] = []
    found = rehearse_presets(["tiny"], said.append)
    assert said == ["1/1: tiny on v5e-8"]
    (one,) = found["rows"]
    assert 0 < one["exposed"] < one["seconds"] < 1 and one["fits"] and not one["refused"]
    assert json.loads(json.dumps(found)) == found
