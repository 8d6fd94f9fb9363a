"""Tables of what the time of a run went on, and of the goodput to expect where machines fail."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Column, Table

from jaxpar.base.console import duration_text
from jaxpar.train.goodput import CAUSES, Costs, Totals, best_interval, expected_goodput

DAY = 86_400.0
INTERVALS = {
    "1 min": 60.0,
    "5 min": 300.0,
    "15 min": 900.0,
    "30 min": 1_800.0,
    "1 h": 3_600.0,
    "4 h": 14_400.0,
}
"""The intervals between checkpoints that a table has, in seconds."""


def causes_table(totals: Totals) -> Table:
    """Make the table of what the time of a run went on, by its account."""
    table = Table(
        "",
        Column("time", justify="right"),
        Column("share", justify="right"),
        "what it is",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    wall = max(totals.wall, 1e-9)
    for cause, meaning in CAUSES.items():
        seconds = totals.seconds[cause]
        share = f"{100 * seconds / wall:.1f} %"
        table.add_row(meaning.name, duration_text(seconds), share, meaning.text)
    table.add_row("all", duration_text(wall), "100.0 %", "since the first process began")
    return table


def interval_table(
    costs: Costs,
    nodes: Sequence[int],
    node_mtbf: float,
    step_seconds: float | None = None,
) -> Table:
    """Make the table of the goodput to expect, by nodes and interval between checkpoints.

    Args:
      costs: what checkpoints and faults cost.
      nodes: numbers of machines, any of which ends the run where it fails.
      node_mtbf: the mean seconds between two faults of one machine.
      step_seconds: the time of a step, in which the best interval is told too.

    Raises:
      UserError: a cost is negative, or the time between faults is 0.
    """
    names = ["nodes", "MTBF", *INTERVALS, "best interval"]
    if step_seconds:
        names.append("checkpoint.every")
    columns = [Column(name, justify="right") for name in names]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for count in nodes:
        mtbf = node_mtbf / count
        shares = [expected_goodput(seconds, mtbf, costs) for seconds in INTERVALS.values()]
        best = best_interval(mtbf, costs)
        cells = [f"{count:,}", _long(mtbf), *map(_share, shares)]
        cells.append(f"{_long(best)}: {_share(expected_goodput(best, mtbf, costs))}")
        if step_seconds:
            cells.append(str(max(round(best / step_seconds), 1)))
        table.add_row(*cells)
    return table


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _long(seconds: float) -> str:
    """Write a duration in its largest unit: `2.7 h`."""
    for unit, size in {"days": DAY, "h": 3_600.0, "min": 60.0}.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"
