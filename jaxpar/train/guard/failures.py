"""What ends a run before its last step, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxpar.base.errors import PEER_LOST, UserError
from jaxpar.base.jax_compat import (
    compiler_message,
    kernel_memory_message,
    says_peer_is_lost,
)
from jaxpar.models import Params
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer.update import largest_parameter

Program = Literal["this step", "this evaluation"]
STEP: Program = "this step"
EVALUATION: Program = "this evaluation"


class OutOfMemory(UserError):
    """A device has too little memory for a step or an evaluation, at compilation or when it runs.

    Attributes:
      experiment: what ran.
      said: the device's message.
      where: what had too little.
    """

    def __init__(self, experiment: Experiment, said: str, where: Program = STEP):
        tries = "memory.policy=full, a higher train.accumulation, or memory.budget=auto"
        if where == EVALUATION:  # which keeps nothing for a backward pass
            tries = "a higher train.accumulation, which is that of an evaluation too, or mesh.fsdp"
        super().__init__(f"out of memory in {where} ({compiler_message(said)[:200]}): try {tries}")
        self.experiment = experiment
        self.said = said
        self.where = where


class Diverged(UserError):
    """The loss, the gradients or the update of a step are not finite."""


class CopiesDiffer(UserError):
    """Devices that hold copies of an array do not hold the same: one of them fails."""

    exit_code = 77


class PeerLost(UserError):
    """Another process of the run is gone, so that this one cannot go on."""

    exit_code = PEER_LOST
    ends_at_once = True

    def __init__(self, said: str):
        super().__init__(
            f"another process of this run does not answer any more ({compiler_message(said)[:200]})"
            ": look at what it said, and start all processes again, with the same command: they go "
            "on from the last checkpoint"
        )


@dataclass
class Running:
    """Which program an error of a device is one of."""

    program: Program = STEP


@contextmanager
def peer_errors() -> Iterator[None]:
    """Raise `PeerLost` where another process does not answer any more: in a program of a device, or
    in what processes tell each other (`multihost_utils`, which raises a ValueError).

    Raises:
      PeerLost: another process does not answer any more.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if jax.process_count() > 1 and says_peer_is_lost(str(error)):
            raise PeerLost(str(error)) from error
        raise


@contextmanager
def memory_errors(experiment: Experiment, running: Running) -> Iterator[None]:
    """Raise `OutOfMemory` where a device has too little memory, at compilation or when the program
    runs.

    Args:
      experiment: what runs.
      running: says which of its programs does, at any time.

    Raises:
      OutOfMemory: a device has too little memory.
      PeerLost: another process does not answer any more.
      UserError: a kernel asks for more of its own memory than there is.
    """
    try:
        with peer_errors():
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        if said := kernel_memory_message(str(error)):
            raise UserError(f"the compiler refuses {running.program}: {said}") from error
        raise OutOfMemory(experiment, str(error), running.program) from error


class StepNumbers(NamedTuple):
    """What a step says of itself, before it is read: its loss, gradient norm, and overflows (see
    `Updated`).
    """

    step: int
    loss: Any
    norm: Any
    overflows: Any

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any]) -> StepNumbers:
        """Take them from a step's metrics, which need not have arrived."""
        return cls(step, metrics["loss"], metrics["grad_norm"], metrics["overflows"])

    @property
    def kept_state(self) -> bool:
        """Whether the step, whose numbers have been read, left its state as it was, every entry."""
        return not (np.isfinite(self.loss) and np.isfinite(self.norm))

    @property
    def finite(self) -> bool:
        """Whether the step, whose numbers have been read, was made."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.norm) and self.overflows == 0)


def divergence_message(
    numbers: StepNumbers, trained: Params, saved: int | None, folder: Path, looked: str = ""
) -> str:
    """Return what to say of a step that was not finite, with advice that the next command takes.

    Args:
      numbers: those of the step, read.
      trained: the parameters that are trained, as they were before the step.
      saved: the last step that has a checkpoint; None = there is none.
      folder: the run folder.
      looked: what was found when the step was looked at once more, or why it is too many.
    """
    found = f"loss {numbers.loss} and gradient norm {numbers.norm} at step {numbers.step}"
    if np.isfinite(numbers.loss) and np.isfinite(numbers.norm):
        name, size = largest_parameter(trained)
        found = (
            f"step {numbers.step} would make {numbers.overflows} entries of the parameters not "
            f"finite (the largest is now {size:.2g}, in {name})"
        )
    if numbers.finite:  # a spike
        found = looked
    elif looked:
        found = f"{found}: {looked}"
    advice = (
        "try a lower train.learning_rate or a longer train.warmup_steps in another --run folder"
    )
    if saved is None:
        return f"{found}: the run diverged; {advice}; no checkpoint was saved before"
    return (
        f"{found}: the run diverged; {advice}, from the start or with train.init={folder}; "
        f"the checkpoint of step {saved} is kept"
    )
