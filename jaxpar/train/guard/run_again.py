"""What a step that was not finite says when it is run again: whether a device, the batch or the
computation is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.train.experiment import Experiment
from jaxpar.train.guard.failures import StepNumbers
from jaxpar.train.guard.layer_by_layer import Batch
from jaxpar.train.guard.nonfinite import first_nonfinite
from jaxpar.train.state import TrainState

Program = Callable[[TrainState[jax.Array], Batch], Any]
"""The compiled training step: state and batch to state and metrics."""


def look_again(
    experiment: Experiment,
    program: Program,
    state: TrainState[jax.Array],
    batches: Iterator[Batch],
    row: StepNumbers,
    finite_since: int,
) -> str:
    """Look for what was not finite in a step, and run it again, on its batch and on the next.

    All processes must call this together. It uses the state up, which is not the run's any more.

    Args:
      experiment: what is trained.
      program: its compiled step.
      state: the state that the step has left as it was.
      batches: gives the step's batch and then the one after it, on the mesh.
      row: the step's numbers, read.
      finite_since: how many finite steps have changed the weights since.

    Returns:
      What to say of it.
    """
    before = row.step - 1
    at_step = jax.make_array_from_callback((), state.step.sharding, lambda _: np.int32(before))
    state = state._replace(step=at_step)
    batch = next(batches)
    said = first_nonfinite(experiment, state, batch)
    state, metrics = program(state, batch)
    again = _read(row.step, metrics)
    another = None
    if not again.finite:
        state, metrics = program(state, next(batches))
        another = _read(row.step + 1, metrics)
    return f"{said}; {verdict(row, again, another, finite_since)}"


def _read(step: int, metrics: Mapping[str, jax.Array]) -> StepNumbers:
    return jax.device_get(StepNumbers.of(step, metrics))


def same_numbers(one: StepNumbers, other: StepNumbers) -> bool:
    """Whether two steps, whose numbers have been read, say the same of themselves; NaN is NaN."""
    first = np.asarray((one.loss, one.norm, one.overflows), np.float64)
    second = np.asarray((other.loss, other.norm, other.overflows), np.float64)
    return bool(np.array_equal(first, second, equal_nan=True))


def verdict(
    before: StepNumbers, again: StepNumbers, another: StepNumbers | None, moved: int
) -> str:
    """Return what to say of a step that was run again, and of the next batch's.

    Args:
      before: the numbers of the step that was not finite.
      again: those of the same step on the same batch, run once more.
      another: those of the step on the batch after it; None = `again` was finite, so that it was
        not run.
      moved: how many steps had changed the weights since; with 0 they are those of the step.

    Returns:
      A clause that begins with `transient`, `data` or `persistent`.
    """
    if moved and again.finite:
        return (
            f"transient, as it seems: the steps after it were finite ({moved}), and with the "
            "weights that they left so is this one: a device is suspected"
        )
    if again.finite:
        return (
            "transient: run again on the same batch it is finite, so that a device is suspected "
            "(train.check_replicas compares copies)"
        )
    if not moved and not same_numbers(before, again):
        return (
            f"transient: run again on the same batch it has loss {again.loss} and gradient norm "
            f"{again.norm}, so that a device is suspected"
        )
    if another is not None and another.finite:
        return "data: run again it is the same, and finite on the next batch"
    return "persistent: run again it is the same, and on the next batch it is not finite either"
