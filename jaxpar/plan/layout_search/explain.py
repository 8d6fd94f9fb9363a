"""Why the other plans lost, in groups, and what would change the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.engine import Price, Priced
from jaxpar.plan.layout_search.answer import Changed, Lost
from jaxpar.plan.layout_search.contenders import Choices
from jaxpar.plan.layout_search.facts import Facts
from jaxpar.plan.layout_search.layouts import Layout
from jaxpar.plan.layout_search.rank import Ranking, rank
from jaxpar.plan.layout_search.refine import refine
from jaxpar.plan.layout_search.request import Request
from jaxpar.rehearse.report.report_tables import seconds_text

_PARTS = {
    "exposed": "collectives that nothing hides",
    "bubble": "stages that wait for each other",
    "compute": "more compute, or smaller matmuls",
    "host": "copies to host memory and back",
    "launches": "more kernels to launch",
    "update": "a longer update",
}
"""What the parts of an estimate are, by which a plan may be slower."""
_MOST_GROUPS = 12
_MOST_REFINED = 8
"""The number of plans that are refined for another request."""


def losers(ranking: Ranking, refined: Sequence[Priced], best: Priced, size: int) -> list[Lost]:
    """Group the plans that lost by what they have and the best plan has not.

    Args:
      refined: the contenders, which stand for the plans that they were refined from.
      best: the best plan. Its time by the closed forms is what theirs are held against.
      size: the number of plans of a branch.

    Returns:
      The groups, the nearest first.
    """
    has = set(_traits(best.candidate))
    groups = dict[str, list[Priced]]()
    own = _branch(best.candidate)
    known = {_branch(plan.candidate): plan for plan in reversed(refined)}
    for plan in (*ranking.plans, *ranking.behind):
        branch = _branch(plan.candidate)
        if branch == own:
            continue
        plan = known.get(branch, plan)
        others = (trait for trait in _traits(plan.candidate) if trait not in has)
        groups.setdefault(next(others, "another batching"), []).append(plan)
    found = []
    for what, plans in groups.items():
        nearest = min(plans, key=lambda plan: plan.seconds)
        times = nearest.seconds / best.seconds
        why = _reason(nearest, best)
        found.append(Lost(what, why, size * len(plans), times, nearest.candidate))
    found.sort(key=lambda group: group.times)
    return found[:_MOST_GROUPS]


def _branch(candidate: Candidate) -> tuple[object, ...]:
    """Return what a plan shares with the other plans of its mesh and batching."""
    batching = (candidate.accumulation, candidate.microbatches, candidate.zero)
    pipeline = (candidate.schedule, candidate.virtual)
    return (candidate.mesh, candidate.dcn, *batching, *pipeline)


def _traits(candidate: Candidate) -> Iterator[str]:
    """Yield what sets a plan apart, the most telling first."""
    if "offload" in (candidate.optimizer, candidate.parameters):
        yield "offload"
    for axis in ("stage", "context", "expert", "tensor", "data"):
        if candidate.size(axis) > 1:
            yield f"{axis}={candidate.size(axis)}"
    if candidate.policy != "none":
        yield "recomputation"
    if candidate.accumulation > 1:
        yield "accumulation"
    yield "more along fsdp"


def _reason(plan: Priced, best: Priced) -> str:
    """Name the part of a plan's time that is furthest above the best plan's."""
    more = {name: getattr(plan.estimate, name) - getattr(best.estimate, name) for name in _PARTS}
    name = max(more, key=lambda part: more[part])
    if more[name] <= 0:
        return "no part that is longer"
    return f"{_PARTS[name]} (+{seconds_text(more[name])})"


def changes_of(
    choices: Choices,
    facts: Facts,
    meshes: Sequence[Layout],
    price_of: Callable[[Request], Price],
    best: Priced,
) -> list[Changed]:
    """Search once more, on the best meshes alone, for requests that differ in one thing.

    Args:
      choices: what a plan of the request may choose.
      meshes: the meshes to look at.
      price_of: makes what prices the plans of a request.
      best: the answer to the request itself, by the closed forms.
    """
    found = []
    request = choices.request
    ladder = choices.ladder
    for what, other in _others(request, facts):
        price = price_of(other)
        ranking = rank(other, facts, meshes, ladder, price)
        refined = [
            refine(plan, other, price, other.budget, ladder.may_offload)
            for plan in ranking.plans[:_MOST_REFINED]
        ]
        if not refined:
            found.append(Changed(what, None))
            continue
        plan = min(refined, key=lambda one: one.seconds)
        rate = other.tokens / request.tokens * best.seconds / plan.seconds
        is_other = _choice(plan.candidate) != _choice(best.candidate)
        found.append(Changed(what, plan.candidate, rate, is_other))
    return found


def _choice(candidate: Candidate) -> Candidate:
    """Return a plan without what follows from the request that it answers."""
    return candidate._replace(moments="float32", keep=(), overlap=(), loss_mib=0)


def _others(request: Request, facts: Facts) -> Iterator[tuple[str, Request]]:
    """Yield requests that differ from one in one thing, each with a few words."""
    config = request.config
    batch = config.train.batch
    yield f"twice the batch, {2 * batch:,} sequences", _with_batch(request, 2 * batch)
    if batch % 2 == 0:
        yield f"half the batch, {batch // 2:,} sequences", _with_batch(request, batch // 2)
    is_open = "precision.moments" not in request.fixed and not request.may
    if facts.rounds_moments and config.precision.moments == "float32" and is_open:
        fixed = {**request.fixed, "precision.moments": "bfloat16"}
        yield "first moments in bfloat16", replace(request, fixed=fixed)
    yield "half the memory", replace(request, budget=request.budget // 2)
    if request.forbidden:
        yield "nothing forbidden", replace(request, forbidden=frozenset())


def _with_batch(request: Request, batch: int) -> Request:
    train = replace(request.config.train, batch=batch)
    return replace(request, config=replace(request.config, train=train))
