"""The plans that are rehearsed, and the winner among them.

The rehearsals of a round correct the closed forms for the next one, until no plan is left that
should be faster than the fastest that was rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import Say
from jaxpar.plan.layout_search.answer import Found, plan_text
from jaxpar.plan.layout_search.correct import Correction, Rehearsed, unlike
from jaxpar.plan.layout_search.infeasible import Infeasible
from jaxpar.plan.layout_search.memory_choices import (
    POLICIES,
    Ladder,
    Price,
    Priced,
    best_rung,
)
from jaxpar.plan.layout_search.processes import Outcome
from jaxpar.plan.layout_search.refine import refine
from jaxpar.plan.layout_search.request import Request
from jaxpar.rehearse.report.report_tables import seconds_text

MOST_CONTENDERS = 48
"""The number of plans that are refined and looked at in each round."""
_OTHER_KIND = 2.0
"""The differences from which a plan is of another kind than one that was rehearsed."""
_UNSURE = 1.03
"""The multiple of the fastest rehearsed time up to which a plan of another kind is rehearsed too:
what the closed forms say of two kinds is no surer.
"""
_REFUSED_BY = 0.02
"""The share of the budget by which a plan that the compiler refused is taken to be too large."""
_SAME = 1.005
"""The multiple of the fastest plan's time up to which plans count as equally fast: of those the
one that splits along fewest axes comes first.
"""
_NEAR = 1.05
"""The multiple of a plan's time up to which its other policies are contenders too."""

Measure = Callable[[Sequence[Config]], Sequence[Outcome]]
"""Rehearses configs."""


class Round(NamedTuple):
    """What a round of rehearsals has to choose from."""

    request: Request
    ladder: Ladder
    price: Price
    plans: Sequence[Priced]
    """The best plan of each branch, by the closed forms."""


def contenders(of: Round, correction: Correction) -> list[Priced]:
    """List the plans that may win, corrected by what was rehearsed, the fastest first."""
    found = dict[object, Priced]()
    for plan in of.plans[:MOST_CONTENDERS]:
        room = of.request.budget - max(correction.more_bytes(plan.candidate), 0.0)
        fitting: Priced | Infeasible = plan
        if plan.bytes > room:
            fitting, _ = best_rung(plan.candidate, of.ladder, of.price, room)
        if isinstance(fitting, Infeasible):
            continue
        best = refine(fitting, of.request, of.price, room)
        for one in (best, *_other_policies(best, of, room)):
            found[one.candidate] = one
    for one in correction.rehearsed:
        if one.fits:
            found[one.plan.candidate] = one.plan
        else:
            found.pop(one.plan.candidate, None)
    right = [one for one in found.values() if correction.bytes(one) <= of.request.budget]
    return _in_order(right, correction)


def _in_order(plans: Sequence[Priced], correction: Correction) -> list[Priced]:
    """Sort plans by their time, and those that are as fast as the fastest by their axes."""
    fastest = min((correction.seconds(one) for one in plans), default=0.0)

    def key(plan: Priced) -> tuple[float, int, float, float]:
        seconds = correction.seconds(plan)
        axes = sum(size > 1 for size in plan.candidate.sizes)
        return (max(seconds, _SAME * fastest), axes, seconds, plan.bytes)

    return sorted(plans, key=key)


def _other_policies(plan: Priced, of: Round, room: float) -> list[Priced]:
    """List a plan under other policies, where it is nearly as fast."""
    if "memory.policy" in of.request.fixed:
        return []
    found = []
    for policy in POLICIES:
        candidate = plan.candidate._replace(policy=policy, keep=())
        other = Priced(candidate, of.price(candidate))
        near = other.seconds <= _NEAR * plan.seconds and other.bytes <= room
        if near and candidate != plan.candidate and of.request.allows(candidate):
            found.append(other)
    return found


def rehearse_finalists(
    of: Round,
    measure: Measure,
    most: int,
    at_once: int,
    say: Say,
    listed: Callable[[Round, Correction], list[Priced]] | None = None,
) -> tuple[Correction, list[Priced]]:
    """Rehearse the best plans until the winner is stable.

    Args:
      measure: rehearses configs.
      most: the number of rehearsals.
      at_once: how many configs are rehearsed at once.
      say: is called with a line for each.
      listed: lists the plans that may win; None = `contenders`.

    Returns:
      What was rehearsed, and the contenders, the fastest first by all that is known.
    """
    listed = listed or contenders
    correction = Correction()
    best = listed(of, correction)
    while len(correction.rehearsed) < most:
        count = min(at_once, most - len(correction.rehearsed))
        chosen = _next(best, correction, count)
        if not chosen:
            break
        for plan in chosen:
            say(f"rehearsing {plan_text(plan.candidate)}: {_figures(plan, correction)}")
        outcomes = measure([of.request.config_of(plan.candidate) for plan in chosen])
        for plan, outcome in zip(chosen, outcomes, strict=True):
            known = _rehearsed(plan, outcome, of.request.budget)
            correction = Correction((*correction.rehearsed, known))
            say(f"rehearsed {plan_text(plan.candidate)}: {_outcome(known)}")
        best = listed(of, correction)
    return correction, best


def _next(best: Sequence[Priced], correction: Correction, count: int) -> list[Priced]:
    """Choose the plans to rehearse next: those that should be faster than what was rehearsed, and
    those of another kind that may be. Those of one round are of different kinds.
    """
    known = [one.plan for one in correction.rehearsed]
    fits = [one.plan for one in correction.rehearsed if one.fits]
    limit = min((correction.seconds(one) for one in fits), default=float("inf"))
    chosen = list[Priced]()
    for plan in best:
        if len(chosen) == count:
            break
        if correction.of(plan.candidate) is not None:
            continue
        seconds = correction.seconds(plan)
        faster = seconds < limit and _is_other(plan, chosen)
        may_be = seconds < _UNSURE * limit and _is_other(plan, [*known, *chosen])
        if faster or may_be:
            chosen.append(plan)
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


def _figures(plan: Priced, correction: Correction) -> str:
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


def found(plan: Priced, correction: Correction) -> Found:
    """Say what is known of a plan."""
    known = correction.of(plan.candidate)
    figures = None if known is None else known.figures
    return Found(plan.candidate, correction.seconds(plan), correction.bytes(plan), plan, figures)


def runners_up(
    winner: Priced | None, best: Sequence[Priced], correction: Correction, most: int
) -> list[Found]:
    """List the next plans beside the winner, one for each mesh."""
    seen = {winner.candidate.sizes} if winner else set()
    listed = []
    for plan in best:
        if plan.candidate.sizes not in seen and len(listed) < most:
            seen.add(plan.candidate.sizes)
            listed.append(found(plan, correction))
    return listed
