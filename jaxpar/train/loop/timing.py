"""What of a call's time belongs to its steps.

Four ask for it: how fast the steps are (`metrics.Meter`), whether one of them hangs
(`guard.watchdog`), whether the time of the call is up (`guard.time_limit`), and what the time of
the run went on (`goodput.Account`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext

import jax

from jaxpar.base.storage.outages import LIMIT_SECONDS
from jaxpar.train.goodput import Account, Cause, DeviceClock
from jaxpar.train.guard.time_limit import TimeLimit
from jaxpar.train.guard.watchdog import Watchdog
from jaxpar.train.metrics import Meter
from jaxpar.train.opening import OpenRun
from jaxpar.train.runs.bucket import copy_of
from jaxpar.train.runs.orbax_options import SLOWEST_BYTES, held_at_most


def save_watchdog(run: OpenRun) -> Watchdog:
    """Make the watchdog of one save of a run, or of the wait for the one that is being written.

    Its limit is `train.hang_seconds`, and besides the time that what a process has of the state
    takes at `SLOWEST_BYTES`. A bucket that does not answer is given up in a line of its own before
    that.

    Returns:
      The watchdog, which watches inside of `with`; nothing where `train.hang_seconds` is 0.
    """
    setting = run.experiment.config.train.hang_seconds
    if not setting:
        return Watchdog(0)
    held = held_at_most(run.experiment.state)
    least = setting if copy_of(run.folder) is None else max(setting, 3 * LIMIT_SECONDS)
    return Watchdog(least + held / SLOWEST_BYTES, what="save", setting=setting)


class Timing:
    """Tells the time of steps from that of an evaluation, a save or a look at a bad step.

    Attributes:
      meter: measures the speed of the steps.
      watchdog: ends the process where a step hangs.
      limit: the time that the call may take.
      account: counts the time by what it went on.
    """

    def __init__(self, run: OpenRun, limit: TimeLimit, account: Account):
        """Begin to measure the steps of a run after its first, within a limit."""
        experiment = run.experiment
        config = experiment.config
        flops = experiment.model.flops_per_token(config.data.seq_len)
        self._run = run
        self.meter = Meter(run.after, flops, experiment.devices, experiment.plan.compute)
        self.watchdog = Watchdog(config.train.hang_seconds)
        self.limit = limit
        self.account = account
        self._device: DeviceClock | None = None
        self._begun: Mapping[str, jax.Array] = {}
        self._is_apart = False

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Inside, all that is not set apart is the time of steps."""
        with (
            closing(DeviceClock()) as self._device,
            self.watchdog,
            self.account.clock.during("productive"),
        ):
            yield

    def step_began(self, metrics: Mapping[str, jax.Array]) -> None:
        """Note that a step was given to the device, by the metrics that it computes."""
        self._begun = metrics
        if self._device is not None:
            self._device.step_began(metrics["loss"])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside is to wait for data. Only what of it the device has nothing to do in
        is time that was lost.
        """
        began = time.monotonic()
        with self.meter.timed("waiting"), self.account.clock.during("data"):
            yield
        if self._device is not None:
            busy = self._device.busy_seconds(began, time.monotonic())
            self.account.clock.move("data", "productive", busy)

    @contextmanager
    def apart(self, cause: Cause, waits: bool = True) -> Iterator[None]:
        """What is done inside is no part of the steps: neither their speed, nor a hang of one, nor
        the time that the next one is expected to take. Inside another time apart only the cause is
        another.

        Args:
          waits: whether the steps that have begun are waited for first, as training.
        """
        if self._is_apart:
            with self.account.clock.during(cause):
                yield
            return
        if waits:
            jax.block_until_ready(self._begun)
        self._is_apart = True
        try:
            with (
                self.meter.timed("aside"),
                self.watchdog.paused(),
                self.account.clock.during(cause),
                save_watchdog(self._run) if cause == "saving" else nullcontext(),
            ):
                yield
        finally:
            self._is_apart = False
        self.limit.pause()
