"""The tables of a comparison of two rehearsals, as a terminal prints them."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import RenderableType

from jaxpar.base.console import bytes_text, console
from jaxpar.rehearse.report.comparison import (
    ROUNDING,
    Change,
    CollectiveChange,
    Comparison,
    PlaceChange,
    lost_time,
)
from jaxpar.rehearse.report.report_tables import finding_lines, seconds_text, titled_table


def comparison_parts(found: Comparison, most: int = 12) -> list[RenderableType]:
    """Make the parts of a comparison in the order in which a terminal prints them.

    Args:
      most: the number of rows that a long table shows.
    """
    parts: list[RenderableType] = [
        "",
        f"before       {found['before']}",
        f"after        {found['after']}",
        *_asked_lines(found),
        *_figures_table("the step", found["time"], seconds_text),
        *_figures_table("memory of a device", found["memory"], bytes_text),
        *_places_table(found["places"], most),
        *_collectives_table(found["collectives"], most),
    ]
    for title, findings in (("found anew", found["found"]), ("found no longer", found["gone"])):
        if findings:
            parts += ["", title, *finding_lines(findings)]
    return parts


def print_comparison(found: Comparison) -> None:
    """Print the result of `compare` on the terminal."""
    for part in comparison_parts(found):
        console().print(part)


def change_text(old: float, new: float, text: Callable[[float], str]) -> str:
    """Write by how much a figure has changed, with its sign; `=` where it has not."""
    if abs(new - old) <= ROUNDING:
        return "="
    sign = "+" if new > old else "-"
    return f"{sign}{text(abs(new - old))}"


def _asked_lines(found: Comparison) -> list[str]:
    """Say what was asked for otherwise, and whether the compiler made the same program of it."""
    words = [
        f"{row['name']} {row['before'] or '(absent)'} -> {row['after'] or '(absent)'}"
        for row in found["settings"]
    ]
    lines = [f"differs      {', '.join(words)}"] if words else []
    if found["same_program"]:
        names = ", ".join(row["name"] for row in found["settings"])
        changed = f"{names} changed nothing" if names else "nothing differs"
        lines.append(f"program      {changed}: both compile to the same program")
    return lines


def _figures_table(
    title: str, changes: list[Change], text: Callable[[float], str]
) -> list[RenderableType]:
    """Make the table of a whole, which stands first, and its parts, of which the one that has
    changed most is first.
    """
    rows = []
    parts = sorted(changes[1:], key=lambda row: -abs(row["after"] - row["before"]))
    for row in [*changes[:1], *parts]:
        old = row["before"]
        new = row["after"]
        if old:
            share = f"{100 * (new / old - 1):+.1f} %"
        else:
            share = "new"
        changed = abs(new - old) > ROUNDING
        rows.append(
            [
                text(old),
                text(new),
                share if changed else "=",
                change_text(old, new, text),
                row["name"],
            ]
        )
    return titled_table(title, ["before", "after", "change", "", ""], rows, 4, len(rows))


def _places_table(places: list[PlaceChange], most: int) -> list[RenderableType]:
    """Make the table of the lines whose time differs; a line that only one of the two has is
    `new` or `gone`.
    """
    rows = [
        [
            change_text(lost_time(row["before"]), lost_time(row["after"]), seconds_text),
            *_change_cells(row["before"]["compute"], row["after"]["compute"], seconds_text),
            *_change_cells(row["before"]["exposed"], row["after"]["exposed"], seconds_text),
            _coming(row["before"], row["after"]),
            row["source"],
            row["scope"],
            row["phase"],
        ]
        for row in places
    ]
    columns = ["change", "compute", "was", "exposed", "was", "", "line", "scope", "phase"]
    return titled_table("where the time differs, the most first", columns, rows, 5, most)


def _collectives_table(changes: list[CollectiveChange], most: int) -> list[RenderableType]:
    rows = []
    for row in changes:
        was = row["before"]
        now = row["after"]
        rows.append(
            [
                *_change_cells(was["exposed"], now["exposed"], seconds_text),
                *_change_cells(was["seconds"], now["seconds"], seconds_text),
                *_change_cells(was["sent_bytes"], now["sent_bytes"], bytes_text),
                *_change_cells(was["count"], now["count"], lambda count: f"{count:.0f}"),
                _coming(was, now),
                row["kind"],
                " x ".join(row["axes"]),
                row["scope"],
                row["phase"],
            ]
        )
    figures = ["exposed", "was", "time", "was", "sent", "was", "times", "was"]
    columns = [*figures, "", "kind", "over", "scope", "phase"]
    return titled_table("collectives that differ, the most first", columns, rows, 8, most)


def _coming(before: dict[str, float], after: dict[str, float]) -> str:
    """Say that a line or a collective is in one of two rehearsals alone; empty where it is in
    both.
    """
    if not any(before.values()):
        return "new"
    if not any(after.values()):
        return "gone"
    return ""


def _change_cells(
    old: float,
    new: float,
    text: Callable[[float], str],
) -> tuple[str, str]:
    """Write a figure, and what it was if that differs."""
    return text(new) if new else "", text(old) if abs(new - old) > ROUNDING else "="
