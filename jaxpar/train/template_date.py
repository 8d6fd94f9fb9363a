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
from jaxpar.base.registry import SOURCES
from jaxpar.base.runtime import run_together
from jaxpar.data.chat_template import writes_date
from jaxpar.train.run_folder import finished_steps, is_run, read_run_config


def with_template_date(config: Config, folder: Path) -> Config:
    """Return the config of a run with the date that its chat template writes, if it writes one.

    All processes must call this.

    Args:
      config: a config, whose own date stays if it has one.
      folder: the run folder, which has the date once the run has trained.

    Raises:
      UserError: a file of the tokenizer or of the run cannot be read.
    """
    writes = "template_date" in SOURCES[config.data.source].reads
    if not writes or config.data.template_date:
        return config
    kept = run_together(lambda: _kept_date(folder))
    if kept is None:
        if run_together(lambda: writes_date(config.data.tokenizer)):
            kept = _today()
        else:
            kept = ""
    return replace(config, data=replace(config.data, template_date=kept))


def _kept_date(folder: Path) -> str | None:
    """Return the date of a run that has trained, which may be empty in one of an older version;
    None for a new run.
    """
    steps = finished_steps(folder)
    if not is_run(folder) or steps == [0]:  # an import has not trained yet
        return None
    found = read_run_config(folder).data.template_date
    return found if steps else found or None


def _today() -> str:
    """Return the first process's date, for all."""
    today = date.today().toordinal()
    if jax.process_count() > 1:
        today = int(multihost_utils.broadcast_one_to_all(np.int32(today)))
    return date.fromordinal(today).isoformat()
