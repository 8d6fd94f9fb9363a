"""Plans of one model on this GPU: what the closed forms, a rehearsal and the clock say of each, and
how far the plan that the planner takes is behind the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from on_gpu.pieces import Found, Say
from on_gpu.stopwatch import ready_step, time_once
from scipy.stats import kendalltau

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import usable_bytes
from jaxpar.bench.measure import BenchRow
from jaxpar.plan import search
from jaxpar.plan.candidate import ONE_DEVICE, Candidate, changes, plan_text
from jaxpar.plan.closed_form import Estimate, estimate, step_shapes
from jaxpar.rehearse.report.memory import CompiledBytes
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import simulate
from jaxpar.train.metrics import device_memory

COUNT = 12
_POLICIES = ("none", "attention_out", "dots", "full")
_ACCUMULATIONS = (1, 2, 4)
_OPTIMIZERS = ("device", "offload")
_LAYERS = (True, False)
"""Whether layers run in a loop."""


class Drawn(NamedTuple):
    """A plan that is measured, with what the closed forms say of it."""

    candidate: Candidate
    estimate: Estimate


def draw_plans(config: Config, target: Target) -> list[Drawn]:
    """The plan that the planner takes by the closed forms, and others that fit at equal distances
    in their order.
    """
    answer = search(config, target, may=["unrolled"], rehearsals=0, verify=False)
    if answer.best is None:
        raise UserError(f"no plan of this model fits {target.name}")
    shapes = step_shapes(config)
    axes = itertools.product(_POLICIES, _ACCUMULATIONS, _OPTIMIZERS, _LAYERS)
    found = [_drawn(_candidate(*choices), shapes, target) for choices in axes]
    taken = _drawn(answer.best.candidate, shapes, target)
    room = usable_bytes(target.hardware.hbm_bytes, target.platform)
    fits = [
        one
        for one in found
        if one.estimate.bytes.total <= room and one.candidate != taken.candidate
    ]
    fits.sort(key=lambda one: one.estimate.seconds)
    places = np.linspace(0, len(fits) - 1, COUNT - 1).round().astype(int)
    return [taken, *(fits[place] for place in places)]


def _candidate(policy: Any, accumulation: int, optimizer: str, scan: bool) -> Candidate:
    return Candidate(
        mesh=ONE_DEVICE,
        policy=policy,
        accumulation=accumulation,
        optimizer=optimizer,
        scan=scan,
    )


def _drawn(candidate: Candidate, shapes: Any, target: Target) -> Drawn:
    return Drawn(candidate, estimate(shapes, candidate, target))


def plan_rows(number: int, config: Config, target: Target, say: Say) -> list[BenchRow]:
    """A row for one of the plans that are drawn: its time by the closed forms, by a rehearsal of
    the program that ran, and by the clock.
    """
    drawn = draw_plans(config, target)[number]
    step = ready_step(override(config, changes(drawn.candidate)))
    times = [time_once(step.run) for _ in range(int(np.clip(1 / step.seconds, 5, 50)))]
    measured = float(np.median(times))
    peak = device_memory(jax.devices()[:1])
    rehearsed = simulate(step.text, step.mesh, target).seconds
    taken = CompiledBytes.of(step.stats, target.platform).total
    return [
        {
            "plan": plan_text(drawn.candidate),
            "choice": "the planner's" if number == 0 else "",
            "closed forms, ms": 1e3 * drawn.estimate.seconds,
            "rehearsed, ms": 1e3 * rehearsed,
            "measured, ms": 1e3 * measured,
            "closed forms, GiB": drawn.estimate.bytes.total / 2**30,
            "rehearsed, GiB": taken / 2**30,
            "peak, GiB": peak and peak / 2**30,
        }
    ]


def judge_plans(cases: Mapping[str, Found]) -> str:
    """Say how the orders of the closed forms and of the rehearsals agree with the measured one, and
    how far the planner's choice and the plan that is rehearsed as fastest are behind the best.
    """
    rows = [row for case in cases.values() for row in case.get("rows", ())]
    if len(rows) < 3:
        return f"{len(rows)} plans were measured, which is too few to compare their orders"
    measured = [row["measured, ms"] for row in rows]
    best = min(measured)
    parts = []
    for name in ("closed forms", "rehearsed"):
        said = [row[f"{name}, ms"] for row in rows]
        agree = kendalltau(said, measured).statistic
        behind = measured[said.index(min(said))] / best - 1
        parts.append(f"{name}: Kendall tau {agree:.3f}, first choice {behind:.1%} behind the best")
    for row in rows:
        if row["choice"]:
            parts.append(f"the planner's: {row['measured, ms'] / best - 1:.1%} behind the best")
    return f"{len(rows)} plans measured; " + "; ".join(parts)
