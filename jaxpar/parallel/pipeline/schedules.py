"""Pipeline schedules as data: which microbatch each stage works on in each tick.

One jitted program is the same on all stages, and there is no collective in a branch that only some of them take. So
the tables made here have ticks of one kind: in a tick every stage runs a forward, or every stage a backward, or is
idle. That costs nothing where a forward meets a forward anyway: GPipe, 1F1B, interleaved and looped take as long as
when every stage runs a program of its own. 1F1B then keeps up to 2P-1 inputs and not P (as in "eager" 1F1B, Zhuang et
al. 2022, arXiv:2211.05322), and of ZB-H1's saving (P-1)W of 2(P-1)W is left.

`own_programs` gives 1F1B and ZB-H1 as they are in the literature, to compare with.

P stages, M microbatches, v virtual stages of a stage: virtual stage c P + s is chunk c of stage s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxpar.base.errors import UserError, nearest
from jaxpar.base.plan import Schedule

Kind = Literal["forward", "backward", "input", "weight"]
"""`backward` = gradients of a virtual stage's input and of its weights; `input` and `weight` = one of the two."""


class Action(NamedTuple):
    """What a stage does in a tick, with which microbatch, and with which of its virtual stages."""

    kind: Kind
    microbatch: int
    chunk: int = 0


Tick = tuple[Action | None, ...]
"""What each stage does; None = idle."""


@dataclass(frozen=True)
class Table:
    """A schedule.

    Attributes:
      stages, microbatches, virtual: P, M, v.
      rounds: ticks in groups that repeat, such as a forward tick and a backward tick.
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
    """The table of a schedule, in ticks of one kind.

    `gpipe` (Huang et al. 2018, arXiv:1811.06965): all forwards, then all backwards. `1f1b` (PipeDream-Flush, Narayanan
    et al. 2020, arXiv:2006.09503): a backward as soon as there is one. `interleaved` (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2): 1F1B through v chunks a stage, some P microbatches at a time. `looped`
    (breadth-first, Lamy-Poirier 2022, arXiv:2211.05953): GPipe through v chunks a stage. `zb_h1` (Qi et al. 2023,
    arXiv:2401.10241): 1F1B whose weight gradients wait, so that input gradients are passed on earlier.

    Args:
      name: one of these.
      stages: P, at least 1.
      microbatches: M, at least 1.
      virtual: v; 1 but for `interleaved` and `looped`.

    Raises:
      UserError: no such schedule, sizes below 1, or virtual stages that it cannot have.
    """
    check_sizes(name, stages, microbatches, virtual)
    return _SCHEDULES[name](stages, microbatches, virtual)


def check_sizes(name: Schedule, stages: int, microbatches: int, virtual: int) -> None:
    """Refuse what `schedule` refuses."""
    if name not in get_args(Schedule):
        raise UserError(f"no schedule {name!r}{nearest(name, get_args(Schedule))}: {', '.join(get_args(Schedule))}")
    if min(stages, microbatches, virtual) < 1:
        raise UserError(
            f"a pipeline has at least one stage, microbatch and virtual stage, found {stages}, {microbatches}, "
            f"{virtual}"
        )
    if virtual > 1 and name not in ("interleaved", "looped"):
        raise UserError(
            f"pipeline.schedule {name} has one virtual stage a stage, found pipeline.virtual={virtual}: try "
            "--pipeline.schedule interleaved, or --pipeline.virtual 1"
        )


def _gpipe(P: int, M: int, v: int) -> Table:
    return _uniform(P, M, v, [M], max(_position(P, [M], v).values()) + P, split=False)


def _one_f_one_b(P: int, M: int, v: int) -> Table:
    groups = _groups(P, M)
    return _uniform(P, M, v, groups, (v - 1) * max(P, *groups) + P - 1, split=False)


def _zb_h1(P: int, M: int, v: int) -> Table:
    return _uniform(P, M, v, [M], P - 1, split=True)


_SCHEDULES: dict[str, Callable[[int, int, int], Table]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _one_f_one_b,
    "looped": _gpipe,
    "zb_h1": _zb_h1,
}


def _groups(P: int, M: int) -> list[int]:
    """Microbatches that go through all chunks together: P, or as little more as their number asks for."""
    count = max(M // P, 1)
    return [M // count + (i < M % count) for i in range(count)]


def _position(P: int, groups: list[int], v: int) -> dict[tuple[int, int], int]:
    """The forward ticks (of stage 0) of microbatches and chunks: a group goes through a chunk, then the next chunk."""
    found, at, first = {}, 0, 0
    for size in groups:
        stride = max(P, size)  # a microbatch is back at the first stage after P ticks
        for c in range(v):
            for i in range(size):
                found[first + i, c] = at + c * stride + i
        at += v * stride if size < P else v * size
        first += size
    return found


def _uniform(P: int, M: int, v: int, groups: list[int], first: int, split: bool) -> Table:
    """Forward of unit n at stage s in round n + s; its backward from the last stage on, `first` rounds after the first
    forward; its weights' gradients, where they wait, when the first stage is done: in one round for all stages.
    """
    at = _position(P, groups, v)
    span = max(at.values()) + P + first
    ticks: list[dict[str, list[Action | None]]] = [{} for _ in range(span + P)]

    def put(turn: int, stage: int, action: Action) -> None:
        ticks[turn].setdefault(action.kind, [None] * P)[stage] = action

    for (i, c), n in at.items():
        back = first + at[i, v - 1 - c]
        for s in range(P):
            put(n + s, s, Action("forward", i, c))
            put(back + P - 1 - s, s, Action("input" if split else "backward", i, c))
            if split:
                put(back + P - 1, s, Action("weight", i, c))
    order = ("forward", "backward", "input", "weight")
    rounds = (tuple(tuple(turn[kind]) for kind in order if kind in turn) for turn in ticks)
    return Table(P, M, v, tuple(filter(None, rounds)))


def own_programs(name: Literal["1f1b", "zb_h1"], stages: int, microbatches: int) -> Table:
    """1F1B or ZB-H1 where every stage runs a program of its own, an action a tick: what the literature draws.

    A stage s keeps at most P - s inputs (1F1B), or P of which s wait for their weights' gradients (ZB-H1).
    """
    P, M, split = stages, microbatches, name == "zb_h1"
    left: list[list[Action]] = []
    for s in range(P):
        ahead, lag = min(P - 1 - s, M), s
        order = [Action("forward", i) for i in range(ahead)]
        for j in range(M):
            order += [Action("forward", j + ahead)] if j + ahead < M else []
            order.append(Action("input" if split else "backward", j))
            order += [Action("weight", j - lag)] if split and j >= lag else []
        order += [Action("weight", j) for j in range(max(M - lag, 0), M)] if split else []
        left.append(order)
    done: set[tuple[int, Action]] = set()
    rounds: list[tuple[Tick, ...]] = []
    while any(left):
        tick = tuple(order[0] if order and needs(order[0], s, P, 1) <= done else None for s, order in enumerate(left))
        for s, action in enumerate(tick):
            if action:
                done.add((s, left[s].pop(0)))
        rounds.append((tick,))
    return Table(P, M, 1, tuple(rounds))


def needs(action: Action, stage: int, stages: int, virtual: int) -> set[tuple[int, Action]]:
    """What must be done before an action of a stage: (stage, action)s."""
    kind, i, c = action
    place, last = c * stages + stage, stages * virtual - 1

    def at(place: int, kind: Kind) -> tuple[int, Action]:
        return place % stages, Action(kind, i, place // stages)

    if kind == "forward":
        return {at(place - 1, kind)} if place else set()
    if kind == "weight":
        return {at(place, "input")}
    return {at(place, "forward")} | ({at(place + 1, kind)} if place < last else set())
