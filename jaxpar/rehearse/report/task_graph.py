"""The types of what `jaxpar rehearse --graph` writes. `docs/task_graph.md` explains each key."""

from typing import NotRequired, TypedDict

from jaxpar.hlo.program.tasks import Phase

GRAPH_SCHEMA = 1
"""The version goes up when a key is renamed, removed or changes its meaning."""


class TaskRow(TypedDict):
    """A task; seconds, bytes and FLOPs are those of one run on one device."""

    id: int
    name: str
    """The HLO instruction's name."""
    op: str
    kind: str
    """`matmul`, `fusion`, `kernel`, `copy`, `host_copy`, `control`, or that of the collective."""
    lanes: list[str]
    """The lanes that it holds while it runs."""
    seconds: float
    bytes: int
    """Bytes of device memory read and written; of a collective, what one device sends."""
    flops: float
    runs: int
    """How often it runs in a step."""
    loop: int | None
    """The id of the loop in whose body it stands."""
    scope: str
    source: str
    phase: Phase
    slack: float | None
    """The least, of all its runs, by which it could be later without making the critical path
    longer; None where loops were too long to unroll."""


class LoopRow(TypedDict):
    """A loop, which is one node among those of the list that it stands in."""

    id: int
    name: str
    trips: int
    loop: int | None


class Edge(TypedDict):
    """Something that must be over before something else begins."""

    before: int
    after: int
    """The ids of tasks or loops of one list."""
    trips: int
    """How many trips earlier the first one ran: 0 = in the same trip."""


class OrderRow(TypedDict):
    """What an order of the tasks could reach on some lanes, in seconds."""

    loads: dict[str, float]
    """How long each lane is held, the longest first."""
    critical_path: float | None
    bound: float | None
    """What no schedule can be shorter than: the critical path, or the busiest lane."""
    list_schedule: float | None
    """A list schedule in which trips of a loop may overlap; None where loops are too long."""
    list_schedule_in_loops: float
    """A list schedule of each loop's body by itself, its trips one after another."""
    events: list[list[float]]
    """The bars of `list_schedule`: lane (a position in `loads`), microseconds at which it begins,
    microseconds that it takes, and the task's id."""


class LineSlack(TypedDict):
    """A line of the model in a phase, with the tasks of all its runs."""

    scope: str
    source: str
    phase: Phase
    seconds: float
    """What its runs take together."""
    critical: float
    """Of them, those without slack: the line's part of the critical path."""
    slack: float
    """The least slack of its runs."""


class Fused(TypedDict):
    """How many tasks there are, and what they move."""

    tasks: int
    runs: int
    bytes: int
    edges: NotRequired[int]
    """Between the runs, where it was compiled so."""
    seconds: NotRequired[float]
    """What a step takes, where it was compiled so."""


class TaskGraph(TypedDict):
    """A step as a graph of tasks."""

    schema: int
    tasks: list[TaskRow]
    loops: list[LoopRow]
    edges: list[Edge]
    runs: int
    """The runs of all tasks in a step."""
    run_edges: int | None
    """The edges between them."""
    work: float
    """The seconds of all runs, one after another."""
    played: float
    """The step in the compiler's order."""
    as_compiled: OrderRow
    """On the lanes that the compiler gave to each task."""
    beside_compute: OrderRow
    """If no collective and no host copy held compute, also where the compiler made them so."""
    lines: list[LineSlack]
    """By line of the model, the largest part of the critical path first."""
    fused: Fused
    """The program as it is."""
    opened: Fused
    """The same program if each operation in a fusion were a task of its own."""
    unfused: NotRequired[Fused]
    """The step compiled without XLA's fusion passes."""
