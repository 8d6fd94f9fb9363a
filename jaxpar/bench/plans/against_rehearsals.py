"""The planner held against rehearsals: within each pair of a model and a target, how well the
closed forms order the plans, and what the plan that is chosen costs more than the fastest, before
and after the few rehearsals that the planner would make.

Everything is played from rows that were rehearsed before, so that no compiler is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.base.errors import Say
from jaxpar.bench.measure import BenchRow
from jaxpar.bench.plans.order import kendall, spearman
from jaxpar.bench.plans.pairs import Space, pair_of, space_of
from jaxpar.bench.plans.rehearsed import RehearsedPlan, by_pair
from jaxpar.plan import engine
from jaxpar.plan.candidate import Candidate, plan_text
from jaxpar.plan.closed_form import Estimate
from jaxpar.plan.engine import (
    MARGIN,
    Correction,
    Outcome,
    Priced,
    rehearse_finalists,
    winner_of,
)
from jaxpar.plan.figures import Figures
from jaxpar.plan.layout_search.contenders import UNSURE
from jaxpar.plan.layout_search.find import REHEARSALS, WORKERS


class RankedRehearsal(NamedTuple):
    """A rehearsed plan with its estimate."""

    row: RehearsedPlan
    predicted: Estimate


class RankedPair(NamedTuple):
    """The plans of a pair, as the closed forms rank them.

    Attributes:
      name: the pair.
      room: the bytes of a device that a step may take.
      plans: its plans, in the order of the file.
      found: the plan that the planner takes after its rehearsals.
      rehearsals: how many it makes.
    """

    name: str
    room: int
    plans: tuple[RankedRehearsal, ...]
    found: RankedRehearsal
    rehearsals: int

    @property
    def compiled(self) -> list[RankedRehearsal]:
        """The plans that the compiler did not refuse, whether they fit or not."""
        return [one for one in self.plans if not one.row.refused]

    @property
    def fitting(self) -> list[RankedRehearsal]:
        """The plans that fit by the compiler."""
        return [one for one in self.compiled if one.row.memory <= self.room]

    @property
    def called_fitting(self) -> list[RankedRehearsal]:
        """The plans that the planner takes to fit before anything is compiled, with its margin."""
        surely = (1 - MARGIN) * self.room
        return [one for one in self.plans if one.predicted.bytes.total <= surely]

    @property
    def falsely_fitting(self) -> list[RankedRehearsal]:
        """The plans that are called fitting, and do not fit by the compiler."""
        return [one for one in self.called_fitting if one not in self.fitting]

    @property
    def kendall(self) -> float:
        """Kendall's tau of predicted with rehearsed seconds."""
        return kendall(*self._seconds())

    @property
    def spearman(self) -> float:
        """Spearman's rank correlation of predicted with rehearsed seconds."""
        return spearman(*self._seconds())

    def _seconds(self) -> tuple[list[float], list[float]]:
        rehearsed = [one.row.seconds for one in self.compiled]
        return rehearsed, [one.predicted.seconds for one in self.compiled]

    @property
    def fastest(self) -> RankedRehearsal:
        """The fastest plan by rehearsals, of those that fit."""
        return min(self.fitting, key=lambda one: one.row.seconds)

    @property
    def chosen(self) -> RankedRehearsal:
        """The plan that the closed forms rank first, of those that they and the compiler say fit;
        of those that the compiler says fit, where there is none.
        """
        both = [one for one in self.called_fitting if one in self.fitting]
        return min(both or self.fitting, key=lambda one: one.predicted.seconds)

    @property
    def regret(self) -> float:
        """How much longer the chosen plan takes than the fastest, as a share of the fastest."""
        return self.chosen.row.seconds / self.fastest.row.seconds - 1

    @property
    def regret_after(self) -> float:
        """Likewise of the plan that the planner takes after its rehearsals."""
        return self.found.row.seconds / self.fastest.row.seconds - 1

    def errors(self, ratio: Callable[[RankedRehearsal], float]) -> list[float]:
        """List by how much a ratio of predicted to rehearsed is off 1, for every plan."""
        return [abs(ratio(one) - 1) for one in self.compiled]


def time_ratio(one: RankedRehearsal) -> float:
    """Return predicted over rehearsed seconds."""
    return one.predicted.seconds / one.row.seconds


def memory_ratio(one: RankedRehearsal) -> float:
    """Return predicted over rehearsed bytes of a device."""
    return one.predicted.bytes.total / one.row.memory


def rank_rehearsed(
    plans: Sequence[RehearsedPlan], say: Say = lambda line: None
) -> list[RankedPair]:
    """Price rehearsed plans by the closed forms, and rank them within their pairs; a pair of fewer
    than two plans that fit is left out.

    Args:
      say: is called with a line for each pair.
    """
    found: list[RankedPair] = []
    for name, rows in by_pair(plans).items():
        space = space_of(pair_of(name))
        room = space.request.budget
        if sum(0 < row.memory <= room for row in rows) < 2:
            say(f"{name}: fewer than two plans that fit, of which nothing is ranked")
            continue
        say(f"{name}: {len(rows)} plans")
        ranked = tuple(RankedRehearsal(row, space.price(row.candidate)) for row in rows)
        winner, count = _play(space, ranked)
        found.append(RankedPair(name, room, ranked, winner, count))
    return found


def _play(space: Space, plans: Sequence[RankedRehearsal]) -> tuple[RankedRehearsal, int]:
    """Rehearse plans as the planner would, from rows: what it takes in the end, and after how many
    rehearsals.
    """
    by_candidate = {one.row.candidate: one for one in plans}
    priced = [Priced(one.row.candidate, one.predicted) for one in plans]

    def within(plan: Priced, room: float) -> list[Priced]:
        return [plan] if plan.bytes <= room else []

    def measure(chosen: Sequence[Priced], correction: Correction) -> list[Outcome]:
        return [_outcome(by_candidate[plan.candidate].row, space) for plan in chosen]

    budget = space.request.budget
    plays = engine.Space(budget, priced, within, margin=MARGIN, unsure=UNSURE)
    correction, best = rehearse_finalists(plays, measure, REHEARSALS, WORKERS)
    winner = winner_of(best, correction)
    candidate: Candidate = (winner or priced[0]).candidate
    return by_candidate[candidate], len(correction.rehearsed)


def _outcome(row: RehearsedPlan, space: Space) -> Outcome:
    if row.refused:
        return Outcome(refused=row.refused, too_large=True)
    room = space.request.budget
    figures = Figures(
        step=row.seconds,
        tokens_per_second=space.request.tokens / row.seconds,
        exposed=row.exposed,
        host_stall=0.0,
        mfu=None,
        memory=row.memory,
        usable=room,
        fits=row.memory <= room,
        compile_seconds=0.0,
    )
    return Outcome(figures)


def pair_rows(pairs: Sequence[RankedPair]) -> list[BenchRow]:
    """Make the table of pairs."""
    return [
        {
            "pair": one.name,
            "plans": len(one.plans),
            "Kendall": one.kendall,
            "Spearman": one.spearman,
            "regret, %": 100 * one.regret,
            "after rehearsals, %": 100 * one.regret_after,
            "rehearsals": one.rehearsals,
            "error of seconds, median %": 100 * float(np.median(one.errors(time_ratio))),
            "of bytes": 100 * float(np.median(one.errors(memory_ratio))),
            "said to fit, refused": len(one.falsely_fitting),
        }
        for one in pairs
    ]


def choice_rows(pairs: Sequence[RankedPair]) -> list[BenchRow]:
    """Make the table of what is chosen where it is not the fastest plan."""
    return [
        {
            "pair": one.name,
            "regret, %": 100 * one.regret,
            "chosen": plan_text(one.chosen.row.candidate),
            "fastest": plan_text(one.fastest.row.candidate),
        }
        for one in sorted(pairs, key=lambda one: -one.regret)
        if one.regret > 0
    ]


def as_json(pairs: Sequence[RankedPair]) -> list[dict[str, object]]:
    """Return every pair with its plans, rehearsed and predicted, as JSON has it."""
    return [
        {
            "pair": one.name,
            "kendall": one.kendall,
            "spearman": one.spearman,
            "regret": one.regret,
            "regret_after": one.regret_after,
            "rehearsals": one.rehearsals,
            "chosen": plan_text(one.chosen.row.candidate),
            "fastest": plan_text(one.fastest.row.candidate),
            "found": plan_text(one.found.row.candidate),
            "said_to_fit_and_refused": len(one.falsely_fitting),
            "plans": [_plan_json(plan) for plan in one.plans],
        }
        for one in pairs
    ]


def _plan_json(plan: RankedRehearsal) -> dict[str, object]:
    return {
        "plan": plan_text(plan.row.candidate),
        "drawn": plan.row.drawn,
        "rehearsed": plan.row.seconds,
        "predicted": plan.predicted.seconds,
        "rehearsed_bytes": plan.row.memory,
        "predicted_bytes": plan.predicted.bytes.total,
        "refused": plan.row.refused,
    }
