"""What a pipeline schedule costs: a checker of its table, and a simulator of its time, idle share, memory, transfers.

Plain Python on the table alone: no model, no devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np

from jaxpar.base.plan import Schedule
from jaxpar.parallel.pipeline.schedules import Action, Kind, Table, needs, own_programs, schedule


class Times(NamedTuple):
    """How long an action of one virtual stage takes, in seconds or any other unit.

    Attributes:
      forward: a forward.
      backward: a whole backward; of the two halves `input` takes this less `weight`.
      weight: the part of it that makes the weights' gradients.
      transfer: an activation or a cotangent to a neighbour.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """The time of an action of this kind."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "input": self.backward - self.weight,
            "weight": self.weight,
        }[kind]

    def chunk(self, virtual: int) -> Times:
        """Where these are a stage's: those of one of its `virtual` chunks, which sends as much as a whole stage."""
        return Times(self.forward / virtual, self.backward / virtual, self.weight / virtual, self.transfer)


UNIT = Times()


class Simulation(NamedTuple):
    """What `simulate` found.

    Attributes:
      makespan: from the first start to the last end.
      busy: time that each stage computes.
      bubble: idle share of all stages' time.
      starts: float[tick, stage], when an action starts; nan where the stage is idle.
      stash: the most inputs that each stage keeps at a time, each from the start of its forward to the end of its
        backward, or of its weights' gradient where that waits.
      stash_over_time: int[tick, stage], inputs kept during a tick.
      waiting: the most weights' gradients that wait at each stage, of inputs whose own gradient is made.
      arrived: the most activations and cotangents that lie at each stage during a tick, made in an earlier one and used
        in a later one: receive buffers, which `stash` does not count.
      forwards, backwards: activations and cotangents sent from one stage to another.
    """

    makespan: float
    busy: tuple[float, ...]
    bubble: float
    starts: np.ndarray
    stash: tuple[int, ...]
    stash_over_time: np.ndarray
    waiting: tuple[int, ...]
    arrived: tuple[int, ...]
    forwards: int
    backwards: int


Place = tuple[int, Action]
"""A stage, and what it does."""


def check(table: Table) -> None:
    """Prove a table valid.

    Every microbatch goes through every virtual stage once, forward and backward (or input and weight, not both forms),
    and everything an action needs (`schedules.needs`) is done in an earlier tick. That a stage does one thing a tick
    follows from the form of a tick.

    Args:
      table: any table.

    Raises:
      ValueError: it is not valid; names the tick, the stage and the action.
    """
    P, M, v = table.stages, table.microbatches, table.virtual
    when: dict[Place, int] = {}
    for t, tick in enumerate(table.ticks):
        if len(tick) != P:
            raise ValueError(f"tick {t} has {len(tick)} stages, not {P}")
        for s, action in _busy(tick):
            wrong = ""
            if action.kind not in get_args(Kind):
                wrong = f"no such kind, {', '.join(get_args(Kind))} are"
            elif not 0 <= action.microbatch < M:
                wrong = f"microbatches are 0 to {M - 1}"
            elif not 0 <= action.chunk < v:
                wrong = f"chunks are 0 to {v - 1}"
            elif (s, action) in when:
                wrong = f"done before, in tick {when[s, action]}"
            if wrong:
                raise ValueError(f"tick {t}, stage {s}: {_text(action)}: {wrong}")
            when[s, action] = t
    _check_order(when, P, v)
    _check_whole(when, P, M, v)


def _check_order(when: dict[Place, int], P: int, v: int) -> None:
    for (s, action), t in when.items():
        for stage, needed in sorted(needs(action, s, P, v)):
            at = when.get((stage, needed))
            if at is None or at >= t:
                found = "is never done" if at is None else f"is done in tick {at}"
                here = f"tick {t}, stage {s}: {_text(action)}"
                raise ValueError(f"{here} needs {_text(needed)} of stage {stage}: {found}")


def _check_whole(when: dict[Place, int], P: int, M: int, v: int) -> None:
    end = max(when.values(), default=-1)
    for s, i, c in np.ndindex(P, M, v):
        done = {kind: when[s, Action(kind, i, c)] for kind in get_args(Kind) if (s, Action(kind, i, c)) in when}
        if "backward" in done and ("input" in done or "weight" in done):
            t = done["backward"]
            raise ValueError(f"tick {t}, stage {s}: {_text(Action('backward', i, c))}: also done as input or weight")
        halves = "input" in done or "weight" in done
        wanted: tuple[Kind, ...] = ("forward", "input", "weight") if halves else ("forward", "backward")
        for kind in wanted:
            if kind not in done:
                raise ValueError(f"tick {end}, stage {s}: the end, and {_text(Action(kind, i, c))} is never done")


def simulate_schedule(table: Table, times: Times = UNIT, lockstep: bool = True) -> Simulation:
    """The time, memory and traffic of a table.

    A transfer begins when the action that makes its contents ends, and overlaps with what the stages do meanwhile. A
    stage sends nothing to itself (P = 1).

    Args:
      table: what the stages do.
      times: of one action of one virtual stage.
      lockstep: a tick begins when the one before has ended on all stages and all that its actions need has arrived, as
        in one jitted program. Otherwise each stage goes through its own column, an action as soon as the one before
        has ended and all it needs has arrived, as in a program per stage.

    Raises:
      ValueError: the table is not valid, as `check` says.
    """
    check(table)
    ticks, P, v = table.ticks, table.stages, table.virtual
    starts = np.full((len(ticks), P), np.nan)
    ends: dict[Place, float] = {}
    free, busy = [0.0] * P, [0.0] * P

    def arrives(needed: Place, stage: int) -> float:
        return ends[needed] + (times.transfer if needed[0] != stage else 0.0)

    for t, tick in enumerate(ticks):
        ready = {s: max([free[s], *(arrives(n, s) for n in needs(a, s, P, v))]) for s, a in _busy(tick)}
        begin = max(ready.values(), default=0.0)
        for s, action in _busy(tick):
            starts[t, s] = begin if lockstep else ready[s]
            ends[s, action] = free[s] = float(starts[t, s]) + times.of(action.kind)
            busy[s] += times.of(action.kind)
        if lockstep:
            free = [max(free)] * P
    makespan = max(ends.values(), default=0.0)
    whole = P * makespan
    kept, waiting, arrived, sent = _buffers(table)
    return Simulation(
        makespan, tuple(busy), (whole - sum(busy)) / whole if whole else 0.0, starts,
        _most(kept), kept, _most(waiting), _most(arrived), *sent,
    )  # fmt: skip


def _buffers(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
    """By tick and stage: inputs kept, weights' gradients that wait, what has arrived. And what is sent, both ways.

    No clock is asked: a stage goes through its column in the same order however long its actions take.
    """
    ticks, P, v = table.ticks, table.stages, table.virtual
    when = {(s, action): t for t, tick in enumerate(ticks) for s, action in _busy(tick)}
    steps = np.zeros((3, len(ticks) + 1, P), int)  # how many more there are than in the tick before
    sent = [0, 0]

    def keep(what: int, stage: int, first: int, end: int) -> None:
        steps[what, first, stage] += 1
        steps[what, end, stage] -= 1

    for (s, action), t in when.items():
        done = [when.get((s, action._replace(kind=kind)), -1) for kind in ("backward", "weight")]
        if action.kind == "forward":
            keep(0, s, t, max(done) + 1)
        elif action.kind == "input":
            keep(1, s, t, max(done) + 1)
        for stage, needed in needs(action, s, P, v):
            if needed.kind == action.kind:  # from the virtual stage before, or of a cotangent the one after
                keep(2, s, when[stage, needed] + 1, t)
                sent[action.kind != "forward"] += stage != s
    kept, waiting, arrived = steps.cumsum(axis=1)[:, :-1]
    return kept, waiting, arrived, (sent[0], sent[1])


def _busy(tick: tuple[Action | None, ...]) -> Iterator[Place]:
    return ((s, action) for s, action in enumerate(tick) if action is not None)


def _most(counts: np.ndarray) -> tuple[int, ...]:
    return tuple(int(n) for n in counts.max(axis=0, initial=0))


def _text(action: Action) -> str:
    return f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk}"


class Compared(NamedTuple):
    """A row of `compare`.

    Attributes:
      schedule, virtual: which one.
      programs: `one` = all stages in one jitted program, ticks of one kind; `own` = each stage runs its own.
      ticks: of its table.
      makespan, bubble: as of a `Simulation`.
      stash: the most inputs that a stage keeps, of all stages.
      sent: activations and cotangents that go from one stage to another.
    """

    schedule: Schedule
    virtual: int
    programs: Literal["one", "own"]
    ticks: int
    makespan: float
    bubble: float
    stash: int
    sent: int


def rank_schedules(stages: int, microbatches: int, virtual: int = 1, times: Times = UNIT) -> list[Compared]:
    """Every schedule for the same stages and microbatches, and for 1F1B and ZB-H1 also a program per stage.

    Args:
      stages: P.
      microbatches: M.
      virtual: chunks of a stage, where a schedule takes them; with 1 those schedules are as others, and left out.
      times: of a whole stage, however many chunks it has.

    Raises:
      UserError: sizes below 1.
    """

    def row(name: Schedule, v: int, table: Table, programs: Literal["one", "own"]) -> Compared:
        found = simulate_schedule(table, times.chunk(v), lockstep=programs == "one")
        sent = found.forwards + found.backwards
        return Compared(name, v, programs, len(table.ticks), found.makespan, found.bubble, max(found.stash), sent)

    rows = []
    for name in get_args(Schedule):
        takes_chunks = name in ("interleaved", "looped")
        if takes_chunks and virtual == 1:
            continue
        v = virtual if takes_chunks else 1
        rows.append(row(name, v, schedule(name, stages, microbatches, v), "one"))
        if name in ("1f1b", "zb_h1"):
            rows.append(row(name, 1, own_programs(name, stages, microbatches), "own"))
    return rows
