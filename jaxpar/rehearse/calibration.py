"""A step that was measured, and what it says of the steps that are rehearsed: the seconds of
compute are scaled until its own rehearsal takes as long as it did.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path

from jaxpar.base.errors import UserError
from jaxpar.hlo.program.tasks import Program, walk_paths
from jaxpar.rehearse.compiled import Compiled
from jaxpar.rehearse.cost import Costs
from jaxpar.rehearse.report.report_tables import seconds_text
from jaxpar.rehearse.report.schema import Calibration
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import MOVING, read_and_price, replay
from jaxpar.train.metrics import METRICS, read_metrics

_WIDEST = 16.0
"""The most that compute is scaled by, up or down: beyond it something else was measured."""
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_HALVINGS = 40


def written_seconds(text: str) -> float:
    """Read a time such as `1.453s` or `850ms`; 0 = it is none.

    Raises:
      UserError: it is a time, and no number that a step can take.
    """
    number = re.fullmatch(r"([\d.]+(?:e-?\d+)?)\s*(s|ms|us)", text)
    if not number:
        return 0.0
    try:
        seconds = float(number[1]) * _UNITS[number[2]]
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UserError(f"measured: {text!r} are no seconds of a step: try 1.453s or 850ms")
    return seconds


def seconds_of_run(folder: str) -> float:
    """Return the seconds of a step of a run: the median of its steps, without the first, which has
    the compilation in it.

    Raises:
      UserError: it is no run folder, or the run has measured no step.
    """
    if not (Path(folder) / METRICS).is_file():
        raise UserError(
            f"measured: {folder!r} is neither a run folder with {METRICS} nor the time of a step: "
            "try runs/NAME, 1.453s or 850ms"
        )
    times = [row.get("step_seconds") for row in read_metrics(Path(folder))]
    known = [float(one) for one in times if isinstance(one, int | float) and one > 0]
    if not known:
        raise UserError(f"measured: {folder}/{METRICS} has no step_seconds: the run made no step")
    return statistics.median(known[1:] or known)


def calibrate(compiled: Compiled, seconds: float) -> tuple[Target, Calibration]:
    """Scale what compute takes on a target until a compiled step takes as long as was measured.

    Args:
      compiled: the step that was measured, compiled for the target.
      seconds: what it took.

    Returns:
      The target with these prices, and what was found.

    Raises:
      UserError: no scale gives this time: its collectives and copies alone take longer, or compute
        would have to take many times what is predicted.
    """
    target = compiled.target
    priced = read_and_price(compiled.text, compiled.mesh, target)
    predicted = replay(priced.program, priced.costs).seconds

    def scaled(factor: float) -> float:
        return replay(priced.program, scale_compute(priced.program, priced.costs, factor)).seconds

    low, high = 1 / _WIDEST, _WIDEST
    if not scaled(low) <= seconds <= scaled(high):
        raise UserError(
            f"measured: a step of {seconds_text(seconds)} on {target.name} is not explained by "
            f"its compute: {seconds_text(predicted)} are predicted, and at a {_WIDEST:.0f}th of "
            f"its compute {seconds_text(scaled(low))}; is it a step of this config on this target?"
        )
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if scaled(middle) < seconds:
            low = middle
        else:
            high = middle
        if high / low < 1 + 1e-6:
            break
    prices = target.hardware.prices
    hardware = replace(target.hardware, prices=replace(prices, compute=prices.compute * high))
    found: Calibration = {"measured": seconds, "predicted": predicted, "compute": high}
    return replace(target, hardware=hardware), found


def scale_compute(program: Program, costs: Costs, factor: float) -> Costs:
    """Return the costs with all seconds of compute times a factor: not launches, collectives and
    what the host does.
    """
    found = dict(costs)
    for path, task, _ in walk_paths(program.nodes):
        cost = costs[path]
        if task.kind not in MOVING:
            found[path] = replace(
                cost,
                seconds=cost.launch + factor * (cost.seconds - cost.launch),
                slows=factor * cost.slows,
            )
    return found
