"""A lower bound says how short another schedule of the same graph could be.

The bound keeps loops as loops: each trip is over before the next begins, except for what the program lets cross.
Every collective and host copy may run beside compute, even one that the compiler made synchronous. The bound ignores
memory: a schedule that starts everything early may not fit.
"""

from __future__ import annotations

from collections import defaultdict

from jaxpar.hlo.tasks import Loop, Node, Program, Task, Wait
from jaxpar.rehearse.cost.cost import COMPUTE, Costs, Path


def crossing(body: tuple[Node, ...]) -> set[int]:
    """Return the positions of a loop body's asynchronous tasks that may still run when the next trip begins."""
    waited = {node.task for node in body if isinstance(node, Wait) and not node.previous_trip}
    return {i for i, node in enumerate(body) if isinstance(node, Task) and node.asynchronous} - waited


def lower_bound(program: Program, costs: Costs) -> float:
    """Return the seconds that every schedule of this graph takes at least, with links and compute as fast as priced.

    This is the larger of the longest chain of dependencies and the most work of any one lane. A loop counts as its
    trips times the bound of its body.
    """
    return _bound(program.nodes, costs, ())[0]


def _bound(nodes: tuple[Node, ...], costs: Costs, path: Path) -> tuple[float, dict[str, float]]:
    """Return the bound of a list of nodes, and the seconds of work on each lane."""
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
    # A task that crosses into the next trip does not hold up the end of this one.
    chain = max((end for i, end in enumerate(ends) if i not in across), default=0.0)
    return max(chain, *load.values(), 0.0), load


def _needs(node: Node) -> tuple[int, ...]:
    """Return the positions of the nodes that must be over before a node begins."""
    if isinstance(node, Wait):
        return () if node.previous_trip else (node.task,)
    return tuple(set(node.depends))


def _own_lanes(task: Task, lanes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lanes that a task would hold if it ran asynchronously wherever it can."""
    if task.kind in ("collective", "host_copy") and len(lanes) > 1:
        return tuple(lane for lane in lanes if lane != COMPUTE)
    return lanes
