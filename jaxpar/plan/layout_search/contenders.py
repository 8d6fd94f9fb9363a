"""The plans of a mesh and batching that may win within some bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.plan.engine import MARGIN, Price, Priced, Space, priced
from jaxpar.plan.layout_search.infeasible import Infeasible
from jaxpar.plan.layout_search.memory_choices import POLICIES, Ladder, best_rung
from jaxpar.plan.layout_search.refine import refine
from jaxpar.plan.layout_search.request import Request

_MOST = 48
"""The number of branches whose plans are refined and looked at in each round."""
UNSURE = 1.03
"""The multiple of the fastest rehearsed time up to which plans of another kind are rehearsed."""
_NEAR = 1.05
"""The multiple of a plan's time up to which its other policies are contenders too."""


class Choices(NamedTuple):
    """What a plan of a request may choose, and what it then costs."""

    request: Request
    ladder: Ladder
    price: Price


def space_of(of: Choices, plans: Sequence[Priced]) -> Space:
    """Return what rehearsals have to choose from.

    Args:
      plans: the best plan of each branch, the fastest first.
    """

    def within(plan: Priced, room: float) -> list[Priced]:
        fitting: Priced | Infeasible = plan
        if plan.bytes > room:
            fitting, _ = best_rung(plan.candidate, of.ladder, of.price, room)
        if isinstance(fitting, Infeasible):
            return []
        best = refine(fitting, of.request, of.price, room, of.ladder.may_offload)
        return [best, *_other_policies(best, of, room)]

    return Space(of.request.budget, plans[:_MOST], within, margin=MARGIN, unsure=UNSURE)


def _other_policies(plan: Priced, of: Choices, room: float) -> list[Priced]:
    """List a plan under other policies, where it is nearly as fast."""
    if "memory.policy" in of.request.fixed:
        return []
    found = []
    for policy in POLICIES:
        other = priced(plan.candidate._replace(policy=policy, keep=()), of.price)
        near = other.seconds <= _NEAR * plan.seconds and other.bytes <= room
        if near and other.candidate != plan.candidate and of.request.allows(other.candidate):
            found.append(other)
    return found
