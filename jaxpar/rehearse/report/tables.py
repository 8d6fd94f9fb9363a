"""A rehearsal as sections of columns and rows, which a terminal shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxpar.base.console import bytes_text, console, count_text
from jaxpar.rehearse.report.schema import LintFinding, Memory, Rehearsal

Row = Mapping[str, Any]
_NOTHING = 1e-9  # seconds; what is less is rounding
_WAITS = {
    "exposed communication": "exposed_communication",
    "waits for the host": "host_stall",
    "waits for copies": "copy_stall",
    "idle": "idle",
}
"""The names of what the compute units wait for, with the keys of the report's `time`."""
_MOST = 12  # the rows that a terminal shows of a long table


def seconds_text(seconds: float) -> str:
    """Write seconds to three significant digits: `396 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            value = seconds / size
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"


def percent_text(share: float) -> str:
    """Write a share as a percentage: `49.3 %`."""
    return f"{100 * share:.1f} %"


@dataclass(frozen=True)
class Column:
    """One column of a section."""

    name: str
    value: str | Callable[[Row], Any]
    """A key of the row, or a function of the row."""
    text: Callable[[float], str] | None = None
    """Writes a number; None for a column of words."""

    def cell(self, row: Row) -> str:
        """The value that a row has in this column as text, or a dash where there is none."""
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        if not value:
            return "-"
        if self.text:
            return self.text(value)
        return ", ".join(str(item or "-") for item in value) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Section:
    """A titled table."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    """The rows in the order in which they are shown."""


_LINE, _SCOPE, _PHASE = Column("line", "source"), Column("scope", "scope"), Column("phase", "phase")
_TIMES = Column("times", "count", str)
LINES = (
    Column("exposed", "exposed", seconds_text),
    Column("comm", "communication", seconds_text),
    Column("compute", "compute", seconds_text),
    Column("FLOPs", "flops", count_text),
    _LINE, _SCOPE, _PHASE,
)  # fmt: skip
COLLECTIVES = (
    Column("exposed", "exposed", seconds_text),
    Column("time", "seconds", seconds_text),
    Column("sent", "sent_bytes", bytes_text),
    _TIMES,
    Column("kind", "kind"),
    Column("over", "axes"),
    Column("plan", lambda row: "planned" if row.get("planned", True) else "UNPLANNED"),
    _PHASE, _LINE,
)  # fmt: skip


def report_sections(report: Rehearsal) -> list[Section]:
    """All tables of a report that have rows."""
    exposed = sum(row["exposed"] for row in report["lines"])
    by_exposed = sorted(report["lines"], key=lambda row: (-row["exposed"], -row["compute"]))
    by_plan = sorted(
        report["collectives"], key=lambda row: (row.get("planned", True), -row["exposed"], -row["seconds"])
    )
    unplanned = sum(not row.get("planned", True) for row in by_plan)
    known = any("planned" in row for row in by_plan)
    asked = f": {unplanned or 'none'} unplanned" if known else ""
    columns = COLLECTIVES if known else tuple(column for column in COLLECTIVES if column.name != "plan")
    sections = [
        _time_section(report),
        _parts_section("memory", "memory of a device", report["memory"]["categories"], bytes_text),
        _parts_section("host", "memory of the host, for each device", report["memory"]["host"], bytes_text),
        Section("lines", f"by line of the model: {seconds_text(exposed)} exposed", LINES, by_exposed),
        Section("collectives", f"collectives{asked}", columns, by_plan),
    ]
    return [section for section in sections if section.rows]


def _time_section(report: Rehearsal) -> Section:
    """The table of a step's time: compute by kind of task, and what the compute units wait for."""
    time = report["time"]
    parts = {kind: value for kind, value in time["by_category"].items() if kind not in ("collective", "host_copy")}
    parts |= {name: time[key] for name, key in _WAITS.items() if time[key] >= _NOTHING}
    busy = time["by_category"].get("collective", 0.0)
    hidden = max(0.0, 1 - time["exposed_communication"] / busy) if busy else 0.0
    beside = f"; collectives run for {seconds_text(busy)}, {percent_text(hidden)} of it beside compute" if busy else ""
    return _parts_section("step", f"one step{beside}", parts, seconds_text)


def _parts_section(name: str, title: str, parts: Mapping[str, float], text: Callable[[float], str]) -> Section:
    """A table of the parts of a whole, the largest first."""
    whole = sum(parts.values())
    rows = [
        {"part": part, "value": value, "share": value / whole}
        for part, value in sorted(parts.items(), key=lambda item: -item[1])
        if value
    ]
    words = Column("", lambda row: row["part"].replace("_", " "))
    return Section(name, title, (Column("", "value", text), Column("", "share", percent_text), words), rows)


def summary(report: Rehearsal) -> list[tuple[str, str]]:
    """Summarize the report in pairs of a word and a text; the word is empty where a line goes on."""
    target, memory, time = report["target"], report["memory"], report["time"]
    slices = f", {target['slices']} slices" if target["slices"] > 1 else ""
    note = f" ({note})" if (note := target.get("note")) else ""
    parts = [f"compute {seconds_text(time['compute'])}"]
    parts += [f"{name} {seconds_text(time[key])}" for name, key in _WAITS.items() if time[key] >= _NOTHING]
    rates = [f"{count_text(time['tokens_per_second'])} tokens/s"] if "tokens_per_second" in time else []
    shares = {"MFU": time["mfu"], "HFU": time["hfu"]}
    rates += [f"{name} {percent_text(share)}" for name, share in shares.items() if share is not None]
    return [
        ("target", f"{target['name']}: {target['chips']} x {target['chip']}, {target['topology']}{slices}{note}"),
        ("mesh", " x ".join(f"{name}={size}" for name, size in report["mesh"].items()) or "one device"),
        ("step", f"{_size(report)}compiled in {seconds_text(report['compile_seconds'])}"),
        ("memory", memory_verdict(memory)),
        *(("", advice) for advice in memory["advice"]),
        ("time", f"{seconds_text(time['step'])} a step: {', '.join(parts)}"),
        *([("throughput", ", ".join(rates))] if rates else []),
    ]  # fmt: skip


def _size(report: Rehearsal) -> str:
    """The size of what a config's step computes; an empty string for another function."""
    if "model" not in report or "batch" not in report:
        return ""
    batch = report["batch"]
    return (
        f"{count_text(report['model']['parameters'])} parameters, {batch['sequences']} x {batch['seq_len']} tokens, "
        f"accumulation {batch['accumulation']}, {report['target']['dtype']}; "
    )


def memory_verdict(memory: Memory) -> str:
    """Say whether a step fits: `fits, 90.03 GiB to spare: 4.97 GiB of 95.00 GiB a device`."""
    takes, has = memory["total"], memory["hbm_bytes"]
    if not has:
        return f"{bytes_text(takes)} a device; what it has is not known"
    fits, over = f"fits, {bytes_text(has - takes)} to spare", f"does not fit: {bytes_text(takes - has)} too much"
    return f"{fits if memory['fits'] else over}: {bytes_text(takes)} of {bytes_text(has)} a device"


def finding_lines(findings: Iterable[LintFinding]) -> list[str]:
    """One line for each finding, errors first, in the form of a compiler's messages, which editors can follow."""
    order = ["error", "warning", "note"]
    lines = []
    for row in sorted(findings, key=lambda row: order.index(row["severity"])):
        costs = [seconds_text(row["seconds"])] * bool(row["seconds"]) + [bytes_text(row["bytes"])] * bool(row["bytes"])
        where = row["source"] or row["scope"] or "no known line"
        cost = f" ({', '.join(costs)})" if costs else ""
        lines.append(f"{where}: {row['severity']}: {row['rule']}: {row['message']}{cost}")
    return lines or ["the linter found nothing to report"]


def note_lines(report: Rehearsal) -> list[str]:
    """Lines on what was assumed, and on what was not understood."""
    lines = [f"note: {note}" for note in report["notes"]]
    if (estimated := report["time"]["estimated_without_cycles"]) >= _NOTHING:
        lines.append(
            f"note: {percent_text(estimated)} of the compute time is a roofline estimate, not the compiler's own"
        )
    if report["unknown"]:
        names = ", ".join(f"{name} x {count}" for name, count in report["unknown"].items())
        lines.append(f"note: instructions not understood: {names}")
    return lines


def show(report: Rehearsal) -> None:
    """Print a report on the terminal."""
    for part in report_parts(report):
        console().print(part)


def report_parts(report: Rehearsal, most: int = _MOST) -> list[RenderableType]:
    """The parts of a report in the order in which a terminal prints them; a long table shows `most` rows."""
    return [
        *(f"{name:<12} {text}" for name, text in summary(report)),
        *(part for section in report_sections(report) for part in printed_section(section, most)),
        "",
        *finding_lines(report["findings"]),
        *note_lines(report),
    ]


def section_table(section: Section, most: int = _MOST) -> Table:
    """A section as a terminal's table. Words fold where there is no room, and a last row counts the rows left out."""
    columns = section.columns
    table = Table(box=None, pad_edge=False, show_header=any(column.name for column in columns))
    for column in columns:
        if column.text:
            table.add_column(column.name, justify="right", no_wrap=True)
        else:
            wide = column.name in ("line", "scope", "task")
            table.add_column(column.name, overflow="fold", min_width=14 if wide else 6)
    for row in section.rows[:most]:
        table.add_row(*(column.cell(row) for column in columns))
    if len(section.rows) > most:
        numbers = sum(column.text is not None for column in columns)
        table.add_row(*[""] * numbers, f"and {len(section.rows) - most} more")
    return table


def printed_section(section: Section, most: int) -> list[RenderableType]:
    """A section's title and table, which are printed one after the other."""
    return ["", Text(section.title, style="bold"), section_table(section, most)]
