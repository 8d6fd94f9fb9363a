"""The conditions on which a rehearsal fails a CI run: `--fail-on unplanned-collective,does-not-fit`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, suggest
from jaxpar.rehearse.report.lint import RULES
from jaxpar.rehearse.report.schema import Rehearsal

UNPLANNED, DOES_NOT_FIT = "unplanned-collective", "does-not-fit"


def parse_conditions(text: str) -> list[str]:
    """Read `--fail-on`, before anything is compiled: `does-not-fit` and rules of the linter, separated by commas.

    Raises:
      UserError: a name is unknown.
    """
    names, known = [part for part in map(str.strip, text.split(",")) if part], sorted({DOES_NOT_FIT, *RULES})
    for name in names:
        if name not in known:
            raise UserError(f"--fail-on {name}: unknown condition{suggest(name, known)}: it may be {', '.join(known)}")
    return names


def failures(conditions: Sequence[str], report: Rehearsal) -> list[str]:
    """A line for each condition that is met; none = the run passes."""
    lines = []
    for name in conditions:
        places = _places(name, report)
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        lines += [f"{name}: {places[0]}{more}"] if places else []
    return lines


def _places(name: str, report: Rehearsal) -> list[str]:
    """The places where a condition is met; unplanned collectives come with the longest first."""
    if name == DOES_NOT_FIT:
        memory = report["memory"]
        over, has = bytes_text(memory["total"] - memory["hbm_bytes"]), bytes_text(memory["hbm_bytes"])
        return [] if memory["fits"] else [f"{over} more than {has} of HBM"]
    collectives = [
        f"{row['kind']} over {', '.join(row['axes']) or 'no axis'} at {row['source'] or 'no known line'}"
        for row in sorted(report["collectives"], key=lambda row: -row["seconds"])
        if name == UNPLANNED and not row.get("planned", True)
    ]
    return collectives or [f"{row['source']}: {row['message']}" for row in report["findings"] if row["rule"] == name]
