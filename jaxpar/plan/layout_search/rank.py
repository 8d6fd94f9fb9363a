"""The order of all plans by the closed forms.

A mesh with a batching is a branch. Its fastest plan, whether it fits or not, bounds all others of
the branch from below, so that a branch whose bound is far behind the best plan costs few estimates.
Where the bound is better than the best plan, activations are chosen one by one: a policy for all of
them would say little of what the branch can do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpar.base.errors import Say
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.engine import Price, Priced
from jaxpar.plan.layout_search.facts import Facts
from jaxpar.plan.layout_search.infeasible import Infeasible
from jaxpar.plan.layout_search.layouts import Layout, batchings, refused_layout
from jaxpar.plan.layout_search.memory_choices import Ladder, best_rung, fastest_of_top
from jaxpar.plan.layout_search.refine import keep_by_name
from jaxpar.plan.layout_search.request import Request

BEHIND = 1.3
"""The multiple of the best plan's time from which a branch is given up by its bound alone. The
closed forms are nearer than this to a rehearsal.
"""
_SAY_EVERY = 5.0  # seconds


@dataclass
class Ranking:
    """The plans of a request in order.

    Attributes:
      plans: the best plan of each branch that fits, the fastest first.
      behind: the fastest plan of each branch that was given up, which need not fit.
      refused: why plans cannot run, each with the number of plans that it stops.
      count: the number of plans in the space.
      priced: the number of plans that were priced one by one.
      seconds: the time that it took.
    """

    plans: list[Priced] = field(default_factory=list)
    behind: list[Priced] = field(default_factory=list)
    refused: list[tuple[Infeasible, int]] = field(default_factory=list)
    count: int = 0
    priced: int = 0
    seconds: float = 0.0


def rank(
    request: Request,
    facts: Facts,
    meshes: Sequence[Layout],
    ladder: Ladder,
    price: Price,
    say: Say = lambda line: None,
) -> Ranking:
    """Price the plans of a request on some meshes.

    Args:
      meshes: the meshes, those first that are likely to be fast.
      ladder: the choices of memory.
      price: what a step costs.
      say: is called with a line every few seconds.
    """
    began = time.perf_counter()
    said = began
    ranking = Ranking()
    best = float("inf")
    for number, layout in enumerate(meshes, 1):
        reason = refused_layout(layout, facts)
        if reason is not None:
            ranking.count += ladder.size
            ranking.refused.append((reason, ladder.size))
            continue
        branches, reasons = batchings(layout, request, facts)
        ranking.count += ladder.size * (len(branches) + len(reasons))
        ranking.refused += [(reason, ladder.size) for reason in reasons]
        for branch in branches:
            best = _rank_branch(branch, ranking, request, ladder, price, best)
        if time.perf_counter() - said > _SAY_EVERY:
            said = time.perf_counter()
            say(f"{number:,} of {len(meshes):,} meshes, {ranking.priced:,} plans priced")
    ranking.plans.sort(key=lambda plan: (plan.seconds, plan.bytes))
    ranking.seconds = time.perf_counter() - began
    return ranking


def _rank_branch(
    branch: Candidate,
    ranking: Ranking,
    request: Request,
    ladder: Ladder,
    price: Price,
    best: float,
) -> float:
    """Put the best plan of a branch in its place; return the seconds of the best plan."""
    room = request.budget
    top, count = fastest_of_top(branch, ladder, price, BEHIND * best)
    ranking.priced += count
    if top.seconds > BEHIND * best:
        ranking.behind.append(top)
        return best
    if top.bytes <= room:
        ranking.plans.append(top)
        return min(best, top.seconds)
    found, count = best_rung(branch, ladder, price, room)
    ranking.priced += count
    if isinstance(found, Infeasible):
        ranking.refused.append((found, ladder.size))
        return best
    if top.seconds < best:
        # what may go to host memory besides is tried on the best plans alone
        found = keep_by_name(found, request, price, room, offload=False) or found
    if found.seconds > BEHIND * best:
        ranking.behind.append(found)
        return best
    ranking.plans.append(found)
    return min(best, found.seconds)
