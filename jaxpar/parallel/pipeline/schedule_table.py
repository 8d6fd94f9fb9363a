"""A pipeline schedule as data: which microbatch each stage works on in each tick; proved valid, and
timed.

One jitted program is the same on all stages, and no collective may stand in a branch that only some
of them take. So each tick is of one kind: in it all stages that are not idle run a forward, or all
of them run a backward.

There are P stages, M microbatches and v virtual stages per stage; virtual stage c P + s is chunk c
of stage s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from jaxpar.base.errors import UserError

ActionKind = Literal["forward", "backward"]
"""The kind of an action: `backward` computes the gradients of a virtual stage's input and of its
weights."""


class Action(NamedTuple):
    """The work of a stage in a tick: a forward or a backward of a microbatch, through one of the
    stage's chunks.
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0


Tick = tuple[Action | None, ...]
"""The action of each stage in a tick; None = the stage is idle."""
StageAction = tuple[int, Action]
"""A stage and its action."""


@dataclass(frozen=True)
class Table:
    """A schedule with every action of every stage.

    Attributes:
      stages, microbatches, virtual: P, M, v.
      rounds: groups of ticks that repeat, such as a forward tick and a backward tick.
    """

    stages: int
    microbatches: int
    virtual: int
    rounds: tuple[tuple[Tick, ...], ...]

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """All ticks, one after another."""
        return tuple(tick for part in self.rounds for tick in part)


def needs(
    action: Action,
    stage: int,
    stages: int,
    virtual: int,
) -> set[StageAction]:
    """Find the actions that must be done before an action of a stage, each with its stage.

    Args:
      stage: the number of the stage that does it.
      virtual: the number of virtual stages of each stage.
    """
    kind, i, c = action
    place = c * stages + stage
    last = stages * virtual - 1

    def at(place: int, kind: ActionKind) -> StageAction:
        return place % stages, Action(kind, i, place // stages)

    if kind == "forward":
        return {at(place - 1, kind)} if place else set()
    return {at(place, "forward")} | ({at(place + 1, kind)} if place < last else set())


def check_table(table: Table) -> None:
    """Check that a table is valid.

    Every microbatch must go through every virtual stage once, forward and backward, and everything
    that an action needs must be done in an earlier tick. Every tick must be of one kind, and a
    round may have only one tick of a kind.

    Raises:
      UserError: the table is not valid; the message names the tick, the stage and the action.
    """
    P = table.stages
    M = table.microbatches
    v = table.virtual
    kinds: tuple[ActionKind, ...] = get_args(ActionKind)
    units = [(s, Action(kind, i, c)) for s, i, c in np.ndindex(P, M, v) for kind in kinds]
    known = set(units)
    when = dict[StageAction, int]()
    for t, tick in enumerate(table.ticks):
        if len(tick) != P:
            raise UserError(f"tick {t} has {len(tick)} stages, not {P}")
        for s, action in _busy(tick):
            here = f"tick {t}, stage {s}: {_text(action)}"
            if (s, action) in when:
                raise UserError(f"{here}: done before, in tick {when[s, action]}")
            if (s, action) not in known:
                sizes = f"microbatches 0 to {M - 1} and chunks 0 to {v - 1}"
                raise UserError(f"{here}: this table has {', '.join(kinds)} of {sizes}")
            when[s, action] = t
    for (s, action), t in when.items():
        for stage, needed in sorted(needs(action, s, P, v)):
            if (at := when.get((stage, needed))) is None or at >= t:
                if at is None:
                    found = "is never done"
                else:
                    found = f"is done in tick {at}"
                here = f"tick {t}, stage {s}: {_text(action)}"
                raise UserError(f"{here} needs {_text(needed)} of stage {stage}: {found}")
    for s, action in units:
        if (s, action) not in when:
            raise UserError(
                f"tick {len(table.ticks) - 1}, stage {s}: the end, and {_text(action)} is never "
                "done"
            )
    for r, part in enumerate(table.rounds):
        of_ticks = [
            " and ".join(sorted({action.kind for _, action in _busy(tick)})) for tick in part
        ]
        if not set(of_ticks) <= set(kinds) or len(set(of_ticks)) < len(of_ticks):
            found = ", ".join(kind or "nothing" for kind in of_ticks)
            raise UserError(
                f"round {r} has ticks of {found}: each is of one kind on all stages, no two of "
                "the same"
            )


class Times(NamedTuple):
    """The times of a forward and a backward of one virtual stage, and of sending an activation or a
    cotangent to a neighbour, in seconds or any other unit."""

    forward: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0

    def of(self, kind: ActionKind) -> float:
        """Return the time of an action of this kind."""
        return getattr(self, kind)

    def chunk(self, virtual: int) -> Times:
        """Turn the times of a whole stage into the times of one of its `virtual` chunks, which
        sends as much as a stage.
        """
        return Times(self.forward / virtual, self.backward / virtual, self.transfer)


UNIT = Times()


class Simulation(NamedTuple):
    """The time and the memory that a schedule takes, as `simulate_schedule` finds them."""

    makespan: float
    """The time from the first start to the last end."""
    bubble: float
    """The idle share of all stages' time."""
    starts: tuple[float, ...]
    """When each tick starts."""
    stash: tuple[int, ...]
    """The most inputs that each stage keeps at a time, from a forward's start to its backward's
    end.
    """


def simulate_schedule(table: Table, times: Times = UNIT) -> Simulation:
    """Simulate the time and the memory of a table, in plain Python.

    A tick begins when the one before has ended on all stages and all that its actions need has
    arrived, as in one jitted program. A transfer begins when the action that makes its contents
    ends, and overlaps with what the stages do meanwhile. A stage sends nothing to itself (P = 1).

    Args:
      times: the times of one action of one virtual stage, in any unit.

    Returns:
      The times in the same unit, the idle share, and the largest number of inputs that each stage
      keeps.

    Raises:
      UserError: the table is not valid, as `check_table` says.
    """
    check_table(table)
    P = table.stages
    ends = dict[StageAction, float]()
    starts = []
    now = 0.0
    busy = 0.0
    kept = [0] * P
    most = [0] * P
    for tick in table.ticks:
        needed = [
            (there, s) for s, action in _busy(tick) for there in needs(action, s, P, table.virtual)
        ]
        arrivals = [ends[there] + (times.transfer if there[0] != s else 0.0) for there, s in needed]
        starts.append(max([now, *arrivals]))
        for s, action in _busy(tick):
            ends[s, action] = now = starts[-1] + times.of(action.kind)
            busy += times.of(action.kind)
            kept[s] += 1 if action.kind == "forward" else -1
            most[s] = max(most[s], kept[s])
    return Simulation(
        now,
        1 - busy / (P * now) if now else 0.0,
        tuple(starts),
        tuple(most),
    )


def _busy(tick: Tick) -> Iterator[StageAction]:
    return ((s, action) for s, action in enumerate(tick) if action is not None)


def _text(action: Action) -> str:
    return f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk}"
