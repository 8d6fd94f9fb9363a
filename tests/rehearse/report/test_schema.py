"""The report's schema: what is checked of a file, and that its page in docs/ leaves nothing out."""

import copy
import json
import re
from pathlib import Path
from typing import get_args, get_type_hints, is_typeddict

import pytest
from fake_rehearsal import fake_rehearsal
from report_types import problems

from jaxpar.rehearse.report.schema import Rehearsal

DOCS = Path(__file__).parents[3] / "docs" / "rehearse_json.md"


@pytest.fixture(scope="module")
def report():
    return fake_rehearsal(layers=2)


def test_a_whole_report_survives_json_and_has_no_problems(report):
    assert json.loads(json.dumps(report)) == report
    assert list(problems(report)) == []


def test_the_timeline_may_be_left_out_and_new_keys_pass(report):
    kept = {key: value for key, value in report.items() if key != "timeline"}
    assert list(problems({**kept, "of_a_later_version": 1})) == []


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("memory", "total"), "5 GiB", "memory.total: expected int, found '5 GiB'"),
        (("memory", "fits"), 1, "memory.fits: expected bool, found 1"),
        (("time", "step"), True, "time.step: expected float, found True"),
        (("time", "mfu"), "high", "time.mfu: expected float or None, found 'high'"),
        (("mesh", "fsdp"), 1.5, "mesh.fsdp: expected int, found 1.5"),
        (("lines", 1), [], "lines[1]: expected a table, found []"),
        (("lines",), {}, "lines: expected list, found {}"),
        (
            ("findings", 0, "severity"),
            "bad",
            "findings[0].severity: expected one of error, warning, found 'bad'",
        ),
        (("collectives", 0, "axes"), [3], "collectives[0].axes[0]: expected str, found 3"),
        (("timeline", "lanes"), None, "timeline.lanes: expected list, found None"),
    ],
)
def test_a_wrong_value_is_named_by_its_place(report, keys, value, message):
    wrong = copy.deepcopy(report)
    inner = wrong
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    assert list(problems(wrong)) == [message]


def test_a_missing_key_is_named(report):
    wrong = copy.deepcopy(report)
    del wrong["time"]["step"], wrong["notes"]
    assert list(problems(wrong)) == ["time.step is missing", "notes is missing"]


def test_the_docs_explain_every_key():
    explained = set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8")))
    missing = {key for kind in tables_of(Rehearsal) for key in get_type_hints(kind)} - explained
    assert not missing


def tables_of(kind) -> list:
    """A TypedDict and all those that stand in it."""
    found = [kind] if is_typeddict(kind) else []
    if found:
        inner = list(get_type_hints(kind).values())
    else:
        inner = get_args(kind)
    return found + [table for hint in inner for table in tables_of(hint)]
