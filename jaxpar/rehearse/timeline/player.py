"""A device that plays a schedule: when each task runs, on what each start rests, and what compute waited for.

Loops are played trip by trip until a trip begins just as the one before did (the same work in flight, equally late).
From there on all trips are alike: the last one that was played counts for those that are left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.hlo.tasks import Loop, Node, Program, Task, Wait
from jaxpar.rehearse.cost.cost import COMPUTE, Cost, Costs, Path
from jaxpar.rehearse.timeline.schedule import crossing

_TIE = 1e-12
"""Seconds. What ends this close together ends at once, and compute comes first: rounding must not choose a cause."""
_LAST_TRIPS = 2
"""At the end of a loop these are played, not counted: in them the critical path finds its way into the loop."""


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


class Step(NamedTuple):
    """A node with all that is needed to play it."""

    node: Node
    path: Path
    cost: Cost | None = None
    """Of a task."""
    body: tuple[Step, ...] = ()
    """Of a loop."""
    crossing: tuple[int, ...] = ()
    """Positions of the body's tasks that may still run in the next trip."""
    lanes: frozenset[str] = frozenset()
    """Held by anything in it, compute left out."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Positions, in the same list, of what must be over first; of a wait the task may be of the previous trip."""
        return (self.node.task,) if isinstance(self.node, Wait) else self.node.depends


def make_steps(nodes: tuple[Node, ...], costs: Costs, path: Path = ()) -> tuple[Step, ...]:
    """A list of nodes made ready to be played.

    Args:
      nodes: of a program or a loop's body.
      costs: of the program's tasks.
      path: of the loop.

    Raises:
      ValueError: a node that depends on a later one: this is not a schedule.
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
class _Entry:
    """One line of the log: a task ran, or compute waited."""

    path: Path | None
    """Of the task; None for a wait."""
    cause: int
    """The entry that its start rests on; -1 = the beginning of the step."""
    blamed: Path
    """What compute stood still for."""
    stalled: float
    """How long it did."""
    times: int = 1


class _Moment(NamedTuple):
    time: float
    entry: int
    """What was over then; -1 = the beginning of the step."""


class _Mark(NamedTuple):
    """The device at the beginning of a trip."""

    now: float
    lags: list[float]
    """How long after `now` each lane of the loop becomes free, and each crossing task is over."""
    entries: int
    """How many there are in the log."""


class Player:
    """The state of a device while it plays. Times in seconds since the step began."""

    def __init__(self, drawn_trips: int, most_events: int):
        self.now = _Moment(0.0, -1)
        """When compute is free."""
        self.free: dict[str, _Moment] = {}
        """When each lane is free."""
        self.log: list[_Entry] = []
        self.events: list[Event] = []
        self.drawn_trips, self.most_events = drawn_trips, most_events

    def play(self, program: Program, costs: Costs) -> float:
        """Play a whole program; the seconds that it takes. At its end compute waits for whatever is still running.

        Raises:
          ValueError: a node that depends on a later one: this is not a schedule.
        """
        self._run(make_steps(program.nodes, costs), {}, 0, True)
        self._wait_for(self.free.values())
        return self.now.time

    def stalls(self) -> dict[Path, float]:
        """How long compute stood still for each task."""
        found: defaultdict[Path, float] = defaultdict(float)
        for entry in self.log:
            found[entry.blamed] += entry.times * entry.stalled
        return found

    def critical_path(self) -> Counter[Path]:
        """How often each task stands in the chain that ends last, each starting when the one before was over."""
        passed: Counter[Path] = Counter()
        at = self.now.entry
        while at >= 0:
            entry = self.log[at]
            if entry.path is not None:
                passed[entry.path] += entry.times
            at = entry.cause
        return passed

    def _run(self, steps: tuple[Step, ...], before: dict[int, _Moment], trip: int, drawn: bool) -> list[_Moment]:
        """Play a list of nodes once; when each of them is over.

        Args:
          steps: the nodes.
          before: when tasks of the previous trip are over, by position.
          trip: of the loop these nodes are the body of.
          drawn: whether this becomes events.
        """
        done: list[_Moment] = []
        for step in steps:
            node = step.node
            if isinstance(node, Task):
                done.append(self._task(step, node, [done[j] for j in step.needs], trip, drawn))
                continue
            if isinstance(node, Wait) and node.previous_trip:
                self._wait_for([before[node.task]] if node.task in before else [])
            else:
                self._wait_for([done[j] for j in step.needs])
            if isinstance(node, Loop):
                self._loop(step, node, drawn)
            done.append(self.now)
        return done

    def _wait_for(self, moments: Iterable[_Moment]) -> None:
        """Compute stands still until all these are over."""
        for moment in moments:
            if moment.time > self.now.time + _TIE:
                blamed = self.log[moment.entry].path or ()
                self.log.append(_Entry(None, moment.entry, blamed, moment.time - self.now.time))
                self.now = _Moment(moment.time, len(self.log) - 1)

    def _task(self, step: Step, task: Task, needs: list[_Moment], trip: int, drawn: bool) -> _Moment:
        """Play a task; when it is over."""
        assert step.cost is not None
        start, blamed = self.now, step.path
        for moment in needs:
            if moment.time > start.time + _TIE:
                start, blamed = moment, self.log[moment.entry].path or ()
        for lane in step.cost.lanes:
            moment = self.free.get(lane, start)
            if moment.time > start.time + _TIE:
                start, blamed = moment, step.path
        end = _Moment(start.time + step.cost.seconds, len(self.log))
        stalled = 0.0 if task.asynchronous else start.time - self.now.time
        self.log.append(_Entry(step.path, start.entry, blamed, stalled))
        for lane in step.cost.lanes:
            if lane != COMPUTE:
                self.free[lane] = end
            if drawn and step.cost.seconds and len(self.events) < self.most_events:
                self.events.append(Event(lane, start.time, step.cost.seconds, task.name, step.path, trip))
        if not task.asynchronous:
            self.now = end
        return end

    def _loop(self, step: Step, loop: Loop, drawn: bool) -> None:
        """Play a loop until its trips are alike, count those, and play the last ones."""
        shown = self.drawn_trips if drawn else 0
        undrawn = self.now.time
        last: _Mark | None = None
        before: dict[int, _Moment] = {}
        trip = 0
        while trip < loop.trips:
            if trip == shown:
                undrawn = self.now.time
            if trip >= shown:
                mark = self._mark(step, before)
                repeats = loop.trips - trip - _LAST_TRIPS
                if last and repeats > 0 and _is_alike(last, mark):
                    self._skip(step, before, last, mark, repeats)
                    trip += repeats
                last = mark
            done = self._run(step.body, before, trip, trip < shown)
            before = {j: done[j] for j in step.crossing}
            trip += 1
        self._wait_for(before.values())  # a loop is over when everything in it is
        if drawn and loop.trips > shown:
            seconds = self.now.time - undrawn
            self.events.append(Event(COMPUTE, undrawn, seconds, loop.name, step.path, shown, loop.trips - shown))

    def _mark(self, step: Step, before: dict[int, _Moment]) -> _Mark:
        moments = [self.free[lane] for lane in sorted(step.lanes) if lane in self.free] + list(before.values())
        return _Mark(self.now.time, [max(0.0, time - self.now.time) for time, _ in moments], len(self.log))

    def _skip(self, step: Step, before: dict[int, _Moment], begin: _Mark, end: _Mark, repeats: int) -> None:
        """Count the trip between two marks as often again as it repeats; all times of the loop move on."""
        for entry in self.log[begin.entries : end.entries]:
            entry.times *= 1 + repeats
        later = repeats * (end.now - begin.now)
        self.now = _Moment(self.now.time + later, self.now.entry)
        for j, (time, entry) in before.items():
            before[j] = _Moment(time + later, entry)
        for lane in step.lanes & self.free.keys():
            time, entry = self.free[lane]
            self.free[lane] = _Moment(time + later, entry)


def _is_alike(old: _Mark, new: _Mark) -> bool:
    """Whether the device stands just as it did a trip before."""
    slack = 1e-9 * (new.now - old.now)
    same = len(new.lags) == len(old.lags)
    return same and all(abs(a - b) <= slack for a, b in zip(new.lags, old.lags, strict=True))
