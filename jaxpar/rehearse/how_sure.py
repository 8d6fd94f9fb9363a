"""How far a rehearsed step may be from a measured one, by published runs that were rehearsed too:
`board.json`, which `jaxpar bench foresight` fills.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import permutations
from typing import TypedDict

from jaxpar.rehearse.report.schema import Interval, NoInterval

_MANY = 4
"""Runs on at least a fourth of the chips say something of a step: collectives take more of it the
more chips there are."""
_COVERED = 0.9
_FEWEST = 3
"""Runs that an interval takes at the least: one or two say little, and a constant of their chip may
be fitted on them."""


class BoardRow(TypedDict):
    """A published run beside its rehearsal; the steps are in seconds."""

    name: str
    chip: str
    chips: int
    model: str
    family: str
    measured: float
    predicted: float


@functools.cache
def read_board() -> tuple[BoardRow, ...]:
    """Read the runs that this version was judged by."""
    text = resources.files("jaxpar.rehearse").joinpath("board.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def interval_of(
    seconds: float,
    chip: str,
    chips: int,
    family: str = "",
    model_measured: bool = False,
    board: Sequence[BoardRow] | None = None,
) -> Interval | NoInterval:
    """Find the interval in which nine tenths of the published runs like a step are.

    Args:
      seconds: the step that was rehearsed.
      chip: the chip, as its file is called.
      chips: the number of chips.
      family: the family of the model; empty = not known.
      model_measured: whether one step of this model on this chip was measured, and scales it: then
        runs of one model on one chip are held against one another.
      board: the runs; None = those of `read_board`.

    Returns:
      The interval, or why there is none.
    """
    rows = [row for row in (read_board() if board is None else board) if row["chip"] == chip]
    if not rows:
        return _none(f"no published run on {chip} was rehearsed")
    if family and not any(row["family"] == family for row in rows):
        return _none(f"no published run of {family} on {chip} was rehearsed")
    most = max(row["chips"] for row in rows)
    if chips > _MANY * most:
        return _none(f"no published run on {chip} has more than {most} chips")
    if model_measured:
        errors = errors_by_one_step(rows)
        kind = f"pairs of published runs of one model on {chip}"
    else:
        errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
        kind = f"published runs on {chip}"
    if model_measured and not errors:
        return _none(f"no model was published twice on {chip}")
    if not model_measured and len(rows) < _FEWEST:
        return _none(f"of published runs on {chip} {len(rows)} are too few to say")
    share = _quantile(errors, _COVERED)
    return {
        "share": share,
        "low": seconds * (1 - share),
        "high": seconds * (1 + share),
        "runs": len(errors),
        "by": kind,
    }


def errors_by_one_step(rows: Iterable[BoardRow]) -> list[float]:
    """List the errors of steps that are scaled by one other measured step of the same model on the
    same chip, each pair both ways.
    """
    pairs = permutations(rows, 2)
    return [
        abs(row["predicted"] / row["measured"] * one["measured"] / one["predicted"] - 1)
        for one, row in pairs
        if (one["chip"], one["model"]) == (row["chip"], row["model"])
    ]


def _none(why: str) -> NoInterval:
    return {"why": why}


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
