"""A device that plays a schedule: when each task runs, on what each start rests, and what compute waited for.

Loops are played trip by trip until a trip begins just as an earlier one did (the same work in flight, the same lags).
From there on they repeat, and the whole periods that are left are added at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.hlo.tasks import Loop, Node, Program, Task, Wait
from jaxpar.rehearse.cost.cost import COMPUTE, Cost, Costs, Path
from jaxpar.rehearse.timeline.schedule import crossing


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


class PlayedNode(NamedTuple):
    """A node made ready to be played. Nodes are numbered in program order, a loop's body right after the loop."""

    number: int
    node: Node
    path: Path
    cost: Cost | None
    """Of a task."""
    needs: tuple[int, ...] = ()
    """Numbers of the nodes that must be over in the same trip."""
    earlier: tuple[int, ...] = ()
    """Numbers of the asynchronous tasks that must be over in the trip before."""
    body: tuple[PlayedNode, ...] = ()
    stop: int = 0
    """One past the last number of the body."""
    crossing: tuple[int, ...] = ()
    """Of the body's tasks that may still run in the next trip."""
    lanes: tuple[str, ...] = ()
    """Held by anything in the body, compute left out."""


def prepare(program: Program, costs: Costs) -> tuple[tuple[PlayedNode, ...], list[Path]]:
    """The program's steps, and the path of each number.

    Raises:
      ValueError: a node that depends on a later one: not a schedule.
    """
    where: list[Path] = []
    return _prepare(program.nodes, (), (), costs, where), where


def _prepare(
    nodes: tuple[Node, ...], carried: tuple[tuple[int, int], ...], path: Path, costs: Costs, where: list[Path]
) -> tuple[PlayedNode, ...]:
    numbers: list[int] = []
    drafts: list[PlayedNode] = []
    for i, node in enumerate(nodes):
        here = (*path, i)
        numbers.append(len(where))
        where.append(here)
        step = PlayedNode(numbers[i], node, here, costs.of.get(here))
        if isinstance(node, Loop):
            body = _prepare(node.body, node.carried, here, costs, where)
            lanes = {lane for inner in body for lane in (inner.cost.lanes if inner.cost else inner.lanes)} - {COMPUTE}
            across = {body[j].number for j in crossing(node.body)}
            across |= {number for inner in body for number in inner.earlier}
            step = step._replace(body=body, stop=len(where), lanes=tuple(sorted(lanes)), crossing=tuple(sorted(across)))
        drafts.append(step)
    # A wait may stand before the task of the previous trip, so numbers are filled in when all are known.
    return tuple(_connect(i, step, nodes, carried, numbers) for i, step in enumerate(drafts))


def _connect(
    i: int, step: PlayedNode, nodes: tuple[Node, ...], carried: tuple[tuple[int, int], ...], numbers: list[int]
) -> PlayedNode:
    """A step with the numbers of what it needs."""
    node = step.node
    if isinstance(node, Wait):
        now, before = ((), (node.task,)) if node.previous_trip else ((node.task,), ())
    else:
        taken = [producer for consumer, producer in carried if consumer == i]
        # What is synchronous is over by the next trip anyway.
        now, before = node.depends, tuple(j for j in taken if getattr(nodes[j], "asynchronous", False))
    if any(j >= i for j in now):
        raise ValueError(f"{node.name} depends on a node that comes after it: not a schedule")
    return step._replace(needs=tuple(numbers[j] for j in now), earlier=tuple(numbers[j] for j in before))


Front = tuple[str, str | int]
"""A part of the device's state: compute, one lane, or one task in flight."""

_NOW: Front = ("now", 0)
_LONGEST_PERIOD = 8  # trips


class _Mark(NamedTuple):
    """The device at the beginning of a trip."""

    lags: tuple[float, ...]
    """How long after `now` each lane becomes free and each crossing task is over."""
    now: float
    waited: list[float]
    """Of the nodes in the body."""
    fronts: dict[Front, int]
    """The record that each part of the state rests on."""
    records: int
    """How many there were."""


@dataclass(slots=True)
class _Jump:
    """Periods of a loop that were added at once: each like the one between two marks."""

    begin: _Mark
    end: _Mark
    periods: int
    steps: dict[Front, tuple[Counter[int], Front]]
    """From one part of the state at the end of a period: what its chain runs through, back to which part."""


class _Record(NamedTuple):
    """That a node ran, or that a part of the state was carried over a jump."""

    number: int = -1
    """Of the node."""
    cause: int = -1
    """The record that its start rests on; -1 = the beginning of the step."""
    jump: _Jump | None = None
    front: Front = _NOW


Moment = tuple[float, int]
"""(time, record that it rests on)."""


class Player:
    """The state of a device while it plays. Times in seconds since the step began."""

    def __init__(self, nodes: int, drawn_trips: int, most_events: int):
        self.now = 0.0
        """When compute is free."""
        self.last = -1
        """The record `now` rests on; -1 = the beginning."""
        self.free: dict[str, Moment] = {}
        """When each lane is free."""
        self.done: dict[int, Moment] = {}
        """When each node was last over."""
        self.waited = [0.0] * nodes
        """How long compute stood still for each node."""
        self.records: list[_Record] = []
        self.loops: dict[Path, list[float]] = {}
        """[executions, seconds] of each loop, as far as played."""
        self.events: list[Event] = []
        self.drawn_trips, self.most_events = drawn_trips, most_events

    def run(self, steps: tuple[PlayedNode, ...], before: dict[int, Moment], trip: int, drawn: bool) -> None:
        """Play a list of nodes once.

        Args:
          steps: the nodes.
          before: when tasks of the previous trip are over.
          trip: of the loop these nodes are the body of.
          drawn: whether this becomes events.
        """
        for step in steps:
            if isinstance(step.node, Task):
                self._task(step, before, trip, drawn)
            elif isinstance(step.node, Wait):
                self._block([*((n, self.done[n]) for n in step.needs),
                             *((n, before[n]) for n in step.earlier if n in before)])  # fmt: skip
                self.done[step.number] = self.now, self.last
            else:
                self._loop(step, drawn)

    def _block(self, moments: list[tuple[int, Moment]]) -> None:
        """Compute stands still until all these are over."""
        for number, (time, record) in moments:
            if time > self.now:
                self.waited[number] += time - self.now
                self.now, self.last = time, record

    def _task(self, step: PlayedNode, before: dict[int, Moment], trip: int, drawn: bool) -> None:
        cost, number = step.cost, step.number
        assert cost is not None and isinstance(step.node, Task)
        (start, cause), blamed = (self.now, self.last), number
        moments = [(n, self.done[n]) for n in step.needs]
        moments += [(n, before[n]) for n in step.earlier if n in before]
        moments += [(number, self.free[lane]) for lane in cost.lanes if lane in self.free]
        for whose, (time, record) in moments:
            if time > start:
                start, cause, blamed = time, record, whose
        end = start + cost.seconds
        record = len(self.records)
        self.records.append(_Record(number, cause))
        for lane in cost.lanes:
            if lane != COMPUTE:
                self.free[lane] = end, record
            if drawn and cost.seconds and len(self.events) < self.most_events:
                self.events.append(Event(lane, start, cost.seconds, step.node.name, step.path, trip))
        self.done[number] = end, record
        if not step.node.asynchronous:
            self.waited[blamed] += start - self.now
            self.now, self.last = end, record

    def _loop(self, step: PlayedNode, drawn: bool) -> None:
        loop = step.node
        assert isinstance(loop, Loop)
        self._block([(n, self.done[n]) for n in step.needs])
        began, undrawn = self.now, self.now
        marks: list[_Mark] = []
        before: dict[int, Moment] = {}
        trip, jumped = 0, False
        while trip < loop.trips:
            if trip == self.drawn_trips:
                undrawn = self.now
            if not jumped and (trip >= self.drawn_trips or not drawn):
                mark = self._mark(step, before)
                period = _period(marks, mark)
                if period and loop.trips - trip >= period:
                    periods, jumped = (loop.trips - trip) // period, True
                    self._jump(step, _Jump(marks[-period], mark, periods, {}), before)
                    trip += periods * period
                    continue
                marks = [*marks[1 - _LONGEST_PERIOD :], mark]
            self.run(step.body, before, trip, drawn and trip < self.drawn_trips)
            before = {n: self.done[n] for n in step.crossing}
            trip += 1
        # A loop is over when everything in it is.
        self._block(list(before.items()))
        self.done[step.number] = self.now, self.last
        played = self.loops.setdefault(step.path, [0, 0.0])
        played[0] += 1
        played[1] += self.now - began
        if drawn and loop.trips > self.drawn_trips:
            rest = loop.trips - self.drawn_trips
            self.events.append(
                Event(COMPUTE, undrawn, self.now - undrawn, loop.name, step.path, self.drawn_trips, rest)
            )

    def _mark(self, loop: PlayedNode, before: dict[int, Moment]) -> _Mark:
        moments: dict[Front, Moment] = {("lane", lane): self.free.get(lane, (0.0, -1)) for lane in loop.lanes}
        moments |= {("task", n): before.get(n, (0.0, -1)) for n in loop.crossing}
        lags = tuple(max(0.0, time - self.now) for time, _ in moments.values())
        # `now` comes first: where two parts of the state rest on one record, a chain goes back through compute.
        fronts = {_NOW: self.last} | {front: record for front, (_, record) in moments.items()}
        return _Mark(lags, self.now, self.waited[loop.number : loop.stop], fronts, len(self.records))

    def _jump(self, loop: PlayedNode, jump: _Jump, before: dict[int, Moment]) -> None:
        """Add the periods of a jump: every time in the loop moves on by as much, and so does what was waited for."""
        later = jump.periods * (jump.end.now - jump.begin.now)
        for i, (old, new) in enumerate(zip(jump.begin.waited, jump.end.waited, strict=True)):
            self.waited[loop.number + i] += jump.periods * (new - old)

        def moved(front: Front, moment: Moment) -> Moment:
            if jump.end.fronts[front] == jump.begin.fronts[front]:
                return moment  # untouched all through the period, so long over
            self.records.append(_Record(jump=jump, front=front))
            return moment[0] + later, len(self.records) - 1

        self.now, self.last = moved(_NOW, (self.now, self.last))
        for lane in loop.lanes:
            if lane in self.free:
                self.free[lane] = moved(("lane", lane), self.free[lane])
        for number, moment in before.items():
            before[number] = moved(("task", number), moment)

    def finish(self) -> float:
        """The end of the step: compute waits for whatever is still running."""
        self._block([(self._number(record), (time, record)) for time, record in self.free.values()])
        return self.now

    def _number(self, record: int) -> int:
        """The node that a record is of."""
        number, _, jump, front = self.records[record]
        return self._number(jump.end.fronts[front]) if jump else number

    def loop_seconds(self) -> dict[Path, float]:
        """One execution of each loop, on average over those played."""
        return {path: seconds / count for path, (count, seconds) in self.loops.items()}

    def critical(self) -> Counter[int]:
        """How often each node stands in the chain that ends last."""
        return self._back(self.last, 0)[0]

    def _back(self, record: int, floor: int) -> tuple[Counter[int], int]:
        """Back along what each start rests on, to the first record below `floor`: what was passed, and that record."""
        passed: Counter[int] = Counter()
        while record >= floor:
            number, cause, jump, front = self.records[record]
            if jump is None:
                passed[number] += 1
                record = cause
                continue
            visits: Counter[Front] = Counter()
            for _ in range(jump.periods):
                visits[front] += 1
                front = self._period_back(jump, front)[1]
            for visited, times in visits.items():
                for inner, count in self._period_back(jump, visited)[0].items():
                    passed[inner] += times * count
            record = jump.end.fronts[front]
        return passed, record

    def _period_back(self, jump: _Jump, front: Front) -> tuple[Counter[int], Front]:
        """One period of a jump, seen from one part of the state at its end."""
        if front not in jump.steps:
            passed, record = self._back(jump.end.fronts[front], jump.begin.records)
            found = next(part for part, first in jump.begin.fronts.items() if first == record)
            jump.steps[front] = passed, found
        return jump.steps[front]


def _period(marks: list[_Mark], mark: _Mark) -> int:
    """How many trips ago the device stood just as it does now; 0 = never, as far as is remembered."""
    for back, old in enumerate(reversed(marks), 1):
        slack = 1e-9 * (mark.now - old.now)
        if all(abs(a - b) <= slack for a, b in zip(mark.lags, old.lags, strict=True)):
            return back
    return 0
