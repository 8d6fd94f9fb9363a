"""A schedule's table as the executor runs it: scans over equal rounds, and for each tick which slot of which buffer.

Slots are given out ahead, as a compiler gives out registers: a buffer is as deep as the most that are in use together
on any stage. What a stage writes while it is idle goes to a slot that nothing is in.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from jaxpar.parallel.pipeline.schedules import Action, Kind, Table, Tick

_Array = Any  # an array of numpy here, and of jax where the program is run


class Rows(NamedTuple):
    """One kind of tick, as int32 arrays [rounds, stages].

    Attributes:
      on: whether the stage does anything.
      microbatch, chunk: those of the action; 0 where there is none.
      kept: the slot of the stash, which a forward writes and a backward reads.
      taken: the slot of what has arrived: the activation for a forward, the cotangent for a backward.
      arrives: the slot that a neighbour's message goes to: the activation after the round of a forward, or before a
        backward the cotangent of the round before.
      ends: whether the action is the first virtual stage's; there a forward begins with the embedding and a backward
        ends with it.
      scores: whether the action is the last virtual stage's forward, which the loss follows.
      cotangent: the slot for the cotangent that the loss gives back.
      some_end, some_score: [rounds], whether there is any such stage.
      scored: [rounds], the microbatch that is scored.
    """

    on: _Array
    microbatch: _Array
    chunk: _Array
    kept: _Array
    taken: _Array
    arrives: _Array
    ends: _Array
    scores: _Array
    cotangent: _Array
    some_end: _Array
    some_score: _Array
    scored: _Array


class Segment(NamedTuple):
    """Rounds of the same kinds of ticks, which one scan runs: rows by kind, in the order of a round's ticks."""

    rounds: int
    ticks: dict[Kind, Rows]


class TickProgram(NamedTuple):
    """A table in the form in which it is run.

    Attributes:
      segments: the scans, one after another.
      stash, inbox, cotangents: depths of the buffers, which hold inputs kept for a backward, activations that have
        arrived, and cotangents that have arrived.
    """

    segments: tuple[Segment, ...]
    stash: int
    inbox: int
    cotangents: int


def program(table: Table, backward: bool = True) -> TickProgram:
    """The program of a valid table (`simulator.check`), or without `backward` that of its forward ticks alone."""
    kept = ([tick for tick in part if backward or _kind(tick) == "forward"] for part in table.rounds)
    rounds = [part for part in kept if part]
    fields = _actions(table, [tick for part in rounds for tick in part])
    depths = {"stash": 0, "inbox": 0, "cotangents": 0}
    for s in range(table.stages):
        for buffer, uses in _uses(table, rounds, s).items():
            depths[buffer] = max(depths[buffer], _assign_slots(uses, s, fields))
    first, segments = 0, list[Segment]()
    for kinds, equal in groupby(rounds, key=_kinds):
        count = len(list(equal))
        end, step = first + count * len(kinds), len(kinds)
        ticks: dict[Kind, Rows] = {kind: _rows(fields, slice(first + n, end, step)) for n, kind in enumerate(kinds)}
        segments.append(Segment(count, ticks))
        first = end
    return TickProgram(tuple(segments), **depths)


def _kinds(part: list[Tick]) -> list[Kind]:
    return [_kind(tick) for tick in part]


def _kind(tick: Tick) -> Kind:
    return next(action.kind for action in tick if action)


def _actions(table: Table, ticks: list[Tick]) -> dict[str, np.ndarray]:
    """Return the fields of `Rows` for each tick and stage, [ticks, stages] by name; slots are still zeros."""
    fields = {name: np.zeros((len(ticks), table.stages), np.int32) for name in Rows._fields[:-3]}
    for t, tick in enumerate(ticks):
        for s, action in enumerate(tick):
            if action is not None:
                place = action.chunk * table.stages + s
                fields["on"][t, s] = True
                fields["microbatch"][t, s], fields["chunk"][t, s] = action.microbatch, action.chunk
                fields["ends"][t, s] = place == 0
                fields["scores"][t, s] = action.kind == "forward" and place == table.stages * table.virtual - 1
    return fields


def _rows(fields: dict[str, np.ndarray], ticks: slice) -> Rows:
    cut = {name: array[ticks] for name, array in fields.items()}
    ends, scores = cut["ends"], cut["scores"]
    return Rows(**cut, some_end=ends.any(1), some_score=scores.any(1), scored=np.sum(cut["microbatch"] * scores, 1))


class _Use(NamedTuple):
    """One use of a buffer by a stage.

    Attributes:
      born, dead: its first and last moment, in quarters of ticks.
      cells: the fields of `Rows`, with their ticks, that name its slot.
    """

    born: int
    dead: int
    cells: list[tuple[str, int]]


_READ, _MADE, _ENDED = 1, 2, 3
"""Quarters of a tick: first a cotangent arrives, then what the tick needs is read, then its results are written; after
a round's last tick an activation arrives."""


def _uses(table: Table, rounds: list[list[Tick]], s: int) -> dict[str, list[_Use]]:
    """Return what a stage has in each buffer, and when. It writes in every tick; what it writes while it is idle, or
    what nobody waits for, is gone at once."""
    P, v = table.stages, table.virtual
    at = {action: t for t, tick in enumerate(tick for part in rounds for tick in part) if (action := tick[s])}
    found: dict[str, list[_Use]] = {"stash": [], "inbox": [], "cotangents": []}

    def use(buffer: str, born: int, written: tuple[str, int], field: str, readers: Iterable[Action]) -> None:
        read = [(field, at[action]) for action in readers if action in at]
        found[buffer].append(_Use(born, max([born, *(4 * t + _READ for _, t in read)]), [written, *read]))

    def of_unit(action: Action | None) -> list[Action]:
        return [] if action is None else [action._replace(kind="backward")]

    def after(action: Action | None, stage: int, by: int) -> list[Action]:
        """Return the actions one virtual stage further on or back that use what another stage's action sends here."""
        place = -1 if action is None else action.chunk * P + stage + by
        return [action._replace(chunk=place // P)] if action is not None and 0 <= place < P * v else []

    first = 0
    before: Tick = (None,) * P  # the last tick whose cotangents have been sent
    for part in rounds:
        for t, tick in enumerate(part, first):
            kind, action = _kind(tick), tick[s]
            if kind == "forward":
                use("stash", 4 * t + _READ, ("kept", t), "kept", of_unit(action))
                arrival = 4 * (first + len(part) - 1) + _ENDED
                use("inbox", arrival, ("arrives", t), "taken", after(tick[s - 1], (s - 1) % P, 1))
                scored = action if action is not None and action.chunk * P + s == P * v - 1 else None
                use("cotangents", 4 * t + _MADE, ("cotangent", t), "taken", of_unit(scored))
            else:
                use("cotangents", 4 * t, ("arrives", t), "taken", after(before[(s + 1) % P], (s + 1) % P, -1))
                before = tick
        first += len(part)
    return found


def _assign_slots(uses: list[_Use], s: int, fields: dict[str, np.ndarray]) -> int:
    """Write the slot of each use into its cells, and return how many slots there are.

    Uses are taken in the order of their first moments, and each gets the lowest free slot. For intervals this needs no
    more slots than are in use together at some moment.
    """
    busy: list[int] = []
    for born, dead, cells in sorted(uses):
        slot = next((n for n, until in enumerate(busy) if until < born), len(busy))
        busy[slot : slot + 1] = [dead]
        for field, t in cells:
            fields[field][t, s] = slot
    return len(busy)
