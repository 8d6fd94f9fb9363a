"""The report as one HTML file that needs nothing else: data, style and script inside, no network."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jaxpar.base.runtime import write_whole
from jaxpar.rehearse.report.schema import Rehearsal, TimelineColumns

SCRIPTS = ("text", "summary", "events", "timeline", "pointer", "tables", "main")
"""Files of `web/`, in the order in which they go into one function of the page."""


def write_page(rehearsal: Rehearsal, path: Path) -> None:
    """Write the page, whole or not at all.

    Args:
      rehearsal: the report; without a timeline the page has none.
      path: of the HTML file.
    """
    write_whole(path, page_text(rehearsal))


def page_text(rehearsal: Rehearsal) -> str:
    """The page. Nothing of the report is ever markup: the title is escaped, the rest is JSON that the script reads."""
    shown: dict[str, Any] = dict(rehearsal)
    if "timeline" in rehearsal:
        shown["timeline"] = _packed(rehearsal["timeline"])
    parts = {
        "title": html.escape(f"{rehearsal['config']} on {rehearsal['target']['name']}"),
        "style": _web("style.css"),
        "script": "\n".join(_web(f"{name}.js") for name in SCRIPTS),
        "data": _json_in_html(shown),
    }
    before, *pieces = _web("page.html").split("@")
    page = [before]
    for name, text in zip(pieces[::2], pieces[1::2], strict=True):  # in one pass, so that no part is searched for names
        page += [parts[name], text]
    return "".join(page)


def _web(name: str) -> str:
    return files("jaxpar.rehearse.report").joinpath("web", name).read_text(encoding="utf-8").strip()


def _json_in_html(value: Any) -> str:
    """JSON that a script element may hold: with `<` escaped, no string in it ends the element or opens a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _packed(timeline: TimelineColumns) -> dict[str, Any]:
    """Events as one flat list of integers a lane: gap to the last one's end (ns), duration (ns), instruction, ...

    Half the size of the rows, or less: in a busy lane the gap is 0. `repeats` has [position, count] where not 0.
    """
    lanes: list[list[tuple[int, int, int, int]]] = [[] for _ in timeline["lanes"]]
    for lane, start, duration, instruction, repeats in timeline["events"]:
        begin = round(1e3 * start)
        lanes[int(lane)].append((begin, round(1e3 * (start + duration)), int(instruction), int(repeats)))
    packed, repeated = [], []
    for rows in lanes:
        now, flat = 0, []
        rows.sort()
        for begin, end, instruction, _ in rows:
            flat += [begin - now, end - begin, instruction]
            now = end
        packed.append(flat)
        repeated.append([[i, row[3]] for i, row in enumerate(rows) if row[3]])
    columns = {key: value for key, value in timeline.items() if key != "events"}
    return {**columns, "packed": packed, "repeats": repeated}
