"""Rank correlations."""

from __future__ import annotations

import pytest

from jaxpar.bench.plans.order import kendall, spearman

UP = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("correlation", [kendall, spearman])
def test_equal_and_opposite_orders_are_the_ends(correlation):
    assert correlation(UP, [10.0, 11.0, 50.0, 51.0]) == pytest.approx(1)
    assert correlation(UP, UP[::-1]) == pytest.approx(-1)
    assert correlation(UP, [1.0] * 4) == 0


def test_kendall_counts_pairs():
    """Of six pairs one is the wrong way round."""
    assert kendall(UP, [1.0, 2.0, 4.0, 3.0]) == pytest.approx(4 / 6)


def test_a_tie_is_neither_right_nor_wrong():
    tied = [1.0, 2.0, 3.0, 3.0]
    assert kendall(UP, tied) == pytest.approx(5 / (6 * 5) ** 0.5)
    assert kendall(tied, tied) == pytest.approx(1)
