"""The schedules of a pipeline by their names, each a function that makes a table.

GPipe, 1F1B, interleaved and looped take as long as in the literature, where every stage runs its
own program. 1F1B keeps up to 2P-1 inputs instead of P (as in "eager" 1F1B, Zhuang et al. 2022,
arXiv:2211.05322).

There are P stages, M microbatches and v virtual stages per stage. `schedule_table` defines a table,
proves it valid and times it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from jaxpar.base.errors import UserError
from jaxpar.base.registry import SCHEDULES, registering
from jaxpar.parallel.pipeline.schedule_table import (
    UNIT,
    Action,
    ActionKind,
    Simulation,
    Table,
    Times,
    check_table,
    simulate_schedule,
)

__all__ = [
    "UNIT",
    "Action",
    "ActionKind",
    "RegisteredSchedule",
    "Simulation",
    "Table",
    "Times",
    "check_sizes",
    "check_table",
    "register_schedule",
    "schedule",
    "simulate_schedule",
]

Build = Callable[[int, int, int], Table]
"""A function that makes a schedule's table from the numbers of stages, microbatches and virtual
stages a stage."""


@dataclass(frozen=True)
class RegisteredSchedule:
    """A schedule that `pipeline.schedule` may name."""

    build: Build
    virtual: bool
    """Whether a stage may have more than one virtual stage."""


def register_schedule(
    name: str,
    *,
    virtual: bool = False,
) -> Callable[[Build], Build]:
    """Make a schedule known by a name, to configs (`pipeline.schedule`) and to `value_and_grad`.

    The decorator that this returns is put on a function of the numbers of stages P, microbatches M
    and virtual stages a stage v (`pipeline.virtual`), which returns the table, and leaves the
    function as it is. The table is checked (`check_table`) wherever it is used.

    Args:
      name: a word that no other schedule has.
      virtual: whether v may be above 1.

    Raises:
      UserError: the name is no word. The decorator raises it where the name is taken, or it is put
        on something that cannot be called so.
    """
    arguments = ("stages", "microbatches", "virtual")
    return registering(SCHEDULES, name, lambda build: RegisteredSchedule(build, virtual), arguments)


def schedule(name: str, stages: int, microbatches: int, virtual: int = 1) -> Table:
    """Build the table of a registered schedule.

    Args:
      name: the schedule's word, such as `1f1b`.
      stages: the number of stages P.
      microbatches: the number of microbatches M that are in the pipeline together.
      virtual: the number of virtual stages of each stage.

    Returns:
      The table, which `check_table` has found valid.

    Raises:
      UserError: there is no such schedule, a size is below 1, the schedule cannot have so many
        virtual stages, or what it made is no valid table of these sizes.
    """
    check_sizes(name, stages, microbatches, virtual)
    table = SCHEDULES[name].build(stages, microbatches, virtual)
    found = (table.stages, table.microbatches, table.virtual)
    if found != (stages, microbatches, virtual):
        raise UserError(
            f"pipeline.schedule {name} made a table of {found} stages, microbatches and virtual "
            f"stages, where {(stages, microbatches, virtual)} were asked for"
        )
    try:
        check_table(table)
    except UserError as error:
        raise UserError(f"pipeline.schedule {name} made no valid table: {error}") from error
    return table


def check_sizes(name: str, stages: int, microbatches: int, virtual: int) -> None:
    """Refuse the sizes that `schedule` refuses.

    Raises:
      UserError: there is no such schedule, a size is below 1, or the schedule cannot have so many
        virtual stages.
    """
    kind: RegisteredSchedule = SCHEDULES[name]
    if min(stages, microbatches, virtual) < 1:
        found = f"{stages}, {microbatches}, {virtual}"
        raise UserError(
            f"a pipeline has at least one stage, microbatch and virtual stage, found {found}"
        )
    if virtual > 1 and not kind.virtual:
        fitting = [other for other, entry in SCHEDULES.items() if entry.virtual]
        raise UserError(
            f"pipeline.schedule {name} has one virtual stage a stage, found "
            f"pipeline.virtual={virtual}: try pipeline.schedule={fitting[0]}, or "
            "pipeline.virtual=1"
        )


@register_schedule("gpipe")
def gpipe(stages: int, microbatches: int, virtual: int) -> Table:
    """Schedule all forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965)."""
    return _all_forwards_first(stages, microbatches, virtual)


@register_schedule("1f1b")
def one_forward_one_backward(stages: int, microbatches: int, virtual: int) -> Table:
    """Schedule each backward as soon as its microbatch is ready (PipeDream-Flush, Narayanan et al.
    2020, arXiv:2006.09503).
    """
    return _backwards_soon(stages, microbatches, virtual)


@register_schedule("interleaved", virtual=True)
def interleaved(stages: int, microbatches: int, virtual: int) -> Table:
    """Schedule 1F1B through v chunks a stage, about P microbatches at a time (Narayanan et al.
    2021, arXiv:2104.04473, section 2.2).
    """
    return _backwards_soon(stages, microbatches, virtual)


@register_schedule("looped", virtual=True)
def looped(stages: int, microbatches: int, virtual: int) -> Table:
    """Schedule GPipe through v chunks a stage (breadth-first; Lamy-Poirier, arXiv:2211.05953)."""
    return _all_forwards_first(stages, microbatches, virtual)


def _all_forwards_first(P: int, M: int, v: int) -> Table:
    at = _positions(P, [M], v)
    return _table(P, M, v, at, first_back=max(at.values()) + P)


def _backwards_soon(P: int, M: int, v: int) -> Table:
    groups = _groups(P, M)
    at = _positions(P, groups, v)
    return _table(
        P,
        M,
        v,
        at,
        first_back=(v - 1) * max(P, *groups) + P - 1,
    )


def _table(
    P: int,
    M: int,
    v: int,
    at: dict[tuple[int, int], int],
    first_back: int,
) -> Table:
    """Make the table in which the forward of each microbatch and chunk is in the round `at`, on
    stage 0, and the first backward in the round `first_back`, on the last stage.
    """
    rounds: list[dict[ActionKind, list[Action | None]]] = [
        {} for _ in range(max(at.values()) + first_back + 2 * P)
    ]

    def put(r: int, stage: int, action: Action) -> None:
        rounds[r].setdefault(action.kind, [None] * P)[stage] = action

    for (i, c), n in at.items():
        back = first_back + at[i, v - 1 - c] + P - 1
        for s in range(P):
            put(n + s, s, Action("forward", i, c))
            put(back - s, s, Action("backward", i, c))
    ordered = (
        tuple(tuple(ticks[kind]) for kind in get_args(ActionKind) if kind in ticks)
        for ticks in rounds
    )
    return Table(P, M, v, tuple(filter(None, ordered)))


def _groups(P: int, M: int) -> list[int]:
    """Group the microbatches that go through all chunks together: P of them, or as few more as
    their number requires.
    """
    count = max(M // P, 1)
    return [M // count + (i < M % count) for i in range(count)]


def _positions(
    P: int,
    groups: list[int],
    v: int,
) -> dict[tuple[int, int], int]:
    """Return the round of the forward of each microbatch and chunk on stage 0; stage s follows s
    rounds later.

    A group goes through one chunk, then through the next. Backwards start from the last stage and
    the last chunk.
    """
    found = {}
    at = 0
    first = 0
    for size in groups:
        stride = max(P, size)  # a microbatch is back at the first stage after P ticks
        for c in range(v):
            for i in range(size):
                found[first + i, c] = at + c * stride + i
        at += v * stride if size < P else v * size
        first += size
    return found
