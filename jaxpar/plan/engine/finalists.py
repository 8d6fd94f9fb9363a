"""The plans that are rehearsed, and the winner among them.

The rehearsals of a round correct the closed forms for the next one, until no plan is left that
should be faster than the fastest that was rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import Say
from jaxpar.plan.candidate import plan_text
from jaxpar.plan.engine.correct import Correction, Rehearsed, unlike
from jaxpar.plan.engine.priced import Outcome, Priced
from jaxpar.plan.engine.rounds import try_rounds
from jaxpar.rehearse.report.report_tables import seconds_text

MARGIN = 0.05
"""The share of a device's memory that is left free until a compiler has said what a plan takes: the
rehearsed plans of docs/plan_board.md take up to 4 % more than the closed forms say.
"""
_OTHER_KIND = 2.0
"""The differences from which a plan is of another kind than one that was rehearsed."""
_WORTH = 0.99
"""The share of the fastest rehearsed time from which a plan is rehearsed: a smaller gain is not
worth a compilation.
"""
_REFUSED_BY = 0.02
"""The share of the budget by which a plan that the compiler refused is taken to be too large."""
_SAME = 1.005
"""The multiple of the fastest plan's time up to which plans count as equally fast: of those the
one that splits along fewest axes comes first.
"""


Measure = Callable[[Sequence[Priced], Correction], Sequence[Outcome]]
"""Rehearses plans, with what the rehearsals before them say."""


class Space(NamedTuple):
    """What rehearsals have to choose from.

    Attributes:
      budget: the bytes of a device that a step may take.
      branches: a plan of each branch, the fastest first.
      within: lists the plans of a branch that are worth a look within some bytes.
      smallest: plans of the fewest bytes, for the last rehearsal where none before it fitted.
      margin: the share of the budget that is left free until something was rehearsed.
      unsure: the multiple of the fastest rehearsed time up to which a plan of another kind is
        rehearsed too, since what the closed forms say of two kinds is no surer.
    """

    budget: float
    branches: Sequence[Priced]
    within: Callable[[Priced, float], Sequence[Priced]]
    smallest: Sequence[Priced] = ()
    margin: float = 0.0
    unsure: float = 1.0


def contenders(space: Space, correction: Correction) -> list[Priced]:
    """List the plans that may win, corrected by what was rehearsed, the fastest first."""
    if not correction.rehearsed:
        careful = _contenders(space, correction, (1 - space.margin) * space.budget)
        if careful:
            return careful
    return _contenders(space, correction, space.budget)


def _contenders(space: Space, correction: Correction, budget: float) -> list[Priced]:
    found = dict[object, Priced]()
    for branch in space.branches:
        room = budget - correction.more_bytes(branch.candidate)
        found |= {one.candidate: one for one in space.within(branch, room)}
    for one in correction.rehearsed:
        if one.fits:
            found[one.plan.candidate] = one.plan
        else:
            found.pop(one.plan.candidate, None)
    right = [one for one in found.values() if correction.bytes(one) <= budget]
    return _in_order(right, correction)


def _in_order(plans: Sequence[Priced], correction: Correction) -> list[Priced]:
    """Sort plans by their time, and those that are as fast as the fastest by their axes."""
    fastest = min((correction.seconds(one) for one in plans), default=0.0)

    def key(plan: Priced) -> tuple[float, int, float, float]:
        seconds = correction.seconds(plan)
        axes = sum(size > 1 for size in plan.candidate.sizes)
        return (max(seconds, _SAME * fastest), axes, seconds, plan.bytes)

    return sorted(plans, key=key)


def rehearse_finalists(
    space: Space, measure: Measure, most: int, at_once: int = 1, say: Say = lambda line: None
) -> tuple[Correction, list[Priced]]:
    """Rehearse the best plans until the winner is stable.

    Args:
      measure: rehearses plans.
      most: the number of rehearsals.
      at_once: how many plans are rehearsed at once.
      say: is called with a line for each.

    Returns:
      What was rehearsed, and the contenders, the fastest first by all that is known.
    """
    tried = dict[Priced, Rehearsed]()

    def known() -> Correction:
        return Correction(tuple(tried.values()))

    def rounds() -> Iterator[list[Priced]]:
        while len(tried) < most:
            count = min(at_once, most - len(tried))
            chosen = _next(space, known(), count, is_last=len(tried) == most - 1)
            if not chosen:
                return
            for plan in chosen:
                say(f"rehearsing {plan_text(plan.candidate)}: {_expected(plan, known())}")
            yield chosen

    def attempt(plans: Sequence[Priced]) -> list[Rehearsed]:
        outcomes = zip(plans, measure(plans, known()), strict=True)
        found = [_rehearsed(plan, outcome, space.budget) for plan, outcome in outcomes]
        for one in found:
            say(f"rehearsed {plan_text(one.plan.candidate)}: {_outcome(one)}")
        return found

    try_rounds(rounds(), attempt, tried, at_once)
    return known(), contenders(space, known())


def _next(space: Space, correction: Correction, count: int, is_last: bool) -> list[Priced]:
    """Choose the plans to rehearse next: those that should be faster than what was rehearsed, and
    those of another kind that may be. Those of one round are of different kinds.
    """
    known = [one.plan for one in correction.rehearsed]
    fits = [one.plan for one in correction.rehearsed if one.fits]
    safe = [one for one in space.smallest if correction.of(one.candidate) is None]
    if is_last and safe and not fits:
        return safe[:1]
    limit = min((correction.seconds(one) for one in fits), default=float("inf"))
    chosen = list[Priced]()
    for plan in contenders(space, correction):
        if len(chosen) == count:
            break
        if correction.of(plan.candidate) is not None:
            continue
        seconds = correction.seconds(plan)
        faster = seconds < _WORTH * limit and _is_other(plan, chosen)
        may_be = seconds < space.unsure * limit and _is_other(plan, [*known, *chosen])
        if faster or may_be:
            chosen.append(plan)
    if not chosen and not fits:
        return safe[:1]
    return chosen


def _is_other(plan: Priced, others: Sequence[Priced]) -> bool:
    """Return whether a plan is of another kind than all others."""
    return all(unlike(plan.candidate, one.candidate) >= _OTHER_KIND for one in others)


def _rehearsed(plan: Priced, outcome: Outcome, budget: float) -> Rehearsed:
    """Note what became of a plan; of one that the compiler refused, by how much it is too large."""
    over = 0.0
    figures = outcome.figures
    if outcome.too_large:
        over = max((1 + _REFUSED_BY) * budget - plan.bytes, 0.0)
    refused = outcome.refused
    if figures is not None and not refused and figures.memory > budget:
        refused = f"{bytes_text(figures.memory - budget)} too large"
    return Rehearsed(plan, figures, refused, over)


def _expected(plan: Priced, correction: Correction) -> str:
    return (
        f"{seconds_text(correction.seconds(plan))}, {bytes_text(correction.bytes(plan))} expected"
    )


def _outcome(one: Rehearsed) -> str:
    if one.figures is None:
        return f"refused: {one.refused}"
    text = f"{seconds_text(one.figures.step)}, {bytes_text(one.figures.memory)}"
    return f"{text}: {one.refused}" if one.refused else text


def winner_of(best: Sequence[Priced], correction: Correction) -> Priced | None:
    """Return the fastest plan that was rehearsed and fits, or where there is none the best
    contender.
    """
    known = [one.plan for one in correction.rehearsed if one.fits]
    return min(known or best[:1], key=correction.seconds, default=None)
