"""Candidates with what they cost, and what became of those that were rehearsed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import Estimate
from jaxpar.plan.figures import Figures

Price = Callable[[Candidate], Estimate]
"""What a step costs under a candidate."""


class Priced(NamedTuple):
    """A candidate with what its step costs."""

    candidate: Candidate
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """The seconds of the step, by the closed forms alone."""
        return self.estimate.seconds

    @property
    def bytes(self) -> float:
        """The bytes of a device, by the closed forms alone."""
        return self.estimate.bytes.total


def priced(candidate: Candidate, price: Price) -> Priced:
    """Return a candidate with what its step costs."""
    return Priced(candidate, price(candidate))


class Outcome(NamedTuple):
    """What became of one rehearsal: its figures, or why there are none."""

    figures: Figures | None = None
    refused: str = ""
    too_large: bool = False
    """Whether the compiler refused it for its memory."""
