"""`--fail-on`: what is read, what is refused, and which reports fail."""

import pytest
from fake_rehearsal import fake_rehearsal

from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.conditions import failures, parse_conditions

pytestmark = pytest.mark.quick


def failed(text: str, report) -> list[str]:
    return failures(parse_conditions(text), report)


@pytest.fixture
def report():
    return fake_rehearsal(layers=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("large-copy, unplaned-collective", r"unknown condition \(did you mean 'unplanned-collective'\?\)"),
        ("xyzzy", r"unknown condition: it may be does-not-fit, large-copy, "),
        ("memory+5%", r"--fail-on memory\+5%: unknown condition"),
    ],
)
def test_what_is_wrong_with_a_condition_is_said(text, message):
    with pytest.raises(UserError, match=message):
        parse_conditions(text)


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


def test_every_condition_that_is_met_is_said(report):
    assert len(failed("unplanned-collective, does-not-fit,large-copy", report)) == 2
