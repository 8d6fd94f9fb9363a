"""The data of a run: they are loaded as its folder says, `data.json` there says which they are,
and a run that goes on compares them with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config, DataConfig
from jaxpar.base.errors import Say, UserError, is_kind, read_json
from jaxpar.base.process.multihost import number_from_first, run_together
from jaxpar.base.registry import SOURCES
from jaxpar.data.chat.template.files import writes_date
from jaxpar.data.corpus import Corpus, load_corpus
from jaxpar.data.identity import Piece, difference, identify, require_same_everywhere
from jaxpar.train.experiment import Experiment
from jaxpar.train.runs.folder.own_tokenizer import with_own_tokenizer
from jaxpar.train.runs.folder.run_folder import (
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


def with_run_data(experiment: Experiment, folder: Path, say: Say) -> tuple[Experiment, Corpus]:
    """Load the data that a run is trained on, unless the experiment has them.

    Of a run that has trained, its own copy of the tokenizer is taken, and the date that its chat
    template wrote when it began. All processes must call this.

    Args:
      experiment: the experiment, with or without its data.
      folder: the run folder, or where it will be.
      say: gets a line where a file of the tokenizer is no longer that of the run.

    Returns:
      The experiment with its data and the date in its config, which is the one given where it has
      both, and the data.

    Raises:
      UserError: the data are missing or bad (see `load_corpus`), another tokenizer is asked for
        than that of the run, or a file cannot be read.
    """
    config = experiment.config
    corpus = experiment.corpus
    if corpus is None:
        data, corpus = load_run_data(config.data, config.model.vocab_size, folder, say)
    else:
        today = _today()
        written = run_together(lambda: template_date(config.data, folder, today))
        if written == config.data.template_date:
            return experiment, corpus  # with the shapes that it has found out already
        data = replace(config.data, template_date=written)
    return replace(experiment, config=replace(config, data=data), corpus=corpus), corpus


def load_run_data(
    data: DataConfig, vocab_size: int, folder: Path, say: Say
) -> tuple[DataConfig, Corpus]:
    """Load data by the tokenizer of a run, its own copy where the run has weights, and with the
    date that its chat template writes.

    All processes must call this.

    Args:
      vocab_size: the vocabulary of the model.
      folder: the run folder, or where it will be, or a folder that is no run.
      say: gets a line where a file of the tokenizer is no longer that of the run.

    Returns:
      How the data are asked for, with that date, and the data.

    Raises:
      UserError: the data are missing or bad (see `load_corpus`), another tokenizer is asked for
        than that of the run, a file cannot be read, or the data are others than those of another
        process.
    """
    today = _today()

    def load() -> tuple[str, Corpus]:
        own = with_own_tokenizer(data, folder, say)
        written = template_date(own, folder, today)
        return written, load_corpus(replace(own, template_date=written), vocab_size)

    written, corpus = run_together(load)
    require_same_everywhere(corpus)
    return replace(data, template_date=written), corpus


def template_date(data: DataConfig, folder: Path, today: str) -> str:
    """Return the date that a run's chat template writes as today's: that of the run's first start,
    on every day and process.

    Args:
      data: how the data are asked for; a date that they have stays.
      folder: the run folder, which has the date once the run has trained.
      today: what a run that has not trained takes, as in 2026-01-31.

    Returns:
      The date; empty where none is written, or where a run of an older version has kept none.

    Raises:
      UserError: a file of the tokenizer or of the run cannot be read.
    """
    if "template_date" not in SOURCES[data.source].reads or data.template_date:
        return data.template_date
    steps = finished_steps(folder)
    if is_run(folder) and steps != [0]:  # an import has not trained yet
        kept = read_run_config(folder).data.template_date
        if kept or steps:
            return kept
    if writes_date(data.tokenizer):
        return today
    return ""


def _today() -> str:
    """Return the first process's date on all; they must all call this."""
    return date.fromordinal(number_from_first(date.today().toordinal())).isoformat()


def compare_data(folder: Path, config: Config, corpus: Corpus) -> Compared:
    """Compare the data of a config with those that the run in a folder was trained on, if it was.

    Args:
      folder: the run folder, or where it will be.
      config: the config that the run is to go on with.

    Returns:
      What came of it; `keep_data` writes its pieces.

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
        f"the run in {folder} was trained on other data: {what}{python}: "
        "bring it back, go on over it with data.accept_changed=True, or start a new --run"
    )


def read_data(file: Path) -> tuple[list[Piece], str]:
    """Return what `keep_data` has written: the pieces, and the error that ended the run over them.

    Args:
      file: the data.json of a run folder.

    Returns:
      The pieces, and the error; empty = the run did not stop over its data.

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
    """Write which data a run is trained on, and if it stopped over them, the error.

    Args:
      broken: the error that ended the run over them; empty = none did.

    Raises:
      UserError: the file cannot be written.
    """
    rows = ",\n  ".join(json.dumps(list(piece), ensure_ascii=False) for piece in pieces)
    write_whole(folder / DATA, f'{{"broken": {json.dumps(broken)}, "files": [\n  {rows}\n]}}\n')


_OF_DATA = "raised_by_data"
"""The attribute of an error of the data."""


@contextmanager
def data_errors() -> Iterator[None]:
    """Mark what is raised inside as an error of the data, after which a run may go on over data
    that were mended (`is_data_error`).

    Raises:
      UserError: the data cannot be read.
    """
    try:
        yield
    except UserError as error:
        setattr(error, _OF_DATA, True)
        raise


def is_data_error(error: BaseException) -> bool:
    """Whether the data ended a run (`data_errors`)."""
    return getattr(error, _OF_DATA, False)
