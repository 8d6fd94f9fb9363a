"""A picture of predicted beside measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BAND = 0.1
"""The error that the band has to each side."""
MARKS = "os^DvP*X<>"


def foresight_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw predicted against measured seconds of steps, both in logarithms, with a band of 10 % to
    each side of equal ones, and below it how far each is off.

    Args:
      rows: what has `chip`, `measured` and `predicted`.
    """
    figure = Figure(figsize=(7.5, 8.5), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    chips = sorted({row["chip"] for row in rows})
    seconds = [row[key] for row in rows for key in ("measured", "predicted")] or [1.0]
    ends = np.array([min(seconds) / 1.5, max(seconds) * 1.5])
    above.fill_between(
        ends, ends * (1 - BAND), ends * (1 + BAND), color="0.88", label=f"±{100 * BAND:.0f} %"
    )
    above.plot(ends, ends, color="0.5", linewidth=0.8)
    below.axhspan(-100 * BAND, 100 * BAND, color="0.88")
    below.axhline(0, color="0.5", linewidth=0.8)
    for index, chip in enumerate(chips):
        of_chip = [row for row in rows if row["chip"] == chip]
        measured = np.array([row["measured"] for row in of_chip])
        predicted = np.array([row["predicted"] for row in of_chip])
        look = {
            "marker": MARKS[index % len(MARKS)],
            "linestyle": "none",
            "color": f"C{index % 10}",
            "markersize": 6,
            "alpha": 0.8,
        }
        above.plot(measured, predicted, label=f"{chip} ({len(of_chip)})", **look)
        below.plot(measured, 100 * (predicted / measured - 1), **look)
    above.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="predicted, s")
    above.legend(frameon=False)
    below.set(xlabel="measured, s", ylabel="error of the prediction, %")
    for axis in (above.xaxis, above.yaxis, below.xaxis):
        _plain_numbers(axis)
    return figure


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis 0.1, 0.3, 1, 3: a saved picture has no powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
