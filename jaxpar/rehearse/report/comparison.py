"""Two rehearsals compared: what changed in the step, in a device's memory, and where.

A place is matched by its scope, phase and line. Where an edit has moved the lines of a file, the
lines of one scope are matched in their order, as long as there are as many as before. Collectives
are matched by their kind, mesh axes, scope and phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from jaxpar.base.errors import UserError, read_json, require_kinds, short
from jaxpar.base.layout.mesh import describe
from jaxpar.rehearse.report.schema import SCHEMA, CollectiveRow, LintFinding, Rehearsal

ROUNDING = 1e-9
"""The seconds, or the share of bytes, below which a difference is rounding."""
_PLACES = ("compute", "exposed", "communication")
_FIGURES = ("exposed", "seconds", "sent_bytes", "count")
"""The figures of a collective that are compared."""


class Change(TypedDict):
    """A figure before and after, in seconds or in bytes."""

    name: str
    before: float
    after: float


class PlaceChange(TypedDict):
    """The seconds of one line of the model in one phase; 0 in a rehearsal that lacks it."""

    scope: str
    source: str
    phase: str
    before: dict[str, float]
    """The seconds of `compute`, `exposed` and `communication`."""
    after: dict[str, float]


class CollectiveChange(TypedDict):
    """The collectives of one kind, over the same mesh axes, from one scope in one phase; 0 in a
    rehearsal that lacks them.
    """

    kind: str
    axes: list[str]
    scope: str
    phase: str
    before: dict[str, float]
    """The seconds `exposed` and of all (`seconds`), the bytes that a device sends (`sent_bytes`),
    and how many there are (`count`).
    """
    after: dict[str, float]


class SettingChange(TypedDict):
    """A setting of the config, a version or an option of the compiler that differs; the texts are
    empty where a rehearsal does not state it.
    """

    name: str
    """The dotted key of a setting, the name of a package or that of an option."""
    before: str
    after: str


class Comparison(TypedDict):
    """The changes from one rehearsal to another."""

    before: str
    """The name of what was rehearsed: `llama3_8b on v5p-64, fsdp=16 x tensor=4`."""
    after: str
    settings: list[SettingChange]
    """What was asked for otherwise: settings, packages, options of the compiler."""
    same_program: bool
    """Whether both compiled to the same program."""
    time: list[Change]
    """The step's time, and what it is made of."""
    memory: list[Change]
    """The device's memory, and its parts."""
    places: list[PlaceChange]
    """The places whose time differs, the largest change first."""
    collectives: list[CollectiveChange]
    """The collectives that differ, the largest change of exposed time first."""
    found: list[LintFinding]
    """The linter's findings that are new."""
    gone: list[LintFinding]


def compare(before: Rehearsal | str | Path, after: Rehearsal | str | Path) -> Comparison:
    """Find what changed from one rehearsal to another.

    Args:
      before: a report of `rehearse.step` or `rehearse.config`, or a file that `jaxpar rehearse
        --json` wrote.
      after: another report, or its file.

    Returns:
      The differences, a dict that is JSON as it stands. Figures that differ by no more than
      rounding are left out of `places`.

    Raises:
      UserError: a file cannot be read, or is no such report.
    """
    old = _report_of(before)
    new = _report_of(after)
    old_findings = [_identity(row) for row in old["findings"]]
    new_findings = [_identity(row) for row in new["findings"]]
    return {
        "before": _title(old),
        "after": _title(new),
        "settings": _setting_changes(old, new),
        "same_program": bool(old.get("program")) and old.get("program") == new.get("program"),
        "time": _changes(_times(old), _times(new)),
        "memory": _changes(_memory(old), _memory(new)),
        "places": _place_changes(old, new),
        "collectives": _collective_changes(old, new),
        "found": [row for row in new["findings"] if _identity(row) not in old_findings],
        "gone": [row for row in old["findings"] if _identity(row) not in new_findings],
    }


def read_report(file: str | Path) -> Rehearsal:
    """Read a report that `jaxpar rehearse --json` wrote, checking only what a comparison needs.

    Raises:
      UserError: the file cannot be read, is no such report, or one of another version of its form.
    """
    path = Path(file)
    found: Any = read_json(
        path,
        {
            "schema": int,
            "config": str,
            "mesh": dict[str, int],
            "program": str,
            "settings": dict[str, str],
            "versions": dict[str, str],
            "compiler_options": dict[str, bool | int | float | str],
        },
    )
    if found.get("schema") != SCHEMA:
        raise UserError(
            f"{file} is no report of this version: schema is {found.get('schema', 'absent')}, and "
            f"{SCHEMA} is wanted; write it again with `jaxpar rehearse --json`"
        )
    parts = {
        "target": {"name": str},
        "time": {"step": float, "exposed_communication": float, "by_category": dict[str, float]},
        "memory": {
            "total": int,
            "categories": dict[str, int],
            "host": dict[str, int],
        },
    }
    rows = {
        "lines": {"scope": str, "source": str, "phase": str} | dict.fromkeys(_PLACES, float),
        "collectives": {"kind": str, "axes": list[str], "scope": str, "phase": str}
        | dict.fromkeys(_FIGURES, float),
        "findings": {"rule": str, "scope": str, "message": str, "source": str, "severity": str},
    }
    for key, kinds in parts.items():
        _require_all(found.get(key), kinds, f"{file}: {key}")
    for key, kinds in rows.items():
        listed = found.get(key)
        if not isinstance(listed, list):
            raise UserError(f"{file}: {key} is not a list, found {short(listed)}")
        for number, row in enumerate(listed):
            _require_all(row, kinds, f"{file}: {key}[{number}]")
    return found


# What is compared.


def _report_of(given: Rehearsal | str | Path) -> Rehearsal:
    if isinstance(given, str | Path):
        return read_report(given)
    if not isinstance(given, dict) or "schema" not in given:
        raise UserError(
            "rehearse.compare takes reports of rehearse.step or rehearse.config, or files of "
            f"them, and was given {short(given)}"
        )
    return given


def _require_all(value: Any, kinds: Mapping[str, Any], origin: str) -> None:
    """Refuse an object of JSON that lacks one of these keys, or has another kind of value there."""
    row = require_kinds(value, kinds, origin)
    missing = [key for key in kinds if key not in row]
    if missing:
        raise UserError(
            f"{origin} has no {missing[0]}: it is no report of `jaxpar rehearse --json`"
        )


def _title(report: Rehearsal) -> str:
    name = report["config"] or "a function"
    return f"{name} on {report['target']['name']}, {describe(report['mesh']) or 'one device'}"


def _times(report: Rehearsal) -> dict[str, float]:
    """List the step's time, its compute by kind of task, what it waits for, and collectives beside
    it.
    """
    time = report["time"]
    kinds = dict(time["by_category"])
    collectives = kinds.pop("collective", 0.0)
    kinds.pop("host_copy", None)
    kinds.pop("host_compute", None)
    waits = {
        "exposed communication": time["exposed_communication"],
        "waits for the host": time.get("host_stall", 0.0),
        "waits for copies": time.get("copy_stall", 0.0),
        "idle": time.get("idle", 0.0),
    }
    return {
        "step": time["step"],
        **{_WORDS.get(kind, kind): seconds for kind, seconds in kinds.items()},
        "collectives, hidden or not": collectives,
        **waits,
    }


_WORDS = {"matmul": "matmuls", "kernel": "kernels", "copy": "copies", "fusion": "fusions"}
"""The words of a table for the kinds of tasks."""


def _memory(report: Rehearsal) -> dict[str, float]:
    memory = report["memory"]
    in_host = {f"{name} in host memory": size for name, size in memory["host"].items()}
    return {"all": memory["total"], **memory["categories"], **in_host}


def _changes(
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> list[Change]:
    """List every figure that either has, in their order."""
    changes: list[Change] = []
    for name in dict.fromkeys([*before, *after]):
        old = before.get(name, 0.0)
        new = after.get(name, 0.0)
        if max(old, new) > ROUNDING:
            changes.append({"name": name, "before": old, "after": new})
    return changes


def _identity(row: LintFinding) -> tuple[str, str, str]:
    """Return what tells findings apart, without the line, as lines move."""
    return row["rule"], row["scope"], row["message"]


# Where the time differs.

_Where = tuple[str, str, str]
"""The scope, the phase and the file of some lines."""
_Lines = dict[int, dict[str, float]]
"""The figures of each line of a file; 0 = no line is known."""


def _place_changes(old: Rehearsal, new: Rehearsal) -> list[PlaceChange]:
    """List the places whose time differs, the largest change first."""
    before = _by_file(old)
    after = _by_file(new)
    changes: list[PlaceChange] = []
    for where in dict.fromkeys([*after, *before]):
        scope, phase, file = where
        for line, was, now in _matched(
            before.get(where, {}),
            after.get(where, {}),
        ):
            if any(abs(now[name] - was[name]) > ROUNDING for name in _PLACES):
                changes.append(
                    {
                        "scope": scope,
                        "source": f"{file}:{line}" if line else file,
                        "phase": phase,
                        "before": was,
                        "after": now,
                    }
                )
    return sorted(changes, key=_size, reverse=True)


def _by_file(report: Rehearsal) -> dict[_Where, _Lines]:
    """Group the figures of a report by scope, phase and file, and there by line."""
    found: defaultdict[_Where, _Lines] = defaultdict(dict)
    for row in report["lines"]:
        file, _, number = row["source"].rpartition(":")
        if number.isdigit():
            line = int(number)
        else:
            file = row["source"]
            line = 0
        figures = {name: float(row[name]) for name in _PLACES}
        found[row["scope"], row["phase"], file][line] = figures
    return found


def _matched(
    before: _Lines, after: _Lines
) -> Iterable[tuple[int, dict[str, float], dict[str, float]]]:
    """Pair one file's lines, with their number now: in their order where there are as many as
    before, else by number.
    """
    if len(before) == len(after):
        for line, old_line in zip(sorted(after), sorted(before), strict=True):
            yield line, before[old_line], after[line]
        return
    nothing: dict[str, float] = dict.fromkeys(_PLACES, 0.0)
    for line in sorted({*before, *after}):
        yield line, before.get(line, nothing), after.get(line, nothing)


def _size(row: PlaceChange) -> float:
    """Return by how much the time of a place that the step waits for has changed."""
    return sum(abs(row["after"][name] - row["before"][name]) for name in ("compute", "exposed"))


def lost_time(figures: Mapping[str, float]) -> float:
    """Add up the seconds of a place that the step waits for: what it computes, and its collectives
    as far as nothing hides them.
    """
    return figures["compute"] + figures["exposed"]


def _collective_changes(old: Rehearsal, new: Rehearsal) -> list[CollectiveChange]:
    """List the collectives that differ, the largest change of exposed time first."""
    before = _by_identity(old["collectives"])
    after = _by_identity(new["collectives"])
    nothing: dict[str, float] = dict.fromkeys(_FIGURES, 0.0)
    changes: list[CollectiveChange] = []
    for identity in dict.fromkeys([*after, *before]):
        was = before.get(identity, nothing)
        now = after.get(identity, nothing)
        if all(abs(now[name] - was[name]) <= ROUNDING for name in _FIGURES):
            continue
        kind, axes, scope, phase = identity
        changes.append(
            {
                "kind": kind,
                "axes": list(axes),
                "scope": scope,
                "phase": phase,
                "before": was,
                "after": now,
            }
        )
    return sorted(changes, key=_collective_size, reverse=True)


_Identity = tuple[str, tuple[str, ...], str, str]
"""The kind, mesh axes, scope and phase of some collectives."""


def _by_identity(rows: Iterable[CollectiveRow]) -> dict[_Identity, dict[str, float]]:
    """Add up the figures of collectives by what they are matched by."""
    found: dict[_Identity, dict[str, float]] = {}
    for row in rows:
        identity = (row["kind"], tuple(row["axes"]), row["scope"], row["phase"])
        figures = found.setdefault(identity, dict.fromkeys(_FIGURES, 0.0))
        for name in _FIGURES:
            figures[name] += row[name]
    return found


def _collective_size(row: CollectiveChange) -> tuple[float, float]:
    """Return by how much the exposed and the busy time of some collectives has changed."""
    return (
        abs(row["after"]["exposed"] - row["before"]["exposed"]),
        abs(row["after"]["seconds"] - row["before"]["seconds"]),
    )


# What was asked for.


def _setting_changes(old: Rehearsal, new: Rehearsal) -> list[SettingChange]:
    """List what differs of settings, packages and options; a kind of these that one of the
    rehearsals does not have is left out.
    """
    changes: list[SettingChange] = []
    for key in ("settings", "versions", "compiler_options"):
        if key not in old or key not in new:
            continue
        before = {name: str(value) for name, value in old.get(key, {}).items()}
        after = {name: str(value) for name, value in new.get(key, {}).items()}
        for name in dict.fromkeys([*before, *after]):
            was = before.get(name, "")
            now = after.get(name, "")
            if was != now:
                changes.append({"name": name, "before": was, "after": now})
    return changes
