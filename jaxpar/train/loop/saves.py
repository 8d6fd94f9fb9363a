"""What a run saves with a step: the state that is trained, and beside it the place in the data,
what the guard has seen, and the states of the caller's own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpar.base.process.multihost import run_together, told_by_first
from jaxpar.train.evaluations import is_due
from jaxpar.train.goodput import Account
from jaxpar.train.guard import Guard
from jaxpar.train.guard.time_limit import TimeLimit, save_seconds
from jaxpar.train.open_run import GUARD, FirstStep, OpenRun
from jaxpar.train.restore import beside_state, fingerprint, saved_part
from jaxpar.train.runs.checkpoints import require_same_form
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.state import TrainState
from jaxpar.train.stateful import STATEFUL, Stateful, load_states, states_of


class Saves:
    """Saves the steps of a run, and gives the caller's objects what was saved of them."""

    def __init__(
        self,
        run: OpenRun,
        start: FirstStep,
        stateful: Mapping[str, Stateful],
        limit: TimeLimit,
        account: Account,
        say: Callable[[str], None],
    ):
        """Take a run before its first step.

        Args:
          run: the run.
          start: what the call begins with.
          stateful: the caller's objects by name.
          limit: is told how long a save takes.
          account: is told which steps the run may come back to.
          say: prints a line.
        """
        self._run = run
        self._frozen = fingerprint(run.experiment.model, start.state.params)
        self._stateful = stateful
        self._first_states = run_together(lambda: states_of(stateful))
        self._limit = limit
        self._account = account
        self._say = say
        self._local_every = run.experiment.config.checkpoint.local_every
        self._folder_has_one = False
        """Whether the run folder is known to have a checkpoint to its end."""

    def is_local(self, step: int) -> bool:
        """Whether a step is due for the local tier because of its number."""
        return self._run.local is not None and is_due(step, self._local_every)

    def save(
        self,
        step: int,
        state: TrainState[jax.Array],
        place: Any,
        guard: Guard,
        local: bool = False,
    ) -> None:
        """Save a step; it is written while the next ones run. All processes must call this.

        Args:
          step: the step.
          state: the state after it.
          place: that of the data after its batch.
          guard: what has judged the steps.
          local: whether it goes to the local tier; but until the run folder has a checkpoint, which
            alone makes it the run of one experiment, it goes there.

        Raises:
          UserError: this save, or the one before it, cannot be written; or the state is one that
            the run could not go on from, and the step before stays.
        """
        run = self._run
        require_same_form(state, run.experiment.state, f"the state after step {step}")
        teacher = None if run.teacher is None else run.teacher.identity
        size = run.corpus.train.size
        beside = beside_state(run.experiment, place, size, self._frozen, teacher, step)
        if seen := guard.saved():
            beside[GUARD] = seen
        if states := run_together(lambda: states_of(self._stateful)):
            beside[STATEFUL] = states
        checkpoints = self._tier(local)
        before = checkpoints.latest()
        self._account.saving(step)
        began = self._account.clock.seconds()["saving"]
        checkpoints.save(step, saved_part(state, run.experiment.model), beside)
        if checkpoints is not run.checkpoints:
            self._account.saved_locally(self._account.clock.seconds()["saving"] - began)
        # which is written to its end by now
        if before is not None and checkpoints is run.checkpoints:
            written = save_seconds(checkpoints.folder / str(before))
            self._limit.note_save(max(written, checkpoints.sending_seconds))

    def _tier(self, local: bool) -> TrainingCheckpoints:
        """Where a save goes. All processes must call this."""
        run = self._run
        if not local or run.local is None:
            return run.checkpoints
        if not self._folder_has_one:
            if told_by_first(not run.checkpoints.latest()):  # step 0 is that of an import
                return run.checkpoints
            run.checkpoints.wait()
            self._folder_has_one = True
        return run.local.checkpoints

    def give_back(self, saved: Mapping[str, Any] | None) -> None:
        """Give the caller's objects the states of a step that the run goes back to.

        Args:
          saved: the states by name; None = it goes back to the beginning, where they had those of
            the begin of this call.
        """
        states = self._first_states if saved is None else saved
        run_together(lambda: load_states(self._stateful, states, self._say))
