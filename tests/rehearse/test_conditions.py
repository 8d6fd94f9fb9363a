"""`--fail-on`: what is read, what is refused, and which reports fail."""

import copy

import pytest
from fake_rehearsal import fake_rehearsal

from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.conditions import failures, parse_conditions

pytestmark = pytest.mark.quick

RULES = ("unplanned-collective", "replicated-parameter", "large-copy")


def failed(text: str, report, against=None) -> list[str]:
    return failures(parse_conditions(text, RULES, against is not None), report, against)


@pytest.fixture
def report():
    return fake_rehearsal(layers=2)


def test_conditions_are_read_with_their_growth():
    assert parse_conditions("unplanned-collective, memory+5%,time+0.5%,large-copy", RULES, True) == {
        "unplanned-collective": None, "memory": 0.05, "time": 0.005, "large-copy": None,
    }  # fmt: skip
    assert parse_conditions("", RULES, False) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unplaned-collective", r"unknown condition \(did you mean 'unplanned-collective'\?\)"),
        ("memry+5%", r"unknown condition \(did you mean 'memory'\?\)"),
        ("xyzzy", r"unknown condition: it may be does-not-fit, large-copy, .*, collective-bytes\+5%$"),
        ("memory", r"memory needs the growth to allow, found none: try memory\+5%"),
        ("time+3", r"time needs the growth to allow, found '\+3': try time\+5%"),
        ("exposed+-3%", r"needs the growth to allow, found '\+-3%'"),
        ("large-copy+5%", r"large-copy either happens or does not: write large-copy"),
    ],
)
def test_what_is_wrong_with_a_condition_is_said(text, message):
    with pytest.raises(UserError, match=message):
        parse_conditions(text, RULES, baseline=True)


def test_a_growth_without_a_baseline_is_refused_before_anything_is_compiled():
    with pytest.raises(UserError, match="compares with another report: name it, --against"):
        parse_conditions("memory+5%", RULES, baseline=False)


def test_the_models_fit_decides(report):
    assert failed("does-not-fit", report) == []
    report["memory"].update(fits=False, total=97 * 2**30)
    assert failed("does-not-fit", report) == ["does-not-fit: 2.00 GiB more than 95.00 GiB of HBM"]


def test_an_unplanned_collective_fails_by_its_row_or_by_a_finding(report):
    expected = "unplanned-collective: all-reduce over tensor at models/llama.py:133"
    assert failed("unplanned-collective", report) == [expected]
    next(row for row in report["collectives"] if row["kind"] == "all-gather")["planned"] = False
    assert failed("unplanned-collective", report)[0].endswith("(and 1 more)")
    for row in report["collectives"]:
        row["planned"] = True
    assert failed("unplanned-collective", report)[0].startswith("unplanned-collective: models/llama.py:133: all-reduce")
    report["findings"] = []
    assert failed("unplanned-collective", report) == []


def test_a_rule_fails_where_the_linter_found_it(report):
    (line,) = failed("large-copy,replicated-parameter", report)
    assert line.startswith("large-copy: jaxpar/parallel/linear.py:141: copy of")


@pytest.mark.parametrize(
    ("name", "keys"),
    [("memory", ("memory", "total")), ("time", ("time", "step")), ("exposed", ("time", "exposed_communication"))],
)
def test_growth_fails_beyond_what_is_allowed_and_not_before(report, name, keys):
    old = copy.deepcopy(report)
    table, key = keys
    report[table][key] = old[table][key] * 1.05
    assert failed(f"{name}+5%", report, old) == []
    assert failed(f"{name}+6%", report, old) == []
    (line,) = failed(f"{name}+4%", report, old)
    assert line.startswith(f"{name}: ")
    assert line.endswith("(+5.0 %, 4 % allowed)")
    report[table][key] = old[table][key] / 2
    assert failed(f"{name}+0%", report, old) == []


def test_the_bytes_of_all_collectives_are_summed(report):
    old = copy.deepcopy(report)
    assert failed("collective-bytes+0%", report, old) == []
    report["collectives"][0]["sent_bytes"] *= 2
    assert len(failed("collective-bytes+0%", report, old)) == 1
    old["collectives"] = []
    assert failed("collective-bytes+0%", report, old)[0].endswith("(from nothing, 0 % allowed)")


def test_every_condition_that_is_met_is_said(report):
    old = copy.deepcopy(report)
    report["time"]["step"] *= 2
    assert len(failed("unplanned-collective,time+3%,memory+3%", report, old)) == 2
