"""Steps of this machine beside their rehearsals."""

from __future__ import annotations

import json

import pytest

from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.bench.here import CASES, QUICK, HereBoard, bench_here, case_config, here_rows
from jaxpar.cli.main import main


def test_the_configs_are_of_several_families_and_meshes():
    configs = {name: check(case_config(name)) for name in CASES}
    assert len(configs) == 16 and set(QUICK) < set(configs) and len(QUICK) == 5
    assert {config.model.family for config in configs.values()} == {"gpt2", "llama", "bert"}
    meshes = {
        (it.mesh.data, it.mesh.fsdp, it.mesh.stage, it.mesh.tensor) for it in configs.values()
    }
    assert len(meshes) >= 5
    assert all(config.mesh.platform == "cpu" for config in configs.values())


def test_the_table_begins_with_the_fastest():
    board: HereBoard = {
        "versions": {},
        "machine": "",
        "rows": [
            {"name": "slow", "devices": 1, "measured": 0.4, "predicted": 0.5},
            {"name": "fast", "devices": 8, "measured": 0.1, "predicted": 0.05},
        ],
        "rank_correlation": None,
        "median_error": 0.0,
    }
    fast, slow = here_rows(board)
    assert (fast["config"], fast["predicted / measured"]) == ("fast", 0.5)
    assert (slow["config"], slow["measured, ms"]) == ("slow", 400.0)


def test_an_unknown_config_is_named(capsys):
    with pytest.raises(UserError, match="did you mean 'gpt2-deep'"):
        bench_here(["gpt2-dep"])
    assert main(["bench", "here", "--quick", "--only", "gpt2"]) == 2
    assert "--quick has no effect" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_board(tmp_path, monkeypatch, capsys):
    """Of five steps, the fastest of which takes an eighth of the slowest, three neighbours may come in
    a circle: 0.7. Other processes may slow a step twofold, so nothing is asked of the seconds.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "here.json"
    assert main(["bench", "here", "--quick", "--rounds", "7", "--json", str(file)]) == 0
    assert "rank correlation" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == list(QUICK)
    assert found["rank_correlation"] >= 0.7
