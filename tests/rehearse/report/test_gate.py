"""The gate of a CI job: which conditions fail, and what is said of them."""

from __future__ import annotations

import copy

import pytest
from fake_rehearsal import fake_rehearsal

from jaxpar import rehearse
from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.gate import read_condition, read_fail_on
from jaxpar.rehearse.report.schema import Rehearsal


@pytest.fixture
def before() -> Rehearsal:
    return fake_rehearsal(layers=2)


@pytest.fixture
def after(before: Rehearsal) -> Rehearsal:
    """A step that is 10 % slower in one line, and 5 % larger in its temporaries."""
    changed = copy.deepcopy(before)
    slower = 0.1 * before["time"]["step"]
    larger = before["memory"]["total"] // 20
    line = next(row for row in changed["lines"] if row["scope"] == "block/mlp/up")
    line["compute"] += slower
    changed["time"]["step"] += slower
    changed["time"]["compute"] += slower
    changed["memory"]["categories"]["temporaries"] += larger
    changed["memory"]["total"] += larger
    return changed


@pytest.mark.parametrize(
    ("condition", "fails"),
    [
        ("step+9%", True),
        ("step+11%", False),
        ("step+0%", True),
        ("exposed+0%", False),
        ("memory+4.5%", True),
        ("memory+5.5%", False),
        ("compile+0%", False),
    ],
)
def test_growth_is_held_against_an_earlier_rehearsal(condition, fails, before, after):
    assert bool(rehearse.failures(after, [condition], before)) == fails
    assert rehearse.failures(before, [condition], before) == [], "it has not grown over itself"


def test_a_limit_needs_no_other_rehearsal(before):
    milliseconds = 1e3 * before["time"]["step"]
    assert rehearse.failures(before, [f"step>{milliseconds * 1.01:.4f}ms"]) == []
    (line,) = rehearse.failures(before, [f"step>{milliseconds * 0.99:.4f}ms"])
    assert "too much" in line and "head/loss forward" in line, "the line that takes most"
    assert rehearse.failures(before, ["memory>95GiB"]) == []
    (line,) = rehearse.failures(before, ["memory>1GiB"])
    assert line.startswith("memory>1GiB: 4.") and ": activations 1.57 GiB, " in line


def test_a_failure_names_what_it_comes_from(before, after):
    (step,) = rehearse.failures(after, ["step+3%"], before)
    assert step.startswith("step+3%: ") and " before, " in step and "(+10.0 %)" in step
    assert ": models/llama.py:97 block/mlp/up " in step
    (memory,) = rehearse.failures(after, ["memory+2%"], before)
    assert "(+5.0 %): temporaries +" in memory


def test_words_are_told_apart():
    rules, conditions = read_fail_on("does-not-fit, step+3%,memory>14GiB")
    assert rules == ["does-not-fit"]
    assert [one.text for one in conditions] == ["step+3%", "memory>14GiB"]
    assert [one.relative for one in conditions] == [True, False]
    assert read_condition("memory>14GiB").most == 14 * 2**30
    assert read_condition("step>1.5s").most == 1.5
    assert read_condition("step+3%").share == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("stepp+3%", "did you mean 'step'"),
        ("step+3", "found no unit"),
        ("step+3ms", "is a percentage, found"),
        ("step>450", "no unit of step"),
        ("step>450GiB", "GiB is no unit"),
        ("memory>14ms", "ms is no unit"),
        ("step-3%", "not a condition"),
        ("step<3s", "not a condition"),
        ("step>1.2.3s", "is no number"),
        ("=", "not a condition"),
    ],
)
def test_mistakes_are_told(word, says):
    with pytest.raises(UserError, match=says):
        read_fail_on(word)


def test_growth_without_another_rehearsal_is_refused(before):
    with pytest.raises(UserError, match="needs --against"):
        rehearse.failures(before, ["step+3%"])
