"""`jaxpar bench pipeline`: what it refuses, what it leaves out, what its table says."""

from __future__ import annotations

import pytest

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.bench import pipeline as bench_pipeline
from jaxpar.bench.pipeline import ScheduleRow, compare_schedules, schedules_table
from jaxpar.rehearse.targets import load_target

SMALL = {"mesh.platform": "auto", "mesh.data": 1, "mesh.fsdp": 1, "model.layers": 4, "model.scan_layers": True}


def test_the_table_is_in_gib_and_percent() -> None:
    rows = [
        ScheduleRow("1f1b", 1, 8, 22, 3 / 11, 3 * 2**29, 2**30, 0.5, 12345.6),
        ScheduleRow("looped", 2, 16, 70, 0.086, 2**30, 0, 7.0755, 74104),
    ]
    assert schedules_table(rows).splitlines()[2:] == [
        "| 1f1b | 8 | 22 | 27.3 % | 1.50 | 1.00 | 0.500 | 12,346 |",
        "| looped, 2 chunks | 16 | 70 | 8.6 % | 1.00 |  | 7.075 | 74,104 |",
    ]


def test_a_mesh_without_stages_or_of_another_size_is_refused() -> None:
    pytest.importorskip("libtpu", reason="a target's devices need the TPU compiler: pip install 'jaxpar[rehearse]'")
    with pytest.raises(UserError, match=r"try --mesh\.stage 4"):
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
    assert [(row.schedule, row.microbatches) for row in rows] == [
        (name, M) for name in ("gpipe", "1f1b", "zb_h1") for M in (2, 8)
    ]
    assert "without interleaved and looped: 2 stages x 2 do not divide model.layers=6" in said
    memory = {(row.schedule, row.microbatches): row.peak for row in rows}
    assert memory["gpipe", 8] > 1.5 * memory["gpipe", 2]
    assert memory["1f1b", 8] < 1.1 * memory["1f1b", 2]
    # So small a step may have its temporaries where what it gives away was, and no byte of its own.
    assert all(row.seconds > 0 and row.peak > 0 and row.temporaries >= 0 for row in rows)
