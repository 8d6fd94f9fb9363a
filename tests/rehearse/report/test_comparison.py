"""Two rehearsals compared."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
from fake_rehearsal import fake_rehearsal
from rich.console import Console

from jaxpar import rehearse
from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.comparison_tables import comparison_parts
from jaxpar.rehearse.report.schema import Rehearsal


@pytest.fixture
def before() -> Rehearsal:
    return fake_rehearsal(layers=2)


@pytest.fixture
def after(before: Rehearsal) -> Rehearsal:
    """The same, but for one line that is slower, larger temporaries, and one finding."""
    changed = copy.deepcopy(before)
    line = next(row for row in changed["lines"] if row["scope"] == "block/mlp/up")
    line["compute"] += 2e-3
    changed["time"]["step"] += 2e-3
    changed["time"]["by_category"]["matmul"] += 2e-3
    changed["memory"]["categories"]["temporaries"] += 2**30
    changed["memory"]["total"] += 2**30
    changed["findings"] = changed["findings"][1:]
    return changed


def figures(changes: list) -> dict[str, tuple[float, float]]:
    return {row["name"]: (row["before"], row["after"]) for row in changes}


def test_what_changed_is_told(before: Rehearsal, after: Rehearsal) -> None:
    found = rehearse.compare(before, after)
    time = figures(found["time"])
    for name in ("step", "matmuls"):
        old, new = time[name]
        assert new - old == pytest.approx(2e-3)
    assert time["exposed communication"][0] == time["exposed communication"][1] > 0
    assert {"kernels", "collectives, hidden or not"} <= set(time)
    memory = figures(found["memory"])
    for name in ("all", "temporaries"):
        old, new = memory[name]
        assert new - old == 2**30
    (place,) = found["places"]
    assert place["scope"] == "block/mlp/up"
    assert place["after"]["compute"] - place["before"]["compute"] == pytest.approx(2e-3)
    assert (found["found"], found["gone"]) == ([], before["findings"][:1])


def test_a_report_differs_from_itself_in_nothing(before: Rehearsal) -> None:
    found = rehearse.compare(before, copy.deepcopy(before))
    assert (found["places"], found["found"], found["gone"]) == ([], [], [])
    assert all(row["before"] == row["after"] for row in [*found["time"], *found["memory"]])


def test_lines_that_an_edit_has_moved_are_the_same_lines(before: Rehearsal) -> None:
    moved = copy.deepcopy(before)
    for row in moved["lines"]:
        file, _, line = row["source"].rpartition(":")
        row["source"] = f"{file}:{int(line) + 7}"
    assert rehearse.compare(before, moved)["places"] == []


def test_a_line_of_one_report_alone_was_nothing_before(before: Rehearsal) -> None:
    more = copy.deepcopy(before)
    line = copy.deepcopy(more["lines"][0])
    line["source"] = "models/new.py:5"
    more["lines"].append(line)
    (place,) = rehearse.compare(before, more)["places"]
    assert place["source"] == "models/new.py:5"
    assert set(place["before"].values()) == {0.0}
    assert place["after"]["compute"] == line["compute"]


def test_the_table(before: Rehearsal, after: Rehearsal) -> None:
    out = Console(file=io.StringIO(), width=200)
    for part in comparison_parts(rehearse.compare(before, after)):
        out.print(part)
    lines = [" ".join(line.split()) for line in out.file.getvalue().splitlines()]  # pyright: ignore[reportAttributeAccessIssue]
    (step,) = [line for line in lines if line.endswith("s step")]
    assert step.endswith("+2.00 ms step") and "%" in step
    (exposed,) = [line for line in lines if line.endswith(" exposed communication")]
    assert exposed.endswith("= exposed communication")
    (place,) = [line for line in lines if "block/mlp/up" in line]
    assert place.endswith("models/llama.py:97 block/mlp/up " + place.split()[-1])
    assert "found no longer" in lines and "found anew" not in lines


def printed(before: Rehearsal, after: Rehearsal) -> list[str]:
    """The lines of the tables, with one space between cells."""
    out = Console(file=io.StringIO(), width=240)
    for part in comparison_parts(rehearse.compare(before, after)):
        out.print(part)
    return [" ".join(line.split()) for line in out.file.getvalue().splitlines()]  # pyright: ignore[reportAttributeAccessIssue]


def test_the_part_that_has_changed_most_stands_below_the_whole(
    before: Rehearsal, after: Rehearsal
) -> None:
    lines = printed(before, after)
    title = lines.index("memory of a device")
    assert [line.split()[-1] for line in lines[title + 2 : title + 4]] == ["all", "temporaries"]


def test_lines_that_came_and_went_are_told(before: Rehearsal) -> None:
    changed = copy.deepcopy(before)
    changed["lines"][0]["source"] = "models/new.py:5"
    gone = before["lines"][0]["source"]
    lines = printed(before, changed)
    assert any(" new models/new.py:5 " in line for line in lines)
    assert any(f" gone {gone} " in line for line in lines)


def test_collectives_are_matched_by_what_they_do(before: Rehearsal) -> None:
    changed = copy.deepcopy(before)
    first = changed["collectives"][0]
    first["exposed"] += 3e-3
    first["seconds"] += 3e-3
    first["source"] = "models/llama.py:999"  # where it stands does not matter
    (row,) = rehearse.compare(before, changed)["collectives"]
    assert (row["kind"], row["axes"]) == (first["kind"], first["axes"])
    assert row["after"]["exposed"] - row["before"]["exposed"] == pytest.approx(3e-3)
    assert row["after"]["count"] == row["before"]["count"] > 0
    changed["collectives"] = before["collectives"][1:]
    gone = rehearse.compare(before, changed)["collectives"][0]
    assert gone["kind"] == first["kind"] and sum(gone["after"].values()) < sum(
        gone["before"].values()
    )
    assert "collectives that differ, the most first" in printed(before, changed)


def test_a_setting_that_changed_nothing_is_named(before: Rehearsal) -> None:
    settings = {"memory.policy": '"dots"', "train.batch": "16"}
    old: Rehearsal = {**before, "program": "a1", "settings": settings}
    new: Rehearsal = {**old, "settings": {**settings, "memory.policy": '"full"'}}
    found = rehearse.compare(old, new)
    assert found["same_program"]
    assert found["settings"] == [
        {"name": "memory.policy", "before": '"dots"', "after": '"full"'},
    ]
    said = printed(old, new)
    assert "program memory.policy changed nothing: both compile to the same program" in said
    new["program"] = "b2"
    assert not rehearse.compare(old, new)["same_program"]
    assert not any(line.startswith("program ") for line in printed(old, new))
    assert not rehearse.compare(before, before)["same_program"], "an older file states no program"


def test_other_versions_are_told(before: Rehearsal) -> None:
    newer = copy.deepcopy(before)
    newer["versions"]["libtpu"] = "0.0.50"
    assert any(line == "differs libtpu 0.0.42 -> 0.0.50" for line in printed(before, newer))


def test_files_are_read(before: Rehearsal, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(before))
    assert rehearse.compare(file, before)["places"] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"time": {"step": 1.0}}, "time has no exposed_communication: it is no report"),
        ({"time": {"step": "long"}}, "step .*found 'long'"),
        ({"lines": [{"scope": "a"}]}, r"lines\[0\] has no source"),
        ({"lines": 3}, "lines .*found 3"),
    ],
)
def test_a_damaged_file_is_named(
    change: dict, says: str, before: Rehearsal, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps({**before, **change}))
    with pytest.raises(UserError, match=says):
        rehearse.compare(file, before)


def test_what_is_no_report_is_refused(before: Rehearsal) -> None:
    with pytest.raises(UserError, match=r"takes reports of rehearse\.step or"):
        rehearse.compare({"a": 1}, before)  # pyright: ignore[reportArgumentType]
