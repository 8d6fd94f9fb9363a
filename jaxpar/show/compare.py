"""A comparison of several runs: what differs in their configs, and their losses in a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from rich import box
from rich.table import Column, Table
from rich.text import Text

from jaxpar.base.config import Config
from jaxpar.base.console import count_text
from jaxpar.base.errors import UserError, short, visible
from jaxpar.base.toml import flatten
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.folder.own_tokenizer import have_other_tokenizers
from jaxpar.train.runs.folder.run_folder import read_run_config, runs_in

_MOST_COLUMNS = 8
"""The most runs that a table of settings has beside each other."""
_OF_TOKENS = ("train.batch", "data.seq_len")
_LOSSES = {"loss": "loss", "val_loss": "validation", "final_val_loss": "at its end"}


class Compared(NamedTuple):
    """A run to compare: its settings, and what it measured."""

    name: str
    config: Config
    rows: Sequence[Mapping[str, Any]]
    folder: Path

    def last(self, key: str) -> float | None:
        """Return the last value of a metric, if it was measured."""
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    def tokens(self, step: float) -> float:
        """Count the tokens that the run has seen after a step."""
        return step * self.config.train.batch * self.config.data.seq_len


def read_runs(folders: Mapping[str, Path]) -> list[Compared]:
    """Read the settings and the metrics of some runs.

    Args:
      folders: run folders, or folders that contain some, by the names that they were given by.

    Returns:
      The runs, each once, with names that tell them from each other.

    Raises:
      UserError: there are fewer than two runs, or one cannot be read.
    """
    found = dict[Path, str]()
    for given, folder in folders.items():
        for run in runs_in(folder):
            below = run.relative_to(folder)
            name = given if run == folder else f"{given.rstrip('/')}/{below}"
            found.setdefault(run.resolve(), name)
    if len(found) < 2:
        raise UserError(
            f"a comparison takes two runs or more, and {next(iter(found.values()))} is one: "
            "name another, or a folder that has several in it"
        )
    return [
        Compared(name, read_run_config(run), read_metrics(run), run) for run, name in found.items()
    ]


def differing(runs: Sequence[Compared]) -> dict[str, list[Any]]:
    """Return the settings in which some runs differ, each with the value of every run."""
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def settings_table(runs: Sequence[Compared]) -> Table:
    """Make a table of the settings in which some runs differ, and of the last numbers that each
    measured.
    """
    shown = runs[:_MOST_COLUMNS]
    columns = (Column(visible(run.name), overflow="fold", justify="right") for run in shown)
    table = Table(Column("", no_wrap=True), *columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for key, row in differing(runs).items():
        table.add_row(key, *(_value_text(value) for value in row[: len(shown)]))
    table.add_section()
    table.add_row("step", *(_number(run, "step", "{:.0f}".format) for run in shown))
    for key, name in _LOSSES.items():
        if any(run.last(key) is not None for run in runs):
            table.add_row(name, *(_number(run, key, "{:.4f}".format) for run in shown))
    table.add_row("tokens/s", *(_number(run, "tokens_per_second", count_text) for run in shown))
    return table


def notes(runs: Sequence[Compared]) -> list[str]:
    """List what is to be known of a comparison, a sentence each."""
    keys = differing(runs)
    found = list[str]()
    if len(runs) > _MOST_COLUMNS:
        found.append(
            f"the table has the first {_MOST_COLUMNS} of {len(runs)} runs, the picture all of them"
        )
    first = runs[0].folder
    if any(have_other_tokenizers(first, run.folder) for run in runs[1:]):
        found.append(
            "the tokenizers differ: a loss is in nats a token, so losses of other tokens are not "
            "to be compared"
        )
    elif any(key.startswith("data.") and key != "data.seq_len" for key in keys):
        found.append("the data differ, and so may their entropy")
    return found


def comparison_figure(runs: Sequence[Compared]) -> Figure:
    """Draw the losses of some runs over each other.

    They are drawn by step, or by tokens where a step has more of them in one run than in another.
    A line is the loss of training, a dotted one with squares the validation's.

    Raises:
      UserError: no run has a loss yet.
    """
    by_tokens = not differing(runs).keys().isdisjoint(_OF_TOKENS)
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab10" if len(runs) <= 10 else "turbo"]
    drawn = 0
    for place, run in enumerate(runs):
        color = colors(place if len(runs) <= 10 else place / (len(runs) - 1))
        label = run.name
        for key, style, width in (("loss", "-", 1.2), ("val_loss", ":", 1.6)):
            points = [
                (run.tokens(row["step"]) if by_tokens else row["step"], row[key])
                for row in run.rows
                if math.isfinite(row.get(key, math.nan))
            ]
            if not points:
                continue
            drawn += 1
            few = "." if len(points) < 5 else ""  # a line through one point cannot be seen
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                linestyle=style,
                linewidth=width,
                marker="s" if key == "val_loss" else few,
                markersize=4,
                markerfacecolor="white" if key == "val_loss" else color,
                label=label,
            )
            label = "_"  # one entry of the legend for a run
    if not drawn:
        raise UserError("no run has a loss in its metrics.jsonl yet: train them first")
    axes.set(
        xlabel="tokens" if by_tokens else "step",
        ylabel="loss (nats a token)",
        title="training (lines) and validation (dotted, with squares)",
    )
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _number(run: Compared, key: str, text: Any) -> str:
    value = run.last(key)
    return "-" if value is None else text(value)


def _value_text(value: Any) -> Text:
    if value in ("", (), None):
        return Text("-", "dim")
    return Text(short(value)[1:-1] if isinstance(value, str) else short(value))
