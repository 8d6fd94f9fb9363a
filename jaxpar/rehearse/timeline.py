"""The replay of a program's schedule on one device, which shows when each task runs and what
compute waits for.

The device follows the order of the schedule. A synchronous task runs when the task before is over.
An asynchronous task starts when its turn has come, its inputs are there and its lanes are free; it
runs beside what follows until a `Wait`. Two tasks on one lane run one after the other, in schedule
order.

A loop is played trip by trip until a trip begins just as the trip before did (the same work in
flight, equally late). From there on all trips are alike, so that trip stands for those that are
left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from jax.sharding import Mesh

from jaxpar.hlo.origin import PackageDirs
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Loop, Node, Path, Program, Task, Wait, walk_paths
from jaxpar.hlo.read import read_program
from jaxpar.kernels.attention.libraries import kernel_cost
from jaxpar.rehearse.cost import COMPUTE, Cost, Costs, each_time, price
from jaxpar.rehearse.cpu_cost import price_on_cpu
from jaxpar.rehearse.link_costs import collective_time
from jaxpar.rehearse.targets import Position, Target, places

WAITS_FOR_HOST = ("host_copy", "host_compute")
"""The kinds of task for which compute waits for the host."""
MOVING = ("collective", *WAITS_FOR_HOST)
"""The kinds of task that are no work of compute."""
_TIE = 1e-12
"""The seconds within which ends count as one, and compute comes first: rounding must not pick a
cause.
"""


@dataclass(frozen=True, slots=True)
class Event:
    """A bar of a drawing."""

    lane: str
    start: float
    duration: float
    node: Task | Loop
    """The task, or the loop where `repeats` is not 0."""
    repeats: int = 0
    """The number of further trips of a loop that the bar stands for, which are not drawn one by
    one.
    """


@dataclass(frozen=True, slots=True)
class TaskTime:
    """The time that one task takes over the whole step."""

    task: Task
    cost: Cost
    """The cost of one execution."""
    count: int
    """The number of times that the task runs."""
    exposed: float
    """The seconds for which compute stood still for the task: all of them for a synchronous
    collective or host copy, none for other synchronous tasks (they are compute)."""

    @property
    def seconds(self) -> float:
        """The seconds of all its executions together."""
        return self.count * self.cost.seconds


@dataclass(frozen=True)
class Timeline:
    """The replay of a step. All times are in seconds, and `seconds = sum(busy) + sum(stalls) +
    idle`.
    """

    seconds: float
    busy: dict[str, float]
    """The seconds for which compute is at work, by kind of task; synchronous collectives and host
    copies are among them.
    """
    stalls: dict[str, float]
    """The seconds for which compute stands still for an asynchronous task or a busy link, by the
    kind of task it waited for.
    """
    idle: float
    """The seconds for which compute is between tasks, while they are launched."""
    tasks: list[TaskTime]
    """Every task, in program order."""
    events: list[Event]
    notes: tuple[str, ...] = ()
    """The assumptions that were made."""

    @property
    def exposed_communication(self) -> float:
        """The seconds in which compute stood still for collectives."""
        return sum(row.exposed for row in self.tasks if row.task.kind == "collective")

    @property
    def host_stall(self) -> float:
        """The seconds in which compute stood still for copies from and to the host, and for what it
        computed.
        """
        return sum(row.exposed for row in self.tasks if row.task.kind in WAITS_FOR_HOST)


def simulate(
    text: str,
    mesh: Mesh,
    target: Target,
    drawn_trips: int = 2,
    most_events: int = 20_000,
    package_dirs: PackageDirs | None = None,
) -> Timeline:
    """Read the text of a compiled program, price its tasks by a target's figures, and play it out
    on one device.

    Args:
      text: the text of a scheduled module, `compiled.as_text()`.
      mesh: the mesh of the program, made of the target's devices.
      target: the system whose figures price the tasks.
      drawn_trips: the number of trips of a loop that become events.
      most_events: the number of events that are kept.
      package_dirs: where source lines are looked for, as in `read_program`.

    Returns:
      The timeline of one device, with what was assumed in its notes.

    Raises:
      UserError: the text is damaged or no compiled module's, or the target has no figure for a link
        that a collective uses.
    """
    priced = read_and_price(text, mesh, target, package_dirs)
    played = replay(priced.program, priced.costs, drawn_trips, most_events)
    return replace(played, notes=priced.program.notes + priced.notes)


class Priced(NamedTuple):
    """A program with the cost of each of its tasks."""

    program: Program
    costs: Costs
    notes: tuple[str, ...]
    """The assumptions made in pricing; the program has its own."""


def read_and_price(
    text: str,
    mesh: Mesh,
    target: Target,
    package_dirs: PackageDirs | None = None,
) -> Priced:
    """Read the text of a compiled program, and price its tasks by a target's figures.

    Args:
      text: the text of a scheduled module, `compiled.as_text()`.
      mesh: the mesh of the program, made of the target's devices.
      target: the system whose figures price the tasks.
      package_dirs: where source lines are looked for, as in `read_program`.

    Raises:
      UserError: the text is damaged or no compiled module's, or the target has no figure for a link
        that a collective uses.
    """
    where = places(list(mesh.devices.flat), target)
    return price_at_places(text, where, target, package_dirs)


def price_at_places(
    text: str,
    where: tuple[Position, ...],
    target: Target,
    package_dirs: PackageDirs | None = None,
) -> Priced:
    """Read the text of a compiled program, and price its tasks, where the places of its devices are
    known; no compiler is asked.

    Args:
      text: the text of a scheduled module, `compiled.as_text()`.
      where: the places of the program's devices, in its order, as `targets.places` finds them.
      target: the system whose figures price the tasks.
      package_dirs: where source lines are looked for, as in `read_program`.

    Raises:
      UserError: the text is damaged or no compiled module's, or the target has no figure for a link
        that a collective uses.
    """
    if target.platform == "tpu" and target.slices > 1:
        slice_of = [place.slice for place in where]
    else:
        slice_of = None
    program = read_program(
        text, slice_of=slice_of, kernel_cost=kernel_cost, package_dirs=package_dirs
    )
    on_links = partial(collective_time, places=where, target=target)
    if target.cpu is None:
        costs, assumed = price(program, target.hardware, on_links)
    else:
        module = parse_module(text)
        costs, assumed = price_on_cpu(program, module, target.cpu, len(where), on_links)
    return Priced(program, costs, assumed)


def replay(
    program: Program, costs: Costs, drawn_trips: int = 2, most_events: int = 20_000
) -> Timeline:
    """Play a program's schedule out on one device; the timeline has no notes.

    Args:
      costs: the cost of one execution of every task, as `price` returns them.
      drawn_trips: the number of trips of every loop that become events; one bar stands for the
        others.
      most_events: the number of events that are kept.

    Raises:
      ValueError: a node depends on a later one, so this is not a schedule.
    """
    player = _Player(drawn_trips, most_events)
    player.run(_make_steps(program.nodes, each_time(program.nodes, costs)), {}, True)
    player.wait_for(player.free.values())  # for whatever is still running
    waited = defaultdict[Path, float](float)
    for path, seconds in player.stalls:
        waited[path] += seconds
    busy = defaultdict[str, float](float)
    stalls = defaultdict[str, float](float)
    rows = []
    idle = 0.0
    for path, task, count in walk_paths(program.nodes):
        cost = costs[path]
        stalled = waited.get(path, 0.0)
        if COMPUTE in cost.lanes:
            busy[task.kind] += count * (cost.seconds - cost.launch)
            idle += count * cost.launch
        if stalled:
            stalls[task.kind] += stalled
        blocking = task.kind in MOVING and not task.asynchronous
        rows.append(
            TaskTime(task, cost, count, stalled + (count * cost.seconds if blocking else 0.0))
        )
    return Timeline(
        player.now,
        dict(busy),
        dict(stalls),
        idle,
        rows,
        player.events,
    )


class _Step(NamedTuple):
    """A node together with all that is needed to play it."""

    node: Node
    path: Path
    cost: Cost | None = None
    """The cost of a task; None for other nodes."""
    body: tuple[_Step, ...] = ()
    """The steps of a loop's body; empty for other nodes."""
    crossing: tuple[int, ...] = ()
    """The positions of the body's asynchronous tasks that may still run when the next trip
    begins.
    """
    lanes: frozenset[str] = frozenset()
    """The lanes, other than compute, that anything in this node holds."""

    @property
    def needs(self) -> tuple[int, ...]:
        """The positions, in the same list, of what must be over first; a wait's task may belong to
        the previous trip.
        """
        if isinstance(self.node, Wait):
            return (self.node.task,)
        return self.node.depends


def _make_steps(
    nodes: tuple[Node, ...],
    costs: Costs,
    path: Path = (),
) -> tuple[_Step, ...]:
    """Make the nodes of a program, or of the body of the loop at `path`, ready to be played.

    Raises:
      ValueError: a node depends on a later one, so this is not a schedule.
    """
    steps: list[_Step] = []
    for i, node in enumerate(nodes):
        here = (*path, i)
        if isinstance(node, Loop):
            body = _make_steps(node.body, costs, here)
            waited = {
                one.task for one in node.body if isinstance(one, Wait) and not one.previous_trip
            }
            started = (
                j for j, one in enumerate(node.body) if isinstance(one, Task) and one.asynchronous
            )
            lanes = frozenset[str]().union(*(inner.lanes for inner in body))
            step = _Step(
                node, here, None, body, tuple(j for j in started if j not in waited), lanes
            )
        elif isinstance(node, Task):
            step = _Step(
                node,
                here,
                costs[here],
                lanes=frozenset(costs[here].lanes) - {COMPUTE},
            )
        else:
            step = _Step(node, here)
        in_this_trip = not (isinstance(node, Wait) and node.previous_trip)
        if in_this_trip and any(j >= i for j in step.needs):
            raise ValueError(f"{node.name} depends on a node that comes after it: not a schedule")
        steps.append(step)
    return tuple(steps)


class _Moment(NamedTuple):
    time: float
    path: Path = ()
    """The task that was over at this time; empty = the beginning of the step."""


class _Mark(NamedTuple):
    """The state of the device at the beginning of a trip."""

    now: float
    lags: list[float]
    """The time after `now` at which each lane of the loop becomes free and each crossing task is
    over.
    """
    stalls: int
    """The number of stalls until then."""


class _Player:
    """The state of a device while it plays. Times are in seconds since the step began."""

    def __init__(self, drawn_trips: int, most_events: int):
        self.now = 0.0
        """The time at which compute becomes free."""
        self.free: dict[str, _Moment] = {}
        """The moment at which each lane becomes free."""
        self.stalls: list[tuple[Path, float]] = []
        """What compute stood still for, and how many seconds."""
        self.events: list[Event] = []
        self.drawn_trips = drawn_trips
        self.most_events = most_events

    def run(
        self, steps: tuple[_Step, ...], before: dict[int, _Moment], drawn: bool
    ) -> list[_Moment]:
        """Play a list of nodes once, and return when each of them is over.

        Args:
          steps: the nodes, in the order of the schedule.
          before: when the tasks of the previous trip are over, by position.
          drawn: whether events are recorded.
        """
        done: list[_Moment] = []
        for step in steps:
            node = step.node
            if isinstance(node, Task):
                done.append(
                    self._task(
                        step,
                        node,
                        [done[j] for j in step.needs],
                        drawn,
                    )
                )
                continue
            if isinstance(node, Wait) and node.previous_trip:
                self.wait_for([before[node.task]] if node.task in before else [])
            else:
                self.wait_for([done[j] for j in step.needs])
            if isinstance(node, Loop):
                self._loop(step, node, drawn)
            done.append(_Moment(self.now))
        return done

    def wait_for(self, moments: Iterable[_Moment]) -> None:
        """Let compute stand still until all these moments have passed."""
        for moment in moments:
            if moment.time > self.now + _TIE:
                self.stalls.append((moment.path, moment.time - self.now))
                self.now = moment.time

    def _task(
        self,
        step: _Step,
        task: Task,
        needs: list[_Moment],
        drawn: bool,
    ) -> _Moment:
        """Play a task and return when it is over."""
        assert step.cost is not None
        start = self.now
        blamed = step.path
        for moment in needs:
            if moment.time > start + _TIE:
                start, blamed = moment
        for lane in step.cost.lanes:
            if lane in self.free:
                free = self.free[lane].time
            else:
                free = start
            if free > start + _TIE:
                start = free
                blamed = step.path
        end = _Moment(start + step.cost.seconds, step.path)
        if not task.asynchronous and start > self.now:
            self.stalls.append((blamed, start - self.now))
        for lane in step.cost.lanes:
            if lane != COMPUTE:
                self.free[lane] = end
            if drawn and step.cost.seconds and len(self.events) < self.most_events:
                self.events.append(Event(lane, start, step.cost.seconds, task))
        if not task.asynchronous:
            self.now = end.time
        elif step.cost.slows:
            self.stalls.append((step.path, step.cost.slows))
            self.now += step.cost.slows
        return end

    def _loop(self, step: _Step, loop: Loop, drawn: bool) -> None:
        """Play a loop until its trips are alike, and count the alike ones without playing them."""
        shown = self.drawn_trips if drawn else 0
        undrawn = self.now
        last = None
        before: dict[int, _Moment] = {}
        for trip in range(loop.trips):
            if trip == shown:
                undrawn = self.now
            if trip >= shown:
                mark = self._mark(step, before)
                if last and _is_alike(last, mark):
                    self._skip(step, before, last, mark, loop.trips - trip)
                    break
                last = mark
            done = self.run(step.body, before, trip < shown)
            before = {j: done[j] for j in step.crossing}
        self.wait_for(before.values())  # a loop is over when everything in it is over
        if drawn and loop.trips > shown:
            self.events.append(
                Event(COMPUTE, undrawn, self.now - undrawn, loop, loop.trips - shown)
            )

    def _mark(self, step: _Step, before: dict[int, _Moment]) -> _Mark:
        moments = [self.free[lane] for lane in sorted(step.lanes) if lane in self.free] + list(
            before.values()
        )
        return _Mark(
            self.now,
            [max(0.0, time - self.now) for time, _ in moments],
            len(self.stalls),
        )

    def _skip(
        self, step: _Step, before: dict[int, _Moment], begin: _Mark, end: _Mark, repeats: int
    ) -> None:
        """Count the trip between two marks `repeats` times more, and move all times of the loop
        on.
        """
        stalls = self.stalls[begin.stalls : end.stalls]
        self.stalls[begin.stalls : end.stalls] = [
            (path, seconds * (1 + repeats)) for path, seconds in stalls
        ]
        later = repeats * (end.now - begin.now)
        self.now += later
        for j, (time, path) in before.items():
            before[j] = _Moment(time + later, path)
        for lane in step.lanes & self.free.keys():
            time, path = self.free[lane]
            self.free[lane] = _Moment(time + later, path)


def _is_alike(old: _Mark, new: _Mark) -> bool:
    """Return whether the device stands just as it did one trip before."""
    slack = 1e-9 * (new.now - old.now)
    same = len(new.lags) == len(old.lags)
    return same and all(abs(a - b) <= slack for a, b in zip(new.lags, old.lags, strict=True))
