"""The picture of a rehearsed step: what each lane of a device does over the whole step, and close
up.
"""

from __future__ import annotations

from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.schema import Rehearsal, TimelineColumns

COLORS = {
    "matmul": "#2b5c9e",
    "kernel": "#3a9188",
    "fusion": "#8db4dc",
    "copy": "#b8b8b8",
    "all-gather": "#e69f00",
    "reduce-scatter": "#cc4411",
    "all-reduce": "#8e44ad",
    "all-to-all": "#7b5136",
    "ppermute": "#d16ba5",
}
REST = "#dddddd"  # control, loops
PHASES = {
    "forward": "#cfe3cf",
    "recomputed": "#f3e3b3",
    "backward": "#f2cfc4",
    "update": "#d8cfe8",
}
_TASKS = 100
"""The number of tasks of the compute lane that the close-up shows, about; it has a 32nd to a fourth
of the step.
"""


def timeline_figure(report: Rehearsal, *others: Rehearsal) -> Figure:
    """Draw reports' timelines, a row for each lane and the phases above them.

    A training step has a lower panel, a part from the middle of its backward pass. With several
    reports there is a panel for each, on one scale. A collective on the compute lane is one that
    compute waits for.

    Args:
      others: further reports to draw below it.

    Returns:
      The figure, whose times are in milliseconds.

    Raises:
      UserError: a report was kept without its timeline.
    """
    reports = (report, *others)
    timelines = [one["timeline"] for one in reports if "timeline" in one]
    if len(timelines) < len(reports):
        raise UserError(
            "this report was kept without its timeline, so there is no picture of it: rehearse "
            "again"
        )
    longest = 1e3 * max(one["time"]["step"] for one in reports)
    backward = _backward_starts(timelines[0])
    close_up = bool(backward) and not others
    drawn = timelines * 2 if close_up else timelines
    figure, panels = _panels(drawn)
    for axes, one, timeline in zip(panels, reports, timelines, strict=False):
        draw_lanes(axes, timeline, 0, longest)
        axes.set_title(_title(one), loc="left")
    panels[-1].set_xlabel("ms from the start of the step")
    if close_up:
        middle = backward[len(backward) // 2]
        _draw_close_up(panels[0], panels[1], timelines[0], middle, longest)
    _add_legend(figure, timelines, with_phases=bool(backward))
    return figure


def _backward_starts(timeline: TimelineColumns) -> list[float]:
    """List when the events of the backward pass begin, in milliseconds, sorted."""
    starts = [
        event[1] / 1e3
        for event in timeline["events"]
        if timeline["phases"][int(event[3])] == "backward"
    ]
    return sorted(starts)


def _panels(timelines: list[TimelineColumns]) -> tuple[Figure, list[Axes]]:
    """Make a figure with a panel for each timeline, as high as their rows need."""
    rows = sum(len(rows_of(timeline)) for timeline in timelines)
    height = 0.8 + 0.4 * len(timelines) + 0.28 * rows
    figure = Figure(figsize=(12, height), dpi=120, layout="constrained")
    return figure, list(figure.subplots(len(timelines), 1, squeeze=False).ravel())


def _title(report: Rehearsal) -> str:
    step = 1e3 * report["time"]["step"]
    exposed = 1e3 * report["time"]["exposed_communication"]
    name = f"{report['config'] or 'a step'} on {report['target']['name']}"
    return f"{name}: {step:.4g} ms a step, {exposed:.3g} ms of it exposed communication"


def _draw_close_up(
    whole: Axes, close: Axes, timeline: TimelineColumns, middle: float, longest: float
) -> None:
    """Draw a part of a timeline that shows about `_TASKS` tasks, and shade it in the whole one."""
    tasks = sum(timeline["lanes"][int(event[0])] == "compute" for event in timeline["events"])
    share = min(max(_TASKS / max(tasks, 1), 1 / 32), 1 / 4)
    half = longest * share / 2
    draw_lanes(close, timeline, middle - half, middle + half)
    whole.axvspan(*close.get_xlim(), color="black", alpha=0.12, linewidth=0)
    close.set_title("the shaded part, close up", loc="left", fontsize=10)


def _add_legend(figure: Figure, timelines: list[TimelineColumns], with_phases: bool) -> None:
    """Name the colors of what is drawn."""
    found = {name for timeline in timelines for name in (*timeline["kinds"], *timeline["phases"])}
    colors = COLORS | PHASES if with_phases else COLORS
    handles = [Patch(color=color, label=kind) for kind, color in colors.items() if kind in found]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 9),
        frameon=False,
        fontsize=9,
    )


def rows_of(timeline: TimelineColumns) -> list[str]:
    """List the names of the rows from the top down: the phases, if there is more than a forward,
    and the lanes.
    """
    if "backward" in timeline["phases"]:
        return ["phase", *timeline["lanes"]]
    return list(timeline["lanes"])


def draw_lanes(axes: Axes, timeline: TimelineColumns, begin: float, end: float) -> None:
    """Draw the events between two times, a row for each lane and for the phases above them.

    Args:
      begin: the first time, in milliseconds.
      end: the last time, in milliseconds.
    """
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    rows = rows_of(timeline)
    first = len(rows) - len(timeline["lanes"])
    for lane, start, duration, at, _ in timeline["events"]:
        span = (start / 1e3, duration / 1e3)
        kind = timeline["kinds"][int(at)]
        phase = timeline["phases"][int(at)]
        if sum(span) < begin or span[0] > end:
            continue
        bars[int(lane) + first, COLORS.get(kind, REST)].append(span)
        if first and timeline["lanes"][int(lane)] == "compute" and phase in PHASES:
            bars[0, PHASES[phase]].append(span)
    for (row, color), spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(begin, end), ylim=(len(rows) - 0.4, -0.6))
    axes.spines[["top", "right"]].set_visible(False)
