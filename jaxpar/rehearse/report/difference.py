"""Two rehearsals beside each other: what changed in memory, time, collectives, and by line of the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

from jaxpar.rehearse.report.schema import LintFinding, Rehearsal

LINE_FIGURES = ("compute", "communication", "exposed")
COLLECTIVE_FIGURES = ("count", "sent_bytes", "seconds", "exposed")


class Change(TypedDict):
    """One figure; bytes in `memory`, seconds in `time`."""

    name: str
    old: float
    new: float


class PlaceChange(TypedDict):
    """The figures of one line, or of one kind of collective at one line; all of them 0 where it is not there."""

    kind: str
    """Of the collective; an empty string for lines."""
    axes: list[str]
    scope: str
    source: str
    """As in the new report, or in the old where it is gone."""
    phase: str
    old: dict[str, float]
    new: dict[str, float]


class Difference(TypedDict):
    """From an old report to a new one. Places that did not change are left out; the rest have the largest first."""

    old: str
    """`llama3_8b on v5p-64`."""
    new: str
    memory: list[Change]
    time: list[Change]
    collectives: list[PlaceChange]
    lines: list[PlaceChange]
    found: list[LintFinding]
    """What the linter says of the new report only."""
    gone: list[LintFinding]


def difference(new: Rehearsal, old: Rehearsal) -> Difference:
    """What changed from `old` (the baseline) to `new`.

    Places are matched by scope, phase and source line; where lines have moved, by their order in the file, as long as
    there are as many of them as before.
    """
    place = ("scope", "phase", "source")
    found, gone = _findings(new["findings"], old["findings"])
    return {
        "old": _title(old),
        "new": _title(new),
        "memory": _memory(new, old),
        "time": _time(new, old),
        "collectives": _places(new["collectives"], old["collectives"], ("kind", "axes", *place), COLLECTIVE_FIGURES),
        "lines": _places(new["lines"], old["lines"], place, LINE_FIGURES),
        "found": found,
        "gone": gone,
    }


def _title(rehearsal: Rehearsal) -> str:
    return f"{rehearsal['config']} on {rehearsal['target']['name']}"


def _memory(new: Rehearsal, old: Rehearsal) -> list[Change]:
    total: Change = {"name": "total", "old": old["memory"]["total"], "new": new["memory"]["total"]}
    host = _changes({f"host {name}": size for name, size in new["memory"]["host"].items()},
                    {f"host {name}": size for name, size in old["memory"]["host"].items()})  # fmt: skip
    return [total, *_changes(new["memory"]["categories"], old["memory"]["categories"]), *host]


def _time(new: Rehearsal, old: Rehearsal) -> list[Change]:
    parts = ("step", "compute", "exposed_communication", "host_stall", "copy_stall", "idle", "lower_bound")
    first: list[Change] = [{"name": name, "old": old["time"][name], "new": new["time"][name]} for name in parts]
    return [*first, *_changes(new["time"]["by_category"], old["time"]["by_category"])]


def _changes(new: dict[str, Any], old: dict[str, Any]) -> list[Change]:
    names = dict.fromkeys([*old, *new])
    return [{"name": name, "old": old.get(name, 0), "new": new.get(name, 0)} for name in names]


class _Key(NamedTuple):
    """What a row is matched by."""

    rest: tuple[Any, ...]
    """All but the source line; lists as tuples."""
    source: str


Figures = dict[str, float]


def _places(
    new: Sequence[Any], old: Sequence[Any], keys: tuple[str, ...], figures: tuple[str, ...]
) -> list[PlaceChange]:
    """Rows of both reports matched and summed; those that differ, the largest change of time first."""
    before, after = _summed(old, keys, figures), _summed(new, keys, figures)
    nothing = dict.fromkeys(figures, 0.0)
    rows: list[PlaceChange] = []
    for key, old_key in _matches(list(after), list(before)):
        was = before[old_key] if old_key else nothing
        now = after[key] if key else nothing
        if all(math.isclose(was[name], now[name], rel_tol=1e-6, abs_tol=1e-12) for name in figures):
            continue
        shown = key or old_key
        assert shown is not None
        values = dict(zip([name for name in keys if name != "source"], shown.rest, strict=True))
        rows.append({"kind": values.get("kind", ""), "axes": list(values.get("axes", ())), "scope": values["scope"],
                     "source": shown.source, "phase": values["phase"], "old": was, "new": now})  # fmt: skip
    return sorted(rows, key=_size)


def _summed(rows: Sequence[Any], keys: tuple[str, ...], figures: tuple[str, ...]) -> dict[_Key, Figures]:
    sums: dict[_Key, Figures] = {}
    for row in rows:
        rest = tuple(
            tuple(row[name]) if isinstance(row[name], list) else row[name] for name in keys if name != "source"
        )
        entry = sums.setdefault(_Key(rest, row["source"]), dict.fromkeys(figures, 0.0))
        for name in figures:
            entry[name] += row[name]
    return sums


def _matches(new: list[_Key], old: list[_Key]) -> list[tuple[_Key | None, _Key | None]]:
    """Pairs (new, old): the same key, else the same file in the same order, else one of them None."""
    same = set(new) & set(old)
    pairs: list[tuple[_Key | None, _Key | None]] = [(key, key) for key in new if key in same]
    moved: dict[tuple, tuple[list[_Key], list[_Key]]] = defaultdict(lambda: ([], []))
    for side, keys in enumerate((new, old)):
        for key in keys:
            if key not in same:
                moved[key.rest, _file(key)][side].append(key)
    for left, right in moved.values():
        if len(left) == len(right):
            pairs += zip(sorted(left, key=_line), sorted(right, key=_line), strict=True)
        else:
            pairs += [(key, None) for key in left] + [(None, key) for key in right]
    return pairs


def _file(key: _Key) -> str:
    return key.source.rpartition(":")[0]


def _line(key: _Key) -> int:
    number = key.source.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _size(row: PlaceChange) -> tuple[float, float]:
    """Sorts the largest change of time first, then of bytes sent."""

    def change(*names: str) -> float:
        return sum(abs(row["new"].get(name, 0.0) - row["old"].get(name, 0.0)) for name in names)

    return -change("compute", "exposed", "seconds"), -change("sent_bytes", "communication")


def _findings(new: list[LintFinding], old: list[LintFinding]) -> tuple[list[LintFinding], list[LintFinding]]:
    """Those of one side only; the line number does not count, as lines move."""

    def identity(row: LintFinding) -> tuple[str, ...]:
        return row["rule"], row["axis"], row["scope"], row["message"]

    before, after = set(map(identity, old)), set(map(identity, new))
    return [row for row in new if identity(row) not in before], [row for row in old if identity(row) not in after]
