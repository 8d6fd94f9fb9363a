"""The config file of an answer: every setting written out, and the reasons as comments."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Iterator

from jaxpar.base.console import bytes_text, count_text
from jaxpar.base.errors import visible
from jaxpar.base.machine import versions
from jaxpar.base.toml import to_toml
from jaxpar.plan.layout_search.answer import Answer, Found
from jaxpar.rehearse.report.report_tables import interval_text, seconds_text

_WRAPPER = textwrap.TextWrapper(96, break_long_words=False, break_on_hyphens=False)
_COMPILERS = ("jax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def config_text(answer: Answer, command: str) -> str:
    """Write the config of an answer, which has a plan, as TOML.

    Args:
      command: the command line that found it.
    """
    assert answer.config is not None
    lines = [
        wrapped
        for line in reason_lines(answer, command)
        for wrapped in _WRAPPER.wrap(visible(line)) or [""]
    ]
    return to_toml(answer.config, "\n".join(lines))


def reason_lines(answer: Answer, command: str) -> Iterator[str]:
    """Yield the reasons for the plan of an answer, a line each."""
    best = answer.best
    assert best is not None
    request = answer.request
    found = versions(_COMPILERS)
    made_with = ", ".join(f"{name} {number}" for name, number in found.items())
    yield (
        f"Found for {request.target.name} by `{command}` on {datetime.date.today().isoformat()} "
        f"({made_with}): {best.name}."
    )
    yield ""
    yield f"A step of {count_text(request.tokens)} tokens: {step_line(answer)}."
    yield f"Memory of a device: {bytes_text(best.bytes)} of {bytes_text(request.budget)}."
    if answer.verified is not None:
        yield f"Verified: {answer.verified.says}"
    yield from (f"Next: {one.name}: {times_text(one, best)}." for one in answer.runners_up)
    yield from (f"Slower: {group}." for group in answer.lost)
    yield from (f"Cannot run: {group}." for group in answer.refused.values())
    yield from (f"With {change}." for change in answer.changed)
    yield from answer.notes


def step_line(answer: Answer) -> str:
    """Write the step of the best plan in a line: its seconds, its rate, and how they are known."""
    best = answer.best
    assert best is not None
    figures = best.figures
    if figures is None:
        known = "by the closed forms, not rehearsed"
    else:
        known = f"rehearsed, not run; {interval_text(answer.interval)}"
    parts = [seconds_text(best.seconds), f"{count_text(answer.tokens_per_second)} tokens/s"]
    if figures is not None and figures.mfu is not None:
        parts.append(f"MFU {100 * figures.mfu:.1f} %")
    if figures is not None:
        parts.append(f"{seconds_text(figures.exposed)} exposed")
    return f"{', '.join(parts)} ({known})"


def times_text(one: Found, best: Found) -> str:
    """Write the time of a plan beside that of the best one."""
    known = "expected" if one.figures is None else "rehearsed"
    times = one.seconds / best.seconds
    return f"{seconds_text(one.seconds)} {known}, {times:.2f}x, {bytes_text(one.bytes)}"
