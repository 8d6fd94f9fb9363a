"""A picture of measured plans beside their estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter


def measured_plans_figure(groups: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw predicted against measured seconds of all plans, and the regret of each group.

    Args:
      groups: what `jaxpar.bench.plans.ranking.as_json` returns.
    """
    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for fitted, color, label in ((True, "C0", "fitted on"), (False, "C1", "kept apart")):
        plans = [plan for one in groups if one["fitted"] is fitted for plan in one["plans"]]
        left.plot(
            [plan["measured"] for plan in plans],
            [plan["predicted"] for plan in plans],
            marker="o",
            linestyle="none",
            markersize=3,
            alpha=0.6,
            color=color,
            label=f"{label}: {len(plans)} plans",
        )
    seconds = [plan[key] for one in groups for plan in one["plans"] for key in _SECONDS]
    ends = np.array([min(seconds) / 1.2, max(seconds) * 1.2])
    left.plot(ends, ends, color="0.5", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    left.set(xlabel="measured, s", ylabel="predicted, s")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    left.legend(frameon=False)
    regrets = np.sort([100 * one["regret"] for one in groups])[::-1]
    right.bar(range(1, len(regrets) + 1), regrets, color="C3", width=0.9)
    right.set(xlabel="groups of plans, the worst first", ylabel="regret of the chosen plan, %")
    return figure


_SECONDS = ("measured", "predicted")
