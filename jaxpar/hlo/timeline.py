"""The schedule of a program played out on one device: when each task runs, and what compute waits for."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.hlo.cost import Costs, Path
from jaxpar.hlo.tasks import Program, Task


@dataclass(frozen=True, slots=True)
class TaskTime:
    """One task over the whole step."""

    task: Task
    path: Path
    count: int
    """How often it runs."""
    seconds: float
    """Of all its executions."""
    exposed: float
    """How long compute stood still for it; the whole of a synchronous collective or host copy, 0 for other
    synchronous tasks (they are compute)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of a drawing."""

    lane: str
    start: float
    duration: float
    name: str
    """Of the instruction; of the loop where `repeats` is not 0."""
    path: Path
    trip: int = 0
    """Of the innermost loop."""
    repeats: int = 0
    """The bar stands for this many further trips of a loop, which are not drawn one by one."""


@dataclass(frozen=True)
class Timeline:
    """A step as it plays out. Seconds; `seconds = sum(busy) + sum(stalls) + idle`."""

    seconds: float
    busy: dict[str, float]
    """Compute lane at work, by kind of task; synchronous collectives and host copies among them."""
    stalls: dict[str, float]
    """Compute lane standing still for an asynchronous task or a link in use, by kind of what it waited for."""
    idle: float
    """Compute lane with nothing to do and nothing it waits for."""
    lanes: dict[str, float]
    """Seconds each lane was held."""
    tasks: list[TaskTime]
    """Every task, in program order."""
    critical_path: list[tuple[Task, int, float]]
    """The chain of tasks that ends last, each starting when the one before finished: (task, count, seconds), longest
    first. The seconds add up to those of the step."""
    lower_bound: float
    """No schedule of this graph can be shorter (loops kept as loops): `jaxpar.hlo.schedule.lower_bound`."""
    list_schedule: float
    """What a simple scheduler reaches with this graph, memory not considered: `jaxpar.hlo.schedule.list_schedule`."""
    events: list[Event]

    @property
    def exposed(self) -> list[TaskTime]:
        """Collectives, host copies and asynchronous tasks, those that compute waited for longest first."""
        kinds = ("collective", "host_copy")
        found = [row for row in self.tasks if row.task.asynchronous or row.task.kind in kinds]
        return sorted(found, key=lambda row: -row.exposed)

    @property
    def exposed_communication(self) -> float:
        """Seconds in which compute stood still for collectives."""
        return sum(row.exposed for row in self.tasks if row.task.kind == "collective")

    @property
    def host_stall(self) -> float:
        """Seconds in which compute stood still for copies from and to the host."""
        return sum(row.exposed for row in self.tasks if row.task.kind == "host_copy")


def replay(program: Program, costs: Costs) -> Timeline:
    """Play the schedule out; signature first, body follows."""
    raise NotImplementedError
