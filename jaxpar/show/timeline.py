"""A picture of a rehearsed step: what each lane of a device does when, over the whole step and close up."""

from __future__ import annotations

from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.schema import Rehearsal, TimelineColumns

_COLORS = {
    "matmul": "#2b5c9e", "kernel": "#3a9188", "fusion": "#8db4dc", "copy": "#b8b8b8",
    "all-gather": "#e69f00", "reduce-scatter": "#cc4411", "all-reduce": "#8e44ad", "all-to-all": "#7b5136",
    "ppermute": "#d16ba5",
}  # fmt: skip
_REST = "#dddddd"  # control, loops
_PHASES = {"forward": "#cfe3cf", "recomputed": "#f3e3b3", "backward": "#f2cfc4", "update": "#d8cfe8"}
_CLOSE = 1 / 32  # the share of the step that the lower panel has


def timeline_figure(report: Rehearsal) -> Figure:
    """Draw a report's timeline, a row for each lane and the phases above them.

    The lower panel is a part from the middle of the backward pass (or of the step, where it has none). A collective on
    the compute lane is one that compute waits for.

    Raises:
      UserError: the report was kept without its timeline.
    """
    if "timeline" not in report:
        raise UserError("this report was kept without its timeline, so there is no picture of it: rehearse again")
    timeline, step = report["timeline"], 1e3 * report["time"]["step"]
    backward = [start for _, start, _, at, _ in timeline["events"] if timeline["phases"][int(at)] == "backward"]
    middle = sorted(backward)[len(backward) // 2] / 1e3 if backward else step / 2
    figure = Figure(figsize=(12, 1.6 + 0.56 * (len(timeline["lanes"]) + 1)), dpi=120, layout="constrained")
    whole, close = figure.subplots(2, 1)
    _draw(whole, timeline, 0, step)
    _draw(close, timeline, middle - _CLOSE * step / 2, middle + _CLOSE * step / 2)
    whole.axvspan(*close.get_xlim(), color="black", alpha=0.12, linewidth=0)
    exposed = 1e3 * report["time"]["exposed_communication"]
    name = f"{report['config'] or 'a step'} on {report['target']['name']}"
    whole.set_title(f"{name}: {step:.4g} ms a step, {exposed:.3g} ms of it exposed communication", loc="left")
    close.set_xlabel("ms; below, the part that is shaded above")
    found = {kind for kind in timeline["kinds"] if kind in _COLORS}
    colors = {kind: color for kind, color in _COLORS.items() if kind in found} | _PHASES
    handles = [Patch(color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    return figure


def _draw(axes: Axes, timeline: TimelineColumns, begin: float, end: float) -> None:
    """Draw the events between two times, in milliseconds."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for lane, start, duration, at, _ in timeline["events"]:
        start, duration, kind, phase = (
            start / 1e3,
            duration / 1e3,
            timeline["kinds"][int(at)],
            timeline["phases"][int(at)],
        )
        if start + duration < begin or start > end:
            continue
        bars[int(lane) + 1, _COLORS.get(kind, _REST)].append((start, duration))
        if timeline["lanes"][int(lane)] == "compute" and phase in _PHASES:
            bars[0, _PHASES[phase]].append((start, duration))
    for (row, color), spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, linewidth=0)
    axes.set_yticks(range(len(timeline["lanes"]) + 1), ["phase", *timeline["lanes"]])
    axes.set(xlim=(begin, end), ylim=(len(timeline["lanes"]) + 0.6, -0.6))
    axes.spines[["top", "right"]].set_visible(False)
