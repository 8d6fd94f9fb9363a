"""The difference of two rehearsals: what is matched with what, and what is left out."""

import copy

import pytest
from fake_rehearsal import fake_rehearsal

from jaxpar.rehearse.report.difference import difference

pytestmark = pytest.mark.quick


@pytest.fixture
def old():
    return fake_rehearsal(layers=4)


@pytest.fixture
def new(old):
    return copy.deepcopy(old)


def change(rows, name: str) -> tuple[float, float]:
    (row,) = [row for row in rows if row["name"] == name]
    return row["old"], row["new"]


def place(rows, scope: str, phase: str, kind: str = "") -> dict:
    (row,) = [row for row in rows if (row["scope"], row["phase"], row["kind"]) == (scope, phase, kind)]
    return row


def line(report, scope: str, phase: str) -> dict:
    (row,) = [row for row in report["lines"] if (row["scope"], row["phase"]) == (scope, phase)]
    return row


def test_a_report_does_not_differ_from_itself(old, new):
    found = difference(new, old)
    assert (found["lines"], found["collectives"], found["found"], found["gone"]) == ([], [], [], [])
    assert all(row["old"] == row["new"] for row in found["memory"] + found["time"])


def test_memory_and_time_by_category_even_where_only_one_side_has_it(old, new):
    new["memory"]["total"] += 100
    new["memory"]["categories"]["temporaries"] += 100
    new["memory"]["host"] = {"parameters": 7}
    del old["time"]["by_category"]["kernel"]
    found = difference(new, old)
    assert change(found["memory"], "total") == (old["memory"]["total"], old["memory"]["total"] + 100)
    assert change(found["memory"], "host parameters") == (0, 7)
    assert change(found["memory"], "host activations") == (512 * 2**20, 0)
    assert change(found["time"], "kernel") == (0, new["time"]["by_category"]["kernel"])


def test_lines_that_changed_come_the_largest_first_and_others_are_left_out(old, new):
    line(new, "block/mlp/up", "forward")["compute"] += 0.001
    line(new, "embed", "forward")["exposed"] += 0.002
    line(new, "block/norm", "forward")["compute"] *= 1 + 1e-9  # rounding
    rows = difference(new, old)["lines"]
    assert [row["scope"] for row in rows] == ["embed", "block/mlp/up"]
    assert rows[0]["new"]["exposed"] - rows[0]["old"]["exposed"] == pytest.approx(0.002)


def test_lines_that_moved_in_their_file_are_matched_in_order(old, new):
    for row in new["lines"] + new["collectives"]:
        name, number = row["source"].split(":")
        row["source"] = f"{name}:{int(number) + 3}"
    line(new, "block/mlp/up", "forward")["compute"] += 0.001
    found = difference(new, old)
    assert found["collectives"] == []
    (row,) = found["lines"]
    assert (row["source"], row["scope"]) == ("models/llama.py:100", "block/mlp/up")
    assert row["new"]["compute"] == pytest.approx(row["old"]["compute"] + 0.001)


def test_lines_that_cannot_be_matched_are_new_and_gone(old, new):
    row = line(new, "embed", "forward")
    row["source"] = "models/gpt2.py:12"
    new["lines"].append({**row, "source": "models/gpt2.py:13"})
    rows = difference(new, old)["lines"]
    sides = {row["source"]: (row["old"]["compute"], row["new"]["compute"]) for row in rows}
    size = row["compute"]
    assert sides == {
        "models/llama.py:120": (size, 0),
        "models/gpt2.py:12": (0, size),
        "models/gpt2.py:13": (0, size),
    }


def test_collectives_are_summed_by_kind_axes_and_line(old, new):
    reduce = next(row for row in new["collectives"] if row["kind"] == "all-reduce")
    new["collectives"].append({**reduce, "count": 2, "sent_bytes": 50.0})
    gather = next(row for row in new["collectives"] if row["kind"] == "all-gather" and row["axes"] == ["fsdp"])
    gather["axes"] = ["data", "fsdp"]
    rows = difference(new, old)["collectives"]
    row = place(rows, "head/loss", "forward", "all-reduce")
    assert (row["old"]["count"], row["new"]["count"]) == (1, 3)
    assert row["new"]["sent_bytes"] == row["old"]["sent_bytes"] + 50
    axes = {tuple(row["axes"]) for row in rows if row["scope"] == gather["scope"] and row["kind"] == "all-gather"}
    assert axes == {("fsdp",), ("data", "fsdp")}


def test_findings_of_one_side_only_wherever_their_line_moved(old, new):
    new["findings"][1]["source"] = "jaxpar/parallel/linear.py:150"
    gone = new["findings"].pop(0)
    anew = {**gone, "rule": "large-copy", "axis": "mlp"}
    new["findings"].append(anew)
    found = difference(new, old)
    assert (found["found"], found["gone"]) == ([anew], [gone])
