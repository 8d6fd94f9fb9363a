"""What a compiled step does, as data: tasks in schedule order, loops with their trip counts, and waits.

A `Program` is read from scheduled HLO (`jaxpar.hlo.read`), priced (`jaxpar.rehearse.cost.cost`) and replayed
(`jaxpar.rehearse.timeline.timeline`). Nothing here knows a model or a mesh: a collective names its devices by their
position in the program's device assignment, which is the mesh's devices in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["matmul", "fusion", "kernel", "collective", "copy", "host_copy", "control"]
Phase = Literal["forward", "recomputed", "backward", "update", "other"]
CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ppermute"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the model a task comes from; empty strings where the compiler kept no trace."""

    scope: str = ""
    """Named scopes, jax's own wrappers taken out: `block/attention`."""
    source: str = ""
    """`models/transformer.py:72`: the innermost line of a model, else of the library."""
    phase: Phase = "other"


def sent_bytes(kind: CollectiveKind, size: int, devices: int) -> float:
    """Bytes one device of a group sends in a bandwidth-optimal algorithm (ring); `size` is as `Collective.bytes`."""
    if kind == "ppermute":
        return float(size)
    return size * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)


@dataclass(frozen=True, slots=True)
class Collective:
    """What moves between which devices, in one execution."""

    kind: CollectiveKind
    groups: tuple[tuple[int, ...], ...]
    """Positions of the devices that take part together; for a ppermute the (source, target) pairs."""
    bytes: int
    """Bytes of one group's whole array: the gathered output, the input to be scattered, the array summed; for an
    all-to-all one device's input, for a ppermute one message."""
    dtype: str

    @property
    def group_size(self) -> int:
        """Devices in a group; 2 for a ppermute."""
        return len(self.groups[0]) if self.groups else 1

    @property
    def sent_bytes(self) -> float:
        """Bytes one device sends in a bandwidth-optimal algorithm (ring): what a plan's closed form predicts."""
        return sent_bytes(self.kind, self.bytes, self.group_size)


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction that takes time; figures are for one execution on one device."""

    name: str
    """The HLO instruction's name, without %."""
    opcode: str
    kind: Kind
    place: Place = Place()
    depends: tuple[int, ...] = ()
    """Positions, in the same list of nodes, of those whose results it needs."""
    flops: float = 0.0
    """2 x multiply-adds of matmuls and convolutions, those inside a fusion counted; elementwise work is not."""
    bytes: int = 0
    """Read from and written to device memory (HBM); operands the compiler put on the chip (VMEM) do not count."""
    cycles: int | None = None
    """The compiler's own estimate."""
    dtype: str = ""
    """Of the matmul's operands, or of the result: which peak applies."""
    shape: str = ""
    """The result, for people: `bf16[1,8192,4096]`."""
    collective: Collective | None = None
    split_by: Literal["", "compiler", "author"] = ""
    """Who chose how its arrays lie on devices: the author of a `shard_map` around it; empty where nothing is known."""
    asynchronous: bool = False
    """Runs beside what follows, until its `Wait`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The `done` half of an asynchronous task: the schedule stops here until that has finished."""

    name: str
    task: int
    """Position of the task waited for, in the same list of nodes."""
    previous_trip: bool = False
    """The task was started in the previous trip of the loop this stands in."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A list of nodes run `trips` times, one trip after another."""

    name: str
    trips: int
    body: tuple[Node, ...]
    depends: tuple[int, ...] = ()
    place: Place = Place()


Node = Task | Wait | Loop


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled step."""

    name: str
    nodes: tuple[Node, ...]
    unknown: dict[str, int] = field(default_factory=dict)
    """Opcodes (or custom-call targets) that were not understood, and how often they stand in the text; each is kept
    as a task."""
    notes: tuple[str, ...] = ()
    """What was assumed while reading: `while.7: no trip count, taken as 1`."""


def walk(nodes: tuple[Node, ...], times: int = 1) -> Iterator[tuple[Task, int]]:
    """Every task of a program (or loop body) with how often it runs in one step: `(task, count)` pairs."""
    for node in nodes:
        if isinstance(node, Loop):
            yield from walk(node.body, times * node.trips)
        elif isinstance(node, Task):
            yield node, times
