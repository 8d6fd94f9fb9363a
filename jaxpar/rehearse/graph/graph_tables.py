"""The tables and lines in which a terminal shows a task graph."""

from __future__ import annotations

from rich.console import RenderableType

from jaxpar.base.console import bytes_text
from jaxpar.rehearse.report.report_tables import seconds_text, titled_table
from jaxpar.rehearse.report.task_graph import Fused, OrderRow, TaskGraph

_MOST = 12
_UNKNOWN = "-"


def graph_parts(graph: TaskGraph, most: int = _MOST) -> list[RenderableType]:
    """Make the tables of a task graph: what an order could reach, the critical path by line of the
    model, and what fusion saves.

    Args:
      graph: the key `graph` of a report.
      most: the number of lines of the model that are shown.
    """
    orders = {
        "as compiled": graph["as_compiled"],
        "collectives beside compute": graph["beside_compute"],
    }
    rows = [_order_row(name, order) for name, order in orders.items()]
    head = (
        f"task graph: {len(graph['tasks']):,} tasks run {graph['runs']:,} times; "
        f"{seconds_text(graph['work'])} of work, {seconds_text(graph['played'])} in the "
        "compiler's order"
    )
    lines = [
        [
            seconds_text(row["critical"]),
            seconds_text(row["seconds"]),
            seconds_text(row["slack"]),
            row["source"],
            row["scope"],
            row["phase"],
        ]
        for row in graph["lines"]
    ]
    columns = ["lanes", "critical path", "busiest lane", "bound", "list schedule", "in loops"]
    path = _text(graph["as_compiled"]["critical_path"])
    return [
        *titled_table(head, columns, rows, 0, len(rows)),
        *titled_table(
            f"the critical path of {path} by line of the model",
            ["critical", "work", "slack", "line", "scope", "phase"],
            lines,
            3,
            most,
        ),
        *titled_table(
            "fusion",
            ["", "tasks", "runs", "edges", "moved", "step"],
            _fusion_rows(graph),
            0,
            3,
        ),
    ]


def _order_row(name: str, order: OrderRow) -> list[str]:
    lane, load = next(iter(order["loads"].items()), ("", 0.0))
    return [
        name,
        _text(order["critical_path"]),
        f"{seconds_text(load)} {lane}" if lane else _UNKNOWN,
        _text(order["bound"]),
        _text(order["list_schedule"]),
        _text(order["list_schedule_in_loops"]),
    ]


def _fusion_rows(graph: TaskGraph) -> list[list[str]]:
    """Make the rows on tasks and traffic with fusion and without."""
    rows = {"as compiled": graph["fused"], "each fusion opened": graph["opened"]}
    if "unfused" in graph:
        rows["compiled without fusion"] = graph["unfused"]
    return [_fusion_row(name, row, graph) for name, row in rows.items()]


def _fusion_row(name: str, row: Fused, graph: TaskGraph) -> list[str]:
    seconds = graph["played"] if row is graph["fused"] else row.get("seconds")
    edges = f"{row['edges']:,}" if "edges" in row else _UNKNOWN
    counts = [f"{row['tasks']:,}", f"{row['runs']:,}", edges]
    return [name, *counts, bytes_text(row["bytes"]), _text(seconds)]


def _text(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    return seconds_text(seconds)
