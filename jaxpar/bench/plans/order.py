"""How well one order of some plans agrees with another: rank correlations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 0 where all of one side are equal."""
    ranks = [_ranks(first), _ranks(second)]
    if any(np.ptp(one) == 0 for one in ranks):
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau-b: of all pairs of plans, those in the same order less those in the
    opposite one, as a share of those that are no ties; 0 where all of one side are equal.
    """
    signs = [_signs(first), _signs(second)]
    untied = np.sqrt(float(np.prod([np.abs(one).sum() for one in signs])))
    if untied == 0:
        return 0.0
    return float((signs[0] * signs[1]).sum() / untied)


def _signs(values: Sequence[float]) -> np.ndarray:
    """Return for each two values whether the first is larger, equal or smaller: 1, 0 or -1."""
    column = np.asarray(values, float)
    return np.sign(column[:, None] - column[None, :])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Rank values from 0; equal ones share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]
