"""`--fail-on unplanned-collective,memory+5%`: when a rehearsal fails a CI run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, nearest
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.tables import seconds_text

UNPLANNED, DOES_NOT_FIT = "unplanned-collective", "does-not-fit"


@dataclass(frozen=True)
class Quantity:
    """A figure of the report that must not grow."""

    of: Callable[[Rehearsal], float]
    text: Callable[[float], str]


QUANTITIES = {
    "memory": Quantity(lambda report: report["memory"]["total"], bytes_text),
    "time": Quantity(lambda report: report["time"]["step"], seconds_text),
    "exposed": Quantity(lambda report: report["time"]["exposed_communication"], seconds_text),
    "collective-bytes": Quantity(lambda report: sum(row["sent_bytes"] for row in report["collectives"]), bytes_text),
}


@dataclass(frozen=True)
class Condition:
    """One of the conditions, any of which fails the run."""

    name: str
    """A quantity, a rule of the linter, or one of the two above."""
    growth: float | None = None
    """Of a quantity: the share of the baseline by which it may grow."""


def parse_conditions(text: str, rules: Collection[str], baseline: bool) -> tuple[Condition, ...]:
    """Read `--fail-on`, before anything is compiled.

    Args:
      text: conditions with commas between: `does-not-fit`, `unplanned-collective`, a rule of the linter, or
        `memory+5%`, `time+3%`, `exposed+10%`, `collective-bytes+0%`: grown by more than that against the baseline.
      rules: names of the linter's rules.
      baseline: whether there is one (`--against`).

    Raises:
      UserError: an unknown name, a quantity without its growth, a growth of something that has none, or no baseline.
    """
    return tuple(_condition(part.strip(), rules, baseline) for part in text.split(",") if part.strip())


def _condition(text: str, rules: Collection[str], baseline: bool) -> Condition:
    name, plus, growth = text.partition("+")
    events = {DOES_NOT_FIT, UNPLANNED, *rules}
    if name in events:
        if plus:
            raise UserError(f"--fail-on {text}: {name} either happens or does not: write {name}")
        return Condition(name)
    if name not in QUANTITIES:
        known = sorted(events) + [f"{quantity}+5%" for quantity in QUANTITIES]
        hint = nearest(name, [*events, *QUANTITIES])
        raise UserError(f"--fail-on {text}: unknown condition{hint}: it may be {', '.join(known)}")
    if not re.fullmatch(r"\d+(\.\d+)?%", growth):
        found = f"found {plus + growth!r}" if plus else "found none"
        raise UserError(f"--fail-on {text}: {name} needs the growth to allow, {found}: try {name}+5%")
    if not baseline:
        raise UserError(f"--fail-on {text} compares with another report: name it, --against FILE_OR_CONFIG")
    return Condition(name, float(growth[:-1]) / 100)


def failures(conditions: Sequence[Condition], rehearsal: Rehearsal, against: Rehearsal | None = None) -> list[str]:
    """A line for each condition that is met; none = the run passes.

    Args:
      conditions: of `parse_conditions`.
      rehearsal: to judge.
      against: the baseline of the quantities.
    """
    lines = [_failure(condition, rehearsal, against) for condition in conditions]
    return [line for line in lines if line]


def _failure(condition: Condition, rehearsal: Rehearsal, against: Rehearsal | None) -> str:
    """What is wrong, or an empty string."""
    if condition.growth is not None:
        assert against is not None, "a growth was parsed without a baseline"
        return _growth_failure(condition.name, condition.growth, rehearsal, against)
    if condition.name == DOES_NOT_FIT:
        memory = rehearsal["memory"]
        over = bytes_text(memory["total"] - memory["hbm_bytes"])
        return "" if memory["fits"] else f"{DOES_NOT_FIT}: {over} more than {bytes_text(memory['hbm_bytes'])} of HBM"
    places = [
        f"{row['kind']} over {', '.join(row['axes']) or 'no axis'} at {row['source'] or 'no known line'}"
        for row in sorted(rehearsal["collectives"], key=lambda row: -row["seconds"])
        if condition.name == UNPLANNED and not row.get("planned", True)
    ] or [f"{row['source']}: {row['message']}" for row in rehearsal["findings"] if row["rule"] == condition.name]
    if not places:
        return ""
    more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
    return f"{condition.name}: {places[0]}{more}"


def _growth_failure(name: str, allowed: float, rehearsal: Rehearsal, against: Rehearsal) -> str:
    quantity = QUANTITIES[name]
    old, new = quantity.of(against), quantity.of(rehearsal)
    if new <= old * (1 + allowed + 1e-9):
        return ""
    grown = f"+{100 * (new / old - 1):.1f} %" if old else "from nothing"
    return f"{name}: {quantity.text(old)} -> {quantity.text(new)} ({grown}, {100 * allowed:g} % allowed)"
