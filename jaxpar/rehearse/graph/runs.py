"""A program as a graph of runs: a node for each time that a task runs, with the nodes that must be
over before.

Loops are unrolled (`unrolled`): a trip needs of the trip before only what it is handed, so that the
graph has what the program says and no more. Or they are closed (`closed`): a loop is one node that
holds its lanes, since XLA runs its trips one after another and moves nothing across its edge.

An edge is a value that is handed on. Where memory is written again, and in what order, is the
compiler's matter: it is no edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxpar.hlo.program.tasks import Loop, Needs, Node, Path, Program, Task, Wait, walk
from jaxpar.rehearse.cost import COMPUTE, Cost, Costs, each_time
from jaxpar.rehearse.timeline import MOVING

MOST_RUNS = 400_000
"""The most runs of a program that is unrolled."""


@dataclass(slots=True)
class RunGraph:
    """The runs of a step. The lists have an entry for each run, in the order of the program."""

    paths: list[Path] = field(default_factory=list)
    """The task of the run, or the loop, where loops are closed."""
    seconds: list[float] = field(default_factory=list)
    lanes: list[tuple[str, ...]] = field(default_factory=list)
    """The lanes that the run holds."""
    needs: list[tuple[int, ...]] = field(default_factory=list)
    """The runs that must be over before the run begins, all of which come before it."""

    def add(
        self, path: Path, seconds: float, lanes: tuple[str, ...], needs: tuple[int, ...]
    ) -> int:
        """Append a run and return its position."""
        self.paths.append(path)
        self.seconds.append(seconds)
        self.lanes.append(lanes)
        self.needs.append(needs)
        return len(self.paths) - 1

    def __len__(self) -> int:
        return len(self.paths)


def beside_compute(program: Program, costs: Costs) -> Costs:
    """Return the costs of a program whose collectives and host copies hold no compute.

    Args:
      costs: the cost of each of its tasks.
    """

    def freed(path: Path) -> Cost:
        cost = costs[path]
        if _task_at(program.nodes, path).kind not in MOVING:
            return cost
        lanes = tuple(lane for lane in cost.lanes if lane != COMPUTE)
        return Cost(cost.seconds, lanes, cost.launch)

    return {path: freed(path) for path in costs}


def _task_at(nodes: Sequence[Node], path: Path) -> Task:
    """Return the task at a path."""
    node = nodes[path[0]]
    if isinstance(node, Loop):
        return _task_at(node.body, path[1:])
    assert isinstance(node, Task)
    return node


def unrolled(program: Program, costs: Costs, most: int = MOST_RUNS) -> RunGraph | None:
    """Lay a program out with every trip of its loops; None where it has more runs than `most`.

    Args:
      costs: the cost of each of its tasks.
    """
    if sum(count for _, count in walk(program.nodes)) > most:
        return None
    graph = RunGraph()
    _lay_out(graph, program.nodes, each_time(program.nodes, costs), (), ())
    return graph


Makers = tuple[int, ...]
"""The runs that make a value."""


def _lay_out(
    graph: RunGraph,
    nodes: Sequence[Node],
    costs: Costs,
    path: Path,
    state: Sequence[Makers],
) -> Callable[[Needs], Makers]:
    """Append the runs of a list of nodes.

    Args:
      nodes: the nodes of the program or of a loop's body.
      costs: the cost of each task.
      path: the path of the list.
      state: the makers of each part of the loop's state before this trip.

    Returns:
      A function that returns the runs that make a value of this list.
    """
    made: dict[int, Makers] = {}
    results: dict[int, Sequence[Makers]] = {}

    def makers(needs: Needs) -> Makers:
        found = set[int]()
        for position in needs.tasks:
            found.update(made[position])
        for position, part in needs.results:
            found.update(results[position][part])
        for part in needs.states:
            found.update(state[part])
        return tuple(sorted(found))

    for i, node in enumerate(nodes):
        here = (*path, i)
        if isinstance(node, Task):
            cost = costs[here]
            made[i] = (graph.add(here, cost.seconds, cost.lanes, makers(node.needs)),)
        elif isinstance(node, Loop):
            inside: Sequence[Makers] = [makers(needs) for needs in node.starts]
            for _ in range(node.trips):
                of_trip = _lay_out(graph, node.body, costs, here, inside)
                inside = [of_trip(needs) for needs in node.ends]
            results[i] = inside
    return makers


def closed(
    program: Program, costs: Costs, schedule: Callable[[RunGraph], float]
) -> tuple[RunGraph, float]:
    """Lay a program out with each loop as one run.

    Args:
      costs: the cost of each of its tasks.
      schedule: gives the seconds of a graph's runs in the best order that is known. A loop takes
        the seconds of its body as often as it has trips.

    Returns:
      The graph of the program's own list, and its seconds in that order.
    """
    graph = _closed_list(program.nodes, costs, (), schedule)
    return graph, schedule(graph)


def _closed_list(
    nodes: Sequence[Node], costs: Costs, path: Path, schedule: Callable[[RunGraph], float]
) -> RunGraph:
    """Lay out one list of nodes, with each loop in it as one run.

    What a trip needs of the trip before is over when the trip begins, and so it is no edge here.
    """
    graph = RunGraph()
    made: dict[int, int] = {}
    for i, node in enumerate(nodes):
        here = (*path, i)
        if isinstance(node, Wait):
            continue
        if isinstance(node, Task):
            needs = node.needs
            seconds = costs[here].seconds
            lanes = costs[here].lanes
        else:
            body = _closed_list(node.body, costs, here, schedule)
            seconds = node.trips * schedule(body)
            lanes = tuple(dict.fromkeys(lane for held in body.lanes for lane in held))
            needs = _merged(node.starts)
        positions = {*needs.tasks, *(position for position, _ in needs.results)}
        made[i] = graph.add(here, seconds, lanes, tuple(sorted(made[at] for at in positions)))
    return graph


def _merged(values: Sequence[Needs]) -> Needs:
    """Merge what makes several values, of tasks and loops."""
    return Needs(
        tuple({position for value in values for position in value.tasks}),
        tuple({result for value in values for result in value.results}),
    )
