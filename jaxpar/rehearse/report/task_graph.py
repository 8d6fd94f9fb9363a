"""The types of what `jaxpar rehearse --graph` writes. `docs/task_graph.md` explains each key."""

from typing import NotRequired, TypedDict

from jaxpar.hlo.program.tasks import Phase

GRAPH_SCHEMA = 1
"""The version of the schema, which goes up when a key is renamed, removed or changes its
meaning.
"""


class TaskRow(TypedDict):
    """A task; seconds, bytes and FLOPs count one run on one device."""

    id: int
    name: str
    """The HLO instruction's name."""
    op: str
    kind: str
    """The kind of task, `matmul`, `fusion`, `kernel`, `copy`, `host_copy` or `control`, or of
    collective.
    """
    lanes: list[str]
    """The lanes that the task holds while it runs."""
    seconds: float
    bytes: int
    """The bytes of device memory read and written; of a collective, what one device sends."""
    flops: float
    runs: int
    """The number of times that the task runs in a step."""
    loop: int | None
    """The id of the loop in whose body the task stands."""
    scope: str
    source: str
    phase: Phase
    slack: float | None
    """The least time, over all its runs, by which the task could be later without making the
    critical path longer; None where loops were too long to unroll."""


class LoopRow(TypedDict):
    """A loop, which is one node of the list that it stands in."""

    id: int
    name: str
    trips: int
    loop: int | None


class Edge(TypedDict):
    """Two tasks or loops of which one must be over before the other begins."""

    before: int
    after: int
    """The id of the task or loop that waits for `before`, in the same list."""
    trips: int
    """The number of trips by which `before` ran earlier: 0 = in the same trip."""


class OrderRow(TypedDict):
    """The times, in seconds, that an order of the tasks could reach on some lanes."""

    loads: dict[str, float]
    """The time for which each lane is held, the longest first."""
    critical_path: float | None
    bound: float | None
    """The least time of any schedule: the critical path, or the busiest lane."""
    list_schedule: float | None
    """The time of a list schedule in which trips of a loop may overlap; None where loops are too
    long.
    """
    list_schedule_in_loops: float
    """The time of list schedules of each loop's body by itself, its trips one after another."""
    events: list[list[float]]
    """The bars of `list_schedule`: lane (a position in `loads`), microseconds at which it begins,
    microseconds that it takes, and the task's id."""


class LineSlack(TypedDict):
    """A line of the model in a phase, with the tasks of all its runs."""

    scope: str
    source: str
    phase: Phase
    seconds: float
    """The seconds of all its runs."""
    critical: float
    """The seconds of its runs without slack: the line's part of the critical path."""
    slack: float
    """The least slack of its runs."""


class Fused(TypedDict):
    """The number of tasks, and what they move."""

    tasks: int
    runs: int
    bytes: int
    edges: NotRequired[int]
    """The edges between the runs, where the program was compiled so."""
    seconds: NotRequired[float]
    """The seconds of a step, where the program was compiled so."""


class TaskGraph(TypedDict):
    """A step as a graph of tasks."""

    schema: int
    tasks: list[TaskRow]
    loops: list[LoopRow]
    edges: list[Edge]
    runs: int
    """The runs of all tasks in a step."""
    run_edges: int | None
    """The edges between the runs."""
    work: float
    """The seconds of all runs, one after another."""
    played: float
    """The seconds of the step in the compiler's order."""
    as_compiled: OrderRow
    """The orders on the lanes that the compiler gave to each task."""
    beside_compute: OrderRow
    """The orders if no collective and no host copy held compute, also where the compiler made them
    so.
    """
    lines: list[LineSlack]
    """The time by line of the model, the largest part of the critical path first."""
    fused: Fused
    """The program as it is."""
    opened: Fused
    """The program if each operation in a fusion were a task of its own."""
    unfused: NotRequired[Fused]
    """The step compiled without XLA's fusion passes."""
