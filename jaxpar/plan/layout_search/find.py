"""The search for the fastest plan of a config on a target, from the space to the answer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.errors import Say, UserError
from jaxpar.parallel.host_memory import check_offload
from jaxpar.plan.candidate import Candidate, plan_text
from jaxpar.plan.closed_form import Estimate, estimate, step_shapes
from jaxpar.plan.engine import (
    Correction,
    Outcome,
    Price,
    Priced,
    rehearse_finalists,
    winner_of,
)
from jaxpar.plan.layout_search.answer import Answer, Found
from jaxpar.plan.layout_search.contenders import Choices, space_of
from jaxpar.plan.layout_search.explain import changes_of, losers
from jaxpar.plan.layout_search.facts import Facts, facts_of
from jaxpar.plan.layout_search.infeasible import by_kind
from jaxpar.plan.layout_search.layouts import Layout, layouts, nothing_left
from jaxpar.plan.layout_search.memory_choices import ladder_of
from jaxpar.plan.layout_search.processes import (
    Verified,
    rehearse_all,
    rehearse_own,
    verify_apart,
    verify_own,
)
from jaxpar.plan.layout_search.rank import Ranking, rank
from jaxpar.plan.layout_search.request import Request, make_request, request_line
from jaxpar.rehearse.targets import Target, load_target
from jaxpar.train.experiment import Experiment

REHEARSALS = 6
WORKERS = 2
"""The number of rehearsals at a time. One of a pod takes some GB of memory and a core or two."""
_RUNNERS_UP = 5
_MESHES_TO_CHANGE = 24
"""The number of the best meshes that are looked at for other requests."""

PriceOf = Callable[[Request], Price]
"""Makes what prices the plans of a request."""
Rehearse = Callable[[Sequence[Config]], Sequence[Outcome]]
"""Rehearses configs."""


def search(
    experiment: Config | Experiment,
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
    measure: Rehearse | None = None,
) -> Answer:
    """Find the fastest plan of a config that fits a target.

    Args:
      experiment: the config, or an experiment, which may have a model or an optimizer of a
        program's own; of its plan nothing counts. What is of a program's own is rehearsed and
        verified in this process, and not remembered.
      target: the target, or its name.
      sequences: the sequences of a step; 0 = the config's.
      tokens: the tokens of a step, in place of `sequences`.
      budget: the bytes of a device that a step may take; 0 = all that a program may have.
      fixed: the values that keys must have, by dotted key or by mesh axis.
      forbidden: what no plan may use, such as `offload` or `pipeline`.
      may: `moments`, where bfloat16 first moments may be chosen, and `unrolled`, where layers
        may be compiled one by one.
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
      UserError: the config is wrong in itself, the request makes no sense, the target's compiler
        is missing and plans are to be rehearsed, or a model of a program's own has no blocks.
    """
    began = time.perf_counter()
    request = make_request(
        experiment,
        target if isinstance(target, Target) else load_target(target),
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
    choices = Choices(request, ladder, price_of(request))
    ranking = _rank(choices, facts, say)
    with tempfile.TemporaryDirectory() as own:
        rehearse = measure or _rehearse_with(request, folder or Path(own), workers)
        correction, best = rehearse_finalists(
            space_of(choices, ranking.plans),
            lambda plans, _: rehearse([request.config_of(plan.candidate) for plan in plans]),
            rehearsals,
            workers,
            say,
        )
    answer = Answer(
        request=request,
        rehearsed=correction.rehearsed,
        refused=by_kind(ranking.refused),
        points=tuple((correction.seconds(one), correction.bytes(one)) for one in ranking.plans),
        count=ranking.count,
        priced=ranking.priced,
        ranked_in=ranking.seconds,
        took=0.0,
        chip_hour=chip_hour,
        notes=tuple(notes),
    )
    if winner := winner_of(best, correction):
        unsettled = _unsettled(winner, best, correction) if rehearsals else []
        config = check(request.config_of(winner.candidate))
        answer = replace(
            answer,
            best=_found(winner, correction),
            config=config,
            runners_up=tuple(_runners_up(winner, best, correction)),
            lost=tuple(losers(ranking, best, winner, ladder.size)),
            changed=tuple(
                changes_of(choices, facts, _best_meshes(ranking.plans), price_of, winner)
            ),
            verified=_verify(request, config, say) if verify else None,
            notes=(*notes, *unsettled),
        )
    return replace(answer, took=time.perf_counter() - began)


def closed_forms(request: Request) -> Price:
    """Make what prices the plans of a request by the closed forms."""
    own = request.experiment
    shapes = step_shapes(request.config if own is None else replace(own, config=request.config))

    def price(candidate: Candidate) -> Estimate:
        return estimate(shapes, candidate, request.target)

    return price


def _rank(choices: Choices, facts: Facts, say: Say) -> Ranking:
    """Put all plans of a request in order by their price."""
    request = choices.request
    meshes = layouts(request, facts)
    ranking = rank(request, facts, meshes, choices.ladder, choices.price, say)
    if not ranking.plans and not ranking.refused:
        ranking.refused.append((nothing_left(request), choices.ladder.size))
    say(
        f"{ranking.count:,} plans on {len(meshes):,} meshes in {ranking.seconds:.1f} s, "
        f"{ranking.priced:,} of them priced one by one; {len(ranking.plans):,} contenders fit"
    )
    return ranking


def _rehearse_with(request: Request, folder: Path, workers: int) -> Rehearse:
    """Return what rehearses configs: in processes of their own, but for a model of a program's own,
    which lives here alone.
    """
    own = request.experiment
    if own is not None:
        return lambda configs: rehearse_own(own, configs, request.target)
    return lambda configs: rehearse_all(configs, request.target, folder, workers)


def _verify(request: Request, config: Config, say: Say) -> Verified:
    """Compare a config with one device."""
    say("verifying the winner on a small model, against one device")
    if request.experiment is None:
        verified = verify_apart(config)
    else:
        verified = verify_own(request.experiment, config, request.target)
    say(verified.says)
    return verified


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


def _found(plan: Priced, correction: Correction) -> Found:
    """Say what is known of a plan."""
    known = correction.of(plan.candidate)
    figures = None if known is None else known.figures
    return Found(plan.candidate, correction.seconds(plan), correction.bytes(plan), plan, figures)


def _runners_up(winner: Priced, best: Sequence[Priced], correction: Correction) -> list[Found]:
    """List the next plans beside the winner, one for each mesh."""
    meshes = dict[object, Priced]()
    for plan in (winner, *best):
        meshes.setdefault(plan.candidate.sizes, plan)
    return [_found(plan, correction) for plan in list(meshes.values())[1 : 1 + _RUNNERS_UP]]
