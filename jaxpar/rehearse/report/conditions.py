"""The conditions on which a rehearsal fails a CI run: `--fail-on unplanned-collective,memory+5%`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, suggest
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.tables import seconds_text

UNPLANNED, DOES_NOT_FIT = "unplanned-collective", "does-not-fit"


class Quantity(NamedTuple):
    """A figure of the report that must not grow, and the way in which it is written."""

    of: Callable[[Rehearsal], float]
    text: Callable[[float], str]


QUANTITIES = {
    "memory": Quantity(lambda report: report["memory"]["total"], bytes_text),
    "time": Quantity(lambda report: report["time"]["step"], seconds_text),
    "exposed": Quantity(lambda report: report["time"]["exposed_communication"], seconds_text),
    "collective-bytes": Quantity(lambda report: sum(row["sent_bytes"] for row in report["collectives"]), bytes_text),
}

Conditions = Mapping[str, float | None]
"""What fails a run, by name: for a quantity the share of the baseline by which it may grow, for others None."""


def parse_conditions(text: str, rules: Collection[str], baseline: bool) -> Conditions:
    """Read `--fail-on`, before anything is compiled.

    Args:
      text: conditions separated by commas: `does-not-fit`, `unplanned-collective`, a rule of the linter, or a growth
        against the baseline that fails the run if exceeded: `memory+5%`, `time+3%`, `exposed+10%`,
        `collective-bytes+0%`.
      rules: the names of the linter's rules.
      baseline: whether there is a baseline (`--against`).

    Raises:
      UserError: a name is unknown, a quantity lacks its growth, another condition has one, or there is no baseline.
    """
    events, conditions = {DOES_NOT_FIT, UNPLANNED, *rules}, dict[str, float | None]()
    for part in filter(None, map(str.strip, text.split(","))):
        name, plus, growth = part.partition("+")
        if name in events and plus:
            raise UserError(f"--fail-on {part}: {name} either happens or does not: write {name}")
        if name not in events and name not in QUANTITIES:
            known = ", ".join([*sorted(events), *(f"{quantity}+5%" for quantity in QUANTITIES)])
            hint = suggest(name, [*events, *QUANTITIES])
            raise UserError(f"--fail-on {part}: unknown condition{hint}: it may be {known}")
        if name in QUANTITIES and not re.fullmatch(r"\d+(\.\d+)?%", growth):
            found = f"found {plus + growth!r}" if plus else "found none"
            raise UserError(f"--fail-on {part}: {name} needs the growth to allow, {found}: try {name}+5%")
        if name in QUANTITIES and not baseline:
            raise UserError(f"--fail-on {part} compares with another report: name it, --against FILE_OR_CONFIG")
        conditions[name] = float(growth[:-1]) / 100 if plus else None
    return conditions


def failures(conditions: Conditions, report: Rehearsal, against: Rehearsal | None = None) -> list[str]:
    """A line for each condition that is met; none = the run passes.

    Args:
      conditions: the conditions from `parse_conditions`.
      report: the report to judge.
      against: the baseline of the quantities.
    """
    lines = []
    for name, growth in conditions.items():
        if growth is not None:
            assert against is not None, "a growth was parsed without a baseline"
            lines.append(_grown(name, growth, report, against))
        elif name == DOES_NOT_FIT:
            lines.append(_too_large(report))
        else:
            places = _places(name, report)
            more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
            lines.append(f"{name}: {places[0]}{more}" if places else "")
    return [line for line in lines if line]


def _too_large(report: Rehearsal) -> str:
    memory = report["memory"]
    over = bytes_text(memory["total"] - memory["hbm_bytes"])
    return "" if memory["fits"] else f"{DOES_NOT_FIT}: {over} more than {bytes_text(memory['hbm_bytes'])} of HBM"


def _places(name: str, report: Rehearsal) -> list[str]:
    """The places where an event happens; unplanned collectives come with the longest first."""
    collectives = [
        f"{row['kind']} over {', '.join(row['axes']) or 'no axis'} at {row['source'] or 'no known line'}"
        for row in sorted(report["collectives"], key=lambda row: -row["seconds"])
        if name == UNPLANNED and not row.get("planned", True)
    ]
    return collectives or [f"{row['source']}: {row['message']}" for row in report["findings"] if row["rule"] == name]


def _grown(name: str, allowed: float, report: Rehearsal, against: Rehearsal) -> str:
    quantity = QUANTITIES[name]
    old, new = quantity.of(against), quantity.of(report)
    if new <= old * (1 + allowed + 1e-9):
        return ""
    grown = f"+{100 * (new / old - 1):.1f} %" if old else "from nothing"
    return f"{name}: {quantity.text(old)} -> {quantity.text(new)} ({grown}, {100 * allowed:g} % allowed)"
