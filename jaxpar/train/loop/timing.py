"""What of a call's time belongs to its steps.

Three ask for it: how fast the steps are (`metrics.Meter`), whether one of them hangs
(`guard.watchdog`), and whether the time of the call is up (`guard.time_limit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxpar.base.layout.sharding import PyTree
from jaxpar.train.guard.time_limit import TimeLimit
from jaxpar.train.guard.watchdog import Watchdog
from jaxpar.train.metrics import Meter
from jaxpar.train.open_run import OpenRun


class Timing:
    """Tells the time of steps from that of an evaluation, a save or a look at a bad step.

    Attributes:
      meter: measures the speed of the steps.
      watchdog: ends the process where a step hangs.
      limit: the time that the call may take.
    """

    def __init__(self, run: OpenRun, limit: TimeLimit):
        """Begin to measure the steps of a run after its first, within a limit."""
        experiment = run.experiment
        config = experiment.config
        flops = experiment.model.flops_per_token(config.data.seq_len)
        self.meter = Meter(run.first, flops, experiment.devices, experiment.plan.compute)
        self.watchdog = Watchdog(config.train.hang_seconds)
        self.limit = limit

    @contextmanager
    def apart(self, after: PyTree = None) -> Iterator[None]:
        """What is done inside is no part of the steps: neither their speed, nor a hang, nor the
        time that the next one is expected to take.

        Args:
          after: arrays of the steps until now, which are waited for first, as training.
        """
        jax.block_until_ready(after)
        with self.meter.timed("aside"), self.watchdog.paused():
            yield
        self.limit.pause()
