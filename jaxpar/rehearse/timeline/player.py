"""A device plays a schedule: it finds when each task runs, what each start depends on, and what compute waited for.

A loop is played trip by trip until a trip begins just as the one before did (the same work in flight, equally late).
From there on all trips are alike, so the last trip that was played stands for those that are left.
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
"""Ends within so many seconds of each other count as one, and compute comes first: rounding must not pick a cause."""
_LAST_TRIPS = 2
"""So many trips at the end of a loop are always played, so that the critical path finds its way into the loop."""


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of a drawing."""

    lane: str
    start: float
    duration: float
    name: str
    """The name of the instruction, or of the loop where `repeats` is not 0."""
    path: Path
    trip: int = 0
    """The trip of the innermost loop."""
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
class _Entry:
    """One line of the log: a task ran, or compute waited."""

    path: Path | None
    """The path of the task; None for a wait."""
    cause: int
    """The entry that had to be over before this one began; -1 = the beginning of the step."""
    blamed: Path
    """What compute stood still for."""
    stalled: float
    """For how many seconds it stood still."""
    times: int = 1


class _Moment(NamedTuple):
    time: float
    entry: int
    """The entry that was over then; -1 = the beginning of the step."""


class _Mark(NamedTuple):
    """The device at the beginning of a trip."""

    now: float
    lags: list[float]
    """How long after `now` each lane of the loop becomes free and each crossing task is over."""
    entries: int
    """How many entries the log has."""


class Player:
    """The state of a device while it plays. Times are in seconds since the step began."""

    def __init__(self, drawn_trips: int, most_events: int):
        self.now = _Moment(0.0, -1)
        """The moment at which compute becomes free."""
        self.free: dict[str, _Moment] = {}
        """The moment at which each lane becomes free."""
        self.log: list[_Entry] = []
        self.events: list[Event] = []
        self.drawn_trips, self.most_events = drawn_trips, most_events

    def play(self, program: Program, costs: Costs) -> float:
        """Play a whole program and return its seconds. At the end compute waits for whatever is still running.

        Raises:
          ValueError: a node depends on a later one, so this is not a schedule.
        """
        self._run(make_steps(program.nodes, costs), {}, 0, True)
        self._wait_for(self.free.values())
        return self.now.time

    def stalls(self) -> dict[Path, float]:
        """Return how many seconds compute stood still for each task."""
        found: defaultdict[Path, float] = defaultdict(float)
        for entry in self.log:
            found[entry.blamed] += entry.times * entry.stalled
        return found

    def critical_path(self) -> Counter[Path]:
        """Count how often each task stands in the chain that ends last, where each starts when the one before ends."""
        passed: Counter[Path] = Counter()
        at = self.now.entry
        while at >= 0:
            entry = self.log[at]
            if entry.path is not None:
                passed[entry.path] += entry.times
            at = entry.cause
        return passed

    def _run(self, steps: tuple[Step, ...], before: dict[int, _Moment], trip: int, drawn: bool) -> list[_Moment]:
        """Play a list of nodes once and return when each of them is over.

        Args:
          steps: the nodes, ready to be played.
          before: when the tasks of the previous trip are over, by position.
          trip: which trip this is of the loop whose body the nodes are.
          drawn: whether the tasks are recorded as events.
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
        """Let compute stand still until all these moments have passed."""
        for moment in moments:
            if moment.time > self.now.time + _TIE:
                blamed = self.log[moment.entry].path or ()
                self.log.append(_Entry(None, moment.entry, blamed, moment.time - self.now.time))
                self.now = _Moment(moment.time, len(self.log) - 1)

    def _task(self, step: Step, task: Task, needs: list[_Moment], trip: int, drawn: bool) -> _Moment:
        """Play a task and return when it is over."""
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
        """Play a loop until its trips are alike, count the alike ones without playing them, and play the last ones."""
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
        self._wait_for(before.values())  # a loop is over when everything in it is over
        if drawn and loop.trips > shown:
            seconds = self.now.time - undrawn
            self.events.append(Event(COMPUTE, undrawn, seconds, loop.name, step.path, shown, loop.trips - shown))

    def _mark(self, step: Step, before: dict[int, _Moment]) -> _Mark:
        moments = [self.free[lane] for lane in sorted(step.lanes) if lane in self.free] + list(before.values())
        return _Mark(self.now.time, [max(0.0, time - self.now.time) for time, _ in moments], len(self.log))

    def _skip(self, step: Step, before: dict[int, _Moment], begin: _Mark, end: _Mark, repeats: int) -> None:
        """Count the trip between two marks `repeats` times more, and move all times of the loop on."""
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
    """Return whether the device stands just as it did one trip before."""
    slack = 1e-9 * (new.now - old.now)
    same = len(new.lags) == len(old.lags)
    return same and all(abs(a - b) <= slack for a, b in zip(new.lags, old.lags, strict=True))
