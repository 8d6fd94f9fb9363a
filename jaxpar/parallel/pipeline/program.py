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

_Array = Any  # of numpy here, of jax where it is run


class Rows(NamedTuple):
    """One kind of tick: int32 arrays [rounds, stages].

    Attributes:
      on: whether the stage does anything.
      microbatch, chunk: of the action, 0 where there is none.
      kept: slot of the stash: written by a forward, read by the others.
      taken: slot of what arrived: of the activation for a forward, of the cotangent for a backward.
      arrives: slot that a neighbour's message goes to: after the round of a forward the activation; before a backward
        the cotangent of the round before.
      ends: whether the action is the first virtual stage's: a forward begins with the embedding, a backward ends there.
      scores: whether the action is the last virtual stage's forward, which the loss follows.
      cotangent: slot for what the loss gives back.
      waits: slot of what a weight's gradient is made of: written by `input`, read by `weight`.
      some_end, some_score: [rounds], whether there is any such stage.
      scored: [rounds], with which microbatch.
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
    waits: _Array
    some_end: _Array
    some_score: _Array
    scored: _Array


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
    """The program of a valid table (`simulator.check`); without `backward` that of its forward ticks alone."""
    kept = ([tick for tick in part if backward or _kind(tick) == "forward"] for part in table.rounds)
    rounds = [part for part in kept if part]
    fields = _actions(table, [tick for part in rounds for tick in part])
    depths = {"stash": 0, "inbox": 0, "cotangents": 0, "waiting": 0}
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
    """What `Rows` has of each tick and stage, [ticks, stages] by name; slots are zeros yet."""
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
    """Something that one stage has in a buffer.

    Attributes:
      born, dead: the first moment and the last, in quarters of ticks.
      cells: fields of `Rows`, and ticks, that name its slot.
    """

    born: int
    dead: int
    cells: list[tuple[str, int]]


_READ, _MADE, _ENDED = 1, 2, 3
"""Quarters of a tick: first a cotangent arrives, then what the tick needs is read, then what it makes is written; after
a round's last tick an activation arrives."""


def _uses(table: Table, rounds: list[list[Tick]], s: int) -> dict[str, list[_Use]]:
    """What a stage has in each buffer, and when. It writes in every tick; what it writes while it is idle, or what
    nobody waits for, is gone at once."""
    P, v = table.stages, table.virtual
    at = {action: t for t, tick in enumerate(tick for part in rounds for tick in part) if (action := tick[s])}
    found: dict[str, list[_Use]] = {"stash": [], "inbox": [], "cotangents": [], "waiting": []}

    def use(buffer: str, born: int, written: tuple[str, int], field: str, readers: Iterable[Action]) -> None:
        read = [(field, at[action]) for action in readers if action in at]
        found[buffer].append(_Use(born, max([born, *(4 * t + _READ for _, t in read)]), [written, *read]))

    def of_unit(action: Action | None, *kinds: Kind) -> list[Action]:
        return [] if action is None else [action._replace(kind=kind) for kind in kinds]

    def after(action: Action | None, stage: int, by: int) -> list[Action]:
        """What goes on, one virtual stage further or before, with what another stage's action sends here."""
        place = -1 if action is None else action.chunk * P + stage + by
        return [action._replace(chunk=place // P)] if action is not None and 0 <= place < P * v else []

    first = 0
    before: Tick = (None,) * P  # the last tick whose cotangents have been sent
    for part in rounds:
        for t, tick in enumerate(part, first):
            kind, action = _kind(tick), tick[s]
            if kind == "forward":
                use("stash", 4 * t + _READ, ("kept", t), "kept", of_unit(action, "backward", "input", "weight"))
                arrival = 4 * (first + len(part) - 1) + _ENDED
                use("inbox", arrival, ("arrives", t), "taken", after(tick[s - 1], (s - 1) % P, 1))
                scored = action if action is not None and action.chunk * P + s == P * v - 1 else None
                use("cotangents", 4 * t + _MADE, ("cotangent", t), "taken", of_unit(scored, "backward", "input"))
            if kind in ("backward", "input"):
                use("cotangents", 4 * t, ("arrives", t), "taken", after(before[(s + 1) % P], (s + 1) % P, -1))
                before = tick
            if kind == "input":
                use("waiting", 4 * t + _MADE, ("waits", t), "waits", of_unit(action, "weight"))
        first += len(part)
    return found


def _assign_slots(uses: list[_Use], s: int, fields: dict[str, np.ndarray]) -> int:
    """Write the slot of each use into its cells; returns how many slots there are.

    Each use, in the order of their first moments, has the lowest slot that is free: of intervals this needs no more
    slots than are in use together at some moment.
    """
    busy: list[int] = []
    for born, dead, cells in sorted(uses):
        slot = next((n for n, until in enumerate(busy) if until < born), len(busy))
        busy[slot : slot + 1] = [dead]
        for field, t in cells:
            fields[field][t, s] = slot
    return len(busy)
