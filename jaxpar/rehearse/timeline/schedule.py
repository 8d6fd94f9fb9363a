"""What another schedule of the same graph could reach: a bound from below, and a schedule that exists.

Both keep loops as loops, each trip over before the next begins (but for what the program itself lets cross), and let
every collective and host copy run beside compute, also those that the compiler made synchronous. Neither looks at
memory: a schedule that starts everything early may not fit.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from jaxpar.hlo.tasks import Loop, Node, Program, Task, Wait
from jaxpar.rehearse.cost.cost import COMPUTE, Costs, Path


def crossing(body: tuple[Node, ...]) -> set[int]:
    """Positions of the asynchronous tasks in a loop's body that may still run when the next trip begins."""
    waited = {node.task for node in body if isinstance(node, Wait) and not node.previous_trip}
    return {i for i, node in enumerate(body) if isinstance(node, Task) and node.asynchronous} - waited


def lower_bound(program: Program, costs: Costs) -> float:
    """Seconds below which no schedule of this graph can be, links and compute as fast as priced.

    The longest of: the longest chain of dependencies, and the total work of any one lane; a loop counts as its trips
    times the bound of its body.
    """
    return _bound(program.nodes, costs, ())[0]


def _bound(nodes: tuple[Node, ...], costs: Costs, path: Path) -> tuple[float, dict[str, float]]:
    """The bound of a list of nodes, and seconds of work by lane."""
    load: defaultdict[str, float] = defaultdict(float)
    ends: list[float] = []
    across = crossing(nodes)
    for i, node in enumerate(nodes):
        begin = max((ends[j] for j in _needs(node)), default=0.0)
        if isinstance(node, Task):
            seconds = costs.of[(*path, i)].seconds
            for lane in _own_lanes(node, costs.of[(*path, i)].lanes):
                load[lane] += seconds
        elif isinstance(node, Loop):
            once, inner = _bound(node.body, costs, (*path, i))
            seconds = node.trips * once
            for lane, work in inner.items():
                load[lane] += node.trips * work
        else:
            seconds = 0.0
        ends.append(begin + seconds)
    # What crosses into the next trip does not hold up the end of this one.
    chain = max((end for i, end in enumerate(ends) if i not in across), default=0.0)
    return max(chain, *load.values(), 0.0), load


def list_schedule(program: Program, costs: Costs) -> float:
    """Seconds of a greedy schedule: whatever is ready and has its lanes free starts, the longest chain first."""
    return _greedy(program.nodes, costs, ())[0]


def _greedy(nodes: tuple[Node, ...], costs: Costs, path: Path) -> tuple[float, tuple[str, ...]]:
    """Seconds of the greedy schedule of a list of nodes, and the lanes it uses."""
    seconds, lanes = [], []
    for i, node in enumerate(nodes):
        here = (*path, i)
        if isinstance(node, Task):
            seconds.append(costs.of[here].seconds)
            lanes.append(_own_lanes(node, costs.of[here].lanes))
        elif isinstance(node, Loop):
            once, inner = _greedy(node.body, costs, here)
            seconds.append(node.trips * once)
            lanes.append(tuple({COMPUTE, *inner}))
        else:
            seconds.append(0.0)
            lanes.append(())
    return _run_greedy(nodes, seconds, lanes), tuple({lane for held in lanes for lane in held})


def _run_greedy(nodes: tuple[Node, ...], seconds: list[float], lanes: list[tuple[str, ...]]) -> float:
    """The end of a greedy list schedule of nodes with these durations on these lanes."""
    needs = [_needs(node) for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    for i, row in enumerate(needs):
        for j in row:
            users[j].append(i)
    remaining = list(seconds)
    for i in reversed(range(len(nodes))):
        remaining[i] += max((remaining[j] for j in users[i]), default=0.0)
    missing = [len(row) for row in needs]
    ready = {i for i, count in enumerate(missing) if not count}
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    now = 0.0
    while ready or running:
        for i in sorted(ready, key=lambda i: (-remaining[i], i)):
            if busy.isdisjoint(lanes[i]):
                ready.remove(i)
                busy.update(lanes[i])
                heapq.heappush(running, (now + seconds[i], i))
        now, i = heapq.heappop(running)
        busy.difference_update(lanes[i])
        for user in users[i]:
            missing[user] -= 1
            if not missing[user]:
                ready.add(user)
    return now


def _needs(node: Node) -> tuple[int, ...]:
    """Positions that must be over before a node begins."""
    if isinstance(node, Wait):
        return () if node.previous_trip else (node.task,)
    return tuple(set(node.depends))


def _own_lanes(task: Task, lanes: tuple[str, ...]) -> tuple[str, ...]:
    """What a task would hold if it ran asynchronously, where it could."""
    if task.kind in ("collective", "host_copy") and len(lanes) > 1:
        return tuple(lane for lane in lanes if lane != COMPUTE)
    return lanes
