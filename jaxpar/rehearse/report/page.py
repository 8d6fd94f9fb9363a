"""The report as one HTML file, with tables and a timeline, and its data and script inside. It needs no network."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path

from jaxpar.base.console import bytes_text, count_text
from jaxpar.base.runtime import write_whole
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.tables import (
    Column,
    Row,
    Section,
    finding_lines,
    note_lines,
    parameter_section,
    percent_text,
    report_sections,
    seconds_text,
    summary,
)


class Markup(str):
    """Text that is HTML already. Any other string is escaped, so that nothing of a report can become markup."""


def write_page(report: Rehearsal, path: Path | str) -> None:
    """Write the page, whole or not at all. A report without a timeline gives a page without one."""
    write_whole(Path(path), page_text(report))


def page_text(report: Rehearsal) -> str:
    """The HTML of the page."""
    timeline = report.get("timeline")
    title = f"{report['config'] or 'a step'} on {report['target']['name']}"
    sections = [*report_sections(report), parameter_section(report)]
    body = [
        _tag("header", _tag("h1", title), _tag("p", report["command"], css="soft code"), _tiles(report)),
        _tag("section", _summary(report), id="summary"),
        _tag("div", *(_parts(section) for section in sections if section.parts), css="pair"),
        _web("timeline.html") if timeline and timeline["events"] else "",
        *(_table(section) for section in sections if section.rows and not section.parts),
        _lines("findings", "Findings of the linter", finding_lines(report["findings"])),
        _lines("notes", "What was assumed, and what was not understood", note_lines(report)),
        _tag("footer", _footer(report)),
    ]
    parts = {
        "title": html.escape(title),
        "style": _web("style.css"),
        "body": "\n".join(body),
        "data": _json_in_html(timeline),
        "script": _web("timeline.js"),
    }
    # All are replaced in one pass, so that no part is searched for the names of others.
    return re.sub("@(title|style|body|data|script)@", lambda found: parts[found[1]], _web("page.html"))


def _web(name: str) -> Markup:
    return Markup(files("jaxpar.rehearse.report").joinpath("web", name).read_text(encoding="utf-8").strip())


def _json_in_html(value: object) -> str:
    """JSON for a script element: `<` is escaped, so that no string in it ends the element or opens a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _tag(name: str, *inside: str, css: str = "", **attributes: str) -> Markup:
    """An HTML element, whose content is escaped unless it is `Markup`."""
    attributes = {"class": css, **attributes} if css else attributes
    words = "".join(f' {key.replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    text = "".join(part if isinstance(part, Markup) else html.escape(part, quote=False) for part in inside)
    return Markup(f"<{name}{words}>{text}</{name}>")


def _tiles(report: Rehearsal) -> Markup:
    """The figures that are read first, each with its value, its name and a short remark."""
    memory, time = report["memory"], report["time"]
    takes, has = bytes_text(memory["total"]), memory["hbm_bytes"]
    fits = ("good", "Fits") if memory["fits"] else ("bad", "Does not fit")
    tiles = [
        (*fits, f"{takes} of {bytes_text(has)}") if has else ("", takes, "a device"),
        ("", seconds_text(time["step"]), "a step"),
        ("", seconds_text(time["exposed_communication"]), "of communication exposed"),
    ]
    if time["mfu"] is not None:
        tiles.append(("", percent_text(time["mfu"]), "MFU"))
    if "tokens_per_second" in time:
        tiles.append(("", count_text(time["tokens_per_second"]), "tokens a second"))
    tiles += [
        ("", f"{days:,.1f} days", f"for {count_text(float(count))} tokens")
        for count, days in time.get("days", {}).items()
    ]
    boxes = (_tag("div", _tag("b", text), _tag("span", what), css=f"tile {mood}") for mood, text, what in tiles)
    return _tag("div", *boxes, css="tiles")


def _summary(report: Rehearsal) -> Markup:
    rows = (_tag("tr", _tag("th", name), _tag("td", text)) for name, text in summary(report))
    return _tag("table", *rows, css="summary")


def _color(part: str) -> str:
    """The style sheet's colour of a kind of task, or of a part of the memory."""
    return f"background: var(--{re.sub('[^a-z_-]', '-', part)}, var(--other))"


def _parts(section: Section) -> Markup:
    """The parts of a whole as a bar, with a row for each."""
    bar = (
        _tag("div", title=f"{row['part']}: {section.columns[0].cell(row)}",
             style=f"width: {100 * row['share']:.3f}%; {_color(row['part'])}")
        for row in section.rows
    )  # fmt: skip
    rows = (
        _tag("tr", _tag("td", _tag("i", css="swatch", style=_color(row["part"])), f" {section.columns[-1].cell(row)}"),
             *(_tag("td", column.cell(row), css="number") for column in section.columns[:-1]))
        for row in section.rows
    )  # fmt: skip
    return _tag("section", _heading(section), _tag("div", *bar, css="stack"), _tag("table", *rows), id=section.name)


def _table(section: Section) -> Markup:
    """A section's table. The style sheet hides the rows after the first twelve until the box is ticked."""

    def cell(column: Column, row: Row) -> Markup:
        if not column.text:
            return _tag("td", column.cell(row))
        return _tag("td", column.cell(row), css="number", data_value=str(column.value_of(row)))

    heads = (_tag("th", column.name, css="number" if column.text else "") for column in section.columns)
    rows = (_tag("tr", *(cell(column, row) for column in section.columns)) for row in section.rows)
    table = _tag("table", _tag("thead", _tag("tr", *heads)), _tag("tbody", *rows))
    count = len(section.rows)
    more = _tag("label", Markup('<input type="checkbox" class="more">'), f" all {count} rows") if count > 12 else ""
    return _tag("section", more, _heading(section), _tag("div", table, css="scroll"), id=section.name)


def _heading(section: Section) -> Markup:
    return _tag("h2", section.title[0].upper() + section.title[1:])


def _lines(name: str, title: str, lines: list[str]) -> Markup:
    return _tag("section", _tag("h2", title), _tag("ul", *(_tag("li", line) for line in lines)), id=name)


def _footer(report: Rehearsal) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    changed = " ".join(f"{key}={value}" for key, value in report["overrides"].items())
    return "  ·  ".join(filter(None, [report["date"], versions, changed]))
