"""A program's schedule is played out on one device, which shows when each task runs and what compute waits for.

The device follows the order of the schedule. A synchronous task runs when the one before is over. An asynchronous task
starts when its turn has come, its inputs are there and its lanes are free; it runs beside what follows until a `Wait`.
Two tasks on one lane run one after the other, in schedule order. `jaxpar.rehearse.timeline.player` does the playing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from jaxpar.hlo.tasks import Program, Task
from jaxpar.rehearse.cost.cost import COMPUTE, Cost, Costs, tasks
from jaxpar.rehearse.timeline.player import Event, Player


@dataclass(frozen=True, slots=True)
class TaskTime:
    """The time that one task takes over the whole step."""

    task: Task
    cost: Cost
    """The cost of one execution."""
    count: int
    """How often it runs."""
    exposed: float
    """The seconds compute stood still for it: all of them for a synchronous collective or host copy, none for other
    synchronous tasks (they are compute)."""

    @property
    def seconds(self) -> float:
        """The seconds of all its executions together."""
        return self.count * self.cost.seconds


@dataclass(frozen=True)
class Timeline:
    """How a step plays out. All times are in seconds, and `seconds = sum(busy) + sum(stalls) + idle`."""

    seconds: float
    busy: dict[str, float]
    """How long compute is at work, by kind of task; synchronous collectives and host copies are among them."""
    stalls: dict[str, float]
    """How long compute stands still for an asynchronous task or a busy link, by the kind of task it waited for."""
    idle: float
    """How long compute is between tasks, while they are launched."""
    tasks: list[TaskTime]
    """Every task, in program order."""
    events: list[Event]

    @property
    def exposed_communication(self) -> float:
        """The seconds in which compute stood still for collectives."""
        return sum(row.exposed for row in self.tasks if row.task.kind == "collective")

    @property
    def host_stall(self) -> float:
        """The seconds in which compute stood still for copies from and to the host."""
        return sum(row.exposed for row in self.tasks if row.task.kind == "host_copy")


def replay(program: Program, costs: Costs, drawn_trips: int = 2, most_events: int = 20_000) -> Timeline:
    """Play a program's schedule out.

    Args:
      program: the program, with its tasks in schedule order.
      costs: the cost of each of its tasks.
      drawn_trips: how many trips of every loop become events; one bar stands for the others.
      most_events: how many events are kept; later ones are left out.

    Raises:
      ValueError: a node depends on a later one, so this is not a schedule.
    """
    player = Player(drawn_trips, most_events)
    seconds = player.play(program, costs)
    waited = player.stalls()
    busy, stalls = defaultdict[str, float](float), defaultdict[str, float](float)
    rows, idle = [], 0.0
    for path, task, count in tasks(program.nodes):
        cost, stalled = costs.of[path], waited.get(path, 0.0)
        if COMPUTE in cost.lanes:
            busy[task.kind] += count * (cost.seconds - cost.launch)
            idle += count * cost.launch
        if stalled:
            stalls[task.kind] += stalled
        blocking = task.kind in ("collective", "host_copy") and not task.asynchronous
        rows.append(TaskTime(task, cost, count, stalled + (count * cost.seconds if blocking else 0.0)))
    return Timeline(seconds, dict(busy), dict(stalls), idle, rows, player.events)
