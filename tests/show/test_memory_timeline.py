"""The picture of what is in memory when, from a made-up report."""

import pytest
from fake_rehearsal import fake_rehearsal

from jaxpar.base.errors import UserError
from jaxpar.show.memory_timeline import memory_timeline_figure

GIB = 2**30


@pytest.fixture
def report():
    made = {"argument": "", "scope": "block/mlp", "source": "models/mine.py:7", "phase": "forward"}
    given = {"argument": "state.params", "scope": "", "source": "", "phase": "other"}
    found = fake_rehearsal(layers=2)
    found["memory"] |= {"usable_bytes": 4 * GIB, "total": 3 * GIB + GIB // 2}
    found["alive"] = {
        "peak_bytes": 3 * GIB,
        "peak_us": 2000.0,
        "times_us": [0.0, 2000.0, 3000.0],
        "parts": {"block/mlp": [0, 2 * GIB, GIB], "state.params": [GIB, GIB, GIB]},
        "arrays": [
            {**made, "shape": "bf16[8,2]", "bytes": 2 * GIB, "count": 2},
            {**given, "shape": "f32[4]", "bytes": GIB, "count": 1},
        ],
    }
    return found


def test_the_peak_is_named_by_its_arrays_and_their_lines(report):
    curve, listed = memory_timeline_figure(report).axes
    title = curve.get_title(loc="left")
    assert "arrays of at most 3 GiB in a device's memory, after 2 ms" in title
    assert "The step takes 3.5 GiB by the compiler's account" in title
    labels = curve.get_legend_handles_labels()[1]
    assert labels == ["state.params", "block/mlp", "peak", "a step may take 4 GiB"]
    said = [text.get_text() for text in listed.texts]
    assert said[:4] == ["2 GiB", "2 x bf16[8,2]", "models/mine.py:7", "block/mlp  (forward)"]
    assert said[4:] == ["1 GiB", "f32[4]", "state.params", ""]
    assert curve.dataLim.y1 == pytest.approx(4)


def test_a_report_that_does_not_say_it_is_refused(report):
    del report["alive"]
    with pytest.raises(UserError, match="in memory when"):
        memory_timeline_figure(report)
