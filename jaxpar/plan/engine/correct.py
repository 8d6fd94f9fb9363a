"""The correction of the closed forms by rehearsals of the same search.

A rehearsal of one plan says most about plans of its kind, and something about all others: each
counts by how alike the plans are, and where none is alike, what all of them have in common counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.engine.priced import Priced
from jaxpar.plan.figures import Figures

_NEAR = 1.0
"""The differences at which a rehearsal counts e times less."""
_PRIOR = 0.02
"""The weight of what is known without plans that are alike, beside a rehearsal of the same plan,
which has 1.
"""
_BEFORE = 0.25
"""The rehearsals that the closed forms count as, in what all plans have in common. A chip whose
matmuls are slower than they say has all plans slower.
"""
_PRIOR_BYTES = 0.005
_HOST = 1.1
"""The multiple of its expected time that a plan with anything in host memory is taken to need:
rehearsals of such plans took longer (docs/benchmarks.md).
"""

_KIND: tuple[Callable[[Candidate], object], ...] = (
    lambda one: one.dcn,
    lambda one: one.policy,
    lambda one: (one.optimizer, one.parameters),
    lambda one: (one.zero, one.virtual, one.schedule),
    lambda one: one.overlap,
    lambda one: one.loss_mib,
)
"""What makes two plans unlike each other, beside the sizes of their axes."""
_OTHER_KEEP = 0.25
"""The difference between two plans that keep other activations by name."""
_SPLIT = 2.0
"""The difference between a plan that splits along an axis and one that does not."""
_TWICE = 0.25
"""The difference between two plans of which one has twice the devices along an axis, or twice the
microbatches.
"""


_LEAST = 1e-9  # seconds


class Rehearsed(NamedTuple):
    """A plan that was rehearsed.

    Attributes:
      plan: the plan with its estimate.
      figures: the figures of its rehearsal; None = it was refused.
      refused: the reason, empty where there is none.
      over: the least by which a refused plan is too large, in bytes; 0 = it is not known to be.
    """

    plan: Priced
    figures: Figures | None = None
    refused: str = ""
    over: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether there are figures, and the plan fits the device and the budget."""
        return self.figures is not None and self.figures.fits and not self.refused


class Correction(NamedTuple):
    """What rehearsals say of the closed forms."""

    rehearsed: tuple[Rehearsed, ...] = ()

    def factor(self, candidate: Candidate) -> float:
        """Return by what the seconds of a plan are multiplied, but for transfers to host memory."""
        known = [
            (one.plan.candidate, math.log(_busy_in(one.figures) / _busy(one.plan)))
            for one in self.rehearsed
            if one.figures is not None
        ]
        common = sum(log for _, log in known) / (len(known) + _BEFORE)
        total = _PRIOR
        logs = _PRIOR * common
        for other, log in known:
            weight = _weight(candidate, other)
            logs += weight * log
            total += weight
        return math.exp(logs / total)

    def host_factor(self, candidate: Candidate) -> float:
        """Return by what the seconds of a plan that wait for host memory are multiplied."""
        total = _PRIOR
        found = _PRIOR
        for one in self.rehearsed:
            expected = one.plan.estimate.host
            if one.figures is not None and expected > 0:
                weight = _weight(candidate, one.plan.candidate)
                found += weight * one.figures.host_stall / expected
                total += weight
        return found / total

    def more_bytes(self, candidate: Candidate) -> float:
        """Return the bytes of a device that a plan takes beside what the closed forms say."""
        total = _PRIOR_BYTES
        found = 0.0
        for one in self.rehearsed:
            if one.figures is not None:
                more = one.figures.memory - one.plan.bytes
            elif one.over:
                more = one.over
            else:
                continue
            weight = _weight(candidate, one.plan.candidate)
            found += weight * more
            total += weight
        return found / total

    def busy(self, plan: Priced) -> float:
        """Return the corrected seconds of a plan without those that wait for host memory."""
        return _busy(plan) * self.factor(plan.candidate)

    def waits(self, plan: Priced) -> float:
        """Return the corrected seconds of a plan that wait for host memory."""
        return plan.estimate.host * self.host_factor(plan.candidate)

    def seconds(self, plan: Priced) -> float:
        """Return the corrected seconds of a plan; a rehearsed plan has those of its rehearsal."""
        known = self.of(plan.candidate)
        if known is not None and known.figures is not None:
            return known.figures.step
        found = self.busy(plan) + self.waits(plan)
        return _HOST * found if plan.estimate.host > 0 else found

    def bytes(self, plan: Priced) -> float:
        """Return the corrected bytes of a plan; a rehearsed plan has those of its rehearsal."""
        known = self.of(plan.candidate)
        if known is not None and known.figures is not None:
            return known.figures.memory
        return plan.bytes + self.more_bytes(plan.candidate)

    def of(self, candidate: Candidate) -> Rehearsed | None:
        """Return the rehearsal of a plan, if there was one."""
        same = (one for one in self.rehearsed if one.plan.candidate == candidate)
        return next(same, None)


def _busy(plan: Priced) -> float:
    """Return the seconds of a plan, by the closed forms, without transfers to host memory."""
    return max(plan.seconds - plan.estimate.host, _LEAST)


def _busy_in(figures: Figures) -> float:
    """Return the seconds of a rehearsed step without those that wait for host memory."""
    return max(figures.step - figures.host_stall, _LEAST)


def unlike(one: Candidate, other: Candidate) -> float:
    """Say how unlike two plans are; a whole number of differences, where sizes count by how often
    one is twice the other.
    """
    found = float(sum(read(one) != read(other) for read in _KIND))
    found += _OTHER_KEEP * (one.keep != other.keep)
    for size, than in zip(one.sizes, other.sizes, strict=True):
        found += _SPLIT * ((size > 1) != (than > 1)) + _TWICE * _doublings(size, than)
    batching = one.accumulation * one.microbatches
    return found + _TWICE * _doublings(batching, other.accumulation * other.microbatches)


def _doublings(one: int, other: int) -> float:
    return abs(math.log2(one / other))


def _weight(one: Candidate, other: Candidate) -> float:
    return math.exp(-unlike(one, other) / _NEAR)
