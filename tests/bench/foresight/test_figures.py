"""Errors of predictions, by invented numbers that can be worked out by hand."""

from __future__ import annotations

import pytest

from jaxpar.bench.foresight.figures import (
    Pair,
    by_chip,
    fit,
    judge,
    leave_one_model_out,
    spearman,
)


def test_errors_are_parts_of_what_was_measured() -> None:
    pairs = [Pair(0.9, 1, "a", "x"), Pair(2.2, 2, "a", "x"), Pair(3.6, 3, "b", "x")]
    found = judge(pairs)
    assert found is not None
    assert found["rows"] == 3
    assert found["median"] == pytest.approx(0.1)
    assert found["worst"] == pytest.approx(0.2)
    assert found["p90"] == pytest.approx(0.1 + 0.8 * 0.1)  # between the second and the third
    assert found["bias"] == pytest.approx((0.9 * 1.1 * 1.2) ** (1 / 3) - 1)
    assert found["spearman"] == pytest.approx(1)
    assert judge([]) is None


def test_a_constant_is_the_median_over_models_that_count_alike() -> None:
    pairs = [Pair(1, 2, "a", "x")] * 7 + [Pair(1, 4, "b", "x"), Pair(1, 5, "c", "x")]
    assert fit(pairs) == {"x": 4}


def test_a_model_is_judged_by_the_others_of_its_chip() -> None:
    pairs = [
        Pair(1, 2, "a", "x"),
        Pair(1, 2.2, "a", "x"),
        Pair(1, 3, "b", "x"),
        Pair(1, 9, "a", "y"),
    ]
    left_out = leave_one_model_out(pairs)
    assert [pair.predicted for pair in left_out] == pytest.approx([3, 3, 2.1])
    assert all(pair.chip == "x" for pair in left_out)  # y has one model alone


def test_ranks_that_are_equal_have_their_mean() -> None:
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_chips_are_in_order() -> None:
    pairs = [Pair(1, 1, "a", "y"), Pair(1, 1, "a", "x"), Pair(2, 1, "b", "y")]
    assert {chip: len(of) for chip, of in by_chip(pairs).items()} == {"x": 1, "y": 2}
    assert list(by_chip(pairs)) == ["x", "y"]
