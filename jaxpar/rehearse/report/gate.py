"""The gate of a CI job: conditions under which a rehearsal has grown too much, such as `step+3%`.

    step+3%  memory+2%  exposed+5%  compile+20%     more than so much above an earlier rehearsal
    step>450ms  memory>14GiB                        more than so much

What is compared is exact: the same compiler makes the same program of the same step, so that
`step+0%` fails where anything has become slower. Only `compile` is measured, and varies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, short, suggest
from jaxpar.rehearse.report.comparison import ROUNDING, compare, lost_time
from jaxpar.rehearse.report.comparison_tables import change_text
from jaxpar.rehearse.report.lint import parse_rules
from jaxpar.rehearse.report.report_tables import seconds_text
from jaxpar.rehearse.report.schema import Rehearsal

_SHOWN = 3
"""The number of lines, or of parts of the memory, that a failure names."""
_FORM = re.compile(r"([a-z]+)\s*([+>])\s*([0-9.]+)\s*(\S*)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}
_BYTES |= {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}


class _Figure(NamedTuple):
    """A figure of a report that a condition may name."""

    units: dict[str, float]
    text: Callable[[float], str]
    read: Callable[[Rehearsal], float]


FIGURES = {
    "step": _Figure(_SECONDS, seconds_text, lambda report: report["time"]["step"]),
    "compute": _Figure(_SECONDS, seconds_text, lambda report: report["time"]["compute"]),
    "exposed": _Figure(
        _SECONDS, seconds_text, lambda report: report["time"]["exposed_communication"]
    ),
    "memory": _Figure(_BYTES, bytes_text, lambda report: report["memory"]["total"]),
    "compile": _Figure(_SECONDS, seconds_text, lambda report: report["compile_seconds"]),
}
"""The figures that conditions are made of, by name."""


class Condition(NamedTuple):
    """A condition under which a rehearsal fails.

    Attributes:
      text: the condition as it was written, `step+3%`.
      figure: a name of `FIGURES`.
      share: by which share of an earlier rehearsal's the figure may be above it; NaN = it is held
        against `most`.
      most: the seconds or bytes that it may be; NaN = it is held against an earlier rehearsal.
    """

    text: str
    figure: str
    share: float = math.nan
    most: float = math.nan

    @property
    def relative(self) -> bool:
        """Whether an earlier rehearsal is needed."""
        return not math.isnan(self.share)


def is_condition(word: str) -> bool:
    """Return whether a word of `--fail-on` is meant as a condition on a figure, and not as a rule
    of the linter.
    """
    return bool(re.search(r"[+><=%]", word))


def read_fail_on(text: str) -> tuple[list[str], list[Condition]]:
    """Read `--fail-on`, before anything is compiled.

    Args:
      text: the value of the flag, `does-not-fit,step+3%`.

    Returns:
      The names of rules of the linter, and the conditions on figures.

    Raises:
      UserError: a word is neither.
    """
    words = [word for word in map(str.strip, text.split(",")) if word]
    rules = [word for word in words if not is_condition(word)]
    conditions = [read_condition(word) for word in words if is_condition(word)]
    return parse_rules(",".join(rules)), conditions


def read_condition(word: str) -> Condition:
    """Read a condition such as `step+3%` or `memory>14GiB`.

    Raises:
      UserError: it has another form, or names another figure or unit.
    """
    found = _FORM.fullmatch(word.strip())
    if found is None:
        raise UserError(
            f"--fail-on {word}: not a condition: write step+3% (against --against) or "
            f"step>450ms, of {', '.join(FIGURES)}"
        )
    name, sign, digits, unit = found.groups()
    if name not in FIGURES:
        raise UserError(
            f"--fail-on {word}: no figure {name!r}{suggest(name, FIGURES)}: it may be "
            f"{', '.join(FIGURES)}"
        )
    try:
        number = float(digits)
    except ValueError as error:
        raise UserError(f"--fail-on {word}: {short(digits)} is no number") from error
    if sign == "+":
        if unit != "%":
            raise UserError(
                f"--fail-on {word}: what may be added is a percentage, found "
                f"{unit or 'no unit'}: try {name}+{digits}%"
            )
        return Condition(word, name, share=number / 100)
    units = FIGURES[name].units
    if unit not in units:
        raise UserError(
            f"--fail-on {word}: {unit or 'no unit'} is no unit of {name}: it may be "
            f"{', '.join(units)}"
        )
    return Condition(word, name, most=number * units[unit])


def failures(
    report: Rehearsal, conditions: Sequence[Condition | str], before: Rehearsal | None = None
) -> list[str]:
    """Find the conditions that a rehearsal fails.

    Args:
      report: the rehearsal.
      conditions: the conditions, or their text: `step+3%`.
      before: the rehearsal that those with a percentage are held against.

    Returns:
      For each that fails a line: the condition, what was and what is, and the lines of the model,
      or the parts of the memory, from which it comes.

    Raises:
      UserError: a condition cannot be read, or needs an earlier rehearsal and there is none.
    """
    read = [one if isinstance(one, Condition) else read_condition(one) for one in conditions]
    lines = []
    for condition in read:
        if condition.relative and before is None:
            raise UserError(
                f"--fail-on {condition.text} needs --against FILE.json, the rehearsal to hold it "
                "against"
            )
        if line := _failure(report, condition, before):
            lines.append(line)
    return lines


def _failure(report: Rehearsal, condition: Condition, before: Rehearsal | None) -> str:
    """Write the line of a condition that fails; empty where it holds."""
    figure = FIGURES[condition.figure]
    now = figure.read(report)
    most = condition.most
    was = ""
    if before is not None:
        old = figure.read(before)
        if condition.relative:
            most = old * (1 + condition.share)
        was = f"{figure.text(old)} before, "
        grown = f"{100 * (now / old - 1):+.1f} %" if old else change_text(old, now, figure.text)
    else:
        grown = f"{figure.text(now - most)} too much"
    # a share of what is compared, as both sums are rounded
    if now <= most * (1 + ROUNDING) + ROUNDING:
        return ""
    causes = _causes(report, condition.figure, before)
    said = f"{condition.text}: {was}{figure.text(now)} now ({grown})"
    return ": ".join([said, ", ".join(causes)]) if causes else said


def _causes(report: Rehearsal, name: str, before: Rehearsal | None) -> list[str]:
    """Name what has added most to a figure, or without an earlier rehearsal what most of it is."""
    if name == "compile":
        return []
    if name == "memory":
        old = before["memory"]["categories"] if before else {}
        parts = [
            (part, old.get(part, 0), size) for part, size in report["memory"]["categories"].items()
        ]
    else:
        parts = _places(report, name, before)
    parts.sort(key=lambda part: part[1] - part[2])
    text = FIGURES[name].text
    return [
        f"{part} {change_text(old, new, text) if before else text(new)}"
        for part, old, new in parts[:_SHOWN]
        if new - old > ROUNDING
    ]


def _places(
    report: Rehearsal, name: str, before: Rehearsal | None
) -> list[tuple[str, float, float]]:
    """List lines of the model with what they took before and take now of a figure."""

    def seconds(figures: dict[str, float]) -> float:
        return lost_time(figures) if name == "step" else figures[name]

    if before is None:
        return [
            (f"{row['source'] or '(no line)'} {row['scope']} {row['phase']}", 0.0, seconds(row))  # pyright: ignore[reportArgumentType]
            for row in report["lines"]
        ]
    return [
        (
            f"{row['source'] or '(no line)'} {row['scope']} {row['phase']}",
            seconds(row["before"]),
            seconds(row["after"]),
        )
        for row in compare(before, report)["places"]
    ]
