"""Interim: what each process of a run does."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxpar.base.config import Config, check
from jaxpar.base.console import console
from jaxpar.base.processes import run_together
from jaxpar.base.runtime import start
from jaxpar.data.corpus import load_corpus
from jaxpar.plan import resolve
from jaxpar.train.loop import Result, run
from jaxpar.train.metrics import Report
from jaxpar.train.plans import make_plan


def train_config(config: Config, folder: Path, verify: bool = False, report: Report | None = None) -> Result:
    check(config)
    devices = start(config.mesh)
    say = console().print if jax.process_index() == 0 else lambda line: None
    make_plan(config, devices)
    corpus = run_together(lambda: load_corpus(config.data, config.model.vocab_size))
    return run(resolve(config, say=say), folder, corpus, report=report)
