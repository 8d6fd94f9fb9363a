"""The date that a run's chat template writes as today's: that of the run's first start, on every
day and process.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.config import Config
from jaxpar.base.process.multihost import run_together
from jaxpar.base.registry import SOURCES
from jaxpar.data.chat.template.files import writes_date
from jaxpar.train.runs.folder.run_folder import finished_steps, is_run, read_run_config


def with_template_date(config: Config, folder: Path) -> Config:
    """Return the config of a run with the date that its chat template writes, if it writes one.

    All processes must call this.

    Args:
      config: a config, whose own date stays if it has one.
      folder: the run folder, which has the date once the run has trained.

    Returns:
      The config with the date of the run's first start, which is today's where it has not trained;
      the config as it is where no date is written.

    Raises:
      UserError: a file of the tokenizer or of the run cannot be read.
    """
    writes = "template_date" in SOURCES[config.data.source].reads
    if not writes or config.data.template_date:
        return config
    written = run_together(lambda: _known_date(folder, config.data.tokenizer))
    if written is None:
        written = _today()
    if not written:
        return config
    return replace(config, data=replace(config.data, template_date=written))


def _known_date(folder: Path, tokenizer: str) -> str | None:
    """Return the date that is written whatever day it is; empty = none; None = today's.

    That of a run that has trained is empty in one of an older version.
    """
    steps = finished_steps(folder)
    if is_run(folder) and steps != [0]:  # an import has not trained yet
        kept = read_run_config(folder).data.template_date
        if kept or steps:
            return kept
    if writes_date(tokenizer):
        return None
    return ""


def _today() -> str:
    """Return the first process's date, for all."""
    today = date.today().toordinal()
    if jax.process_count() > 1:
        today = int(multihost_utils.broadcast_one_to_all(np.int32(today)))
    return date.fromordinal(today).isoformat()
