"""The search for the fastest plan of a config on a target, from the space to the answer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.errors import Say, UserError
from jaxpar.parallel.host_memory import check_offload
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import Estimate, estimate, step_shapes
from jaxpar.plan.layout_search.answer import Answer, plan_text
from jaxpar.plan.layout_search.correct import Correction
from jaxpar.plan.layout_search.explain import changes_of, losers
from jaxpar.plan.layout_search.facts import facts_of
from jaxpar.plan.layout_search.finalists import (
    Measure,
    Round,
    found,
    rehearse_finalists,
    runners_up,
    winner_of,
)
from jaxpar.plan.layout_search.infeasible import by_kind
from jaxpar.plan.layout_search.layouts import Layout, layouts, nothing_left
from jaxpar.plan.layout_search.memory_choices import Price, Priced, ladder_of
from jaxpar.plan.layout_search.processes import Outcome, rehearse_all, verify_apart
from jaxpar.plan.layout_search.rank import rank
from jaxpar.plan.layout_search.request import Request, make_request, request_line
from jaxpar.rehearse.targets import Target, load_target

REHEARSALS = 6
WORKERS = 2
"""The number of rehearsals at a time. One of a pod takes some GB of memory and a core or two."""
_RUNNERS_UP = 5
_MESHES_TO_CHANGE = 24
"""The number of the best meshes that are looked at for other requests."""

PriceOf = Callable[[Request], Price]
"""Makes what prices the plans of a request."""


def search(
    config: Config,
    target: Target | str,
    *,
    sequences: int = 0,
    tokens: int = 0,
    budget: int = 0,
    fixed: Mapping[str, Any] | None = None,
    forbidden: Sequence[str] = (),
    may: Sequence[str] = (),
    rehearsals: int = REHEARSALS,
    workers: int = WORKERS,
    verify: bool = True,
    chip_hour: float = 0.0,
    folder: Path | None = None,
    say: Say = lambda line: None,
    price_of: PriceOf | None = None,
    measure: Measure | None = None,
) -> Answer:
    """Find the fastest plan of a config that fits a target.

    Args:
      config: the config; of its plan nothing counts.
      target: the target, or its name.
      sequences: the sequences of a step; 0 = the config's.
      tokens: the tokens of a step, in place of `sequences`.
      budget: the bytes of a device that a step may take; 0 = all that a program may have.
      fixed: the values that keys must have, by dotted key or by mesh axis.
      forbidden: what no plan may use, such as `offload` or `pipeline`.
      may: `moments`, where bfloat16 first moments may be chosen.
      rehearsals: the most plans that are rehearsed; 0 = the closed forms decide.
      workers: how many are rehearsed at a time, in processes of their own.
      verify: whether the winner is verified.
      chip_hour: the price of a chip for an hour.
      folder: where rehearsals are remembered; None = nowhere beyond this call.
      say: is called with lines about the progress.
      price_of: what prices plans in place of the closed forms.
      measure: what rehearses configs in place of processes of their own.

    Returns:
      The answer, which says why nothing fits where nothing does.

    Raises:
      UserError: the config is wrong in itself, the request makes no sense, or the target's compiler
        is missing and plans are to be rehearsed.
    """
    began = time.perf_counter()
    if not isinstance(target, Target):
        target = load_target(target)
    request = make_request(
        config,
        target,
        sequences=sequences,
        tokens=tokens,
        budget=budget,
        fixed=fixed,
        forbidden=forbidden,
        may=may,
    )
    check(request.config_of(Candidate()))
    say(request_line(request))
    notes = list[str]()
    facts = facts_of(request)
    ladder = ladder_of(request, facts.has_moments, may_offload=True)
    if rehearsals > 0 and measure is None and not _may_offload(request, notes):
        ladder = ladder_of(request, facts.has_moments, may_offload=False)
    price_of = price_of or closed_forms
    price = price_of(request)
    meshes = layouts(request, facts)
    ranking = rank(request, facts, meshes, ladder, price, say)
    if not ranking.plans and not ranking.refused:
        ranking.refused.append((nothing_left(request), ladder.size))
    say(
        f"{ranking.count:,} plans on {len(meshes):,} meshes in {ranking.seconds:.1f} s, "
        f"{ranking.priced:,} of them priced one by one; {len(ranking.plans):,} contenders fit"
    )
    of = Round(request, ladder, price, ranking.plans)
    with tempfile.TemporaryDirectory() as own:
        place = folder or Path(own)
        measure = measure or _processes(target, place, workers)
        correction, best = rehearse_finalists(of, measure, rehearsals, workers, say)
    winner = winner_of(best, correction)
    if winner is not None and rehearsals:
        notes += _unsettled(winner, best, correction)
    settled = None if winner is None else check(request.config_of(winner.candidate))
    verified = None
    if settled is not None and verify:
        say("verifying the winner on a small model, against one device")
        verified = verify_apart(settled)
        say(verified.says)
    near = _best_meshes(ranking.plans)
    return Answer(
        request=request,
        best=None if winner is None else found(winner, correction),
        config=settled,
        runners_up=tuple(runners_up(winner, best, correction, _RUNNERS_UP)),
        rehearsed=correction.rehearsed,
        lost=tuple(losers(ranking, best, winner, ladder.size) if winner else ()),
        refused=by_kind(ranking.refused),
        changed=tuple(changes_of(request, facts, near, ladder, price_of, winner) if winner else ()),
        points=tuple((correction.seconds(one), correction.bytes(one)) for one in ranking.plans),
        count=ranking.count,
        priced=ranking.priced,
        ranked_in=ranking.seconds,
        took=time.perf_counter() - began,
        verified=verified,
        chip_hour=chip_hour,
        notes=tuple(notes),
    )


def closed_forms(request: Request) -> Price:
    """Make what prices the plans of a request by the closed forms."""
    shapes = step_shapes(request.config)

    def price(candidate: Candidate) -> Estimate:
        return estimate(shapes, candidate, request.target)

    return price


def _processes(target: Target, folder: Path, workers: int) -> Measure:
    """Return what rehearses configs in processes of their own."""

    def measure(configs: Sequence[Config]) -> list[Outcome]:
        return rehearse_all(configs, target, folder, workers)

    return measure


def _may_offload(request: Request, notes: list[str]) -> bool:
    """Return whether the target's host memory may be used, which its compiler knows; a note says
    why not.
    """
    device = request.target.devices()[0]
    try:
        check_offload("a plan", device, request.config.memory.offload_anyway)
    except UserError as refused:
        notes.append(f"nothing is offloaded: {refused}")
        return False
    return True


def _unsettled(winner: Priced, best: Sequence[Priced], correction: Correction) -> list[str]:
    """Say that a plan which was not rehearsed is expected to be faster, or that none was."""
    if correction.of(winner.candidate) is None:
        return ["no plan that was rehearsed fits: raise --rehearsals"]
    if correction.seconds(best[0]) < correction.seconds(winner):
        name = plan_text(best[0].candidate)
        return [f"{name} is expected to be faster, and was not rehearsed: raise --rehearsals"]
    return []


def _best_meshes(plans: Sequence[Priced]) -> list[Layout]:
    """Return the meshes of the fastest plans, each once."""
    meshes = dict.fromkeys(Layout(plan.candidate.mesh, plan.candidate.dcn) for plan in plans)
    return list(meshes)[:_MESHES_TO_CHANGE]
