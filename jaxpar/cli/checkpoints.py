"""The command `jaxpar checkpoints`, which lists the checkpoints of a run, and checks whether they
are as they were saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from jaxpar.base.console import bytes_text, console
from jaxpar.cli.arguments import parse_words, positional


@dataclass(frozen=True)
class CheckpointsArgs:
    """List the checkpoints of a run: step, size, validation loss, and whether all files are
    there.
    """

    verify: bool = False
    """Read every byte, and compare it with what was saved. Exit code 1 says that one is damaged."""


def checkpoints_command(words: list[str]) -> int:
    """jaxpar checkpoints RUN [--verify]"""
    from jaxpar.train.runs.list_checkpoints import CheckpointRow, list_checkpoints

    (name,) = positional(checkpoints_command.__doc__, CheckpointsArgs(), words, 1)
    args = parse_words(checkpoints_command.__doc__, CheckpointsArgs(), words[1:])
    folder = Path(name)
    found = list_checkpoints(folder, "whole" if args.verify else "sizes")
    best = min((row.loss for row in found.rows if row.loss is not None), default=None)

    def state(row: CheckpointRow) -> str:
        if row.problem:
            return f"DAMAGED: {row.problem}"
        if not row.has_manifest:
            return "no manifest to compare it with"
        return "whole" if args.verify else "all files there"

    table = Table("step", box=None, pad_edge=False)
    for title in ("size", "loss"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in found.rows:
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        mark = ", the best" if row.loss is not None and row.loss == best else ""
        table.add_row(str(row.step), bytes_text(row.size), loss, state(row) + mark)
    say = console().print
    if found.rows:
        say(table)
    else:
        say(f"{folder} has no finished checkpoint")
    for line in found.notes:
        say(line)
    for path in found.aside:
        say(f"{path} was damaged and moved aside: nothing reads it, and it may be deleted")
    return 1 if any(row.problem for row in found.rows) else 0
