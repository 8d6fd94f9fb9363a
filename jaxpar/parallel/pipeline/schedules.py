"""Pipeline schedules as data: they say which microbatch each stage works on in each tick.

One jitted program is the same on all stages, and no collective may stand in a branch that only some of them take. So
each tick is of one kind: in it all stages that are not idle run a forward, or all of them run a backward. GPipe, 1F1B,
interleaved and looped take as long as in the literature, where every stage runs its own program. 1F1B keeps up to 2P-1
inputs instead of P (as in "eager" 1F1B, Zhuang et al. 2022, arXiv:2211.05322).

There are P stages, M microbatches and v virtual stages per stage; virtual stage c P + s is chunk c of stage s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxpar.base.errors import UserError, suggest
from jaxpar.base.plan import Schedule

Kind = Literal["forward", "backward"]
"""`backward` = gradients of a virtual stage's input and of its weights."""


class Action(NamedTuple):
    """What a stage does in a tick, with which microbatch, and with which of its virtual stages."""

    kind: Kind
    microbatch: int
    chunk: int = 0


Tick = tuple[Action | None, ...]
"""What each stage does in a tick; None = it is idle."""


@dataclass(frozen=True)
class Table:
    """A schedule in full.

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


def schedule(name: Schedule, stages: int, microbatches: int, virtual: int = 1) -> Table:
    """Build the table of a schedule, in ticks of one kind.

    `gpipe` (Huang et al. 2018, arXiv:1811.06965) runs all forwards, then all backwards. `1f1b` (PipeDream-Flush,
    Narayanan et al. 2020, arXiv:2006.09503) runs a backward as soon as there is one. `interleaved` (Narayanan et al.
    2021, arXiv:2104.04473, section 2.2) is 1F1B through v chunks per stage, about P microbatches at a time. `looped`
    (breadth-first, Lamy-Poirier 2022, arXiv:2211.05953) is GPipe through v chunks per stage.

    Raises:
      UserError: there is no such schedule, a size is below 1, or the schedule cannot have so many virtual stages.
    """
    check_sizes(name, stages, microbatches, virtual)
    P, v, all_forwards_first = stages, virtual, name in ("gpipe", "looped")
    groups = [microbatches] if all_forwards_first else _groups(P, microbatches)
    at = _positions(P, groups, v)
    last = max(at.values())
    first_back = last + P if all_forwards_first else (v - 1) * max(P, *groups) + P - 1
    rounds: list[dict[Kind, list[Action | None]]] = [{} for _ in range(last + first_back + 2 * P)]

    def put(r: int, stage: int, action: Action) -> None:
        rounds[r].setdefault(action.kind, [None] * P)[stage] = action

    for (i, c), n in at.items():
        back = first_back + at[i, v - 1 - c] + P - 1
        for s in range(P):
            put(n + s, s, Action("forward", i, c))
            put(back - s, s, Action("backward", i, c))
    ordered = (tuple(tuple(ticks[kind]) for kind in get_args(Kind) if kind in ticks) for ticks in rounds)
    return Table(P, microbatches, v, tuple(filter(None, ordered)))


def check_sizes(name: Schedule, stages: int, microbatches: int, virtual: int) -> None:
    """Refuse the sizes that `schedule` refuses."""
    if name not in get_args(Schedule):
        raise UserError(f"no schedule {name!r}{suggest(name, get_args(Schedule))}: {', '.join(get_args(Schedule))}")
    if min(stages, microbatches, virtual) < 1:
        raise UserError(
            f"a pipeline has at least one stage, microbatch and virtual stage, found {stages}, {microbatches}, "
            f"{virtual}"
        )
    if virtual > 1 and name not in ("interleaved", "looped"):
        raise UserError(
            f"pipeline.schedule {name} has one virtual stage a stage, found pipeline.virtual={virtual}: try "
            "pipeline.schedule=interleaved, or pipeline.virtual=1"
        )


def _groups(P: int, M: int) -> list[int]:
    """Return how many microbatches go through all chunks together: P, or as few more as their number requires."""
    count = max(M // P, 1)
    return [M // count + (i < M % count) for i in range(count)]


def _positions(P: int, groups: list[int], v: int) -> dict[tuple[int, int], int]:
    """For each microbatch and chunk, return the round of its forward on stage 0; stage s follows s rounds later.

    A group goes through one chunk, then through the next. Backwards go the same way, starting from the last stage and
    the last chunk.
    """
    found, at, first = {}, 0, 0
    for size in groups:
        stride = max(P, size)  # a microbatch is back at the first stage after P ticks
        for c in range(v):
            for i in range(size):
                found[first + i, c] = at + c * stride + i
        at += v * stride if size < P else v * size
        first += size
    return found


def needs(action: Action, stage: int, stages: int, virtual: int) -> set[tuple[int, Action]]:
    """Return what must be done before an action of a stage, as pairs (stage, action)."""
    kind, i, c = action
    place, last = c * stages + stage, stages * virtual - 1

    def at(place: int, kind: Kind) -> tuple[int, Action]:
        return place % stages, Action(kind, i, place // stages)

    if kind == "forward":
        return {at(place - 1, kind)} if place else set()
    return {at(place, "forward")} | ({at(place + 1, kind)} if place < last else set())
