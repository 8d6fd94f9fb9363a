"""Plans of each pair are drawn and rehearsed, each in a process of its own, and written as rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import Say
from jaxpar.bench.plans.pairs import Drawn, Pair, Space, draw_plans, space_of
from jaxpar.bench.plans.rehearsed import RehearsedPlan, rehearsed_plans, write_row
from jaxpar.plan.layout_search.answer import plan_text
from jaxpar.plan.layout_search.processes import Outcome, rehearse_all
from jaxpar.rehearse.report.report_tables import seconds_text

FILE = "rehearsed.csv"


def rehearse_pairs(
    pairs: Sequence[Pair], folder: Path, say: Say = lambda line: None
) -> list[RehearsedPlan]:
    """Draw plans of some pairs and rehearse them; what the folder has of them is not rehearsed
    again.

    Args:
      folder: the folder of the file of rows, which grows by a row with each rehearsal.
      say: is called with a line for each plan.

    Returns:
      The rows of the file.

    Raises:
      UserError: the compiler of a target is missing, or the file in the folder is none of rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    for pair in pairs:
        space = space_of(pair)
        space.request.target.devices()  # a compiler that is missing is no refusal of a plan
        drawn = draw_plans(space)
        for number, one in enumerate(drawn, 1):
            if not _is_known(pair, one, file):
                row = _rehearse(pair, one, space, folder)
                write_row(file, row)
                say(f"{pair.name}, {number} of {len(drawn)}: {_line(row)}")
    return rehearsed_plans(file)


def _is_known(pair: Pair, one: Drawn, file: Path) -> bool:
    rows = rehearsed_plans(file) if file.exists() else []
    return any(row.pair == pair.name and row.candidate == one.candidate for row in rows)


def _rehearse(pair: Pair, one: Drawn, space: Space, folder: Path) -> RehearsedPlan:
    """Rehearse a plan in a process of its own."""
    config = space.request.config_of(one.candidate)
    (outcome,) = rehearse_all([config], space.request.target, folder / "points", 1)
    plain = RehearsedPlan(pair.name, one.drawn, one.candidate)
    return _with_outcome(plain, outcome)


def _with_outcome(plan: RehearsedPlan, outcome: Outcome) -> RehearsedPlan:
    if outcome.figures is None:
        kind = "memory" if outcome.too_large else "refused"
        return plan._replace(refused=f"{kind}: {outcome.refused}"[:_MOST])
    figures = outcome.figures
    return plan._replace(seconds=figures.step, exposed=figures.exposed, memory=figures.memory)


_MOST = 200
"""The characters of a reason that a row keeps."""


def _line(row: RehearsedPlan) -> str:
    name = plan_text(row.candidate)
    if row.refused:
        return f"{name}: {row.refused}"
    return f"{name}: {seconds_text(row.seconds)}, {bytes_text(row.memory)}"
