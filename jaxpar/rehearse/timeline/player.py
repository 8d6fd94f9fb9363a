"""A device plays a schedule: it finds when each task runs and what compute waited for.

A loop is played trip by trip until a trip begins just as the one before did (the same work in flight, equally late).
From there on all trips are alike, so that trip stands for those that are left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.hlo.tasks import Loop, Node, Program, Task, Wait
from jaxpar.rehearse.cost.cost import COMPUTE, Cost, Costs, Path

_TIE = 1e-12
"""Ends within so many seconds of each other count as one, and compute comes first: rounding must not pick a cause."""


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of a drawing."""

    lane: str
    start: float
    duration: float
    node: Node
    """The task, or the loop where `repeats` is not 0."""
    repeats: int = 0
    """The bar stands for so many further trips of a loop, which are not drawn one by one."""


class Step(NamedTuple):
    """A node together with all that is needed to play it."""

    node: Node
    path: Path
    cost: Cost | None = None
    """What a task costs; None for other nodes."""
    body: tuple[Step, ...] = ()
    """The steps of a loop's body; empty for other nodes."""
    crossing: tuple[int, ...] = ()
    """The positions of the body's tasks that may still run in the next trip."""
    lanes: frozenset[str] = frozenset()
    """The lanes, other than compute, that anything in this node holds."""

    @property
    def needs(self) -> tuple[int, ...]:
        """The positions, in the same list, of what must be over first; a wait's task may be of the previous trip."""
        return (self.node.task,) if isinstance(self.node, Wait) else self.node.depends


def crossing(body: tuple[Node, ...]) -> set[int]:
    """Return the positions of a loop body's asynchronous tasks that may still run when the next trip begins."""
    waited = {node.task for node in body if isinstance(node, Wait) and not node.previous_trip}
    return {i for i, node in enumerate(body) if isinstance(node, Task) and node.asynchronous} - waited


def make_steps(nodes: tuple[Node, ...], costs: Costs, path: Path = ()) -> tuple[Step, ...]:
    """Make a list of nodes ready to be played.

    Args:
      nodes: the nodes of a program or of a loop's body.
      costs: the costs of the program's tasks.
      path: the path of the loop; empty for a program.

    Raises:
      ValueError: a node depends on a later one, so this is not a schedule.
    """
    steps: list[Step] = []
    for i, node in enumerate(nodes):
        here = (*path, i)
        if isinstance(node, Loop):
            body = make_steps(node.body, costs, here)
            lanes = frozenset[str]().union(*(inner.lanes for inner in body))
            step = Step(node, here, body=body, crossing=tuple(sorted(crossing(node.body))), lanes=lanes)
        elif isinstance(node, Task):
            cost = costs.of[here]
            step = Step(node, here, cost, lanes=frozenset(cost.lanes) - {COMPUTE})
        else:
            step = Step(node, here)
        in_this_trip = not (isinstance(node, Wait) and node.previous_trip)
        if in_this_trip and any(j >= i for j in step.needs):
            raise ValueError(f"{node.name} depends on a node that comes after it: not a schedule")
        steps.append(step)
    return tuple(steps)


@dataclass(slots=True)
class _Stall:
    """One line of the log: compute stood still."""

    blamed: Path
    """What it stood still for."""
    seconds: float


class _Moment(NamedTuple):
    time: float
    path: Path = ()
    """The task that was over then; empty = the beginning of the step."""


class _Mark(NamedTuple):
    """The device at the beginning of a trip."""

    now: float
    lags: list[float]
    """How long after `now` each lane of the loop becomes free and each crossing task is over."""
    stalls: int
    """How many entries the log has."""


class Player:
    """The state of a device while it plays. Times are in seconds since the step began."""

    def __init__(self, drawn_trips: int, most_events: int):
        self.now = 0.0
        """The time at which compute becomes free."""
        self.free: dict[str, _Moment] = {}
        """The moment at which each lane becomes free."""
        self.log: list[_Stall] = []
        self.events: list[Event] = []
        self.drawn_trips, self.most_events = drawn_trips, most_events

    def play(self, program: Program, costs: Costs) -> float:
        """Play a whole program and return its seconds. At the end compute waits for whatever is still running.

        Raises:
          ValueError: a node depends on a later one, so this is not a schedule.
        """
        self._run(make_steps(program.nodes, costs), {}, True)
        self._wait_for(self.free.values())
        return self.now

    def stalls(self) -> dict[Path, float]:
        """Return how many seconds compute stood still for each task."""
        found: defaultdict[Path, float] = defaultdict(float)
        for entry in self.log:
            found[entry.blamed] += entry.seconds
        return found

    def _run(self, steps: tuple[Step, ...], before: dict[int, _Moment], drawn: bool) -> list[_Moment]:
        """Play a list of nodes once and return when each of them is over.

        Args:
          steps: the nodes, ready to be played.
          before: when the tasks of the previous trip are over, by position.
          drawn: whether the tasks are recorded as events.
        """
        done: list[_Moment] = []
        for step in steps:
            node = step.node
            if isinstance(node, Task):
                done.append(self._task(step, node, [done[j] for j in step.needs], drawn))
                continue
            if isinstance(node, Wait) and node.previous_trip:
                self._wait_for([before[node.task]] if node.task in before else [])
            else:
                self._wait_for([done[j] for j in step.needs])
            if isinstance(node, Loop):
                self._loop(step, node, drawn)
            done.append(_Moment(self.now))
        return done

    def _wait_for(self, moments: Iterable[_Moment]) -> None:
        """Let compute stand still until all these moments have passed."""
        for moment in moments:
            if moment.time > self.now + _TIE:
                self.log.append(_Stall(moment.path, moment.time - self.now))
                self.now = moment.time

    def _task(self, step: Step, task: Task, needs: list[_Moment], drawn: bool) -> _Moment:
        """Play a task and return when it is over."""
        assert step.cost is not None
        start, blamed = self.now, step.path
        for moment in needs:
            if moment.time > start + _TIE:
                start, blamed = moment.time, moment.path
        for lane in step.cost.lanes:
            free = self.free[lane].time if lane in self.free else start
            if free > start + _TIE:
                start, blamed = free, step.path
        end = _Moment(start + step.cost.seconds, step.path)
        if not task.asynchronous and start > self.now:
            self.log.append(_Stall(blamed, start - self.now))
        for lane in step.cost.lanes:
            if lane != COMPUTE:
                self.free[lane] = end
            if drawn and step.cost.seconds and len(self.events) < self.most_events:
                self.events.append(Event(lane, start, step.cost.seconds, task))
        if not task.asynchronous:
            self.now = end.time
        return end

    def _loop(self, step: Step, loop: Loop, drawn: bool) -> None:
        """Play a loop until its trips are alike, and count the alike ones without playing them."""
        shown = self.drawn_trips if drawn else 0
        undrawn = self.now
        last: _Mark | None = None
        before: dict[int, _Moment] = {}
        trip = 0
        while trip < loop.trips:
            if trip == shown:
                undrawn = self.now
            if trip >= shown:
                mark = self._mark(step, before)
                if last and _is_alike(last, mark):
                    self._skip(step, before, last, mark, loop.trips - trip)
                    break
                last = mark
            done = self._run(step.body, before, trip < shown)
            before = {j: done[j] for j in step.crossing}
            trip += 1
        self._wait_for(before.values())  # a loop is over when everything in it is over
        if drawn and loop.trips > shown:
            seconds = self.now - undrawn
            self.events.append(Event(COMPUTE, undrawn, seconds, loop, loop.trips - shown))

    def _mark(self, step: Step, before: dict[int, _Moment]) -> _Mark:
        moments = [self.free[lane] for lane in sorted(step.lanes) if lane in self.free] + list(before.values())
        return _Mark(self.now, [max(0.0, time - self.now) for time, _ in moments], len(self.log))

    def _skip(self, step: Step, before: dict[int, _Moment], begin: _Mark, end: _Mark, repeats: int) -> None:
        """Count the trip between two marks `repeats` times more, and move all times of the loop on."""
        for entry in self.log[begin.stalls : end.stalls]:
            entry.seconds *= 1 + repeats
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
