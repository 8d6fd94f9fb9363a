"""The board: each published step predicted beside what was measured, and how good that is by
chip.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import Say, UserError, suggest
from jaxpar.base.machine import versions
from jaxpar.bench.foresight.figures import Figures, Pair, judge, leave_one_model_out
from jaxpar.bench.foresight.programs import (
    StoredProgram,
    compile_program,
    find_program,
    kept_program,
    price_program,
)
from jaxpar.bench.foresight.rows import PublishedRow
from jaxpar.bench.foresight.translate import Translation, translate
from jaxpar.bench.measure import BenchRow
from jaxpar.rehearse.how_sure import BoardRow as RehearsedRun
from jaxpar.rehearse.how_sure import errors_by_one_step
from jaxpar.rehearse.report.schema import Line

_LINES = 5
"""The number of lines of the model that a row keeps."""
ALL = "all"
"""The name of what stands for every chip."""


class BoardLine(TypedDict):
    """The time of one line of the model in one phase of the step, exposed communication too."""

    scope: str
    phase: str
    seconds: float


class BoardRow(TypedDict):
    """One published step: what was measured and what is predicted. Numbers of a prediction are 0
    where there is none.
    """

    name: str
    chip: str
    chips: int
    model: str
    family: str
    target: str
    measured: float
    predicted: float
    exposed: float
    """The seconds in which compute waits for collectives."""
    counted: float
    """The seconds that the model's FLOPs, without recomputation, take at the peak."""
    memory: int
    """The bytes that a device needs, by the rehearsal."""
    stated_memory: int
    """The bytes that the source states; 0 = none."""
    fits: bool
    program: str
    """The name of the stored program."""
    not_built: str
    """Why there is no such step; empty = there is one."""
    refused: str
    """Why there is no program of it that could be priced, though it ran."""
    differences: list[str]
    """What is not the same in our step."""
    lines: list[BoardLine]
    """The lines of the model that take the longest."""
    source: str


class ChipFigures(TypedDict):
    """The errors on one chip, or on all."""

    rehearsed: Figures | None
    one_constant: Figures | None
    """With one constant a chip, fitted on the other models of the chip."""
    one_step: float | None
    """The median error of steps that are scaled by one other measured step of the same model on the
    same chip.
    """
    counted: Figures | None
    """Of a plain count of FLOPs, likewise with one constant a chip."""
    counted_on: int
    """The rows that have other models of their chip, over which both of these are."""
    memory: Figures | None
    """The bytes of a device against those that were stated."""
    refused: list[str]
    """The steps that ran, and that do not fit by the rehearsal or were refused by a compiler."""


class Board(TypedDict):
    """The rows, their figures by chip, and what made them."""

    date: str
    versions: dict[str, str]
    command: str
    rows: list[BoardRow]
    figures: dict[str, ChipFigures]


def choose_rows(rows: Sequence[PublishedRow], only: Sequence[str]) -> list[PublishedRow]:
    """Choose the rows whose names begin with one of some words; none = all.

    Raises:
      UserError: no name begins with a word.
    """
    names = [row.name for row in rows]
    for word in only:
        if not any(name.lower().startswith(word.lower()) for name in names):
            raise UserError(f"no row begins with {word!r}{suggest(word, names)}")
    words = tuple(word.lower() for word in only)
    return [row for row in rows if not words or row.name.lower().startswith(words)]


def quick_rows(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """Choose one row a chip: the one with the fewest devices, of these the smallest model."""
    cheapest = dict[str, tuple[tuple[int, int], PublishedRow]]()
    for row in rows:
        try:
            step = translate(row)
        except UserError:
            continue
        model = step.config.model
        price = (step.target.device_count, model.layers * model.embed * model.mlp)
        known = cheapest.get(step.target.chip)
        if known is None or price < known[0]:
            cheapest[step.target.chip] = (price, row)
    return [row for _, row in cheapest.values()]


def make_board(
    rows: Sequence[PublishedRow],
    folder: Path,
    command: str = "",
    say: Say = lambda line: None,
    anew: bool = False,
) -> Board:
    """Predict each step. What the folder has already, or the library brings along, is priced, and
    not compiled again.

    Args:
      folder: where compiled programs are kept.
      anew: whether what the library brings along is compiled by the compilers at hand too.
      command: the command line, for the record.
      say: is called with a line before and after each row.

    Raises:
      UserError: the folder cannot be written, or a file in it is damaged.
    """
    found = list[BoardRow]()
    for number, row in enumerate(rows, 1):
        where = f"{number}/{len(rows)}: {row.name}"
        made = _board_row(row, folder, lambda line, where=where: say(f"{where}: {line}"), anew)
        found.append(made)
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "command": command,
        "rows": found,
        "figures": figures_of(found),
    }


def _board_row(row: PublishedRow, folder: Path, say: Say, anew: bool) -> BoardRow:
    made: BoardRow = {
        "name": row.name,
        "chip": row.chip.lower(),
        "chips": row.numbers["chips"],
        "model": row.words["model"],
        "family": "",
        "target": "",
        "measured": row.measured,
        "predicted": 0.0,
        "exposed": 0.0,
        "counted": 0.0,
        "memory": 0,
        "stated_memory": row.stated_memory,
        "fits": False,
        "program": "",
        "not_built": "",
        "refused": "",
        "differences": [],
        "lines": [],
        "source": row.words["source"],
    }
    try:
        step = translate(row)
    except UserError as why:
        made["not_built"] = str(why)
        say(f"not built: {why}")
        return made
    made["family"] = step.config.model.family
    made["target"] = step.target.name
    made["differences"] = list(step.differences)
    try:
        stored = _stored_program(step, folder, say, anew)
        _predict(made, step, stored)
    except UserError as why:
        made["refused"] = str(why)
        say(f"refused: {why}")
        return made
    ratio = made["predicted"] / row.measured
    say(f"{made['predicted']:.4g} s predicted, {row.measured:.4g} measured, ratio {ratio:.3f}")
    return made


def _stored_program(step: Translation, folder: Path, say: Say, anew: bool) -> StoredProgram:
    """Find the program of a step in the folder or in the library, or compile it there.

    Raises:
      UserError: it is refused.
    """
    stored = find_program(step, folder)
    if stored is None and not anew:
        stored = kept_program(step)
        if stored is not None and stored.versions != versions():
            say(f"the program is by {_compilers(stored)}: --anew compiles it by those at hand")
    if stored is None:
        say(f"compiling for {step.target.name}")
        stored = compile_program(step, folder)
    if stored.refused:
        raise UserError(stored.refused)
    return stored


def _compilers(stored: StoredProgram) -> str:
    """Name what made a program: `jax 0.10.2, libtpu 0.0.42.1`."""
    said = stored.versions.items()
    return ", ".join(f"{name} {version}" for name, version in said if name != "jaxpar")


def _predict(made: BoardRow, step: Translation, stored: StoredProgram) -> None:
    """Fill in what the stored program says by the prices of today."""
    priced = price_program(step, stored)
    made["program"] = stored.text.name.removesuffix(".hlo.xz")
    time = stored.report["time"]
    made["predicted"] = priced.seconds
    made["exposed"] = priced.exposed
    made["counted"] = (time["mfu"] or 0.0) * time["step"]
    made["memory"] = stored.report["memory"]["total"]
    made["fits"] = stored.report["memory"]["fits"]
    made["lines"] = [_line(line) for line in priced.lines[:_LINES]]
    kernels = stored.report.get("kernels", [])
    made["differences"] += [f"attention is {one['priced']}, not {one['runs']}" for one in kernels]


def _line(line: Line) -> BoardLine:
    return {
        "scope": line["scope"],
        "phase": line["phase"],
        "seconds": line["compute"] + line["exposed"],
    }


def figures_of(rows: Sequence[BoardRow]) -> dict[str, ChipFigures]:
    """Judge the rows that have a step, by chip and all together."""
    tried = [row for row in rows if row["predicted"] or row["refused"]]
    chips = sorted({row["chip"] for row in tried})
    found = {chip: _judged([row for row in tried if row["chip"] == chip]) for chip in chips}
    found[ALL] = _judged(tried)
    return found


def _judged(rows: Sequence[BoardRow]) -> ChipFigures:
    built = [row for row in rows if row["predicted"]]
    rehearsed = [_pair(row, row["predicted"]) for row in built]
    counted = [_pair(row, row["counted"]) for row in built if row["counted"]]
    left_out = leave_one_model_out(counted)
    memory = [
        Pair(row["memory"], row["stated_memory"], row["model"], row["chip"])
        for row in built
        if row["stated_memory"]
    ]
    scaled = errors_by_one_step(rehearsal_errors(built))
    return {
        "rehearsed": judge(rehearsed),
        "one_step": statistics.median(scaled) if scaled else None,
        "one_constant": judge(leave_one_model_out(rehearsed)),
        "counted": judge(left_out),
        "counted_on": len(left_out),
        "memory": judge(memory),
        "refused": [row["name"] for row in rows if not row["fits"]],
    }


def _pair(row: BoardRow, seconds: float) -> Pair:
    return Pair(seconds, row["measured"], row["model"], row["chip"])


def write_board(board: Board) -> str:
    """Write a board as JSON, a line for each row, so that two of them can be compared."""
    rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in board["rows"])
    head = {key: value for key, value in board.items() if key != "rows"}
    return json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n'


def rehearsal_errors(rows: Sequence[BoardRow]) -> list[RehearsedRun]:
    """Collect what `jaxpar.rehearse` takes its intervals from: each prediction beside what was
    measured.
    """
    return [
        {
            "name": row["name"],
            "chip": row["chip"],
            "chips": row["chips"],
            "model": row["model"],
            "family": row["family"],
            "measured": row["measured"],
            "predicted": row["predicted"],
        }
        for row in rows
        if row["predicted"]
    ]


def write_errors(board: Board) -> str:
    """Write the errors as JSON, a line for each prediction."""
    lines = [json.dumps(row) for row in rehearsal_errors(board["rows"])]
    return "[\n" + ",\n".join(lines) + "\n]\n"


# What a person reads.


def chip_rows(board: Board) -> list[BenchRow]:
    """Make the lines of a table with the figures of each chip."""
    lines = list[BenchRow]()
    for chip, found in board["figures"].items():
        line: BenchRow = {"chip": chip}
        if figures := found["rehearsed"]:
            line |= {
                "rows": figures["rows"],
                "median": _percent(figures["median"]),
                "90th percentile": _percent(figures["p90"]),
                "worst": _percent(figures["worst"]),
                "bias": f"{100 * figures['bias']:+.1f} %",
                "Spearman": figures["spearman"],
            }
        line["by one step"] = _percent(found["one_step"]) if found["one_step"] else None
        for key, name in (("one_constant", "one constant"), ("counted", "FLOP count")):
            figures = found[key]
            line[f"{name}, left out"] = _percent(figures["median"]) if figures else None
        line["on rows"] = found["counted_on"]
        if memory := found["memory"]:
            line["memory"] = _percent(memory["median"])
            line["memory, worst"] = _percent(memory["worst"])
        line["do not fit"] = len(found["refused"])
        lines.append(line)
    return lines


def step_rows(board: Board) -> list[BenchRow]:
    """Make the lines of a table of the steps that have a prediction."""
    lines = list[BenchRow]()
    for row in board["rows"]:
        if not row["predicted"]:
            continue
        lines.append(
            {
                "step": row["name"],
                "target": row["target"],
                "measured, s": _digits(row["measured"]),
                "predicted, s": _digits(row["predicted"]),
                "ratio": f"{row['predicted'] / row['measured']:.3f}",
                "exposed, s": _digits(row["exposed"]),
                "memory": bytes_text(row["memory"]) + ("" if row["fits"] else ", does not fit"),
                "stated": bytes_text(row["stated_memory"]) if row["stated_memory"] else "",
            }
        )
    return lines


def worst_lines(board: Board, most: int = 5) -> list[str]:
    """Describe the rows that are off the most, with the lines of the model that take their time."""
    built = [row for row in board["rows"] if row["predicted"]]
    built.sort(key=lambda row: -abs(row["predicted"] / row["measured"] - 1))
    lines = list[str]()
    for row in built[:most]:
        took = ", ".join(
            f"{line['scope'] or 'no scope'} {line['phase']} "
            f"{100 * line['seconds'] / row['predicted']:.0f} %"
            for line in row["lines"]
        )
        waits = f"{100 * row['exposed'] / row['predicted']:.0f} % waits for collectives"
        lines.append(f"{row['name']} {row['predicted'] / row['measured']:.3f}: {took}; {waits}")
    return lines


def left_lines(board: Board) -> list[str]:
    """Say of each row without a prediction why there is none."""
    left = [row for row in board["rows"] if not row["predicted"]]
    return [
        f"{row['name']}: "
        + (f"refused: {row['refused']}" if row["refused"] else f"not built: {row['not_built']}")
        for row in left
    ]


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _digits(number: float) -> float:
    """Round a number to three digits."""
    return float(f"{number:.3g}")
