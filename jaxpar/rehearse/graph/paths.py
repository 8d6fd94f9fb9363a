"""Work, critical path, slack and the bound of any schedule, of a graph of runs."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from jaxpar.rehearse.graph.runs import RunGraph

_ROUNDING = 1e-9
"""Seconds of slack that are rounding: less than any task takes."""


class Paths(NamedTuple):
    """When runs could begin if there were lanes enough. All times are in seconds."""

    length: float
    """The critical path: what the longest chain of runs takes, each of which needs the one
    before."""
    earliest: list[float]
    """When each run can begin at the earliest."""
    slack: list[float]
    """How much later each run could begin without making the critical path longer."""
    tail: list[float]
    """What the longest chain takes that begins with the run, itself included."""


def paths_of(graph: RunGraph) -> Paths:
    """Find the critical path of a graph.

    Args:
      graph: the graph; each run comes after those that it needs.

    Returns:
      The path's length, and each run's place beside it.
    """
    count = len(graph)
    earliest = [0.0] * count
    for run, needs in enumerate(graph.needs):
        for before in needs:
            over = earliest[before] + graph.seconds[before]
            if over > earliest[run]:
                earliest[run] = over
    tail = [0.0] * count
    for run in reversed(range(count)):
        tail[run] += graph.seconds[run]  # until now it had the longest tail of those that need it
        for before in graph.needs[run]:
            tail[before] = max(tail[before], tail[run])
    length = max(map(float.__add__, earliest, tail), default=0.0)
    slack = [length - begin - rest for begin, rest in zip(earliest, tail, strict=True)]
    slack = [0.0 if later < _ROUNDING else later for later in slack]
    return Paths(length, earliest, slack, tail)


def lane_loads(graph: RunGraph) -> dict[str, float]:
    """How long each lane is held by all runs together.

    Args:
      graph: the graph.

    Returns:
      The seconds by lane, the longest first.
    """
    loads = defaultdict[str, float](float)
    for seconds, lanes in zip(graph.seconds, graph.lanes, strict=True):
        for lane in lanes:
            loads[lane] += seconds
    return dict(sorted(loads.items(), key=lambda load: -load[1]))


def bound(graph: RunGraph, paths: Paths) -> float:
    """What no schedule can be shorter than: the critical path, or the lane that is held longest.

    Args:
      graph: the graph.
      paths: its paths.

    Returns:
      The seconds.
    """
    return max([paths.length, *lane_loads(graph).values()])
