"""The data of a run: `data.json` in its folder says which they are, and a run that goes on compares
them with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError, is_kind, read_json
from jaxpar.base.runtime import write_whole
from jaxpar.data.corpus import Corpus
from jaxpar.data.identity import Piece, difference, identify
from jaxpar.train.run_folder import (
    finished_steps,
    is_run,
    moved_data,
    read_run_config,
    refused_changes,
)

DATA = "data.json"


class Compared(NamedTuple):
    """What came of comparing data with those that a run was trained on."""

    pieces: Sequence[Piece]
    """What the data are made of now."""
    known: bool
    """Whether the run says what they were: then their paths mean nothing."""
    changed: bool
    """Whether they are others, which was accepted."""
    note: str
    """What to say of it; empty = nothing."""


NOT_COMPARED = Compared((), False, False, "")
"""On processes other than the first, which compares and writes."""


def compare_data(folder: Path, config: Config, corpus: Corpus) -> Compared:
    """Compare the data of a config with those that the run in a folder was trained on, if it was.

    Raises:
      UserError: they are others, and neither `data.accept_changed` nor an error that ended the run
        over them allows it; or a file cannot be read.
    """
    pieces = identify(corpus)
    file = folder / DATA
    if not (is_run(folder) and file.exists()):
        return Compared(pieces, False, False, "")
    before, broken = read_data(file)
    other_run = moved_data(refused_changes(folder, read_run_config(folder), config))
    what = difference(before, pieces)
    if other_run or not what or not any(finished_steps(folder)):
        return Compared(pieces, True, False, "")
    if broken:
        return Compared(
            pieces,
            True,
            True,
            f"data: {what}; the run goes on over it, as it had stopped over its data",
        )
    if config.data.accept_changed:
        return Compared(
            pieces,
            True,
            True,
            f"data: {what}; the run goes on over it, as data.accept_changed says",
        )
    if config.data.source == "stdlib":
        python = " (the stdlib corpus changes with Python)"
    else:
        python = ""
    raise UserError(
        f"the run in {folder} was trained on other data: {what}{python}: bring it back, go on "
        "over it with "
        "data.accept_changed=True, or start a new --run"
    )


def read_data(file: Path) -> tuple[list[Piece], str]:
    """Return what `keep_data` has written: the pieces, and the error that ended the run over them.

    Raises:
      UserError: the file is damaged.
    """
    unchecked = "delete it to go on unchecked"
    try:
        written = read_json(file, {"broken": str, "files": list[Any]})
    except UserError as error:
        raise UserError(f"{error}: {unchecked}") from error
    rows = written.get("files")
    if rows is None or "broken" not in written or not all(_is_piece(row) for row in rows):
        raise UserError(f"{file} does not say what the run was trained on: {unchecked}")
    return [Piece(*row) for row in rows], written["broken"]


def _is_piece(row: Any) -> bool:
    """Whether a value of JSON is a `Piece`."""
    if not is_kind(row, list[Any]) or len(row) != len(Piece._fields):
        return False
    name, length, hashed = row
    return is_kind(name, str) and is_kind(length, int | None) and is_kind(hashed, str)


def keep_data(folder: Path, pieces: Sequence[Piece], broken: str = "") -> None:
    """Write which data a run is trained on, and if it stopped over them, the error."""
    rows = ",\n  ".join(json.dumps(list(piece), ensure_ascii=False) for piece in pieces)
    write_whole(folder / DATA, f'{{"broken": {json.dumps(broken)}, "files": [\n  {rows}\n]}}\n')
