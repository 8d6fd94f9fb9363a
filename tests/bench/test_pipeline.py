"""`jaxpar bench pipeline`: what it refuses, what it leaves out, what its rows say."""

from __future__ import annotations

import pytest

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.bench import pipeline as bench_pipeline
from jaxpar.bench.pipeline import compare_schedules
from jaxpar.rehearse.targets import load_target

SMALL = {"mesh.platform": "auto", "mesh.data": 1, "mesh.fsdp": 1, "model.layers": 4, "model.scan_layers": True}


def test_a_mesh_without_stages_or_of_another_size_is_refused() -> None:
    pytest.importorskip("libtpu", reason="a target's devices need the TPU compiler: pip install 'jaxpar[rehearse]'")
    with pytest.raises(UserError, match=r"try mesh\.stage=4"):
        compare_schedules(override(load_config("tiny"), SMALL | {"mesh.tensor": 4}), load_target("v5e-4"))
    with pytest.raises(UserError, match="needs 8 devices, v5e-4 has 4"):
        compare_schedules(override(load_config("tiny"), SMALL | {"mesh.stage": 4}), load_target("v5e-4"))


@pytest.mark.slow
def test_each_schedule_is_compiled_with_more_and_more_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler is not here: pip install 'jaxpar[rehearse]'")
    monkeypatch.setattr(bench_pipeline, "_TIMES", (1, 4))
    said: list[str] = []
    config = override(load_config("tiny"), SMALL | {"mesh.stage": 2, "model.layers": 6})
    rows = compare_schedules(config, load_target("v5e-4"), said.append)
    assert [(row["schedule"], row["microbatches"]) for row in rows] == [
        (name, M) for name in ("gpipe", "1f1b", "zb_h1") for M in (2, 8)
    ]
    assert "without interleaved and looped: 2 stages x 2 do not divide model.layers=6" in said
    assert list(rows[0]) == [
        "schedule", "microbatches", "ticks", "bubble, %", "temporaries, GiB", "peak less arguments, GiB", "step, s",
        "tokens/s",
    ]  # fmt: skip
    assert rows[2]["bubble, %"] == pytest.approx(100 / 3), "1f1b, 2 stages, 2 microbatches: 1 of 3 rounds"
    memory = {(row["schedule"], row["microbatches"]): float(row["peak less arguments, GiB"] or 0) for row in rows}
    assert memory["gpipe", 8] > 1.5 * memory["gpipe", 2]
    assert memory["1f1b", 8] < 1.1 * memory["1f1b", 2]
    # So small a step may have its temporaries where what it gives away was, and no byte of its own.
    assert all(row["step, s"] > 0 and row["temporaries, GiB"] >= 0 for row in rows)
    assert all(peak > 0 for peak in memory.values())
