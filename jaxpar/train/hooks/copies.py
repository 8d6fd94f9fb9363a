"""The comparison of the copies of a run's state: every `train.check_replicas` steps, and before
each save, so that what a device has spoilt is not saved.
"""

from __future__ import annotations

import jax

from jaxpar.train.guard.failures import CopiesDiffer
from jaxpar.train.guard.replicas import ReplicaCheck, mismatch_message, replicas_note
from jaxpar.train.hooks.hook import Hook, HookedRun
from jaxpar.train.opening import OpenRun
from jaxpar.train.state import TrainState


class Copies(Hook):
    """Compares the copies of a run's state, and stops the run where they differ."""

    needs_end = True

    def __init__(self, run: OpenRun):
        """Take a run whose `train.check_replicas` is not 0."""
        self.every = run.experiment.config.train.check_replicas
        self._opened = run
        self._check: ReplicaCheck | None = None

    def on_begin(self, run: HookedRun, state: TrainState[jax.Array]) -> None:
        """Take the run, and say once how much of its state can be compared."""
        self._run = run
        if self._check is None:
            self._check = ReplicaCheck(run.experiment.state, run.experiment.plan.mesh)
            run.say(replicas_note(self._check))

    def on_step(self, step: int, state: TrainState[jax.Array]) -> None:
        """Compare the copies after a step.

        Raises:
          CopiesDiffer: devices hold other copies than their peers, on all processes alike.
        """
        assert self._check is not None
        with self._run.apart("guard"):
            found = self._check.mismatches(state)
        if not found:
            return
        newest = self._opened.newest
        kept = "no checkpoint was saved before"
        if newest is not None:
            kept = f"the checkpoint of step {newest} is kept"
        raise CopiesDiffer(f"{mismatch_message(found, self.every, step)}; {kept}")

    def before_save(self, step: int, state: TrainState[jax.Array]) -> None:
        """Compare them before a step is saved."""
        self.on_step(step, state)
