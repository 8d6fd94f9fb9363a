"""The tables and lines in which a terminal shows a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxpar.base.compiler import options_text
from jaxpar.base.console import bytes_text, console, count_text
from jaxpar.rehearse.report.schema import Interval, LintFinding, Memory, NoInterval, Rehearsal

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


def show(report: Rehearsal) -> None:
    """Print a report of `rehearse.step` or `rehearse.config` on the terminal."""
    for part in report_parts(report):
        console().print(part)


def report_parts(report: Rehearsal, most: int = _MOST) -> list[RenderableType]:
    """Make the parts of a report in the order in which a terminal prints them.

    Args:
      most: the number of rows that a long table shows.
    """
    memory = report["memory"]
    return [
        *(f"{name:<12} {text}" for name, text in summary(report)),
        *_time_table(report),
        *_parts_table("memory of a device", memory["categories"], bytes_text),
        *_parts_table("memory of the host, for each device", memory["host"], bytes_text),
        *lines_table(report, most),
        *collectives_table(report, most),
        "",
        *(finding_lines(report["findings"]) or ["the linter found nothing to report"]),
        *note_lines(report),
    ]


def lines_table(report: Rehearsal, most: int) -> list[RenderableType]:
    """Make the table of the lines of the model, the most exposed first, under a title; nothing
    where no line is known.

    Args:
      most: the number of rows.
    """
    exposed = sum(row["exposed"] for row in report["lines"])
    rows = [
        [
            *(_cell(row[key], seconds_text) for key in ("exposed", "communication", "compute")),
            _cell(row["flops"], count_text),
            row["source"],
            row["scope"],
            row["phase"],
        ]
        for row in sorted(
            report["lines"],
            key=lambda row: (-row["exposed"], -row["compute"]),
        )
    ]
    columns = ["exposed", "comm", "compute", "FLOPs", "line", "scope", "phase"]
    return titled_table(
        f"by line of the model: {seconds_text(exposed)} exposed", columns, rows, 4, most
    )


def collectives_table(report: Rehearsal, most: int) -> list[RenderableType]:
    """Make the table of the collectives, under a title: those that the plan did not ask for, then
    the most exposed.

    Args:
      most: the number of rows.
    """
    found = sorted(
        report["collectives"],
        key=lambda row: (
            row.get("planned", True),
            -row["exposed"],
            -row["seconds"],
        ),
    )
    plan = {None: "", True: "planned", False: "UNPLANNED"}
    rows = [
        [
            *(_cell(row[key], seconds_text) for key in ("exposed", "seconds")),
            _cell(row["sent_bytes"], bytes_text),
            str(row["count"]),
            row["kind"],
            ", ".join(row["axes"]),
            plan[row.get("planned")],
            row["phase"],
            row["source"],
        ]
        for row in found
    ]
    unplanned = sum(not row.get("planned", True) for row in found)
    if any("planned" in row for row in found):
        asked = f": {unplanned or 'none'} unplanned"
    else:
        asked = ""
    columns = ["exposed", "time", "sent", "times", "kind", "over", "plan", "phase", "line"]
    return titled_table(f"collectives{asked}", columns, rows, 4, most)


def _time_table(report: Rehearsal) -> list[RenderableType]:
    """Make the table of a step's time: compute by kind of task, and what the compute units wait
    for.
    """
    time = report["time"]
    parts = {
        kind: value
        for kind, value in time["by_category"].items()
        if kind not in ("collective", "host_copy", "host_compute")
    }
    parts |= {name: time[key] for name, key in _WAITS.items() if time[key] >= _NOTHING}
    busy = time["by_category"].get("collective", 0.0)
    if busy:
        hidden = max(0.0, 1 - time["exposed_communication"] / busy)
    else:
        hidden = 0.0
    if busy:
        beside = (
            f"; collectives run for {seconds_text(busy)}, {percent_text(hidden)} of it "
            "beside compute"
        )
    else:
        beside = ""
    return _parts_table(f"one step{beside}", parts, seconds_text)


def _parts_table(
    title: str, parts: Mapping[str, float], text: Callable[[float], str]
) -> list[RenderableType]:
    """Make the table of the parts of a whole, the largest first."""
    whole = sum(parts.values())
    found = sorted(
        (item for item in parts.items() if item[1]),
        key=lambda item: -item[1],
    )
    rows = [
        [text(value), percent_text(value / whole), part.replace("_", " ")] for part, value in found
    ]
    return titled_table(title, ["", "", ""], rows, 2, len(rows))


def titled_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int, most: int
) -> list[RenderableType]:
    """Make an empty line, a title and a table; nothing where there are no rows.

    Words fold where there is no room, and an empty cell is a dash.

    Args:
      columns: the heads of the columns; there is no head where all are empty.
      rows: the cells of each row.
      numbers: how many of the first columns are numbers, which are aligned at the right.
      most: how many rows are shown; a last row counts those beyond.
    """
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for name in columns[:numbers]:
        table.add_column(name, justify="right", no_wrap=True)
    for name in columns[numbers:]:
        table.add_column(name, overflow="fold", min_width=14 if name in ("line", "scope") else 6)
    for row in rows[:most]:
        table.add_row(*(cell or "-" for cell in row))
    if len(rows) > most:
        table.add_row(*[""] * numbers, f"and {len(rows) - most} more")
    if rows:
        return ["", Text(title, style="bold"), table]
    return []


def _cell(value: float, text: Callable[[float], str]) -> str:
    return text(value) if value else ""


def summary(report: Rehearsal) -> list[tuple[str, str]]:
    """Summarize a report in pairs of a word and a text, a line each; the word is empty where a line
    goes on.
    """
    target = report["target"]
    memory = report["memory"]
    time = report["time"]
    if target["slices"] > 1:
        slices = f", {target['slices']} slices"
    else:
        slices = ""
    if note := target.get("note"):
        note = f" ({note})"
    else:
        note = ""
    parts = [f"compute {seconds_text(time['compute'])}"]
    parts += [
        f"{name} {seconds_text(time[key])}" for name, key in _WAITS.items() if time[key] >= _NOTHING
    ]
    if "tokens_per_second" in time:
        rates = [f"{count_text(time['tokens_per_second'])} tokens/s"]
    else:
        rates = []
    shares = {"MFU": time["mfu"], "HFU": time["hfu"]}
    rates += [
        f"{name} {percent_text(share)}" for name, share in shares.items() if share is not None
    ]
    return [
        (
            "target",
            f"{target['name']}: {target['chips']} x {target['chip']}, "
            f"{target['topology']}{slices}{note}",
        ),
        (
            "mesh",
            " x ".join(f"{name}={size}" for name, size in report["mesh"].items()) or "one device",
        ),
        ("step", f"{_size(report)}compiled in {seconds_text(report['compile_seconds'])}"),
        *(
            [("compiler", options_text(options))]
            if (options := report.get("compiler_options"))
            else []
        ),
        *(
            (
                "KERNELS",
                f"{row['op']} compiled as {row['priced']}, with the time of "
                f"{row.get('time', row['priced'])}'s; the target runs {row['runs']}, which is not "
                f"here: {row['install']}",
            )
            for row in report.get("kernels", [])
        ),
        ("memory", memory_verdict(memory)),
        *(("", advice) for advice in memory["advice"]),
        ("time", f"{seconds_text(time['step'])} a step: {', '.join(parts)}"),
        *(("", line) for line in _sure_lines(report)),
        *([("throughput", ", ".join(rates))] if rates else []),
    ]


def _sure_lines(report: Rehearsal) -> list[str]:
    """Write what scaled the time, and how sure it is."""
    lines = []
    if found := report.get("calibration"):
        lines.append(
            f"compute times {found['compute']:.3f}, since a step took "
            f"{seconds_text(found['measured'])} where {seconds_text(found['predicted'])} "
            "were predicted"
        )
    if interval := report.get("interval"):
        lines.append(interval_text(interval))
    return lines


def interval_text(interval: Interval | NoInterval) -> str:
    """Write an interval: `±9 % by 18 published runs on v5p`, or why there is none."""
    if "why" in interval:
        return f"how sure is not known: {interval['why']}"
    return f"±{100 * interval['share']:.0f} % by {interval['runs']} {interval['by']}"


def _size(report: Rehearsal) -> str:
    """Write the size of what a config's step computes; empty for another function."""
    if "model" not in report or "batch" not in report:
        return ""
    batch = report["batch"]
    parameters = count_text(report["model"]["parameters"])
    tokens = (
        f"{batch['sequences']} x {batch['seq_len']} tokens, accumulation {batch['accumulation']}"
    )
    return f"{parameters} parameters, {tokens}, {report['target']['dtype']}; "


def memory_verdict(memory: Memory) -> str:
    """Say whether a step fits: `fits, 90.03 GiB to spare: 4.97 GiB of 95.00 GiB a device`; only
    what it takes where the device's memory is not known.
    """
    takes = memory["total"]
    has = memory["hbm_bytes"]
    if not has:
        return f"{bytes_text(takes)} a device; what it has is not known"
    usable = memory["usable_bytes"]
    verdict = f"fits, {bytes_text(usable - takes)} to spare"
    if not memory["fits"]:
        verdict = f"does not fit: {bytes_text(takes - usable)} too much"
    if usable == has:
        may_take = ""
    else:
        may_take = f", of which JAX's pool may take {bytes_text(usable)}"
    return f"{verdict}: {bytes_text(takes)} of {bytes_text(has)} a device{may_take}"


def finding_lines(findings: Iterable[LintFinding]) -> list[str]:
    """Write findings of the linter, a line each, in the form of a compiler's messages, which
    editors can follow.
    """
    lines = []
    for row in findings:
        costs = [seconds_text(row["seconds"])] * bool(row["seconds"]) + [
            bytes_text(row["bytes"])
        ] * bool(row["bytes"])
        where = row["source"] or row["scope"]
        cost = f" ({', '.join(costs)})" if costs else ""
        lines.append(
            f"{f'{where}: ' * bool(where)}{row['severity']}: {row['rule']}: {row['message']}{cost}"
        )
    return lines


def note_lines(report: Rehearsal) -> list[str]:
    """Write lines on what was assumed."""
    lines = [f"note: {note}" for note in report["notes"]]
    if basis := report["memory"].get("basis"):
        lines.append(f"note: memory is {basis}")
    if (share := report["time"]["estimated_without_cycles"]) >= _NOTHING:
        lines.append(
            f"note: {percent_text(share)} of the compute time is a roofline estimate, not the "
            "compiler's own"
        )
    return lines
