"""Measurements that compare candidates: they take turns in one run, so that a noisy machine is noisy for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

LEAST_SECONDS = 0.02
"""Calls are timed together until they take this long, as a small kernel runs for less time than its start takes."""

Cell = str | int | float | None
Row = dict[str, Cell]
"""A line of a table, keyed by column."""


class Timing(NamedTuple):
    """The time of a candidate. Its ratio is to the first candidate in the same round; below 1 means faster than it."""

    seconds: float
    """The time of one call, as the median over the rounds."""
    ratio: float
    """The median of the ratio over the rounds."""
    quartiles: tuple[float, float]
    """The quartiles of the ratio."""


def alternate(candidates: Mapping[str, Callable[[], object]], rounds: int, calls: int = 0) -> dict[str, Timing]:
    """Time every candidate, one after the other, `rounds` times over; each is called once beforehand.

    The arrays that a call returns are waited for. A turn has `calls` calls; 0 = as many as take LEAST_SECONDS, at most
    100.
    """
    for function in candidates.values():
        mean_seconds(function, 1)
    calls_of = {
        name: calls or int(np.clip(LEAST_SECONDS / mean_seconds(function, 1), 1, 100))
        for name, function in candidates.items()
    }
    times = [[mean_seconds(call, calls_of[name]) for name, call in candidates.items()] for _ in range(rounds)]
    seconds = np.array(times)  # rounds x candidates
    low, middle, high = np.percentile(seconds / seconds[:, :1], (25, 50, 75), axis=0)
    medians = np.median(seconds, axis=0)
    return {
        name: Timing(float(medians[i]), float(middle[i]), (float(low[i]), float(high[i])))
        for i, name in enumerate(candidates)
    }


def mean_seconds(function: Callable[[], object], calls: int) -> float:
    """The mean seconds of a call, over `calls` calls in a row; the arrays that the last one returns are waited for."""
    began, last = time.perf_counter(), None
    for _ in range(calls):
        last = function()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / calls


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with every column that any row has; empty if there are no rows."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([_text(row.get(key)) for key in head] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if head else ""


def _text(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value
