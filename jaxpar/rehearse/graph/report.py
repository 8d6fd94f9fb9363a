"""A step's task graph in the form that JSON has.

Loops stay loops here, each a node with a body of its own and edges that say from how many trips
earlier a value comes: with all trips written out a step of LLaMA-3 8B has fifteen times the tasks,
and none of them says anything new. Critical path, slack and list schedule are of all trips.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError
from jaxpar.hlo.fusions import Operations, operations, operations_opened
from jaxpar.hlo.program.tasks import (
    Loop,
    Needs,
    Node,
    Origin,
    Path,
    Program,
    Task,
    Wait,
    walk_paths,
)
from jaxpar.rehearse.cost import Costs
from jaxpar.rehearse.graph.list_schedule import Schedule, best_schedule
from jaxpar.rehearse.graph.paths import Paths, bound, lane_loads, paths_of
from jaxpar.rehearse.graph.runs import MOST_RUNS, RunGraph, beside_compute, closed, unrolled
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.task_graph import (
    GRAPH_SCHEMA,
    Edge,
    Fused,
    LineSlack,
    LoopRow,
    OrderRow,
    TaskGraph,
    TaskRow,
)

_MOST_EVENTS = 60_000


def task_graph_of(
    text: str, program: Program, costs: Costs, played: float, most_runs: int = MOST_RUNS
) -> TaskGraph:
    """Write down the task graph of a program, as it goes into JSON.

    Args:
      text: the text of the scheduled module.
      program: the result of `read_program` for the text.
      costs: the cost of each of its tasks.
      played: the seconds of a step in the compiler's order.
      most_runs: loops are unrolled up to so many runs of tasks.
    """
    ids = _ids(program.nodes)
    graph = unrolled(program, costs, most_runs)
    paths = paths_of(graph) if graph else None
    slack = _least_slack(graph, paths) if graph and paths else {}
    counted = operations(program)
    edges = edges_of(graph)
    return {
        "schema": GRAPH_SCHEMA,
        "tasks": list(_task_rows(program, costs, ids, slack)),
        "loops": list(_loop_rows(program.nodes, ids)),
        "edges": list(_edges(program.nodes, ids)),
        "runs": counted.runs,
        "run_edges": edges,
        "work": sum(costs[path].seconds * count for path, _, count in walk_paths(program.nodes)),
        "played": played,
        "as_compiled": _order(program, costs, ids, most_runs),
        "beside_compute": _order(program, beside_compute(program, costs), ids, most_runs),
        "lines": _lines(program, graph, paths) if graph and paths else [],
        "fused": fused_row(counted, edges=edges),
        "opened": fused_row(operations_opened(text, program)),
    }


def write_graph(report: Rehearsal, path: FilePath | str) -> None:
    """Write the task graph of a report as JSON, with what was rehearsed.

    Raises:
      UserError: the report has no task graph, or the file cannot be written.
    """
    if "graph" not in report:
        raise UserError("this report has no task graph: rehearse again with graph=True")
    about = ("config", "command", "date", "versions", "target", "mesh")
    whole = {key: report[key] for key in about} | dict(report["graph"])
    write_whole(FilePath(path), json.dumps(whole, allow_nan=False) + "\n")


def edges_of(graph: RunGraph | None) -> int | None:
    """Count the edges between the runs of all tasks; None where there are too many runs."""
    if graph is None:
        return None
    return sum(map(len, graph.needs))


def fused_row(counted: Operations, seconds: float | None = None, edges: int | None = None) -> Fused:
    """Make the row of what was counted of a program, with edges and a step's seconds if they are
    known.
    """
    row: Fused = {"tasks": counted.tasks, "runs": counted.runs, "bytes": counted.bytes}
    if edges is not None:
        row["edges"] = edges
    if seconds is not None:
        row["seconds"] = seconds
    return row


def _nodes(nodes: Sequence[Node], path: Path = ()) -> Iterator[tuple[Path, Task | Loop]]:
    """Yield every task and loop with its path, a loop before what is in it."""
    for i, node in enumerate(nodes):
        if isinstance(node, Wait):
            continue
        yield (*path, i), node
        if isinstance(node, Loop):
            yield from _nodes(node.body, (*path, i))


def _ids(nodes: Sequence[Node]) -> dict[Path, int]:
    """Number the tasks and loops."""
    return {path: number for number, (path, _) in enumerate(_nodes(nodes))}


def _task_rows(
    program: Program, costs: Costs, ids: dict[Path, int], slack: dict[Path, float]
) -> Iterator[TaskRow]:
    for path, task, count in walk_paths(program.nodes):
        cost = costs[path]
        sent = task.collective.sent_bytes if task.collective else task.bytes
        yield {
            "id": ids[path],
            "name": task.name,
            "op": task.opcode,
            "kind": task.collective.kind if task.collective else task.kind,
            "lanes": list(cost.lanes),
            "seconds": cost.seconds,
            "bytes": int(sent),
            "flops": task.flops,
            "runs": count,
            "loop": ids.get(path[:-1]),
            "scope": task.origin.scope,
            "source": task.origin.source,
            "phase": task.origin.phase,
            "slack": slack.get(path),
        }


def _loop_rows(nodes: Sequence[Node], ids: dict[Path, int]) -> Iterator[LoopRow]:
    for path, node in _nodes(nodes):
        if isinstance(node, Loop):
            yield {
                "id": ids[path],
                "name": node.name,
                "trips": node.trips,
                "loop": ids.get(path[:-1]),
            }


class _Maker(NamedTuple):
    """The node of a list that makes a value, and how many trips before."""

    position: int
    trips: int


def _edges(
    nodes: Sequence[Node], ids: dict[Path, int], path: Path = (), ends: Sequence[Needs] = ()
) -> Iterator[Edge]:
    """Yield each edge between the nodes of a list, and of the bodies in it, once.

    Args:
      nodes: the nodes of the program, or of the body of the loop at `path`.
      ids: the number of each node.
      path: the path of the list.
      ends: the makers of each part of the loop's state in a trip.
    """
    for i, node in enumerate(nodes):
        if isinstance(node, Wait):
            continue
        values = [node.needs] if isinstance(node, Task) else node.starts
        makers = sorted({maker for value in values for maker in _makers(value, ends)})
        for maker in makers:
            yield {
                "before": ids[(*path, maker.position)],
                "after": ids[(*path, i)],
                "trips": maker.trips,
            }
        if isinstance(node, Loop):
            yield from _edges(node.body, ids, (*path, i), node.ends)


def _makers(needs: Needs, ends: Sequence[Needs]) -> Iterator[_Maker]:
    """Yield the makers of a value: in this trip, or in an earlier one, through the state of the
    loop.
    """
    yield from _makers_in_trip(needs, 0)
    seen = set[int]()
    states = set(needs.states)
    trips = 0
    while states:
        trips += 1
        seen |= states
        for state in states:
            yield from _makers_in_trip(ends[state], trips)
        states = {further for state in states for further in ends[state].states} - seen


def _makers_in_trip(needs: Needs, trips: int) -> Iterator[_Maker]:
    yield from (_Maker(position, trips) for position in needs.tasks)
    yield from (_Maker(position, trips) for position, _ in needs.results)


def _order(program: Program, costs: Costs, ids: dict[Path, int], most_runs: int) -> OrderRow:
    """Describe what an order of the tasks could reach with these costs."""
    graph = unrolled(program, costs, most_runs)
    _, in_loops = closed(program, costs, lambda graph: best_schedule(graph).seconds)
    row: OrderRow = {
        "loads": {},
        "critical_path": None,
        "bound": None,
        "list_schedule": None,
        "list_schedule_in_loops": in_loops,
        "events": [],
    }
    if graph:
        paths = paths_of(graph)
        schedule = best_schedule(graph)
        row["loads"] = lane_loads(graph)
        row["critical_path"] = paths.length
        row["bound"] = bound(graph, paths)
        row["list_schedule"] = schedule.seconds
        row["events"] = _events(graph, schedule, list(row["loads"]), ids)
    return row


def _events(
    graph: RunGraph, schedule: Schedule, lanes: list[str], ids: dict[Path, int]
) -> list[list[float]]:
    """List the bars of a schedule, in the order in which they begin."""
    bars = []
    for run in sorted(range(len(graph)), key=schedule.begins.__getitem__):
        if graph.seconds[run]:
            begin = 1e6 * schedule.begins[run]
            takes = 1e6 * graph.seconds[run]
            task = ids[graph.paths[run]]
            bars += [[lanes.index(lane), begin, takes, task] for lane in graph.lanes[run]]
    return bars[:_MOST_EVENTS]


def _least_slack(graph: RunGraph, paths: Paths) -> dict[Path, float]:
    """Find the least slack of each task's runs."""
    least: dict[Path, float] = {}
    for path, slack in zip(graph.paths, paths.slack, strict=True):
        least[path] = min(slack, least.get(path, slack))
    return least


def _lines(program: Program, graph: RunGraph, paths: Paths) -> list[LineSlack]:
    """Add up time and slack by line of the model and phase."""
    origins = {path: task.origin for path, task, _ in walk_paths(program.nodes)}
    rows: dict[Origin, LineSlack] = {}
    runs = defaultdict[Origin, list[int]](list)
    for run, path in enumerate(graph.paths):
        runs[origins[path]].append(run)
    for origin, of_line in runs.items():
        critical = [run for run in of_line if not paths.slack[run]]
        rows[origin] = {
            "scope": origin.scope,
            "source": origin.source,
            "phase": origin.phase,
            "seconds": sum(graph.seconds[run] for run in of_line),
            "critical": sum(graph.seconds[run] for run in critical),
            "slack": min(paths.slack[run] for run in of_line),
        }
    return sorted(rows.values(), key=lambda row: (-row["critical"], -row["seconds"]))
