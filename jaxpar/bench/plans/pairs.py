"""Pairs of a model and a target whose plans are rehearsed, and plans that are drawn from the
planner's own space for each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpar.base.config import load_config
from jaxpar.base.errors import UserError, suggest
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.engine import Correction, Price, Priced
from jaxpar.plan.engine.finalists import contenders
from jaxpar.plan.layout_search.contenders import Choices
from jaxpar.plan.layout_search.contenders import space_of as contending
from jaxpar.plan.layout_search.facts import Facts, facts_of
from jaxpar.plan.layout_search.find import closed_forms
from jaxpar.plan.layout_search.layouts import batchings, layouts, refused_layout
from jaxpar.plan.layout_search.memory_choices import Ladder, ladder_of
from jaxpar.plan.layout_search.rank import rank
from jaxpar.plan.layout_search.request import Request, make_request
from jaxpar.rehearse.targets import load_target

PLANS = 32
"""The plans that are drawn for a pair."""
_FIRST = 8
"""The number of plans among them that the closed forms rank highest."""
_BRIM = 3
"""The number of plans that take nearly all of the memory, by the closed forms."""
_FULL = 0.93
"""The share of that memory from which a plan counts as nearly too large."""
_SLOWEST = 3.0
"""The multiple of the best plan's seconds up to which a plan is drawn: nobody asks for a slower."""
_SEED = 45


class Pair(NamedTuple):
    """A model and a target, with the sequences of a step."""

    name: str
    config: str
    target: str
    sequences: int


PAIRS = (
    Pair("gpt2_124m on h100x8", "gpt2_124m", "h100x8", 256),
    Pair("llama32_1b on h100x8", "llama32_1b", "h100x8", 64),
    Pair("llama3_8b on h100x16", "llama3_8b", "h100x16", 128),
    Pair("gpt2_1558m on a100x16", "gpt2_1558m", "a100x16@dgx-a100", 512),
    Pair("llama3_70b on h100x64", "llama3_70b", "h100x64", 256),
    Pair("mixtral_8x7b on h100x64", "mixtral_8x7b", "h100x64", 256),
    Pair("llama32_1b on v5p-16", "llama32_1b", "v5p-16", 64),
)
"""The pairs that docs/plan_board.md has: models of 124M to 70B, one of them of experts, on one
node, several, and a slice."""


def pair_of(name: str) -> Pair:
    """Look up a pair.

    Raises:
      UserError: there is no such pair.
    """
    known = {pair.name: pair for pair in PAIRS}
    if name not in known:
        raise UserError(f"no pair is called {name!r}{suggest(name, known)}: {', '.join(known)}")
    return known[name]


def pairs_of(beginnings: Sequence[str]) -> list[Pair]:
    """Return the pairs whose names begin so; without a beginning all.

    Raises:
      UserError: no name begins so.
    """
    for beginning in beginnings:
        if not any(pair.name.startswith(beginning) for pair in PAIRS):
            names = ", ".join(pair.name for pair in PAIRS)
            raise UserError(f"no pair's name begins with {beginning!r}: there are {names}")
    return [pair for pair in PAIRS if not beginnings or pair.name.startswith(tuple(beginnings))]


class Space(NamedTuple):
    """The planner's space for a pair: what is asked, what must be known of the model, the choices
    of memory, and the price of a plan.
    """

    request: Request
    facts: Facts
    ladder: Ladder
    price: Price


def space_of(pair: Pair) -> Space:
    """Make the planner's space for a pair, without offload."""
    target = load_target(pair.target)
    request = make_request(load_config(pair.config), target, sequences=pair.sequences)
    facts = facts_of(request)
    ladder = ladder_of(request, facts.has_moments, may_offload=False)
    return Space(request, facts, ladder, closed_forms(request))


class Drawn(NamedTuple):
    """A plan that was drawn, and as what: `first`, `brim` or `spread`."""

    drawn: str
    candidate: Candidate


def draw_plans(space: Space, count: int = PLANS, seed: int = _SEED) -> list[Drawn]:
    """Draw plans of a pair: those that the planner would rehearse first, some that barely fit, and
    others from all meshes that are no more than three times as slow. None is too large by the
    closed forms.
    """
    request = space.request
    meshes = layouts(request, space.facts)
    ranking = rank(request, space.facts, meshes, space.ladder, space.price)
    choices = Choices(request, space.ladder, space.price)
    best = contenders(contending(choices, ranking.plans), Correction())[:_FIRST]
    found = {one.candidate: Drawn("first", one.candidate) for one in best}
    limit = _SLOWEST * best[0].seconds
    others = [
        one
        for one in _spread(space, random.Random(seed))
        if one.bytes <= request.budget and one.seconds <= limit
    ]
    full = [one for one in others if one.bytes > _FULL * request.budget]
    for drawn, plans, most in (
        ("brim", full, min(len(found) + _BRIM, count)),
        ("spread", others, count),
    ):
        for one in plans:
            if len(found) < most and one.candidate not in found:
                found[one.candidate] = Drawn(drawn, one.candidate)
    return list(found.values())


_DRAWS = 4_000


def _spread(space: Space, draws: random.Random) -> Iterator[Priced]:
    """Yield random plans: a kind of mesh, a mesh of this kind, what it does with the batch, and
    what it keeps.
    """
    kinds: dict[tuple[bool, ...], list[list[Candidate]]] = {}
    for layout in layouts(space.request, space.facts):
        if refused_layout(layout, space.facts) is None:
            branches, _ = batchings(layout, space.request, space.facts)
            if branches:
                kind = tuple(size > 1 for size in branches[0].sizes)
                kinds.setdefault(kind, []).append(branches)
    choices = [choice for rung in space.ladder.rungs for choice in rung]
    for _ in range(_DRAWS):
        meshes = draws.choice(list(kinds.values()))
        branch = draws.choice(draws.choice(meshes))
        candidate = branch._replace(**draws.choice(choices))
        yield Priced(candidate, space.price(candidate))
