"""A rehearsal, and the difference of two, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxpar.base.console import bytes_text, console, count_text
from jaxpar.rehearse.report.difference import Change, Difference, PlaceChange
from jaxpar.rehearse.report.schema import LintFinding, Memory, Rehearsal

_NOTHING = 1e-9  # seconds: what is less is rounding


def seconds_text(seconds: float) -> str:
    """`396 ms`, three significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            value = seconds / size
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"


def summary_lines(rehearsal: Rehearsal) -> list[str]:
    """What the report comes to, in the form of the start-up lines: a word and what is to be said of it."""
    target = rehearsal["target"]
    memory, time = rehearsal["memory"], rehearsal["time"]
    slices = f", {target['slices']} slices" if target["slices"] > 1 else ""
    note = f" ({note})" if (note := target.get("note")) else ""
    waits = {"exposed communication": "exposed_communication", "waits for the host": "host_stall",
             "waits for copies": "copy_stall", "idle": "idle"}  # fmt: skip
    parts = [f"compute {seconds_text(time['compute'])}"]
    parts += [f"{name} {seconds_text(time[key])}" for name, key in waits.items() if time[key] >= _NOTHING]
    shares = {"MFU": time["mfu"], "HFU": time["hfu"]}
    speeds = [f"{count_text(time['tokens_per_second'])} tokens/s"] if "tokens_per_second" in time else []
    speeds += [f"{name} {100 * share:.1f} %" for name, share in shares.items() if share is not None]
    lines = [
        ("target", f"{target['name']}: {target['chips']} x {target['chip']}, {target['topology']}{slices}{note}"),
        ("mesh", " x ".join(f"{name}={size}" for name, size in rehearsal["mesh"].items()) or "one device"),
        ("step", f"{_size(rehearsal)}compiled in {seconds_text(rehearsal['compile_seconds'])}"),
        ("memory", _verdict(memory)),
        *(("", advice) for advice in memory["advice"]),
        ("time", f"{seconds_text(time['step'])} a step: {', '.join(parts)}"),
        ("bounds", f"{seconds_text(time['list_schedule'])} by a greedy schedule of the same tasks, "
                   f"{seconds_text(time['lower_bound'])} at the very least"),
        *([("throughput", ", ".join(speeds))] if speeds else []),
        *(("", f"{n:,.1f} days for {count_text(float(tokens))} tokens") for tokens, n in time.get("days", {}).items()),
    ]  # fmt: skip
    return [f"{name:<12} {text}" for name, text in lines]


def _size(rehearsal: Rehearsal) -> str:
    """Of a config's step, what it computes."""
    if "model" not in rehearsal or "batch" not in rehearsal:
        return ""
    batch = rehearsal["batch"]
    return (
        f"{count_text(rehearsal['model']['parameters'])} parameters, {batch['sequences']} x {batch['seq_len']} tokens, "
        f"accumulation {batch['accumulation']}, {rehearsal['target']['dtype']}; "
    )


def _verdict(memory: Memory) -> str:
    takes, has = memory["total"], memory["hbm_bytes"]
    if not has:
        return f"{bytes_text(takes)} a device; what it has is not known"
    fits, over = f"fits, {bytes_text(has - takes)} to spare", f"does not fit: {bytes_text(takes - has)} too much"
    return f"{fits if memory['fits'] else over}: {bytes_text(takes)} of {bytes_text(has)} a device"


def show(rehearsal: Rehearsal) -> None:
    """Print a report on the terminal."""
    for part in report_parts(rehearsal):
        console().print(part)


def report_parts(rehearsal: Rehearsal, most: int = 12) -> list[RenderableType]:
    """Everything a terminal shows of a rehearsal, to be printed one after another.

    Args:
      rehearsal: the report.
      most: rows of a long table.
    """
    time, memory = rehearsal["time"], rehearsal["memory"]
    exposed = sum(row["exposed"] for row in rehearsal["lines"])
    unplanned = sum(not row.get("planned", True) for row in rehearsal["collectives"])
    asked = f": {unplanned or 'none'} unplanned" if any("planned" in row for row in rehearsal["collectives"]) else ""
    return [
        *summary_lines(rehearsal),
        *_section("memory of a device", _shares(memory["categories"], memory["total"], bytes_text)),
        *(_section("memory of the host, for each device", _shares(memory["host"], None, bytes_text))
          if memory["host"] else []),
        *_section("busy by kind (collectives and host copies also beside compute)",
                  _shares(time["by_category"], time["step"], seconds_text)),
        *_section(f"by line of the model: {seconds_text(exposed)} exposed", line_table(rehearsal, most)),
        *_section(f"collectives{asked}", collective_table(rehearsal, most)),
        *_section("critical path", path_table(rehearsal, most)),
        "", *finding_lines(rehearsal["findings"]), *note_lines(rehearsal),
    ]  # fmt: skip


def line_table(rehearsal: Rehearsal, most: int) -> Table:
    """Lines of the model, those with the most exposed communication and compute first."""
    rows = sorted(rehearsal["lines"], key=lambda row: (-row["exposed"], -row["compute"]))
    table = _table("exposed", "comm", "compute", "FLOPs", left=("line", "scope", "phase"))
    for row in rows[:most]:
        times = [_or_dash(row[key], seconds_text) for key in ("exposed", "communication", "compute")]
        where = [row["source"] or "-", row["scope"] or "-", row["phase"]]
        table.add_row(*times, _or_dash(row["flops"], count_text), *where)
    return _with_rest(table, len(rows), most, 4)


def collective_table(rehearsal: Rehearsal, most: int) -> Table:
    """Collectives, the unplanned first, then those exposed the longest."""
    rows = sorted(
        rehearsal["collectives"], key=lambda row: (row.get("planned", True), -row["exposed"], -row["seconds"])
    )
    known = ("plan",) if any("planned" in row for row in rows) else ()
    table = _table("exposed", "time", "sent", "times", left=("kind", "over", *known, "phase", "line"))
    for row in rows[:most]:
        times = [_or_dash(row[key], seconds_text) for key in ("exposed", "seconds")]
        plan = ["planned" if row.get("planned", True) else "UNPLANNED"] if known else []
        where = [row["kind"], ", ".join(row["axes"]) or "-", *plan, row["phase"], row["source"] or "-"]
        table.add_row(*times, _or_dash(row["sent_bytes"], bytes_text), str(row["count"]), *where)
    return _with_rest(table, len(rows), most, 4)


def path_table(rehearsal: Rehearsal, most: int) -> Table:
    """The critical path's longest stretches."""
    rows = sorted(rehearsal["critical_path"], key=lambda row: -row["seconds"])
    table = _table("time", "times", left=("task", "kind", "scope", "line"))
    for row in rows[:most]:
        where = [row["name"], row["kind"], row["scope"] or "-", row["source"] or "-"]
        table.add_row(seconds_text(row["seconds"]), str(row["count"]), *where)
    return _with_rest(table, len(rows), most, 2)


def finding_lines(findings: Iterable[LintFinding]) -> list[str]:
    """A line a finding, errors first; the form of a compiler's, so that editors can follow it."""
    order = ["error", "warning", "note"]
    rows = sorted(findings, key=lambda row: order.index(row["severity"]))
    lines = []
    for row in rows:
        costs = [_or_nothing(row["seconds"], seconds_text), _or_nothing(row["bytes"], bytes_text)]
        cost = ", ".join(filter(None, costs))
        where = row["source"] or row["scope"] or "no known line"
        lines.append(f"{where}: {row['severity']}: {row['rule']}: {row['message']}" + (f" ({cost})" if cost else ""))
    return lines or ["the linter found nothing to report"]


def note_lines(rehearsal: Rehearsal) -> list[str]:
    """What was assumed, and what was not understood."""
    lines = [f"note: {note}" for note in rehearsal["notes"]]
    if rehearsal["unknown"]:
        names = ", ".join(f"{name} x {count}" for name, count in rehearsal["unknown"].items())
        lines.append(f"note: instructions not understood: {names}")
    return lines


def difference_parts(changes: Difference, most: int = 12) -> list[RenderableType]:
    """Everything a terminal shows of a difference, to be printed one after another."""
    parts: list[RenderableType] = [
        f"{changes['new']} against {changes['old']}",
        *_section("memory of a device", _change_table(changes["memory"], bytes_text)),
        *_section("time of a step", _change_table(changes["time"], seconds_text)),
    ]
    if changes["lines"]:
        parts += _section("by line of the model", _line_changes(changes["lines"], most))
    if changes["collectives"]:
        parts += _section("collectives", _collective_changes(changes["collectives"], most))
    for title, findings in (("found anew", changes["found"]), ("no longer found", changes["gone"])):
        if findings:
            parts += ["", title, *finding_lines(findings)]
    if not any(changes[key] for key in ("lines", "collectives", "found", "gone")):
        parts += ["", "no line, collective or finding differs"]
    return parts


def _change_table(rows: Sequence[Change], text: Callable[[float], str]) -> Table:
    table = _table("old", "new", "change", "", left=("",))
    for row in rows:
        if max(row["old"], row["new"]) > _NOTHING:
            table.add_row(*_pair(row["old"], row["new"], text), _percent(row["old"], row["new"]), _words(row["name"]))
    return table


def _line_changes(rows: Sequence[PlaceChange], most: int) -> Table:
    table = _table("compute", "change", "exposed", "change", left=("line", "scope", "phase"))
    for row in rows[:most]:
        cells = [cell for name in ("compute", "exposed") for cell in _now_and_change(row, name, seconds_text)]
        table.add_row(*cells, row["source"] or "-", row["scope"] or "-", row["phase"])
    return _with_rest(table, len(rows), most, 4)


def _collective_changes(rows: Sequence[PlaceChange], most: int) -> Table:
    table = _table("exposed", "change", "sent", "change", "times", left=("kind", "over", "phase", "line"))
    for row in rows[:most]:
        cells = [*_now_and_change(row, "exposed", seconds_text), *_now_and_change(row, "sent_bytes", bytes_text)]
        times = " -> ".join(dict.fromkeys(f"{row[side]['count']:.0f}" for side in ("old", "new")))
        where = [row["kind"], ", ".join(row["axes"]) or "-", row["phase"], row["source"] or "-"]
        table.add_row(*cells, times, *where)
    return _with_rest(table, len(rows), most, 5)


def _now_and_change(row: PlaceChange, name: str, text: Callable[[float], str]) -> list[str]:
    _, new, change = _pair(row["old"][name], row["new"][name], text)
    return [new, change]


def _pair(old: float, new: float, text: Callable[[float], str]) -> list[str]:
    change = new - old
    sign = "+" if change > 0 else "-"
    return [_or_dash(old, text), _or_dash(new, text), sign + text(abs(change)) if abs(change) > _NOTHING else "="]


def _percent(old: float, new: float) -> str:
    if abs(old - new) <= _NOTHING:
        return ""
    return f"{100 * (new / old - 1):+.1f} %" if old else "new"


def _shares(parts: dict[str, Any], whole: float | None, text: Callable[[float], str]) -> Table:
    """Parts by size with their share of the whole."""
    table = _table("", "", left=("",))
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value:
            table.add_row(text(value), f"{100 * value / whole:.1f} %" if whole else "", _words(name))
    return table


def _section(title: str, table: Table) -> list[RenderableType]:
    return ["", Text(title, style="bold"), table]


def _table(*numbers: str, left: tuple[str, ...]) -> Table:
    """Columns of numbers, to the right, then columns of words, which fold where there is no room."""
    table = Table(box=None, pad_edge=False, show_header=any([*numbers, *left]))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in left:
        table.add_column(name, overflow="fold", min_width=14 if name in ("line", "scope", "task") else 6)
    return table


def _with_rest(table: Table, count: int, most: int, position: int) -> Table:
    """The table with a last row that says how many were left out."""
    if count > most:
        table.add_row(*[""] * position, f"and {count - most} more")
    return table


def _or_dash(value: float, text: Callable[[float], str]) -> str:
    return text(value) if value else "-"


def _or_nothing(value: float, text: Callable[[float], str]) -> str:
    return text(value) if value else ""


def _words(name: str) -> str:
    return name.replace("_", " ")
