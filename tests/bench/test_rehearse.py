"""Predicted against measured: the comparison, its summary and its picture, on programs of known length."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from jaxpar.base.config import Config, check, override
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware
from jaxpar.bench import rehearse as bench_rehearse
from jaxpar.bench.alternate import Row
from jaxpar.bench.rehearse import (
    compare_predictions,
    configs,
    rank_correlation,
    ready_config,
    summary,
)
from jaxpar.hlo.tasks import Collective, Loop, Program, Task
from jaxpar.rehearse.calibrate import Calibration
from jaxpar.rehearse.cost.speeds import Sample
from jaxpar.rehearse.cost.stopwatch import Ready

DOT = Task("dot", "dot", "matmul", flops=1e7, dtype="f32", shape="f32[10,10]")
CALIBRATION = Calibration({"platform": "cpu", "processor": "Z80"}, (Sample("matmul dot f32", (0, 3, 3, 16), 1e9),), 0.0)
HARDWARE = CALIBRATION.hardware(Hardware())
STATS = SimpleNamespace(
    argument_size_in_bytes=5, output_size_in_bytes=4, alias_size_in_bytes=3, temp_size_in_bytes=100,
    generated_code_size_in_bytes=10, host_argument_size_in_bytes=0, host_temp_size_in_bytes=0,
)  # fmt: skip


def sleeper(config: Config, name: str) -> Ready:
    """A program of `layers` matmuls that are said to take 10 ms each and take 11."""
    layers = config.model.layers
    nodes = (Loop("layers", layers, (DOT,)),)
    return Ready(Program(name, nodes), {}, lambda: time.sleep(0.011 * layers), 0.011 * layers, STATS)


def test_each_config_is_predicted_and_timed(monkeypatch):
    monkeypatch.setattr(bench_rehearse, "ready_config", sleeper)
    shapes = {f"{n} layers": override(Config(), {"model.layers": n}) for n in (3, 1)}
    said: list[str] = []
    rows = compare_predictions(shapes, HARDWARE, CALIBRATION.speeds(), rounds=2, say=said.append)
    assert [(row["config"], row["predicted, ms"]) for row in rows] == [
        ("3 layers", pytest.approx(30)), ("1 layers", pytest.approx(10)),
    ]  # fmt: skip
    assert {float(row["predicted, GiB"] or 0) * 2**30 for row in rows} == {116}
    for row in rows:
        predicted, fastest, median = (float(row[f"{name}, ms"] or 0) for name in ("predicted", "fastest", "median"))
        assert median >= fastest >= 1.1 * predicted
        assert row["predicted / fastest"] == pytest.approx(predicted / fastest)
    assert said == ["compiling 3 layers", "compiling 1 layers", "timing, round 1/2", "timing, round 2/2"]


def test_a_step_over_several_devices_is_refused(monkeypatch):
    gather = Task("ag", "all-gather", "collective", collective=Collective("all-gather", ((0, 1),), 8, "f32"))
    ready = Ready(Program("step", (gather,)), {}, lambda: None, 1.0, STATS)
    monkeypatch.setattr(bench_rehearse, "ready_config", lambda config, name: ready)
    with pytest.raises(UserError, match=r"between devices .all-gather."):
        compare_predictions({"one": Config()}, HARDWARE, rounds=1)


def rows(*pairs: tuple[float, float]) -> list[Row]:
    return [
        {"config": f"config {i}", "predicted, ms": predicted, "fastest, ms": fastest,
         "predicted / fastest": predicted / fastest}
        for i, (predicted, fastest) in enumerate(pairs)
    ]  # fmt: skip


def test_rank_correlation():
    assert rank_correlation(rows((1, 10), (2, 20), (3, 21), (9, 500))) == 1.0
    assert rank_correlation(rows((1, 3), (2, 2), (3, 1))) == -1.0
    assert rank_correlation(rows((1, 1), (2, 3), (3, 2), (4, 4))) == pytest.approx(0.8)


def test_the_summary_states_the_errors_and_the_worst():
    found = rows((10, 10), (30, 20), (70, 100))
    text = summary(found)
    assert "correlation (Spearman) 1.000 over 3 configs; error 30 % at the median, 27 % on average" in text
    assert text.endswith("worst 1.50 x (config 1).")


def test_a_training_step_gives_its_tasks():
    sizes = {"model.layers": 1, "model.embed": 32, "model.heads": 2, "model.mlp": 64, "model.vocab_size": 64}
    config = override(Config(), sizes | {"data.seq_len": 16, "train.batch": 2})
    step = ready_config(config, "shape")
    assert {module for module, _ in step.tasks} == {"jit_shape"}
    assert {"matmul", "fusion"} <= {task.kind for task in step.tasks.values()}
    step.run()  # the state is donated, so only a new one can be stepped again
    assert step.seconds > 0


def test_the_configs_are_sound():
    shapes = configs()
    assert len(shapes) >= 10
    assert len({check(config) for config in shapes.values()}) == len(shapes)
