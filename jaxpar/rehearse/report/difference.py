"""Two rehearsals are compared here: what changed in memory, in time, in collectives, and by line of the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict

from rich.console import RenderableType

from jaxpar.base.console import bytes_text
from jaxpar.rehearse.report.schema import LintFinding, Rehearsal
from jaxpar.rehearse.report.tables import Column, Row, Section, finding_lines, printed_section, seconds_text

_LINE_FIGURES = ("compute", "communication", "exposed")
_COLLECTIVE_FIGURES = ("count", "sent_bytes", "seconds", "exposed")
_TIMES = ("step", "compute", "exposed_communication", "host_stall", "copy_stall", "idle", "lower_bound")
_NOTHING = 1e-9  # seconds; a smaller change is rounding


class Change(TypedDict):
    """The change of one figure, which is in bytes in `memory` and in seconds in `time`."""

    name: str
    old: float
    new: float


class PlaceChange(TypedDict):
    """The figures of one line, or of one kind of collective at a line; they are all 0 in a report that lacks it."""

    kind: str
    """The kind of the collective; an empty string for a line."""
    axes: list[str]
    scope: str
    source: str
    """The source line in the new report, or in the old one where the new one lacks it."""
    phase: str
    old: dict[str, float]
    new: dict[str, float]


class Difference(TypedDict):
    """The changes from an old report to a new one, the largest first. Places that did not change are left out."""

    old: str
    """The title of the old report: `llama3_8b on v5p-64`."""
    new: str
    memory: list[Change]
    time: list[Change]
    collectives: list[PlaceChange]
    lines: list[PlaceChange]
    found: list[LintFinding]
    """The linter's findings that are in the new report only."""
    gone: list[LintFinding]


def difference(new: Rehearsal, old: Rehearsal) -> Difference:
    """Find what changed from `old` (the baseline) to `new`.

    Places are matched by scope, phase and source line. Where an edit has moved the lines of a file, they are matched by
    their order, as long as there are as many of them as before.
    """
    before, after = ([_finding_identity(row) for row in report["findings"]] for report in (old, new))
    return {
        "old": f"{old['config']} on {old['target']['name']}",
        "new": f"{new['config']} on {new['target']['name']}",
        "memory": _changes(new, old, _memory),
        "time": _changes(new, old, _time),
        "collectives": _places(new["collectives"], old["collectives"], _COLLECTIVE_FIGURES),
        "lines": _places(new["lines"], old["lines"], _LINE_FIGURES),
        "found": [row for row in new["findings"] if _finding_identity(row) not in before],
        "gone": [row for row in old["findings"] if _finding_identity(row) not in after],
    }


def _memory(report: Rehearsal) -> dict[str, float]:
    memory = report["memory"]
    host = {f"host {name}": size for name, size in memory["host"].items()}
    return {"total": memory["total"], **memory["categories"], **host}


def _time(report: Rehearsal) -> dict[str, float]:
    return {**{name: report["time"][name] for name in _TIMES}, **report["time"]["by_category"]}


def _finding_identity(row: LintFinding) -> tuple[str, ...]:
    """What tells findings apart. The line number is left out of it, as lines move."""
    return row["rule"], row["axis"], row["scope"], row["message"]


def _changes(new: Rehearsal, old: Rehearsal, figures: Callable[[Rehearsal], Mapping[str, float]]) -> list[Change]:
    after, before = figures(new), figures(old)
    names = dict.fromkeys([*before, *after])
    return [{"name": name, "old": before.get(name, 0), "new": after.get(name, 0)} for name in names]


_Place = tuple[str, tuple[str, ...], str, str, str]
"""The kind, axes, scope and phase of some rows, and the file of their lines."""
_Figures = dict[str, float]


def _places(new: Sequence[Row], old: Sequence[Row], figures: Sequence[str]) -> list[PlaceChange]:
    """Match and sum the rows of both reports, and return those that differ, the largest change of time first."""
    before, after = _by_place(old, figures), _by_place(new, figures)
    nothing: _Figures = dict.fromkeys(figures, 0.0)
    rows: list[PlaceChange] = []
    for place in dict.fromkeys([*after, *before]):
        kind, axes, scope, phase, file = place
        for line, now, was in _match_lines(after.get(place, {}), before.get(place, {}), nothing):
            if not all(math.isclose(was[name], now[name], rel_tol=1e-6, abs_tol=1e-12) for name in figures):
                source = f"{file}:{line}" if line else file
                rows.append({
                    "kind": kind, "axes": list(axes), "scope": scope, "source": source, "phase": phase,
                    "old": was, "new": now,
                })  # fmt: skip
    return sorted(rows, key=_size)


def _by_place(rows: Sequence[Row], figures: Sequence[str]) -> dict[_Place, dict[int, _Figures]]:
    """Sum the figures by place, and within a place by line number (0 = none is known)."""
    sums: defaultdict[_Place, dict[int, _Figures]] = defaultdict(dict)
    for row in rows:
        file, _, number = row["source"].rpartition(":")
        file, line = (file, int(number)) if number.isdigit() else (row["source"], 0)
        place = row.get("kind", ""), tuple(row.get("axes", ())), row["scope"], row["phase"], file
        found = sums[place].setdefault(line, dict.fromkeys(figures, 0.0))
        for name in figures:
            found[name] += row[name]
    return sums


def _match_lines(
    new: Mapping[int, _Figures], old: Mapping[int, _Figures], nothing: _Figures
) -> Iterator[tuple[int, _Figures, _Figures]]:
    """Pair the lines of one place with their new and old figures. They are matched in their order where there are as
    many as before, and by number otherwise."""
    if len(new) == len(old):
        for line, before in zip(sorted(new), sorted(old), strict=True):
            yield line, new[line], old[before]
    else:
        for line in sorted({*new, *old}):
            yield line, new.get(line, nothing), old.get(line, nothing)


def _size(row: PlaceChange) -> tuple[float, float]:
    """A sort key that puts the largest change of time first, and then the largest change of bytes sent."""
    change = {name: abs(after - row["old"][name]) for name, after in row["new"].items()}
    time = sum(change.get(name, 0.0) for name in ("compute", "exposed", "seconds"))
    return -time, -change.get("sent_bytes", change.get("communication", 0.0))


# On a terminal.


def difference_parts(changes: Difference, most: int = 12) -> list[RenderableType]:
    """The parts of a difference in the order in which a terminal prints them; a long table shows `most` rows."""
    where = (Column("line", "source"), Column("scope", "scope"), Column("phase", "phase"))
    over = (Column("kind", "kind"), Column("over", "axes"), Column("phase", "phase"), Column("line", "source"))
    lines = (*_figure("compute", seconds_text), *_figure("exposed", seconds_text), *where)
    collectives = (*_figure("exposed", seconds_text), *_figure("sent_bytes", bytes_text), Column("times", _times, str))
    sections = [
        _figures_section("memory", "memory of a device", changes["memory"], bytes_text),
        _figures_section("time", "time of a step", changes["time"], seconds_text),
        Section("lines", "by line of the model", lines, changes["lines"]),
        Section("collectives", "collectives", (*collectives, *over), changes["collectives"]),
    ]
    parts: list[RenderableType] = [f"{changes['new']} against {changes['old']}"]
    for section in sections:
        parts += printed_section(section, most) if section.rows else []
    for title, findings in (("found anew", changes["found"]), ("no longer found", changes["gone"])):
        parts += ["", title, *finding_lines(findings)] if findings else []
    if not any(changes[key] for key in ("lines", "collectives", "found", "gone")):
        parts += ["", "no line, collective or finding differs"]
    return parts


def _figures_section(name: str, title: str, rows: Sequence[Change], text: Callable[[float], str]) -> Section:
    def change(row: Row) -> str:
        share = f" ({100 * (row['new'] / row['old'] - 1):+.1f} %)" if row["old"] else " (new)"
        return _change_text(row["old"], row["new"], text) + share * (row["old"] != row["new"])

    columns = (
        Column("old", "old", text), Column("new", "new", text), Column("change", change, str),
        Column("", lambda row: row["name"].replace("_", " ")),
    )  # fmt: skip
    return Section(name, title, columns, [row for row in rows if max(row["old"], row["new"]) > _NOTHING])


def _figure(name: str, text: Callable[[float], str]) -> tuple[Column, Column]:
    """Two columns of a figure: its value at a place now, and how much more that is than before."""
    return (
        Column(name.partition("_")[0], lambda row: row["new"][name], text),
        Column("change", lambda row: _change_text(row["old"][name], row["new"][name], text), str),
    )


def _times(row: Row) -> str:
    return " -> ".join(dict.fromkeys(f"{row[side]['count']:.0f}" for side in ("old", "new")))


def _change_text(old: float, new: float, text: Callable[[float], str]) -> str:
    """The change of a figure in words: `+1.00 ms`, or `=` where there is none."""
    if abs(new - old) <= _NOTHING:
        return "="
    return ("+" if new > old else "-") + text(abs(new - old))
