"""A run as a page of the terminal, read from its folder alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from jaxpar.base.console import PlainConsole, bytes_text, count_text, duration_text
from jaxpar.base.errors import UserError, visible, with_urls
from jaxpar.base.layout.mesh import describe, total_sizes
from jaxpar.rehearse.report.report_tables import percent_text, seconds_text
from jaxpar.train.goodput import add_up, read_lives
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.folder.run_folder import is_run, read_run_config, runs_in
from jaxpar.train.runs.locks.run_lock import LOCK

_MOST = 1e15
"""The bound that no number of a run reaches, unless its line is damaged: such a number is not
shown.
"""
_LEAST_WIDTH = 20
"""The columns that a curve needs."""
# the bits of a braille letter's dots
_DOTS = np.array(
    [
        [0x01, 0x08],
        [0x02, 0x10],
        [0x04, 0x20],
        [0x40, 0x80],
    ]
)
_NUMBERS = {
    "loss": ("loss", "{:.4f}".format, "cyan"),
    "val_loss": ("validation", "{:.4f}".format, "red"),
    "tokens_per_second": ("tokens/s", count_text, ""),
    "step_seconds": ("a step", seconds_text, ""),
    "mfu": ("MFU", percent_text, ""),
    "data_wait": ("data wait", percent_text, ""),
    "device_memory": ("memory", bytes_text, ""),
}
"""The name of a metric on the page, its text, and the colour of it and its curve."""


def watch(folder: Path, once: bool = False, refresh: Callable[[], None] = lambda: None) -> None:
    """Show a run, or the runs in a folder, until Ctrl-C.

    Args:
      folder: a run folder, or one that has run folders in it.
      once: print it and return, as in a pipe.
      refresh: is called before each look at the folder, as one in a bucket needs.

    Raises:
      UserError: there is no run, or the settings of the only one cannot be read.
    """
    out = PlainConsole()
    if once or not out.is_terminal:
        out.print(page(folder, out.width))
        return
    with (
        suppress(KeyboardInterrupt),
        Live(page(folder, out.width), console=out, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(2)
            refresh()
            live.update(page(folder, out.width), refresh=True)


def page(folder: Path, width: int) -> RenderableType:
    """Make the page of a run, or a table of several runs.

    Args:
      folder: a run folder, or one that has run folders in it or in their subfolders.
      width: the columns of the terminal. The page of a run takes at most 100 of them.

    Returns:
      What `rich` prints. A run in a table that cannot be read has the error in its row.

    Raises:
      UserError: there is no run, or the settings of the only one cannot be read.
    """
    if is_run(folder):
        return _run_page(folder, min(width, 100))
    runs = runs_in(folder)
    columns = (
        Column(name, justify="right") for name in ("step", "", "loss", "validation", "tokens/s")
    )
    table = Table("run", "", *columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for run in runs:
        name = visible(str(run.relative_to(folder)))
        try:
            _, _, (step, last), state, facts = _look(run)
        except UserError as error:  # the run of another version beside others
            table.add_row(name, Text(visible(str(error)), "red"))
        else:
            numbers = (facts[name] for name in ("left", "loss", "validation", "tokens/s"))
            table.add_row(name, state, f"{step}/{last}", *numbers)
    return table


def _look(folder: Path) -> tuple[Any, list[dict[str, Any]], tuple[int, int], Text, dict[str, str]]:
    """Read the run's config, its rows, its step of how many, whether it lives, and the last of each
    number as text.
    """
    config = read_run_config(folder)
    now = time.time()
    rows = [
        {key: value for key, value in row.items() if _is_shown(key, value)}
        for row in read_metrics(folder)
    ]
    found = {key: value for row in rows for key, value in row.items()}
    steps = config.train.steps
    stop = config.train.stop_at
    step = found.get("step", 0)
    last = min(stop or steps, steps)
    took = found.get("step_seconds", 0.0)
    age = now - (folder / ("metrics.jsonl" if rows else "config.toml")).stat().st_mtime
    if rows:
        state = Text("running", "green")
    else:
        state = Text("starting", "yellow")
    if step >= steps:
        state = Text("done", "blue")
    elif step >= last:
        state = Text(f"stopped at train.stop_at={stop}", "blue")
    elif how := _how_it_ended(folder):
        state = Text(visible(how), "yellow")
    # an evaluation or a save may take a while
    elif age > max(60, 5 * took * config.metrics.log_every):
        if rows or (folder / LOCK).exists():
            state = Text(f"silent for {duration_text(age)}", "bold red")
        else:
            state = Text("not begun", "yellow")
    saved = {
        int(path.name): path.stat().st_mtime
        for path in folder.glob("checkpoints/*")
        if path.name.isdecimal()
    }
    newest = max(saved, default=0)
    facts = {
        name: text(found[key]) if key in found else "-" for key, (name, text, _) in _NUMBERS.items()
    } | {
        "checkpoint": f"{newest}, {duration_text(now - saved[newest])} ago" if saved else "-",
        "last line": f"{duration_text(age)} ago",
        "left": _left((last - step) * took, stop if last < steps else 0)
        if took and step < last
        else "",
    }
    return config, rows, (step, steps), state, facts


def _how_it_ended(folder: Path) -> str:
    """Say how the last process that trained a run ended; empty where it runs, or was killed."""
    lives = read_lives(folder).lives
    return lives[-1].how if lives else ""


def _is_shown(key: str, value: float) -> bool:
    """Return whether a run can have such a number. A loss may be NaN or infinite, which tells that
    the run diverged.
    """
    is_loss = bool(key in _NUMBERS and _NUMBERS[key][2])
    return abs(value) < _MOST or (is_loss and not math.isfinite(value))


def _left(seconds: float, stop: int) -> str:
    """Say how long a run takes until its end, or until it stops before that, at a step other than
    0.
    """
    return f"{duration_text(seconds)} left" + (f" to {stop}" if stop else "")


def _run_page(folder: Path, width: int) -> RenderableType:
    config, rows, (step, last), state, facts = _look(folder)
    model, bar, grid = config.model, *(Table.grid(padding=(0, 2), expand=True) for _ in range(2))
    what = (
        f"{model.family}, {model.layers} layers of {model.embed}; "
        f"{describe(total_sizes(config.mesh))}"
    )
    bar.add_column(ratio=1)
    bar.add_row(
        ProgressBar(last, step, finished_style="blue"), f"step {step} of {last}", facts.pop("left")
    )
    colors = {name: color for name, _, color in _NUMBERS.values()}
    cells = [
        Text.assemble((f"{key} ", "dim"), (text, f"bold {colors.get(key, '')}"))
        for key, text in facts.items()
    ]
    for first in range(0, len(cells), 3):
        grid.add_row(*cells[first : first + 3])
    batch = Text(f"{what}; {config.train.batch} x {config.data.seq_len} tokens a step", "dim")
    parts: list[RenderableType] = [batch, bar, "", *_curves(rows, width - 4, 8), grid]
    lives = read_lives(folder).lives
    if lives:
        parts += ["", Text(add_up(lives).summary(), "dim")]
    return Panel(
        Group(*parts),
        title=Text(visible(with_urls(str(folder))), "bold"),
        title_align="left",
        subtitle=state,
        width=width,
    )


def _curves(
    rows: list[dict[str, Any]],
    width: int,
    height: int,
) -> list[Text]:
    """Draw the losses by step in lines of braille letters, each of which has 4 x 2 dots."""
    series = [
        (
            np.array(
                [(row["step"], row[key]) for row in rows if np.isfinite(row.get(key, np.nan))]
            ),
            color,
        )
        for key, (_, _, color) in _NUMBERS.items()
        if color
    ]
    series = [(points, color) for points, color in series if len(points) > 1]
    if not series:
        return []
    steps, losses = np.concatenate([points for points, _ in series]).T
    labels = [f"{losses.max():.3f} ", *[""] * (height - 2), f"{losses.min():.3f} "]
    margin = max(map(len, labels))
    if width - margin < _LEAST_WIDTH:
        return []
    letters = np.full((height, width - margin), 0x2800)
    styles = np.full((height, width - margin), "", object)
    for points, color in series:
        # so many that a steep part is a line too
        at = np.linspace(
            points[0, 0],
            points[-1, 0],
            100 * width,
        )
        fallen = (losses.max() - np.interp(at, *points.T)) / max(np.ptp(losses), 1e-9)
        x = (at / steps.max() * (2 * (width - margin) - 1)).astype(int)
        y = (fallen * (4 * height - 1)).round().astype(int)
        np.bitwise_or.at(
            letters,
            (y // 4, x // 2),
            _DOTS[y % 4, x % 2],
        )
        styles[y // 4, x // 2] = color
    drawn = [
        Text.assemble(
            (label.rjust(margin), "dim"),
            *zip(map(chr, row), colors, strict=True),
        )
        for label, row, colors in zip(labels, letters, styles, strict=True)
    ]
    return [
        *drawn,
        Text(" " * margin + "0" + f"step {steps.max():.0f}".rjust(width - margin - 1), "dim"),
        Text(),
    ]
