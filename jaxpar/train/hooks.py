"""What a program of one's own does at the steps of a run: an average of the weights, a number of
its own in the log, a rule by which the run stops, an upload.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from jaxpar.base.errors import Say, UserError, short
from jaxpar.base.process.multihost import number_from_first, run_together
from jaxpar.base.registry import require_callable
from jaxpar.models import Params
from jaxpar.train.experiment import Experiment
from jaxpar.train.state import TrainState


@dataclass(frozen=True)
class HookedRun:
    """What a hook knows of the run that calls it.

    Attributes:
      experiment: what is trained.
      folder: the run folder on this machine.
      after: the step that the run goes on after; 0 = it begins.
      say: prints a line, on the first process.
      stop: asks the run to save and stop after this step or the next, with a word that says why; of
        several processes one may ask.
    """

    experiment: Experiment
    folder: Path
    after: int
    say: Say
    stop: Callable[[str], None]


class Hook:
    """What is done at steps of a run; each method does nothing until it is overridden.

    All processes are given the same hooks in the same order, and each of them calls every method at
    the same places, so that a hook may run jitted functions of the state, which is split over all
    devices. What the first process alone is to do asks `jax.process_index() == 0`.

    Attributes:
      every: `on_step` is called after each so many steps; 0 = never.
      needs_end: whether `on_step` waits until the step has run. Without it the step may still be
        running, and what the hook computes of its state is computed after it.
    """

    every: int = 1
    needs_end: bool = False

    @property
    def name(self) -> str:
        """What its state is called beside a checkpoint; two hooks of a run need two names."""
        return type(self).__name__

    def on_begin(self, run: HookedRun, state: TrainState[jax.Array]) -> None:
        """Take the run and the state that it goes on with, after what was saved of this hook has
        been loaded; also where the run goes back to an earlier step.
        """

    def on_compiled(self, compiled: Compiled) -> None:
        """Look at the compiled step, in a thread of the first process while the first steps run."""

    def on_step(self, step: int, state: TrainState[jax.Array]) -> None:
        """Do what is due after a step.

        Args:
          step: its number.
          state: the state after it, whose arrays the next step takes: keep none of them.
        """

    def on_row(self, step: int, row: dict[str, float]) -> None:
        """Read a row of metrics.jsonl before it is written; numbers that are put into it are
        written with it.
        """

    def before_save(self, step: int) -> None:
        """Do what is due before a step is saved."""

    def evaluated(self, params: Params) -> Params:
        """Return the parameters that an evaluation takes in place of these."""
        return params

    def on_evaluation(self, step: int, loss: float) -> None:
        """Learn the validation loss of a step, in nats a token."""

    def on_end(self, step: int) -> None:
        """Do what is due after the last step of this call, once it is saved and the folder is still
        this training's.
        """

    def state_dict(self) -> Any:
        """Return what is to be saved with each step, of what JSON holds; None = nothing. Of several
        processes that of the first is saved.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` returned when a step was saved, on every process."""

    def params(self) -> Params | None:
        """Return arrays that are to be saved with each step, in the form of the parameters that are
        trained (`model.trained(state.params)`); None = there are none.
        """
        return None

    def load_params(self, params: Params | None) -> None:
        """Take what `params` returned, on a mesh of any shape; None = nothing was saved."""


class OnRow(Hook):
    """Calls a function with each row of metrics.jsonl: the step, and what was measured at it."""

    def __init__(self, function: Callable[[int, dict[str, float]], object]):
        """Take the function.

        Raises:
          UserError: it cannot be called with a step and a row.
        """
        require_callable("a function of each row", function, ("step", "row"))
        self._function = function

    def on_row(self, step: int, row: dict[str, float]) -> None:
        """Call the function."""
        self._function(step, row)


def require_hooks(hooks: Sequence[Hook]) -> None:
    """Refuse hooks that could not be called alike on all processes. All processes must call this.

    Raises:
      UserError: one is no hook; two that are saved have one name, or a name that no file of a
        checkpoint can have; or the processes were given other hooks.
    """
    run_together(lambda: _require_names(hooks))
    names = json.dumps([hook.name for hook in hooks])
    own = int.from_bytes(hashlib.sha256(names.encode()).digest()[:3], "big")
    first = number_from_first(own)

    def require_same() -> None:
        if own != first:
            raise UserError(
                f"the processes of this run were given different hooks (process "
                f"{jax.process_index()} has {names}): give all of them the same, in the same "
                "order, and let one that is for the first alone ask jax.process_index()"
            )

    run_together(require_same)


def _require_names(hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise UserError(
                f"hooks= takes objects of classes of jaxpar.train.Hook, found {short(hook)}: for a "
                "function of each row write hooks=[OnRow(function)]"
            )
    saved = [hook.name for hook in hooks if _is_saved(hook)]
    for name, count in Counter(saved).items():
        if count > 1:
            raise UserError(
                f"{count} hooks are called {name}, and what is saved of one would be taken for the "
                "other's: let their property `name` tell them apart"
            )
        if not name.isidentifier():
            raise UserError(
                f"a hook is called {name!r}, by which its state cannot be saved: let its `name` be "
                "of letters, digits and underscores"
            )


def keeps_params(hook: Hook) -> bool:
    """Whether a hook has arrays that are saved, now or later."""
    return type(hook).params is not Hook.params


def _is_saved(hook: Hook) -> bool:
    """Whether a hook has anything that is saved, now or later."""
    return type(hook).state_dict is not Hook.state_dict or keeps_params(hook)


def states_of(hooks: Sequence[Hook]) -> dict[str, Any]:
    """Return the state of each hook that has one, by name, as it is saved.

    Raises:
      UserError: a state is of something that would not come back as it was.
    """
    found = {}
    for hook in hooks:
        state = hook.state_dict()
        if state is None:
            continue
        try:
            copy = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError):
            copy = None
        if copy != state:
            raise UserError(
                f"the state of the hook {hook.name} would not come back from JSON as it was: let "
                "its state_dict return finite numbers, texts, lists and dicts with texts as keys"
            )
        found[hook.name] = copy  # the hook may go on to change what it returned
    return found


def load_states(hooks: Sequence[Hook], saved: Mapping[str, Any], say: Say) -> None:
    """Give each hook the state that a checkpoint has of it.

    Args:
      hooks: the hooks.
      saved: the states by name, as `states_of` returned them.
      say: gets a line for each hook without a state, and for each state without a hook.
    """
    for hook in hooks:
        if hook.name in saved:
            hook.load_state_dict(saved[hook.name])
        elif hook.state_dict() is not None:
            say(f"warning: the checkpoint has no state of the hook {hook.name}, which starts anew")
    names = {hook.name for hook in hooks}
    for name in saved:
        if name not in names:
            say(f"warning: the checkpoint has a state of {name}, and no such hook is given")
