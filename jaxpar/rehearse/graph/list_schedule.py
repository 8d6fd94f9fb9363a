"""A list schedule: whenever lanes are free, the most urgent run that can begin there begins.

This is Graham's list scheduling (SIAM J. Appl. Math. 17(2), 1969) with the length of the chain
that hangs on a run as its priority, as in HEFT (Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002).
`check_schedule` knows nothing of how an order was found: it plays the orders and refuses one that
breaks an edge or takes a lane twice.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from jaxpar.rehearse.graph.paths import paths_of
from jaxpar.rehearse.graph.runs import RunGraph

_TIE = 1e-12
"""The seconds that rounding may take from a difference of two times."""


class Schedule(NamedTuple):
    """The times at which runs begin, in seconds."""

    seconds: float
    """The time at which the last run is over."""
    begins: list[float]


def best_schedule(graph: RunGraph) -> Schedule:
    """Return the shorter of two list schedules, by the longest chain and by the order of the
    program; `check_schedule` has checked it.
    """
    urgent = list_schedule(graph, paths_of(graph).tail)
    in_order = list_schedule(graph, [-float(run) for run in range(len(graph))])
    best = min(urgent, in_order, key=lambda schedule: schedule.seconds)
    check_schedule(graph, best.begins)
    return best


def list_schedule(graph: RunGraph, priority: Sequence[float]) -> Schedule:
    """Begin each run as soon as what it needs is over and its lanes are free, the run of the
    highest priority first.

    Args:
      priority: the priority of each run.
    """
    users: list[list[int]] = [[] for _ in graph.needs]
    missing = [len(needs) for needs in graph.needs]
    for run, needs in enumerate(graph.needs):
        for before in needs:
            users[before].append(run)
    # Runs that wait for the same lanes wait in one queue: only its first is ever asked.
    ready = defaultdict[tuple[str, ...], list[tuple[float, int]]](list)
    for run, count in enumerate(missing):
        if not count:
            heapq.heappush(ready[graph.lanes[run]], (-priority[run], run))
    held = set[str]()
    running: list[tuple[float, int]] = []
    begins = [0.0] * len(graph)
    now = 0.0
    while True:
        while (run := _most_urgent(ready, held)) is not None:
            begins[run] = now
            held.update(graph.lanes[run])
            heapq.heappush(running, (now + graph.seconds[run], run))
        if not running:
            return Schedule(now, begins)
        now = running[0][0]
        while running and running[0][0] <= now + _TIE:
            over, run = heapq.heappop(running)
            now = max(now, over)
            held.difference_update(graph.lanes[run])
            for user in users[run]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready[graph.lanes[user]], (-priority[user], user))


def _most_urgent(
    ready: dict[tuple[str, ...], list[tuple[float, int]]], held: set[str]
) -> int | None:
    """Take the most urgent run whose lanes are free out of its queue; None where there is none."""
    found = [
        (queue[0], lanes) for lanes, queue in ready.items() if queue and held.isdisjoint(lanes)
    ]
    if not found:
        return None
    (_, run), lanes = min(found)
    heapq.heappop(ready[lanes])
    return run


def check_schedule(graph: RunGraph, begins: Sequence[float]) -> float:
    """Play a schedule, whoever made it, and return when the last run is over, in seconds.

    Args:
      begins: when each run begins, in seconds.

    Raises:
      ValueError: a run begins before one that it needs is over, two runs hold one lane at a time,
        or a run has no time.
    """
    if len(begins) != len(graph):
        raise ValueError(f"{len(graph)} runs, and {len(begins)} of them have a time")
    over = [begin + taken for begin, taken in zip(begins, graph.seconds, strict=True)]
    end = max(over, default=0.0)
    slack = _TIE * max(1, len(graph))
    for run, needs in enumerate(graph.needs):
        late = [before for before in needs if begins[run] < over[before] - slack]
        if late:
            raise ValueError(f"run {run} begins before run {late[0]}, which it needs, is over")
    holders = defaultdict[str, list[int]](list)
    for run, lanes in enumerate(graph.lanes):
        for lane in lanes:
            if graph.seconds[run]:
                holders[lane].append(run)
    for lane, runs in holders.items():
        runs.sort(key=lambda run: (begins[run], over[run]))
        for first, second in pairwise(runs):
            if begins[second] < over[first] - slack:
                raise ValueError(f"runs {first} and {second} hold {lane} at one time")
    return end
