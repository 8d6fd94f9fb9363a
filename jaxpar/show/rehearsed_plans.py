"""A picture of rehearsed plans beside their estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

_COLUMNS = 3
_MARKS = {"first": "s", "brim": "^", "spread": "o"}
_LABELS = {
    "first": "ranked highest",
    "brim": "barely fitting",
    "spread": "others",
}


def rehearsed_plans_figure(pairs: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw predicted against rehearsed seconds of the plans of each pair, and a line where the two
    are equal.

    Args:
      pairs: what `jaxpar.bench.plans.against_rehearsals.as_json` returns.
    """
    rows = -(-len(pairs) // _COLUMNS)
    columns = min(len(pairs), _COLUMNS)
    size = (0.5 + 4 * columns, 0.5 + 3.8 * rows)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axis, pair in zip(axes, pairs, strict=False):
        _draw_pair(axis, pair)
    for axis in axes[len(pairs) :]:
        axis.set_axis_off()
    axes[0].legend(frameon=False, loc="upper left")
    return figure


def _draw_pair(axis: Axes, pair: Mapping[str, Any]) -> None:
    plans = [plan for plan in pair["plans"] if plan["rehearsed"]]
    for drawn, mark in _MARKS.items():
        some = [plan for plan in plans if plan["drawn"] == drawn]
        axis.plot(
            [plan["rehearsed"] for plan in some],
            [plan["predicted"] for plan in some],
            marker=mark,
            linestyle="none",
            markersize=4,
            alpha=0.7,
            label=_LABELS[drawn],
        )
    seconds = [plan[key] for plan in plans for key in ("rehearsed", "predicted")]
    ends = np.array([min(seconds) / 1.15, max(seconds) * 1.15])
    axis.plot(ends, ends, color="0.5", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axis.set(xlabel="rehearsed, s", ylabel="predicted, s")
    axis.set_title(f"{pair['pair']}: tau {pair['kendall']:.2f}", fontsize=10)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_formatter(NullFormatter())
