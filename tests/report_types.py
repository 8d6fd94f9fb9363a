"""Holds a report to what is promised of it: `Rehearsal`'s types, checked on a value, and a trace
that is the step.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import pytest

from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.trace import chrome_trace


def problems(
    value: Any,
    kind: Any = Rehearsal,
    where: str = "",
) -> Iterator[str]:
    """Where a value departs from the types above; keys that they do not name are let through.

    Yields:
      `memory.total: expected int, found 'x'`.
    """
    origin = get_origin(kind)
    inside = get_args(kind)
    if origin is NotRequired:
        yield from problems(value, inside[0], where)
    elif is_typeddict(kind):
        yield from _dict_problems(value, kind, where)
    elif origin in (Union, types.UnionType):
        if all(any(problems(value, choice, where)) for choice in inside):
            yield _wrong(where, " or ".join(map(_name, inside)), value)
    elif origin is Literal:
        if value not in inside:
            yield _wrong(where, "one of " + ", ".join(inside), value)
    elif origin is list and isinstance(value, list):
        for i, item in enumerate(value):
            yield from problems(item, inside[0], f"{where}[{i}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from problems(item, inside[1], f"{where}.{key}" if where else key)
    elif kind is not Any:
        if kind is float:
            accepted = (int, float)
        else:
            accepted = origin or kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            yield _wrong(where, _name(kind), value)


def _dict_problems(value: Any, kind: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _wrong(where, "a table", value)
        return
    hints = get_type_hints(kind, include_extras=True)
    for key, hint in hints.items():
        inner = f"{where}.{key}" if where else key
        if key in value:
            yield from problems(value[key], hint, inner)
        elif get_origin(hint) is not NotRequired:
            yield f"{inner} is missing"


def _name(kind: Any) -> str:
    if kind is type(None):
        return "None"
    return getattr(kind, "__name__", str(kind))


def _wrong(where: str, expected: str, value: Any) -> str:
    found = repr(value)
    return (
        f"{where or 'the report'}: expected {expected}, found "
        f"{found if len(found) < 60 else found[:56] + ' ...'}"
    )


def assert_the_trace_is_the_step(report: Rehearsal) -> None:
    """Bars of a lane follow one another, and the last of all ends with the step."""
    lanes = defaultdict(list)
    for event in chrome_trace(report)["traceEvents"]:
        if event["ph"] == "X":
            lanes[event["tid"]].append(
                (
                    event["ts"],
                    event["ts"] + event["dur"],
                )
            )
    for bars in lanes.values():
        bars.sort()
        assert all(start >= end - 0.002 for (_, end), (start, _) in pairwise(bars)), (
            "a nanosecond is rounding"
        )
    end = max(end for bars in lanes.values() for _, end in bars)
    assert end == pytest.approx(
        1e6 * report["time"]["step"],
        rel=1e-6,
        abs=0.01,
    )
