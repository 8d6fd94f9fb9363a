"""The picture of a device's memory in the course of a rehearsed step."""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.alive import REST
from jaxpar.rehearse.report.schema import Alive, Rehearsal

_GIB = 2**30
_MIB = 2**20
_LIMIT = "#cc3311"
_REST_COLOR = "#cccccc"
_NEAR = 2
"""The most times the peak at which a line at what a step may take is still drawn."""
_ROWS = 8
"""The number of arrays that are listed below."""


def memory_timeline_figure(report: Rehearsal) -> Figure:
    """Draw the bytes in a device's memory by part over a step, and list the arrays at the peak.

    Arguments are blue, and what the step makes is brown to yellow. A dashed line is what a step may
    take of the device, where it is near.

    Raises:
      UserError: the report lacks the memory over time.
    """
    alive = report.get("alive")
    if not alive or not alive["times_us"]:
        raise UserError(
            "this report does not say what is in memory when, so there is no picture of it: "
            "rehearse again"
        )
    figure = Figure(figsize=(12, 6.6), dpi=120, layout="constrained")
    curve, listed = figure.subplots(2, 1, height_ratios=[3.1, 1.5])
    _draw_parts(curve, alive)
    size, unit = _unit(alive["peak_bytes"])
    may_take = report["memory"]["usable_bytes"]
    if 0 < may_take <= _NEAR * alive["peak_bytes"]:
        label = f"a step may take {may_take / size:.3g} {unit}"
        curve.axhline(may_take / size, color=_LIMIT, linestyle="--", label=label)
    name = f"{report['config'] or 'a step'} on {report['target']['name']}"
    peak = f"{alive['peak_bytes'] / size:.4g} {unit}"
    reserved = f"{report['memory']['total'] / size:.4g} {unit}"
    curve.set_title(
        f"{name}: arrays of at most {peak} in a device's memory, after "
        f"{alive['peak_us'] / 1e3:.4g} ms\n"
        f"The step takes {reserved} by the compiler's account, which has its code and gaps too.",
        loc="left",
        fontsize=11,
    )
    curve.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    _list_arrays(listed, alive)
    return figure


def _draw_parts(axes: Axes, alive: Alive) -> None:
    size, unit = _unit(alive["peak_bytes"])
    times = [time / 1e3 for time in alive["times_us"]]
    labels = list(alive["parts"])
    arguments = [one for one in labels if one in {row["argument"] for row in alive["arrays"]}]
    made = [one for one in labels if one not in arguments and one != REST]
    rest = [one for one in labels if one == REST]
    blues = matplotlib.colormaps["Blues_r"]
    browns = matplotlib.colormaps["YlOrBr_r"]
    colors = {one: blues(0.15 + 0.5 * n / len(arguments)) for n, one in enumerate(arguments)}
    colors |= {one: browns(0.2 + 0.65 * n / len(made)) for n, one in enumerate(made)}
    colors |= dict.fromkeys(rest, _REST_COLOR)
    drawn = [*arguments, *made, *rest]
    axes.stackplot(
        times,
        [[bytes_ / size for bytes_ in alive["parts"][one]] for one in drawn],
        labels=drawn,
        colors=[colors[one] for one in drawn],
        step="post",
        linewidth=0,
    )
    axes.axvline(alive["peak_us"] / 1e3, color="black", linewidth=1, label="peak")
    axes.set(
        xlabel="ms from the start of the step; the trips of a loop are drawn as one",
        ylabel=unit,
        xlim=(0, max(times[-1], alive["peak_us"] / 1e3)),
    )
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def _list_arrays(axes: Axes, alive: Alive) -> None:
    """Write the largest arrays at the peak, each with its line or its argument."""
    axes.axis("off")
    axes.set_title("the largest arrays at the peak", loc="left", fontsize=10)
    columns = (0.0, 0.11, 0.4, 0.61)
    for place, row in enumerate(alive["arrays"][:_ROWS]):
        size, unit = _unit(row["bytes"])
        many = f"{row['count']} x " if row["count"] > 1 else ""
        phase = "" if row["argument"] else f"({row['phase']})"
        cells = (
            f"{row['bytes'] / size:.3g} {unit}",
            f"{many}{row['shape']}",
            row["argument"] or row["source"],
            f"{row['scope']}  {phase}".strip(),
        )
        height = 0.95 - place / _ROWS
        for left, cell in zip(columns, cells, strict=True):
            axes.text(left, height, cell, fontsize=9, va="top", transform=axes.transAxes)


def _unit(bytes_: int) -> tuple[int, str]:
    """Choose a unit that suits so many bytes, by its size and its name."""
    return (_GIB, "GiB") if bytes_ >= _GIB else (_MIB, "MiB")
