"""A measured step scales compute until its rehearsal takes as long; what cannot be explained so is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.hlo.program.tasks import Collective, Program, Task
from jaxpar.rehearse import calibration
from jaxpar.rehearse.calibration import calibrate, scale_compute
from jaxpar.rehearse.cost import Cost
from jaxpar.rehearse.of_config import measured_step
from jaxpar.rehearse.targets import load_target
from jaxpar.rehearse.timeline import Priced, replay

MATMUL = Task("dot", "dot", "matmul", flops=1e12)
GATHER = Task("ag", "all-gather", "collective", collective=Collective("all-gather", (), 1, "bf16"))
PROGRAM = Program("test", (MATMUL, GATHER))
COSTS = {(0,): Cost(1.5, ("compute",), launch=0.5), (1,): Cost(0.5, ("compute", "ici:x"))}


def test_only_compute_is_scaled():
    found = scale_compute(PROGRAM, COSTS, 3.0)
    assert found[0,].seconds == 0.5 + 3 * 1.0, "a launch takes what it takes"
    assert found[1,] == COSTS[1,]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(calibration, "read_and_price", lambda *_: Priced(PROGRAM, COSTS, ()))
    return SimpleNamespace(text="", mesh=None, target=load_target("h100x8"))


@pytest.mark.parametrize(("seconds", "factor"), [(2.0, 1.0), (3.5, 2.5), (1.25, 0.25)])
def test_the_rehearsal_of_the_measured_step_takes_as_long_as_it_did(
    compiled: SimpleNamespace, seconds: float, factor: float
):
    target, found = calibrate(compiled, seconds)  # type: ignore[arg-type]
    assert (found["measured"], found["predicted"]) == (seconds, 2.0)
    assert found["compute"] == pytest.approx(factor, rel=1e-5)
    own = compiled.target.hardware.prices.compute
    assert target.hardware.prices.compute == pytest.approx(own * factor, rel=1e-5)
    again = replay(PROGRAM, scale_compute(PROGRAM, COSTS, found["compute"])).seconds
    assert again == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize("seconds", [0.9, 100.0])
def test_a_time_that_compute_does_not_explain_is_refused(compiled: SimpleNamespace, seconds: float):
    with pytest.raises(UserError, match="not explained by"):
        calibrate(compiled, seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("1.453s", 1.453), ("850ms", 0.85), ("1e-3 s", 0.001)]
)
def test_a_number_is_of_the_config_as_given(text: str, seconds: float):
    config = Config()
    assert measured_step(text, config) == (config, pytest.approx(seconds))


@pytest.mark.parametrize("text", ["", "1.4", "1.2.3s", "0s", "nowhere", "5 minutes"])
def test_what_is_no_measurement_is_refused(text: str, tmp_path: Path):
    with pytest.raises(UserError, match="measured: "):
        measured_step(text and (text if text[0].isdigit() else str(tmp_path / text)), Config())


def test_of_a_run_the_median_without_the_first_counts(tmp_path: Path):
    rows = [{"step": n + 1, "step_seconds": s} for n, s in enumerate((9.0, 1.0, 1.2, 1.1))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text("[model]\nlayers = 3\n")
    found = measured_step(str(tmp_path), Config())
    assert found.seconds == pytest.approx(1.1) and found.config.model.layers == 3
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="made no step"):
        measured_step(str(tmp_path), Config())
