"""What is done at steps of a run beside training, by the library and by a program of one's own: an
average of the weights, a number of its own in the log, a rule by which the run stops, an upload.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from jaxpar.base.errors import Say
from jaxpar.base.registry import require_callable
from jaxpar.models import Params
from jaxpar.train.experiment import Experiment
from jaxpar.train.goodput.clock import Cause
from jaxpar.train.state import TrainState


def is_due(step: int, every: int) -> bool:
    """Whether what happens every so many steps (0 = never) happens after this one."""
    return every > 0 and step % every == 0


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
      apart: `with run.apart("evaluation"):` waits for the steps that have begun, and what is done
        inside is no part of them: neither of their speed, nor of a hang, nor of what
        `train.max_time` expects of the next. It counts as this cause of `goodput.jsonl`.
    """

    experiment: Experiment
    folder: Path
    after: int
    say: Say
    stop: Callable[[str], None]
    apart: Callable[[Cause], AbstractContextManager[None]]


class Hook:
    """What is done at steps of a run; each method does nothing until it is overridden.

    All processes are given the same hooks in the same order, and each of them calls every method at
    the same places, so that a hook may run jitted functions of the state, which is split over all
    devices. What the first process alone is to do asks `jax.process_index() == 0`. `on_row`,
    `evaluated`, `on_evaluation` and `on_end` are called of a program's hooks alone.

    Attributes:
      every: `on_step` is called after each so many steps; 0 = never.
      needs_end: whether `on_step` waits until the step has run. Without it the step may still be
        running, and what the hook computes of its state is computed after it.
      needs_good: whether `on_step` waits until the step has run, it and all before it were found
        good, and it is saved, where a save is due.
    """

    every: int = 1
    needs_end: bool = False
    needs_good: bool = False

    @property
    def name(self) -> str:
        """What its state is called beside a checkpoint; two hooks of a run need two names."""
        return type(self).__name__

    def is_due(self, step: int) -> bool:
        """Whether `on_step` is called after a step; the same on all processes."""
        return is_due(step, self.every)

    def on_begin(self, run: HookedRun, state: TrainState[jax.Array]) -> None:
        """Take the run and the state that it goes on with, after what was saved of this hook has
        been loaded; also where the run goes back to an earlier step.
        """

    def on_compiled(self, compiled: Compiled) -> None:
        """Look at the compiled step, in a thread of the first process while the first steps run."""

    def before_step(self, step: int) -> None:
        """Do what is due before the batch of a step is read."""

    def on_started(self, step: int) -> None:
        """Do what is due once a step was given to the devices, which run it."""

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

    def before_save(self, step: int, state: TrainState[jax.Array]) -> None:
        """Do what is due before a step is saved, whose state this is."""

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
