"""What a rehearsal says of plans that were not rehearsed."""

from __future__ import annotations

import pytest

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import Bytes, Estimate
from jaxpar.plan.engine import Correction, Priced, Rehearsed
from jaxpar.plan.figures import Figures

FSDP = Candidate(mesh=(1, 1, 8, 1, 1, 1))
TENSOR = Candidate(mesh=(1, 1, 2, 1, 1, 4))
STAGES = Candidate(mesh=(4, 2, 1, 1, 1, 1), microbatches=8, policy="full")


def rehearsed(candidate: Candidate, times: float) -> Rehearsed:
    """A plan of one second whose rehearsal takes so many times as long."""
    estimate = Estimate(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, Bytes(1.0, 1.0, 1.0, 1.0, 1.0))
    figures = Figures(times, 1.0, 0.0, 0.0, None, 5, 100, True, 1.0)
    return Rehearsed(Priced(candidate, estimate), figures)


def test_without_rehearsals_the_closed_forms_stand() -> None:
    assert Correction().factor(FSDP) == 1.0


def test_one_rehearsal_says_most_of_its_kind_and_something_of_all() -> None:
    """A plan of another kind is not taken to be faster because it alone was not rehearsed."""
    known = Correction((rehearsed(FSDP, 1.3),))
    assert known.factor(FSDP) == pytest.approx(1.3, rel=0.01)
    assert 1.2 < known.factor(STAGES) < known.factor(FSDP)


def test_what_one_kind_alone_has_stays_with_it() -> None:
    known = Correction((rehearsed(FSDP, 1.0), rehearsed(TENSOR, 1.6)))
    assert known.factor(FSDP) < 1.05 and known.factor(TENSOR) > 1.5
    assert 1.05 < known.factor(STAGES) < 1.5
