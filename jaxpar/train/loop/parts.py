"""What a call of `run` hands to its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from jax.stages import Compiled

from jaxpar.base.console import ProgressLine
from jaxpar.train.evaluations import Evaluations
from jaxpar.train.experiment import Experiment
from jaxpar.train.goodput import Account
from jaxpar.train.guard.time_limit import TimeLimit
from jaxpar.train.metrics import MetricsLog, Profile
from jaxpar.train.open_run import OpenRun
from jaxpar.train.stateful import Stateful

Watch = Callable[[Experiment, Compiled], None]
"""A function that runs beside the first steps and gets the experiment and the compiled step."""


class Parts(NamedTuple):
    """What the steps of a call are given.

    Attributes:
      run: the run folder and what is trained in it.
      evaluations: those of the run.
      log: where rows are written.
      show: the progress line.
      beside: the other thread.
      profile: the trace of some steps.
      watch: the caller's function.
      limit: the time that the call may take.
      stateful: the caller's objects whose state is saved.
      account: counts the time by what it went on.
    """

    run: OpenRun
    evaluations: Evaluations
    log: MetricsLog
    show: ProgressLine
    beside: ThreadPoolExecutor
    profile: Profile
    watch: Watch
    limit: TimeLimit
    stateful: Mapping[str, Stateful]
    account: Account
