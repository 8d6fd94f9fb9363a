"""Rounds of candidates, each tried once, and the correction of prices by rehearsals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import Bytes, Estimate
from jaxpar.plan.engine import (
    Correction,
    Outcome,
    Priced,
    Rehearsed,
    Space,
    one_by_one,
    rehearse_finalists,
    try_rounds,
    winner_of,
)
from jaxpar.plan.figures import Figures

GIB = 2**30
FIGURES = Figures(1.0, 1000.0, 0.0, 0.0, None, GIB, 16 * GIB, True, 0.0)


def plan(seconds: float, gib: float, host: float = 0.0, **choices: object) -> Priced:
    size = Bytes(activations=gib * GIB)
    cost = Estimate(seconds, 0.0, 0.0, 0.0, 0.0, host, size)
    return Priced(Candidate(**choices), cost)  # type: ignore[arg-type]


def test_no_candidate_is_tried_twice_and_rounds_see_what_was_tried() -> None:
    tried = dict[int, int]()
    seen = list[int]()

    def rounds() -> Iterator[list[int]]:
        yield [3, 1, 3]
        yield [min(tried), 2]

    def square(number: int) -> int:
        seen.append(number)
        return number**2

    assert try_rounds(rounds(), one_by_one(square), tried) is tried
    assert tried == {3: 9, 1: 1, 2: 4} and seen == [3, 1, 2]


def test_what_waits_for_the_host_is_corrected_apart() -> None:
    """Of a step of 2 s half a second was to wait; it waits one, and computes in the 1.5 expected."""
    away = plan(1.5, 1, host=0.5, policy="full", keep=(("up", "offload"),))
    figures = replace(FIGURES, step=2.5, host_stall=1.0)
    known = Correction((Rehearsed(away, figures),))
    assert known.factor(away.candidate) == pytest.approx(1.0)
    assert known.host_factor(away.candidate) == pytest.approx(2.0, rel=0.05)
    here = plan(2.2, 1, policy="full")
    assert known.seconds(here) == pytest.approx(2.2), "what waits for no host is as expected"
    assert known.seconds(away) == 2.5, "a rehearsed plan takes what its rehearsal says"
    more = plan(1.5, 1, host=1.0, policy="full", keep=(("gate", "offload"),))
    assert known.seconds(more) > 1.5 + 1.9
    assert Correction().seconds(more) == pytest.approx(1.1 * 2.5), "it is taken to be slower"


def search(plans: Sequence[Priced], more: float, most: int = 3, **options: object):
    """Rehearse plans that take so many GiB more than expected, of 10."""
    seen = list[Priced]()

    def measure(chosen: Sequence[Priced], known: Correction) -> list[Outcome]:
        seen.extend(chosen)
        return [outcome(one) for one in chosen]

    def outcome(one: Priced) -> Outcome:
        memory = round(one.bytes + more * GIB)
        figures = replace(FIGURES, step=one.seconds, host_stall=one.estimate.host, memory=memory)
        return Outcome(figures)

    def within(branch: Priced, room: float) -> list[Priced]:
        return [one for one in plans if one.bytes <= room]

    space = Space(10 * GIB, plans[:1], within, **options)  # type: ignore[arg-type]
    correction, best = rehearse_finalists(space, measure, most)
    return winner_of(best, correction), seen


KEEPS = [(("up", "save"),), (("gate", "save"),), (("q", "save"),)]
PLANS = [
    plan(seconds, gib, policy="full", keep=keep)
    for seconds, gib, keep in zip((1.0, 1.2, 1.4), (9.4, 7.0, 2.0), KEEPS, strict=True)
]


def test_the_fastest_that_fits_is_rehearsed_and_wins() -> None:
    winner, seen = search(PLANS, more=0.0)
    assert winner == PLANS[0] and seen == [PLANS[0]]
    careful, seen = search(PLANS, more=0.0, margin=0.1)
    assert careful == PLANS[0] and seen == [PLANS[1], PLANS[0]], "the first leaves a margin"


def test_one_that_is_too_large_tells_of_the_others() -> None:
    winner, seen = search(PLANS, more=3.5)
    assert winner == PLANS[2] and seen == [PLANS[0], PLANS[2]], "9.4 + 3.5 says that 7 is too much"


def test_the_last_rehearsal_is_of_the_smallest_where_none_has_fitted() -> None:
    smallest = plan(3.0, 0.5, policy="full")
    winner, seen = search(PLANS, more=9.0, most=2, smallest=[smallest])
    assert seen == [PLANS[0], smallest] and winner == smallest
    nothing, seen = search(PLANS, more=9.9, most=3, smallest=[smallest])
    assert nothing is None and seen[-1] == smallest
