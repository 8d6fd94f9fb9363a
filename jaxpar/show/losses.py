"""Pictures of losses: of a run, and of the runs of a sweep beside their speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_Numbers = Mapping[str, float]
_TRAIN = "#4477aa"
_VAL = "#cc3311"
_REFERENCE = "#777777"


def loss_figure(
    rows: Sequence[_Numbers],
    title: str,
    references: _Numbers | None = None,
) -> Figure:
    """Draw the training and validation loss by step.

    Args:
      rows: the lines of `metrics.jsonl`; losses are in nats a token, and either may be absent.
      references: horizontal lines by label, such as the text's unigram entropy, in nats a token.
    """
    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for key, label, color, marker in (
        ("loss", "train", _TRAIN, None),
        ("val_loss", "validation", _VAL, "o"),
    ):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            dot = "." if len(points) < 5 else marker  # a line through one point cannot be seen
            (line,) = axes.plot(
                *zip(*points, strict=True),
                color=color,
                marker=dot,
                linewidth=1.3,
            )
            line.set(label=f"{label} (last {points[-1][1]:.3f})", markersize=4 if dot == "o" else 8)
    for label, value in (references or {}).items():
        axes.axhline(
            value, color=_REFERENCE, linestyle="--", linewidth=1, label=f"{label} ({value:.3f})"
        )
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure


def sweep_figure(rows: Mapping[str, Sequence[_Numbers]], rates: Mapping[str, float]) -> Figure:
    """Draw the loss of each run by step, and beside it its tokens a second.

    Args:
      rows: the lines of each run's `metrics.jsonl`, by the name of the run.
      rates: the tokens a second of each run that is drawn, by the same names.
    """
    figure = Figure(
        figsize=(10, 2.4 + 0.35 * max(len(rates), 5)),
        dpi=120,
        layout="constrained",
    )
    curves, bars = figure.subplots(1, 2, width_ratios=(4, 3))
    for place, (name, rate) in enumerate(rates.items()):
        # the first curves are widest: one that later ones cover is seen
        behind = 1 - place / max(len(rates) - 1, 1)
        color = matplotlib.colormaps["viridis"](0.9 - 0.9 * behind)
        points = [(row["step"], row["loss"]) for row in rows[name] if "loss" in row]
        curves.plot(
            *zip(*points, strict=True),
            color=color,
            linewidth=1.2 + 4 * behind,
        )
        bars.bar_label(
            bars.barh(place, rate, color=color, height=0.6),
            [f" {rate:,.0f}"],
        )
    curves.set(xlabel="step", ylabel="training loss (nats a token)")
    curves.grid(alpha=0.25)
    names = [name.replace(" ", "\n") for name in rates]
    bars.set(
        xlabel="tokens a second",
        yticks=range(len(names)),
        yticklabels=names,
        xticks=[],
    )
    bars.margins(x=0.2)
    bars.invert_yaxis()
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
