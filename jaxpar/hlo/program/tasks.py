"""The description of what a compiled step does: tasks in schedule order, loops with their trip
counts, and waits.

A `Program` is read from scheduled HLO (`jaxpar.hlo.read`), priced (`jaxpar.rehearse.cost`) and
replayed (`jaxpar.rehearse.timeline`). Nothing here knows a model or a mesh: a collective names its
devices by their position in the program's device assignment, which is the mesh's devices in
row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.base.kernel_work import AttentionWork

TaskKind = Literal[
    "matmul", "fusion", "kernel", "collective", "copy", "host_copy", "host_compute", "control"
]
Phase = Literal["forward", "recomputed", "backward", "update", "other"]
CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ppermute"]
Groups = tuple[tuple[int, ...], ...]
Path = tuple[int, ...]
"""The place of a node: its position in the program, then in the loop's body, and so on."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place in the model that a task comes from; strings are empty where the compiler kept no
    trace.
    """

    scope: str = ""
    """The named scopes without jax's own wrappers: `block/attention`."""
    source: str = ""
    """The innermost line of a model, else of the library: `models/transformer.py:72`."""
    phase: Phase = "other"
    told: bool = field(default=False, compare=False)
    """Whether the program states this origin. Then an empty scope means that the task is in no
    scope; otherwise the compiler made the task, and this origin is a neighbour's.
    """


def sent_bytes(kind: CollectiveKind, size: int, devices: int) -> float:
    """Count the bytes that one device of a group sends in one execution of a bandwidth-optimal
    ring.

    Args:
      size: the bytes of the array, as in `Collective.bytes`.
      devices: the number of devices of a group, which does not matter for a ppermute.
    """
    if kind == "ppermute":
        return float(size)
    return size * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)


@dataclass(frozen=True, slots=True)
class Collective:
    """The data that one execution of a collective moves, and the devices that it moves between."""

    kind: CollectiveKind
    groups: Groups
    """The positions of the devices that take part together; for a ppermute, the (source, target)
    pairs.
    """
    bytes: int
    """The bytes of one group's whole array: the gathered output, the input to be scattered, or the
    array summed; for an all-to-all, of one device's input; for a ppermute, of one message."""
    dtype: str

    @property
    def sent_bytes(self) -> float:
        """The bytes that one device sends in a bandwidth-optimal ring, as a plan's closed form
        predicts.
        """
        return sent_bytes(
            self.kind,
            self.bytes,
            len(self.groups[0]) if self.groups else 1,
        )


@dataclass(frozen=True, slots=True)
class Needs:
    """The nodes, loops' results and loop state, within one list of nodes, that a value is made
    from.
    """

    tasks: tuple[int, ...] = ()
    """The positions of tasks."""
    results: tuple[tuple[int, int], ...] = ()
    """The positions of loops, each with the part of its result that is needed."""
    states: tuple[int, ...] = ()
    """In a loop's body, the parts of the loop's state that are needed, as they were before this
    trip.
    """


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction that takes time; its figures are for one execution on one device."""

    name: str
    """The HLO instruction's name, without %."""
    opcode: str
    kind: TaskKind
    origin: Origin = Origin()
    depends: tuple[int, ...] = ()
    """The positions, in the same list of nodes, of the nodes whose results it needs."""
    flops: float = 0.0
    """2 x the multiply-adds of matmuls and convolutions, also inside a fusion; elementwise work
    does not count.
    """
    bytes: int = 0
    """The bytes moved to and from device memory (HBM); operands the compiler put on the chip (VMEM)
    do not count. For a computation of the host, the bytes of the host's own memory.
    """
    link_bytes: int = 0
    """The bytes that cross the host link for a computation of the host; a copy has them in `bytes`.
    """
    cycles: int | None = None
    """The compiler's own estimate, in clock cycles; None where it made none."""
    dtype: str = ""
    """The dtype of the matmul's operands, or else of the result; it decides which peak applies."""
    shape: str = ""
    """The shape of the result, for people: `bf16[1,8192,4096]`."""
    collective: Collective | None = None
    attention: AttentionWork | None = None
    """What it computes where it is a kernel of attention that is known."""
    asynchronous: bool = False
    """Whether it runs beside what follows, until its `Wait`."""
    needs: Needs = Needs()
    """The makers of its operands. `depends` has the same nodes, without the parts of loops and
    without what comes from the trip before."""
    share: float = 1.0
    """The share of the times that its list of nodes runs in which it runs too: less than 1 in a
    branch that is known to be taken more rarely (`base.taken_share`)."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The `done` half of an asynchronous task: the schedule stops here until that task is over."""

    name: str
    task: int
    """The position, in the same list of nodes, of the task that is waited for, or of the loop whose
    last trip has started it."""
    previous_trip: bool = False
    """Whether the task was started in the previous trip of the loop around this wait."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A list of nodes that runs `trips` times, one trip after another."""

    name: str
    trips: int
    body: tuple[Node, ...]
    depends: tuple[int, ...] = ()
    origin: Origin = Origin()
    starts: tuple[Needs, ...] = ()
    """The makers of each part of the loop's state before the first trip, in the list around the
    loop."""
    ends: tuple[Needs, ...] = ()
    """The makers of each part of the loop's state in a trip, in the loop's body."""


Node = Task | Wait | Loop


@dataclass(frozen=True, slots=True)
class Program:
    """The tasks of a compiled step."""

    name: str
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    """The assumptions made while reading: `while.7: no trip count, taken as 1`."""


def walk(nodes: tuple[Node, ...]) -> Iterator[tuple[Task, int]]:
    """Yield every task of a program, or of a loop's body, with how often it runs each time that
    `nodes` run.

    Args:
      nodes: the nodes of a program or of a loop's body.

    Yields:
      `(task, count)` pairs in the order of the program.
    """
    return ((task, count) for _, task, count in walk_paths(nodes))


def executions(task: Task, times: int) -> int:
    """Count how often a task runs where its list of nodes runs some times: a whole number, and not
    0 where it runs at all.
    """
    return max(round(times * task.share), 1) if task.share else 0


def walk_paths(
    nodes: tuple[Node, ...], times: int = 1, path: Path = ()
) -> Iterator[tuple[Path, Task, int]]:
    """Yield every task with its path and how often it runs in one step.

    Args:
      nodes: the nodes of a program or of a loop's body.
      times: how often these nodes run in one step.
      path: where these nodes stand in the program.

    Yields:
      `(path, task, count)` triples in the order of the program.
    """
    for i, node in enumerate(nodes):
        if isinstance(node, Loop):
            yield from walk_paths(node.body, times * node.trips, (*path, i))
        elif isinstance(node, Task):
            yield (*path, i), node, executions(node, times)
