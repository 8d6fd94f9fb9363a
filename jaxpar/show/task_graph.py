"""A picture of a step's task graph: the compiler's order beside a list schedule, and the body of
the longest loop as a graph.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jaxpar.base.errors import UserError
from jaxpar.rehearse.report.schema import Rehearsal, TimelineColumns
from jaxpar.rehearse.report.task_graph import OrderRow, TaskGraph, TaskRow
from jaxpar.show.timeline import COLORS, PHASES, REST, draw_lanes, rows_of

_CRITICAL = "#d40000"
_EDGE = "#b0b0b0"
_MOST_ROWS = 18
"""The number of scopes of a loop's body that have a row of their own; the others share the last."""
_LONG_SCOPE = 32
"""The length of a scope that leaves most of the width to the tasks."""


def task_graph_figure(report: Rehearsal) -> Figure:
    """Draw the task graph of a report.

    Above, what each lane does in the compiler's order, and below it in a list schedule with all
    collectives beside compute, on one scale. At the bottom, the loop's body that takes longest: a
    row for each scope of the model, each task where it could begin at the earliest, and in red the
    body's critical path.

    Args:
      report: the report of a rehearsal with its task graph and its timeline.

    Returns:
      The figure, whose times are in milliseconds.

    Raises:
      UserError: the report has no task graph, or no timeline.
    """
    if "graph" not in report or "timeline" not in report:
        raise UserError(
            "this report has no task graph, or was kept without its timeline: rehearse again with "
            "graph=True"
        )
    graph = report["graph"]
    order = graph["beside_compute"]
    played = report["timeline"]
    listed = _columns(graph, order)
    body = _longest_body(graph)
    panels = [(len(rows_of(played)), played), (len(rows_of(listed)), listed)]
    scopes = _scopes(body.tasks)
    heights = [rows for rows, _ in panels] + ([1.4 * len(scopes)] if body.tasks else [])
    figure = Figure(figsize=(13, 2.2 + 0.26 * sum(heights)), dpi=120, layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    longest = 1e3 * graph["played"]
    for place, (_, timeline) in zip(axes, panels, strict=False):
        draw_lanes(place, timeline, 0, longest)
    name = f"{report['config'] or 'a step'} on {report['target']['name']}"
    axes[0].set_title(f"{name}: {longest:.4g} ms in the compiler's order", loc="left")
    axes[1].set_title(_list_title(order), loc="left", fontsize=10)
    axes[1].set_xlabel("ms from the start of the step")
    if body.tasks:
        _draw_body(axes[2], body, scopes)
    drawn = {*played["kinds"], *listed["kinds"]}
    colors = COLORS
    if rows_of(played)[0] == "phase":
        drawn.update(played["phases"])
        colors = COLORS | PHASES
    handles: list[Patch | Line2D] = [
        Patch(color=color, label=name) for name, color in colors.items() if name in drawn
    ]
    if not drawn <= colors.keys():
        handles.append(Patch(color=REST, label="other"))
    if body.tasks:
        handles.append(Patch(edgecolor=_CRITICAL, fill=False, label="critical path"))
        handles.append(Line2D([], [], color=_EDGE, label="one waits for the other"))
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    return figure


def _list_title(order: OrderRow) -> str:
    """Write the title of the list schedule's panel."""
    if order["list_schedule"] is None or order["critical_path"] is None:
        return "its loops are too long for a list schedule of all trips"
    return (
        f"a list schedule with collectives beside compute: {1e3 * order['list_schedule']:.4g} ms\n"
        f"no schedule is below {1e3 * (order['bound'] or 0):.4g} ms, the critical path is "
        f"{1e3 * order['critical_path']:.4g} ms"
    )


def _columns(graph: TaskGraph, order: OrderRow) -> TimelineColumns:
    """Convert the bars of an order to the form of a timeline."""
    tasks = graph["tasks"]
    places = {task["id"]: place for place, task in enumerate(tasks)}
    return {
        "lanes": list(order["loads"]),
        "names": [task["name"] for task in tasks],
        "kinds": [task["kind"] for task in tasks],
        "scopes": [task["scope"] for task in tasks],
        "sources": [task["source"] for task in tasks],
        "phases": [task["phase"] for task in tasks],
        "bytes": [task["bytes"] for task in tasks],
        "events": [
            [lane, begin, takes, places[int(task)], 0]
            for lane, begin, takes, task in order["events"]
        ],
    }


class _Body(NamedTuple):
    """The tasks of one list without loops, and the times at which each could begin."""

    name: str
    tasks: list[TaskRow]
    edges: list[tuple[int, int]]
    earliest: dict[int, float]
    """The earliest begin of each task by its id, in milliseconds."""
    critical: list[int]
    """The ids of the tasks on the critical path, the last first."""


def _longest_body(graph: TaskGraph) -> _Body:
    """Find the loop's body that takes longest of those without loops inside; else the tasks in no
    loop.
    """
    inside = defaultdict[int | None, list[TaskRow]](list)
    for task in graph["tasks"]:
        inside[task["loop"]].append(task)
    outer = {loop["loop"] for loop in graph["loops"]}
    names = {loop["id"]: f"{loop['name']}, {loop['trips']} trips" for loop in graph["loops"]}
    inner = [loop for loop in names if loop not in outer and inside[loop]]
    chosen = max(
        inner,
        key=lambda loop: sum(task["seconds"] * task["runs"] for task in inside[loop]),
        default=None,
    )
    tasks = inside[chosen]
    ids = {task["id"]: task for task in tasks}
    edges = [
        (edge["before"], edge["after"])
        for edge in graph["edges"]
        if not edge["trips"] and edge["before"] in ids and edge["after"] in ids
    ]
    earliest = dict.fromkeys(ids, 0.0)
    cause: dict[int, int] = {}
    for before, after in sorted(edges, key=lambda edge: edge[1]):
        over = earliest[before] + 1e3 * ids[before]["seconds"]
        if over > earliest[after]:
            earliest[after] = over
            cause[after] = before
    critical = list[int]()
    last = max(ids, key=lambda one: earliest[one] + 1e3 * ids[one]["seconds"], default=None)
    while last is not None:
        critical.append(last)
        last = cause.get(last)
    name = names[chosen] if chosen is not None else "the program"
    return _Body(name, tasks, edges, earliest, critical)


def _scopes(tasks: list[TaskRow]) -> list[str]:
    """List the names of the rows, in the order of the program."""
    found = list(dict.fromkeys(_row_name(task) for task in tasks if task["seconds"]))
    return found if len(found) <= _MOST_ROWS else [*found[: _MOST_ROWS - 1], "others"]


def _row_name(task: TaskRow) -> str:
    """Name a task's row by scope and phase; of a long scope, as a kernel has, the innermost name
    alone.
    """
    scope = task["scope"] or "no scope"
    if len(scope) > _LONG_SCOPE:
        scope = f"…/{scope.rpartition('/')[2]}"
    return f"{scope} ({task['phase']})"


def _draw_body(axes: Axes, body: _Body, scopes: list[str]) -> None:
    """Draw a body's tasks as bars and its edges as lines."""
    rows = {scope: row for row, scope in enumerate(scopes)}
    shown = {task["id"]: task for task in body.tasks if task["seconds"]}
    heights = _heights(body, shown, rows)
    for one, task in shown.items():
        axes.broken_barh(
            [(body.earliest[one], 1e3 * task["seconds"])],
            (heights[one] - 0.09, 0.18),
            facecolors=COLORS.get(task["kind"], REST),
            edgecolors=_CRITICAL if one in body.critical else "none",
            linewidth=1.2 if one in body.critical else 0,
        )
    ends = {one: body.earliest[one] + 1e3 * task["seconds"] for one, task in shown.items()}
    lines = {
        (before, after): [(ends[before], heights[before]), (body.earliest[after], heights[after])]
        for before, after in body.edges
        if before in shown and after in shown
    }
    path = {(before, after) for after, before in pairwise(body.critical)}
    hot = [line for edge, line in lines.items() if edge in path]
    cold = [line for edge, line in lines.items() if edge not in path]
    axes.add_collection(LineCollection(cold, colors=_EDGE, linewidths=0.4, zorder=0))
    axes.add_collection(LineCollection(hot, colors=_CRITICAL, linewidths=0.9, zorder=0))
    axes.set_yticks(range(len(scopes)), scopes, fontsize=7)
    axes.set_ylim(len(scopes) - 0.4, -0.6)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms from the start of a trip, with lanes enough")
    axes.set_title(
        f"a trip of {body.name}: {len(body.tasks)} tasks, each as early as its edges let it",
        loc="left",
        fontsize=10,
    )


def _heights(body: _Body, shown: dict[int, TaskRow], rows: dict[str, int]) -> dict[int, float]:
    """Place each task in its scope's row, beside those that run at the same time."""
    busy = defaultdict[int, list[float]](lambda: [0.0] * 4)
    heights = {}
    for one in sorted(shown, key=lambda one: body.earliest[one]):
        row = rows.get(_row_name(shown[one]), len(rows) - 1)
        tracks = busy[row]
        track = min(
            range(len(tracks)), key=lambda track: (tracks[track] > body.earliest[one], track)
        )
        tracks[track] = body.earliest[one] + 1e3 * shown[one]["seconds"]
        heights[one] = row - 0.3 + 0.2 * track
    return heights
