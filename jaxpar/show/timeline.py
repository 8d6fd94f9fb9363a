"""A picture of a rehearsed step: what each lane of a device does when, over the whole step and
close up.
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
_PHASES = {
    "forward": "#cfe3cf",
    "recomputed": "#f3e3b3",
    "backward": "#f2cfc4",
    "update": "#d8cfe8",
}
# that the lower panel has of the compute lane, about; it has a 32nd to a fourth of the step
_TASKS = 100


def timeline_figure(report: Rehearsal, *others: Rehearsal) -> Figure:
    """Draw reports' timelines, a row for each lane and the phases above them.

    A training step has a lower panel, a part from the middle of its backward pass. With several
    reports there is a panel for each, on one scale. A collective on the compute lane is one that
    compute waits for.

    Args:
      report: the report of a rehearsal.
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
    backward = [
        event[1]
        for event in timelines[0]["events"]
        if timelines[0]["phases"][int(event[3])] == "backward"
    ]
    close_up = bool(backward) and not others
    drawn = timelines * 2 if close_up else timelines
    rows = sum(len(rows_of(timeline)) for timeline in drawn)
    figure = Figure(
        figsize=(12, 0.8 + 0.4 * len(drawn) + 0.28 * rows), dpi=120, layout="constrained"
    )
    panels = figure.subplots(len(drawn), 1, squeeze=False).ravel()
    for axes, one, timeline in zip(panels, reports, timelines, strict=False):
        draw_lanes(axes, timeline, 0, longest)
        step = 1e3 * one["time"]["step"]
        exposed = 1e3 * one["time"]["exposed_communication"]
        name = f"{one['config'] or 'a step'} on {one['target']['name']}"
        axes.set_title(
            f"{name}: {step:.4g} ms a step, {exposed:.3g} ms of it exposed communication",
            loc="left",
        )
    panels[-1].set_xlabel("ms from the start of the step")
    if close_up:
        middle = sorted(backward)[len(backward) // 2] / 1e3
        tasks = sum(
            timelines[0]["lanes"][int(event[0])] == "compute" for event in timelines[0]["events"]
        )
        half = longest * min(max(_TASKS / max(tasks, 1), 1 / 32), 1 / 4) / 2
        draw_lanes(panels[1], timelines[0], middle - half, middle + half)
        panels[0].axvspan(
            *panels[1].get_xlim(),
            color="black",
            alpha=0.12,
            linewidth=0,
        )
        panels[1].set_title("the shaded part, close up", loc="left", fontsize=10)
    found = {name for timeline in timelines for name in (*timeline["kinds"], *timeline["phases"])}
    colors = {
        name: color
        for name, color in (COLORS | (_PHASES if backward else {})).items()
        if name in found
    }
    handles = [Patch(color=color, label=kind) for kind, color in colors.items()]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 9),
        frameon=False,
        fontsize=9,
    )
    return figure


def rows_of(timeline: TimelineColumns) -> list[str]:
    """The names of the rows: the phases, if there is more than a forward, and the lanes.

    Args:
      timeline: the events.

    Returns:
      The names, from the top down.
    """
    return [
        *(["phase"] if "backward" in timeline["phases"] else []),
        *timeline["lanes"],
    ]


def draw_lanes(axes: Axes, timeline: TimelineColumns, begin: float, end: float) -> None:
    """Draw the events between two times, a row for each lane and for the phases above them.

    Args:
      axes: where to draw.
      timeline: the events.
      begin: the first time, in milliseconds.
      end: the last.
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
        if first and timeline["lanes"][int(lane)] == "compute" and phase in _PHASES:
            bars[0, _PHASES[phase]].append(span)
    for (row, color), spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(
        xlim=(begin, end),
        ylim=(len(rows) - 0.4, -0.6),
    )
    axes.spines[["top", "right"]].set_visible(False)
