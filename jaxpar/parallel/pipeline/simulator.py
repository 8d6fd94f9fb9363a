"""Whether a schedule's table is valid, how long it takes, how much of that time is idle, and what a stage keeps.

It is plain Python on the table alone, without a model or devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_args

import numpy as np

from jaxpar.base.errors import UserError
from jaxpar.parallel.pipeline.schedules import Action, Kind, Table, Tick, needs

Place = tuple[int, Action]
"""A stage and its action."""


class Times(NamedTuple):
    """How long an action of one virtual stage takes, in seconds or any other unit.

    Attributes:
      forward: a forward.
      backward: a backward.
      transfer: sending an activation or a cotangent to a neighbour.
    """

    forward: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Return the time of an action of this kind."""
        return getattr(self, kind)

    def chunk(self, virtual: int) -> Times:
        """Turn a whole stage's times into those of one of its `virtual` chunks, which sends as much."""
        return Times(self.forward / virtual, self.backward / virtual, self.transfer)


UNIT = Times()


class Simulation(NamedTuple):
    """What `simulate_schedule` found.

    Attributes:
      makespan: time from the first start to the last end.
      bubble: the idle share of all stages' time.
      starts: when each tick starts.
      stash: the most inputs that each stage keeps at a time. It keeps an input from the start of its forward to the end
        of its backward.
    """

    makespan: float
    bubble: float
    starts: tuple[float, ...]
    stash: tuple[int, ...]


def check(table: Table) -> None:
    """Check that a table is valid.

    Every microbatch must go through every virtual stage once, forward and backward, and everything an action needs
    (`schedules.needs`) must be done in an earlier tick. Every tick must be of one kind, and a round may have only one
    tick of a kind. The form of a tick ensures that a stage does one thing per tick.

    Raises:
      UserError: the table is not valid; the message names the tick, the stage and the action.
    """
    P, M, v = table.stages, table.microbatches, table.virtual
    kinds: tuple[Kind, ...] = get_args(Kind)
    units = [(s, Action(kind, i, c)) for s, i, c in np.ndindex(P, M, v) for kind in kinds]
    known, when = set(units), dict[Place, int]()
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
            at = when.get((stage, needed))
            if at is None or at >= t:
                found = "is never done" if at is None else f"is done in tick {at}"
                here = f"tick {t}, stage {s}: {_text(action)}"
                raise UserError(f"{here} needs {_text(needed)} of stage {stage}: {found}")
    for s, action in units:
        if (s, action) not in when:
            raise UserError(f"tick {len(table.ticks) - 1}, stage {s}: the end, and {_text(action)} is never done")
    _check_kinds(table)


def _check_kinds(table: Table) -> None:
    for r, part in enumerate(table.rounds):
        kinds = [" and ".join(sorted({action.kind for _, action in _busy(tick)})) for tick in part]
        if not set(kinds) <= set(get_args(Kind)) or len(set(kinds)) < len(kinds):
            found = ", ".join(kind or "nothing" for kind in kinds)
            raise UserError(f"round {r} has ticks of {found}: each is of one kind on all stages, no two of the same")


def simulate_schedule(table: Table, times: Times = UNIT) -> Simulation:
    """Simulate the time and the memory of a table.

    A tick begins when the one before has ended on all stages and all that its actions need has arrived, as in one
    jitted program. A transfer begins when the action that makes its contents ends, and overlaps with what the stages do
    meanwhile. A stage sends nothing to itself (P = 1). `times` are those of one action of one virtual stage.

    Raises:
      UserError: the table is not valid, as `check` says.
    """
    check(table)
    P, v = table.stages, table.virtual
    ends: dict[Place, float] = {}
    starts, now, busy = [], 0.0, 0.0
    for tick in table.ticks:
        needed = [(there, s) for s, action in _busy(tick) for there in needs(action, s, P, v)]
        arrivals = [ends[there] + (times.transfer if there[0] != s else 0.0) for there, s in needed]
        starts.append(max([now, *arrivals]))
        for s, action in _busy(tick):
            ends[s, action] = now = starts[-1] + times.of(action.kind)
            busy += times.of(action.kind)
    return Simulation(now, 1 - busy / (P * now) if now else 0.0, tuple(starts), _stash(table))


def _stash(table: Table) -> tuple[int, ...]:
    """Return the most inputs that each stage keeps at a time."""
    kept, most = [0] * table.stages, [0] * table.stages
    for tick in table.ticks:
        for s, action in _busy(tick):
            kept[s] += 1 if action.kind == "forward" else -1
            most[s] = max(most[s], kept[s])
    return tuple(most)


def _busy(tick: Tick) -> Iterator[Place]:
    return ((s, action) for s, action in enumerate(tick) if action is not None)


def _text(action: Action) -> str:
    return f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk}"
