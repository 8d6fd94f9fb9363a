"""A schedule's table as the executor runs it: scans over equal rounds, and for each tick which slot of which buffer.

Slots are given out ahead, as registers are: a buffer is as deep as the most that are in use together on any stage. What
a stage writes while it is idle goes to a slot that nothing is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from jaxpar.parallel.pipeline.schedules import Action, Kind, Table, Tick

_READ, _WRITTEN = 0.3, 0.6  # of a tick: what it needs is read, what it made is written


class Rows(NamedTuple):
    """One kind of tick: int32 arrays [rounds, stages], of numpy here, of jax where they are run.

    Attributes:
      on: whether the stage does anything.
      microbatch, chunk: of the action, 0 where there is none.
      kept: slot of the stash: written by a forward, read by the others.
      taken: slot of what arrived: of the activation for a forward, of the cotangent for a backward.
      arrives: slot that a neighbour's message goes to: after the round of a forward the activation; before a backward
        the cotangent of the round before.
      ends: whether the action is the first virtual stage's: a forward begins with the embedding, a backward ends there.
      scores: whether the action is the last virtual stage's forward, which the loss follows; `cotangent` is the slot
        for what the loss gives back.
      waits: slot of what a weight's gradient is made of: written by `input`, read by `weight`.
      some_end, some_score: [rounds], whether there is any such stage; `scored`, [rounds], with which microbatch.
    """

    on: Any
    microbatch: Any
    chunk: Any
    kept: Any
    taken: Any
    arrives: Any
    ends: Any
    scores: Any
    cotangent: Any
    waits: Any
    some_end: Any
    some_score: Any
    scored: Any


class Segment(NamedTuple):
    """Rounds of the same kinds of ticks, to be run by one scan: rows by kind, in the order of a round's ticks."""

    rounds: int
    ticks: dict[Kind, Rows]


class TickProgram(NamedTuple):
    """A table to be run.

    Attributes:
      segments: one scan after another.
      stash, inbox, cotangents, waiting: depths of the buffers: inputs kept for a backward; activations and cotangents
        that have arrived; what weights' gradients wait for.
    """

    segments: tuple[Segment, ...]
    stash: int
    inbox: int
    cotangents: int
    waiting: int


def program(table: Table, backward: bool = True) -> TickProgram:
    """The program of a table whose ticks have one kind each; its forward ticks only where there is no `backward`."""
    rounds = [[tick for tick in part if backward or _kind(tick) == "forward"] for part in table.rounds]
    rounds = [part for part in rounds if part]
    slots = _Slots(table, rounds)
    segments, at = [], 0
    for _, equal in groupby(rounds, key=lambda part: tuple(map(_kind, part))):
        count = len(same := list(equal))
        numbers = range(at, at + count)
        segments.append(Segment(count, {kind: slots.rows(kind, numbers) for kind in map(_kind, same[0])}))
        at += count
    return TickProgram(tuple(segments), **slots.depths)


def _kind(tick: Tick) -> Kind:
    return next(action.kind for action in tick if action)


class _Use(NamedTuple):
    """Something that is in a buffer from `written` to `read`, in ticks."""

    written: float
    read: float
    key: tuple[str, Action | int]


class _Slots:
    """Who uses which slot: by (what for, action) of a stage; of an idle stage by the tick's number."""

    def __init__(self, table: Table, rounds: list[list[Tick]]):
        self.table, self.rounds = table, rounds
        self.starts = np.cumsum([0, *map(len, rounds)]).tolist()
        self.ticks = [tick for part in rounds for tick in part]
        self.at = {(s, action): t for t, tick in enumerate(self.ticks) for s, action in enumerate(tick) if action}
        self.ends = {t: end for t0, end in pairwise(self.starts) for t in range(t0, end)}
        self.depths, self.slot = {}, [{} for _ in range(table.stages)]
        uses = {"stash": self._stash, "inbox": self._inbox, "cotangents": self._cotangents, "waiting": self._waiting}
        for buffer, of_stage in uses.items():
            depth = 0
            for s in range(table.stages):
                depth = max(depth, _color(list(of_stage(s)), self.slot[s]))
            self.depths[buffer] = depth

    def _last(self, stage: int, i: int, c: int) -> int:
        """The tick that reads a unit's stash last."""
        return max(self.at.get((stage, Action(kind, i, c)), -1) for kind in ("backward", "input", "weight"))

    def _stash(self, s: int) -> Iterator[_Use]:
        for t, tick in enumerate(self.ticks):
            action = tick[s]
            if _kind(tick) != "forward":
                continue
            if action is None:
                yield _Use(t + _WRITTEN, t + _WRITTEN, ("kept", t))
            elif (last := self._last(s, *action[1:])) >= 0:
                yield _Use(t + _READ, last + _READ, ("kept", action))

    def _inbox(self, s: int) -> Iterator[_Use]:
        """What arrives after each round with a forward tick: for some forward of this stage, or for none."""
        P, v = self.table.stages, self.table.virtual
        for t, tick in enumerate(self.ticks):
            if _kind(tick) != "forward":
                continue
            sent, read = tick[s - 1], None
            if sent is not None:
                place = sent.chunk * P + (s - 1) % P + 1
                read = Action("forward", sent.microbatch, place // P) if place < P * v else None
            at = self.ends[t] - 0.1
            yield _Use(at, at if read is None else self.at[s, read] + _READ, ("arrives", t))
            if read is not None:
                self.slot[s]["activation of", read] = ("arrives", t)

    def _cotangents(self, s: int) -> Iterator[_Use]:
        """What arrives before a backward, sent by the one of the round before; and what the loss gives."""
        P = self.table.stages
        sent: Action | None = None
        for t, tick in enumerate(self.ticks):
            kind = _kind(tick)
            if kind in ("backward", "input"):
                read = None
                if sent is not None:
                    place = sent.chunk * P + (s + 1) % P - 1
                    read = Action(kind, sent.microbatch, place // P) if place >= 0 else None
                at = t - 0.2
                yield _Use(at, at if read is None else self.at[s, read] + _READ, ("arrives", t))
                if read is not None:
                    self.slot[s]["cotangent of", read] = ("arrives", t)
                sent = tick[(s + 1) % P]
            if kind == "forward":
                mine = tick[s] if s == P - 1 else None
                back = None if mine is None else self._back(s, mine)
                at = t + _WRITTEN
                yield _Use(at, at if back is None else self.at[s, back] + _READ, ("loss", t))
                if back is not None:
                    self.slot[s]["cotangent of", back] = ("loss", t)

    def _scored(self, action: Action | None) -> bool:
        return action is not None and action.chunk == self.table.virtual - 1

    def _back(self, s: int, action: Action) -> Action | None:
        if not self._scored(action):
            return None
        kinds: tuple[Kind, ...] = ("backward", "input")
        return next((b for kind in kinds if (s, b := Action(kind, *action[1:])) in self.at), None)

    def _waiting(self, s: int) -> Iterator[_Use]:
        for t, tick in enumerate(self.ticks):
            if _kind(tick) != "input":
                continue
            action = tick[s]
            if action is None:
                yield _Use(t + _WRITTEN, t + _WRITTEN, ("waits", t))
            else:
                yield _Use(t + _WRITTEN, self.at[s, Action("weight", *action[1:])] + _READ, ("waits", action))

    def _find(self, s: int, what: str, of: Action | int) -> int:
        """The slot of a stage's use; 0 where there is none."""
        found = self.slot[s].get((what, of), 0)
        return self.slot[s][found] if isinstance(found, tuple) else found

    def rows(self, kind: Kind, rounds: range) -> Rows:
        """The rows of a kind of tick in these rounds."""
        P, v = self.table.stages, self.table.virtual
        found = np.zeros((10, len(rounds), P), np.int32)
        for row, r in enumerate(rounds):
            t = next(t for t in range(self.starts[r], self.starts[r + 1]) if _kind(self.ticks[t]) == kind)
            for s, action in enumerate(self.ticks[t]):
                there = Action("forward", 0, 0) if action is None else action
                unit = there[1:]
                of = "activation of" if kind == "forward" else "cotangent of"
                found[:, row, s] = (
                    action is not None, *unit,
                    self._find(s, "kept", t if action is None else Action("forward", *unit)),
                    0 if action is None else self._find(s, of, action),
                    self._find(s, "arrives", t),
                    action is not None and s == 0 and there.chunk == 0,
                    action is not None and s == P - 1 and there.chunk == v - 1 and kind == "forward",
                    self._find(s, "loss", t),
                    self._find(s, "waits", t if action is None else Action("input", *unit)),
                )  # fmt: skip
        of_round = found[6].any(axis=1), found[7].any(axis=1), np.sum(found[1] * found[7], axis=1)
        return Rows(*[*found, *of_round])


def _color(uses: list[_Use], slot: dict) -> int:
    """Give each use the lowest slot that is free while it lasts; returns how many there are."""
    busy: list[float] = []
    for use in sorted(uses, key=lambda use: use[:2]):
        free = next((n for n, until in enumerate(busy) if until < use.written), len(busy))
        busy[free : free + 1] = [use.read]
        slot[use.key] = free
    return len(busy)
