"""The Chrome trace: what viewers ask of one, and that it is the step."""

import gzip
import json

import pytest
from fake_rehearsal import fake_rehearsal
from report_types import assert_the_trace_is_the_step

from jaxpar import rehearse
from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.trace import chrome_trace


@pytest.fixture
def report():
    return fake_rehearsal(layers=4)


def test_every_event_has_the_keys_that_viewers_ask_for(report):
    trace = chrome_trace(report)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM" and event["pid"] == 0 and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    names = [
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"
    ]
    assert names == report["timeline"]["lanes"]
    (process,) = [
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    ]
    assert process == "llama3_8b on a device of v5p-64"


def test_bars_of_a_lane_do_not_overlap_and_the_last_ends_with_the_step(report):
    assert_the_trace_is_the_step(report)


def test_a_bar_says_what_it_is(report):
    gather = next(
        event for event in chrome_trace(report)["traceEvents"] if event.get("cat") == "all-gather"
    )
    assert gather["name"] == "all-gather.11"
    assert gather["args"] == {
        "scope": "block/mlp/up",
        "line": "models/llama.py:97",
        "phase": "forward",
        "bytes": 436_207_616,
    }
    report["timeline"]["events"][0][4] = 28
    assert chrome_trace(report)["traceEvents"][13]["args"]["stands for so many more trips"] == 28


def test_the_file_is_compressed_where_its_name_says_so(report, tmp_path):
    for name in ("trace.json", "trace.json.gz"):
        rehearse.write_trace(report, tmp_path / name)
    plain = (tmp_path / "trace.json").read_bytes()
    assert json.loads(plain) == chrome_trace(report)
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == plain


def test_a_report_without_its_timeline_has_no_trace(report, tmp_path):
    del report["timeline"]
    with pytest.raises(UserError, match="kept without its timeline"):
        rehearse.write_trace(report, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
