"""Work, critical path, slack and the bound of any schedule, of a graph of runs."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from jaxpar.rehearse.graph.runs import RunGraph

_ROUNDING = 1e-9
"""The seconds of slack that are rounding: less than any task takes."""


class Paths(NamedTuple):
    """The times, in seconds, at which runs could begin if there were lanes enough."""

    length: float
    """The length of the critical path, the longest chain of runs of which each needs the one
    before."""
    earliest: list[float]
    """The earliest time at which each run can begin."""
    slack: list[float]
    """The time by which each run could begin later without making the critical path longer."""
    tail: list[float]
    """The length of the longest chain that begins with the run, itself included."""


def paths_of(graph: RunGraph) -> Paths:
    """Find the critical path of a graph, and each run's place beside it.

    Args:
      graph: the graph; each run comes after those that it needs.
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
    """Add up the seconds for which each lane is held by all runs, the longest first."""
    loads = defaultdict[str, float](float)
    for seconds, lanes in zip(graph.seconds, graph.lanes, strict=True):
        for lane in lanes:
            loads[lane] += seconds
    return dict(sorted(loads.items(), key=lambda load: -load[1]))


def bound(graph: RunGraph, paths: Paths) -> float:
    """Return the seconds that every schedule takes at least: the critical path, or the lane that is
    held longest.
    """
    return max([paths.length, *lane_loads(graph).values()])
