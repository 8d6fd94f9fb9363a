"""How good predictions are: errors by chip, with what one constant a chip, and a plain count of
FLOPs, would reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np


class Pair(NamedTuple):
    """A prediction, in any unit that is the same for a chip, and what was measured.

    Attributes:
      predicted: the prediction.
      measured: the seconds of a step.
      model: the name of the model.
      chip: the kind of chip.
    """

    predicted: float
    measured: float
    model: str
    chip: str


class Figures(TypedDict):
    """The errors of some predictions, as parts of what was measured."""

    rows: int
    median: float
    """The median of the error's size."""
    p90: float
    """Its 90th percentile."""
    worst: float
    bias: float
    """The mean of the logarithm of predicted over measured, as a factor less one: above 0 where
    predictions are too long.
    """
    spearman: float | None
    """The rank correlation of predicted and measured; None for fewer than 3 rows, or equal
    ones.
    """


def judge(pairs: Sequence[Pair]) -> Figures | None:
    """Summarize the errors of predictions; None = there are none."""
    if not pairs:
        return None
    ratios = np.array([pair.predicted / pair.measured for pair in pairs])
    errors = abs(ratios - 1)
    ranked = spearman([pair.predicted for pair in pairs], [pair.measured for pair in pairs])
    return {
        "rows": len(pairs),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "worst": float(errors.max()),
        "bias": float(np.exp(np.log(ratios).mean()) - 1),
        "spearman": ranked,
    }


def fit(pairs: Sequence[Pair]) -> dict[str, float]:
    """Fit one constant a chip, with which its predictions are to be multiplied: the median of
    measured over predicted, first within a model and then over the models, so that a model with
    many rows counts as one.
    """
    ratios = dict[str, dict[str, list[float]]]()
    for pair in pairs:
        of_chip = ratios.setdefault(pair.chip, {})
        of_chip.setdefault(pair.model, []).append(pair.measured / pair.predicted)
    return {
        chip: statistics.median(statistics.median(found) for found in models.values())
        for chip, models in ratios.items()
    }


def leave_one_model_out(pairs: Sequence[Pair]) -> list[Pair]:
    """Multiply each prediction with the constant that the rows of the other models of its chip
    give; a row of a chip's only model is left out.
    """
    found = list[Pair]()
    for pair in pairs:
        others = [one for one in pairs if one.chip == pair.chip and one.model != pair.model]
        if others:
            constant = fit(others)[pair.chip]
            found.append(pair._replace(predicted=constant * pair.predicted))
    return found


def by_chip(pairs: Sequence[Pair]) -> Mapping[str, list[Pair]]:
    """Group pairs by chip, the chips by name."""
    chips = sorted({pair.chip for pair in pairs})
    return {chip: [pair for pair in pairs if pair.chip == chip] for chip in chips}


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Calculate the rank correlation of two lists; None for fewer than 3 pairs, or where all of one
    list are equal.
    """
    one = _ranks(first)
    other = _ranks(second)
    if len(one) < 3 or one.std() == 0 or other.std() == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """The rank of each value; equal ones have the mean of theirs."""
    array = np.array(values)
    below = (array[None] < array[:, None]).sum(1)
    equal = (array[None] == array[:, None]).sum(1)
    return below + (equal - 1) / 2
