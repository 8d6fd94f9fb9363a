"""`jaxpar goodput`: what the time of a run went on, what it has measured, and what to expect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpar.cli.main import main
from jaxpar.train.goodput import Costs, best_interval, expected_goodput
from jaxpar.train.goodput.measured import measure_run

FIRST = {
    "began": 0,
    "ended": 100,
    "lowest": 0,
    "step": 25,
    "saves": 2,
    "marks": [[10, 20.0], [20, 40.0]],
    "seconds": {"productive": 50, "startup": 30, "compiling": 10, "saving": 10},
}
SECOND = FIRST | {
    "began": 120,
    "ended": 190,
    "lowest": 20,
    "step": 45,
    "marks": [[40, 30.0]],
    "seconds": {"productive": 50, "startup": 15, "restoring": 5},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [json.dumps(FIRST), "damaged", json.dumps(SECOND)]
    (tmp_path / "goodput.jsonl").write_text("\n".join(lines) + "\n")
    for step, seconds in ((20, 6.0), (40, 8.0)):
        folder = tmp_path / "checkpoints" / str(step)
        (folder / "state").mkdir(parents=True)
        noted = {"init_timestamp_nsecs": 1e9, "commit_timestamp_nsecs": 1e9 + seconds * 1e9}
        (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(noted))
    return tmp_path


def test_a_run_has_measured_what_faults_and_checkpoints_cost(run: Path) -> None:
    found = measure_run(run)
    # two saves of each process in 10 s, of which the background is what Orbax notes beyond them
    assert found.costs == Costs(save=2.5, write=4.5, recover=30.0, down=20.0)
    assert found.step_seconds == 2.0  # 100 s of 25 steps and 25 steps, some of them made twice


def test_what_it_prints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", str(run), "--nodes", "8", "512", "--node-mtbf-days", "100"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
    assert "goodput 47.4 % of 3:10 in 2 processes: start-up 23.7 %" in said
    assert rows["wasted"][:4] == ["wasted", "0:10", "5.3", "%"]
    assert rows["all"][:4] == ["all", "3:10", "100.0", "%"]
    assert "save 2.5 s, write 4.5 s, recover 30 s, down 20 s" in said
    assert "warning: 1 damaged lines of goodput.jsonl" in said
    mtbf = 100 * 86_400 / 512
    costs = Costs(2.5, 4.5, 30.0, 20.0)
    assert f"{100 * expected_goodput(300.0, mtbf, costs):.1f}" == rows["512"][5]
    assert str(round(best_interval(mtbf, costs) / 2.0)) == rows["512"][-1]


def test_costs_may_be_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", str(run), "--target", "v5p-64", "--save", "0", "--down", "7"]) == 0
    said = capsys.readouterr().out
    assert "save 0 s, write 4.5 s, recover 30 s, down 7 s" in said
    # 64 chips, four to a machine
    assert [line for line in said.splitlines() if line.split()[:1] == ["16"]]


def test_what_cannot_be_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["goodput", str(run), "--target", "v5p-64", "--nodes", "3"]) == 2
    assert "--nodes has no effect beside --target" in capsys.readouterr().err
    (tmp_path / "goodput.jsonl").write_text("damaged\n")
    assert main(["goodput", str(tmp_path)]) == 2
    assert "goodput.jsonl has no account that is whole" in capsys.readouterr().err
    assert main(["goodput", str(tmp_path / "absent")]) == 2
    assert "has no goodput.jsonl" in capsys.readouterr().err
