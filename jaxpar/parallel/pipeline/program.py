"""A schedule's table as the executor runs it: scans over equal rounds, and for each tick which slot
of which buffer.

Slots are assigned ahead, as a compiler assigns registers: a buffer is as deep as the largest number
of slots in use together on any stage. What a stage writes while it is idle goes to a free slot.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from jaxpar.parallel.pipeline.schedule_table import ActionKind, Table, Tick

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
    """The slot of the message that is taken: the activation for a forward, the cotangent for a
    backward."""
    arrives: _Array
    """The slot of a neighbour's message: the activation after a forward's round, the cotangent
    before a backward.
    """
    ends: _Array
    """Whether the action is of the first virtual stage, where a forward begins and a backward ends:
    the embedding.
    """
    scores: _Array
    """Whether the action is a forward of the last virtual stage, which the loss follows."""
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
    """Turn a table into the rows that the stages' one program reads at each tick.

    Args:
      table: a valid table (`schedule_table.check_table`).
      backward: whether there are backward ticks; otherwise the program has forward ticks alone.

    Returns:
      The ticks, in segments of equal rounds, and the depths of the buffers.
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
    """Assign a slot to everything that is written and read, in the fields of `Rows`, and return
    each buffer's depth.
    """
    slots = _Slots(table, rounds, fields)
    t = 0
    for part in rounds:
        for tick in part:
            slots.run(tick, t)
            t += 1
        slots.end_round()
    return slots.depths()


class _Slots:
    """The slots of all buffers, as they are held while the rounds run.

    A stage writes in every tick, into the lowest free slot; what it writes while it is idle, or
    what nobody waits for, holds no slot. A slot that is held is known by its pair of microbatch and
    virtual stage.
    """

    def __init__(self, table: Table, rounds: list[list[Tick]], fields: dict[str, np.ndarray]):
        """Begin with all slots free.

        Args:
          rounds: the ticks of each round.
          fields: the fields of `Rows` [ticks, stages] by name, which `run` fills in.
        """
        stages = table.stages
        self.stages = stages
        self.last = stages * table.virtual - 1
        self.fields = fields
        self.backward = any(_kind(tick) == "backward" for part in rounds for tick in part)
        self.held: dict[str, list[list[_Pair | None]]] = {
            buffer: [[] for _ in range(stages)] for buffer in _BUFFERS
        }
        self.cotangents_of: list[_Pair | None] = [None] * stages
        """The pair whose cotangent was sent last, by stage."""
        self.activations_of: list[_Pair | None] | None = None
        """The pair whose activation was sent in this round, by stage; None = none was."""
        self.sent_in = 0
        """The tick in which the activations were sent."""

    def run(self, tick: Tick, t: int) -> None:
        """Assign the slots of tick number `t`."""
        pairs = [
            None if action is None else (action.microbatch, action.chunk * self.stages + s)
            for s, action in enumerate(tick)
        ]
        if _kind(tick) == "forward":
            for s, pair in enumerate(pairs):
                self._forward(s, pair, t)
            self.activations_of = pairs
            self.sent_in = t
        else:
            for s, pair in enumerate(pairs):
                self._backward(s, pair, t)
            self.cotangents_of = pairs

    def end_round(self) -> None:
        """Assign the slots of the activations, which arrive after their round."""
        if self.activations_of is None:
            return
        for s in range(self.stages):
            arrived = self._received(self.activations_of[s - 1], 1)
            self._write("inbox", s, arrived, "arrives", self.sent_in)
        self.activations_of = None

    def depths(self) -> dict[str, int]:
        """Return the largest number of slots of each buffer that any stage has used."""
        return {buffer: max(map(len, of_stages)) for buffer, of_stages in self.held.items()}

    def _forward(self, s: int, pair: _Pair | None, t: int) -> None:
        if pair and pair[1]:
            self._read("inbox", s, pair, "taken", t)
        if self.backward:
            kept = pair
        else:
            kept = None
        if kept and kept[1] == self.last:
            scored = kept
        else:
            scored = None
        self._write("stash", s, kept, "kept", t)
        self._write("cotangents", s, scored, "cotangent", t)

    def _backward(self, s: int, pair: _Pair | None, t: int) -> None:
        after = (s + 1) % self.stages
        arrived = self._received(self.cotangents_of[after], -1)  # before the tick
        self._write("cotangents", s, arrived, "arrives", t)
        if pair:
            self._read("cotangents", s, pair, "taken", t)
            self._read("stash", s, pair, "kept", t)

    def _received(self, pair: _Pair | None, by: int) -> _Pair | None:
        """Return the pair of a message at the neighbour that receives it, one virtual stage further
        on or back.
        """
        if pair and 0 <= pair[1] + by <= self.last:
            return (pair[0], pair[1] + by)
        return None

    def _write(self, buffer: str, s: int, pair: _Pair | None, field: str, t: int) -> None:
        slots = self.held[buffer][s]
        if None in slots:
            slot = slots.index(None)
        else:
            slot = len(slots)
        slots[slot : slot + 1] = [pair]
        self.fields[field][t, s] = slot

    def _read(self, buffer: str, s: int, pair: _Pair, field: str, t: int) -> None:
        slots = self.held[buffer][s]
        slot = slots.index(pair)
        slots[slot] = None
        self.fields[field][t, s] = slot
