"""What a run saves with a step: the state that is trained, the arrays that hooks keep, and beside
them the place in the data, what the guard has seen, and the states of hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from jaxpar.base.errors import Say
from jaxpar.base.process.multihost import run_together, told_by_first
from jaxpar.models import Params
from jaxpar.train.guard import Guard
from jaxpar.train.guard.judge import Judge
from jaxpar.train.guard.time_limit import save_seconds
from jaxpar.train.hooks.given import is_saved, keeps_params, load_states, states_of
from jaxpar.train.hooks.hook import Hook, is_due
from jaxpar.train.loop.run_step import StepRunner
from jaxpar.train.loop.timing import Timing, save_watchdog
from jaxpar.train.opening import GUARD, HOOKS, FirstStep, OpenRun
from jaxpar.train.restore import (
    fingerprint,
    hooks_with_arrays,
    restore_hook,
    saved_hooks,
    saved_part,
    state_metadata,
)
from jaxpar.train.runs.checkpoints import require_same_form, warn
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.state import TrainState


class Saves:
    """Saves the steps of a run, and gives hooks what was saved of them."""

    def __init__(
        self,
        run: OpenRun,
        hooks: Sequence[Hook],
        timing: Timing,
        say: Say,
    ):
        """Take a run before its first step.

        Args:
          hooks: what is told of a save, and saved with the state where it keeps anything.
          timing: is told how long a save takes, and which steps the run may come back to.
        """
        self._run = run
        self._hooks = hooks
        self._kept = [hook for hook in hooks if is_saved(hook)]
        self._frozen: int | None = None
        self._first_states: dict[str, Any] = {}
        self._timing = timing
        self._say = say
        self._local_every = run.experiment.config.checkpoint.local_every
        self._folder_has_one = False
        """Whether the run folder is known to have a checkpoint to its end."""

    def begin(self, start: FirstStep) -> None:
        """Take what the first step begins with, and give hooks what was saved of them.

        Raises:
          UserError: the state of a hook cannot be loaded or saved.
        """
        run = self._run
        self._frozen = fingerprint(run.experiment.model, start.state.params)
        if start.hooks is not None:
            self._load(run, start.hooks)
        self._first_states = run_together(lambda: states_of(self._kept))

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
          state: the state after it.
          place: the state of the data's iterator after its batch.
          guard: what has judged the steps.
          local: whether it goes to the local tier; but until the run folder has a checkpoint, which
            alone makes it the run of one experiment, it goes there.

        Raises:
          UserError: this save, or the one before it, cannot be written; or the state is one that
            the run could not go on from, and the step before stays.
        """
        run = self._run
        for hook in self._hooks:
            hook.before_save(step, state)
        require_same_form(state, run.experiment.state, f"the state after step {step}")
        teacher = None if run.teacher is None else run.teacher.identity
        size = run.corpus.train.size
        beside = state_metadata(run.experiment, place, size, self._frozen, teacher, step)
        if seen := guard.saved():
            beside[GUARD] = seen
        if states := run_together(lambda: states_of(self._kept)):
            beside[HOOKS] = states
        checkpoints = self._tier(local)
        before = checkpoints.latest()
        account = self._timing.account
        account.saving(step)
        began = account.clock.seconds()["saving"]
        saved = saved_part(state, run.experiment.model)
        checkpoints.save(step, saved_hooks(saved, self._params_of_hooks()), beside)
        if checkpoints is not run.checkpoints:
            account.saved_locally(account.clock.seconds()["saving"] - began)
        # which is written to its end by now
        if before is not None and checkpoints is run.checkpoints:
            written = save_seconds(checkpoints.folder / str(before))
            self._timing.limit.note_save(written + checkpoints.store.seconds)

    def save_good(self, runner: StepRunner, judge: Judge, ended_by: Exception) -> None:
        """Save what was trained until an error that ends the run, and say so, unless the last step
        failed or diverged. All processes must call this.

        Args:
          runner: has the state after the last step that has begun.
          judge: has not judged the last steps yet.
          ended_by: the error, which is the one to tell.
        """
        run = self._run
        say = self._say
        state = runner.state
        if isinstance(ended_by, OSError):  # the reader of the output has gone, or its disk is full
            say = say_elsewhere
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return  # the step that failed had taken the state
        try:
            step = int(jax.device_get(state.step))
            place = runner.batches.place_after(step)
            if step == run.after or place is None or not judge.finite_until(step):
                return
            with self._timing.account.clock.during("saving"), save_watchdog(run):
                self.save(step, state, place, judge.guard)
                run.checkpoints.wait()
        except Exception as error:
            if str(error) != str(ended_by):
                say(f"warning: the steps since the last checkpoint are lost: {error}")
            return
        what = "an error"
        if isinstance(ended_by, BrokenPipeError):
            what = "the end of what reads its output"
        say(
            f"{what} ends this run after step {step}, which is saved: the same command goes on "
            "from there"
        )

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

    def give_back(self, run: OpenRun, saved: Mapping[str, Any] | None) -> None:
        """Give hooks the states of a step that the run goes back to.

        Args:
          run: the run as it goes on after that step.
          saved: the states by name; None = it goes back to the beginning, where they had those of
            the begin of this call.
        """
        self._load(run, self._first_states if saved is None else saved)

    def _load(self, run: OpenRun, states: Mapping[str, Any]) -> None:
        """Give hooks their states, and the arrays that they had kept."""
        run_together(lambda: load_states(self._kept, states, self._say))
        saved = set[str]()
        if not run.is_new:
            saved = hooks_with_arrays(run.source, run.after)
        for hook in filter(keeps_params, self._kept):
            found = None
            if hook.name in saved:
                found = restore_hook(run.source, run.after, run.experiment, hook.name)
            elif not run.is_new:
                self._say(
                    f"warning: the checkpoint has no arrays of the hook {hook.name}, which starts "
                    "anew"
                )
            hook.load_params(found)
        for name in sorted(saved - {hook.name for hook in self._kept}):
            self._say(
                f"warning: the checkpoint has arrays of {name}, and no such hook is given: the "
                "steps that are saved now will not have them"
            )

    def _params_of_hooks(self) -> dict[str, Params]:
        """The arrays that hooks keep, by their names, in the form of the trained parameters."""
        model = self._run.experiment.model
        wanted = model.trained(self._run.experiment.state.params)
        found = {}
        for hook in self._kept:
            params = hook.params()
            if params is not None:
                require_same_form(
                    params,
                    wanted,
                    f"what the hook {hook.name} keeps",
                    "let its params() return arrays in the form of model.trained(state.params)",
                )
                found[hook.name] = params
        return found


def say_elsewhere(line: str) -> None:
    """Say a line on standard error, where standard output takes none, or nowhere."""
    with suppress(OSError):
        warn(line)
