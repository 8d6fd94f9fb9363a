"""A schedule's table as the executor runs it: scans over equal rounds, and for each tick which slot
of which buffer.

Slots are given out ahead, as a compiler gives out registers: a buffer is as deep as the most that
are in use together on any stage. What a stage writes while it is idle goes to a slot that nothing
is in.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from jaxpar.parallel.pipeline.schedules import ActionKind, Table, Tick

_Array = Any  # an array of numpy here, and of jax where the program is run
_Pair = tuple[int, int]  # a microbatch and a virtual stage
_BUFFERS = ("stash", "inbox", "cotangents")


class Rows(NamedTuple):
    """One kind of tick, as int32 arrays [rounds, stages]."""

    on: _Array
    """Whether the stage does anything."""
    microbatch: _Array
    """The microbatch of the action; 0 where there is none."""
    chunk: _Array
    """The chunk of the action; 0 where there is none."""
    kept: _Array
    """The slot of the stash, which a forward writes and a backward reads."""
    taken: _Array
    """The slot of what has arrived: the activation for a forward, the cotangent for a backward."""
    arrives: _Array
    """The slot of a neighbour's message: the activation after a forward's round, the cotangent
    before a backward.
    """
    ends: _Array
    """Whether it is the first virtual stage's, where a forward begins and a backward ends: the
    embedding.
    """
    scores: _Array
    """Whether it is the last virtual stage's forward, which the loss follows."""
    cotangent: _Array
    """The slot for the cotangent that the loss gives back."""
    some_end: _Array
    """Whether `ends` holds for any stage, [rounds]."""
    some_score: _Array
    """Whether `scores` holds for any stage, [rounds]."""
    scored: _Array
    """The microbatch that is scored, [rounds]."""


class Segment(NamedTuple):
    """Rounds of the same kinds of ticks, which one scan runs: rows by kind, in the order of a
    round's ticks.
    """

    rounds: int
    ticks: dict[ActionKind, Rows]


class TickProgram(NamedTuple):
    """A table in the form in which it is run."""

    segments: tuple[Segment, ...]  # the scans, one after another
    stash: int  # depth of the buffer of inputs kept for a backward
    inbox: int  # of activations that have arrived
    cotangents: int  # of cotangents that have arrived


def program(table: Table, backward: bool = True) -> TickProgram:
    """The program of a valid table (`schedules.check`), or without `backward` that of its forward
    ticks alone.
    """
    kept = (
        [tick for tick in part if backward or _kind(tick) == "forward"] for part in table.rounds
    )
    rounds = [part for part in kept if part]
    fields = _actions(table, [tick for part in rounds for tick in part])
    depths = _assign_slots(table, rounds, fields)
    first = 0
    segments = list[Segment]()
    for kinds, equal in groupby(rounds, key=_kinds):
        count = len(list(equal))
        end = first + count * len(kinds)
        step = len(kinds)
        ticks: dict[ActionKind, Rows] = {
            kind: _rows(fields, slice(first + n, end, step)) for n, kind in enumerate(kinds)
        }
        segments.append(Segment(count, ticks))
        first = end
    return TickProgram(tuple(segments), **depths)


def _kinds(part: list[Tick]) -> list[ActionKind]:
    return [_kind(tick) for tick in part]


def _kind(tick: Tick) -> ActionKind:
    return next(action.kind for action in tick if action)


def _actions(table: Table, ticks: list[Tick]) -> dict[str, np.ndarray]:
    """Return the fields of `Rows` for each tick and stage, [ticks, stages] by name; slots are still
    zeros.
    """
    fields = {name: np.zeros((len(ticks), table.stages), np.int32) for name in Rows._fields[:-3]}
    for t, tick in enumerate(ticks):
        for s, action in enumerate(tick):
            if action is not None:
                place = action.chunk * table.stages + s
                fields["on"][t, s] = True
                fields["microbatch"][t, s] = action.microbatch
                fields["chunk"][t, s] = action.chunk
                fields["ends"][t, s] = place == 0
                fields["scores"][t, s] = (
                    action.kind == "forward" and place == table.stages * table.virtual - 1
                )
    return fields


def _rows(fields: dict[str, np.ndarray], ticks: slice) -> Rows:
    cut = {name: array[ticks] for name, array in fields.items()}
    ends = cut["ends"]
    scores = cut["scores"]
    return Rows(
        **cut,
        some_end=ends.any(1),
        some_score=scores.any(1),
        scored=np.sum(cut["microbatch"] * scores, 1),
    )


def _assign_slots(
    table: Table, rounds: list[list[Tick]], fields: dict[str, np.ndarray]
) -> dict[str, int]:
    """Write the slot of everything that is written and read into the fields of `Rows`, and return
    each buffer's depth.

    The rounds are gone through as they will run. A stage writes in every tick, into the lowest free
    slot; what it writes while it is idle, or what nobody waits for, holds no slot. What is held is
    known by its pair.
    """
    P = table.stages
    last = table.stages * table.virtual - 1
    backward = any(_kind(tick) == "backward" for part in rounds for tick in part)
    held: dict[str, list[list[_Pair | None]]] = {name: [[] for _ in range(P)] for name in _BUFFERS}

    def write(
        buffer: str,
        s: int,
        pair: _Pair | None,
        field: str,
        t: int,
    ) -> None:
        slots = held[buffer][s]
        if None in slots:
            slot = slots.index(None)
        else:
            slot = len(slots)
        slots[slot : slot + 1] = [pair]
        fields[field][t, s] = slot

    def read(
        buffer: str,
        s: int,
        pair: _Pair,
        field: str,
        t: int,
    ) -> None:
        slots = held[buffer][s]
        fields[field][t, s] = slot = slots.index(pair)
        slots[slot] = None

    def sent(pair: _Pair | None, by: int) -> _Pair | None:
        """What a stage's message is for its neighbour, one virtual stage further on or back."""
        if pair and 0 <= pair[1] + by <= last:
            return (pair[0], pair[1] + by)
        return None

    t = 0
    cotangents_of = list[_Pair | None]([None] * P)  # whose cotangents have been sent last
    for part in rounds:
        activations_of: tuple[int, list[_Pair | None]] | None = None
        for tick in part:
            pairs = [
                None if a is None else (a.microbatch, a.chunk * P + s) for s, a in enumerate(tick)
            ]
            for s, pair in enumerate(pairs):
                if _kind(tick) == "forward":
                    if pair and pair[1]:
                        read("inbox", s, pair, "taken", t)
                    write("stash", s, pair if backward else None, "kept", t)
                    write(
                        "cotangents",
                        s,
                        pair if backward and pair and pair[1] == last else None,
                        "cotangent",
                        t,
                    )
                else:  # a cotangent arrives before the tick
                    write(
                        "cotangents",
                        s,
                        sent(cotangents_of[(s + 1) % P], -1),
                        "arrives",
                        t,
                    )
                    if pair:
                        read("cotangents", s, pair, "taken", t)
                        read("stash", s, pair, "kept", t)
            if _kind(tick) == "forward":
                activations_of = t, pairs
            else:
                cotangents_of = pairs
            t += 1
        if activations_of is not None:  # they arrive after the round
            for s in range(P):
                write(
                    "inbox",
                    s,
                    sent(activations_of[1][s - 1], 1),
                    "arrives",
                    activations_of[0],
                )
    return {buffer: max(map(len, of_stages)) for buffer, of_stages in held.items()}
