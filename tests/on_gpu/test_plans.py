"""What `make gpu PIECES=plans` measures, and what it says of it."""

from __future__ import annotations

from typing import Any

import pytest
from on_gpu.plans import COUNT, draw_plans, judge_plans

from jaxpar.base.config import load_config, override
from jaxpar.rehearse.targets import load_target


def row(closed: float, rehearsed: float, measured: float, choice: str = "") -> dict[str, Any]:
    """A plan that was measured, in ms."""
    return {
        "choice": choice,
        "closed forms, ms": closed,
        "rehearsed, ms": rehearsed,
        "measured, ms": measured,
    }


def test_the_planners_choice_is_the_first_of_twelve_and_all_fit() -> None:
    config = override(load_config("gpt2_124m"), {"train.batch": 8, "mesh.data": 1})
    target = load_target("h100x1")
    drawn = draw_plans(config, target)
    assert len({one.candidate for one in drawn}) == len(drawn) == COUNT
    seconds = [one.estimate.seconds for one in drawn]
    assert seconds[0] == pytest.approx(min(seconds), rel=0.02)
    assert seconds[1:] == sorted(seconds[1:])
    assert max(seconds) > 1.2 * min(seconds), "plans that are alike say nothing of an order"
    assert all(one.estimate.bytes.total <= target.hardware.hbm_bytes for one in drawn)


def test_orders_and_the_planners_choice_are_judged() -> None:
    rows = [row(1, 2, 11, "the planner's"), row(2, 1, 10), row(3, 3, 15), row(4, 4, 20)]
    text = judge_plans({"a": {"rows": rows[:2]}, "b": {"why": "killed"}, "c": {"rows": rows[2:]}})
    assert "4 plans measured" in text
    assert "closed forms: Kendall tau 0.667, first choice 10.0% behind" in text
    assert "rehearsed: Kendall tau 1.000, first choice 0.0% behind" in text
    assert "the planner's: 10.0% behind" in text


def test_two_plans_have_no_order_to_judge() -> None:
    assert "too few" in judge_plans({"a": {"rows": [row(1, 1, 1), row(2, 2, 2)]}})
