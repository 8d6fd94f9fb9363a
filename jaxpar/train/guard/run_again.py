"""What a step that was not finite says when it is run again: whether a device, the batch or the
computation is at fault.
"""

from __future__ import annotations

import numpy as np

from jaxpar.train.guard.failures import StepNumbers


def same_numbers(one: StepNumbers, other: StepNumbers) -> bool:
    """Whether two steps, whose numbers have been read, say the same of themselves; NaN is NaN."""
    numbers = (one.loss, one.norm, one.overflows), (other.loss, other.norm, other.overflows)
    return bool(np.array_equal(*np.asarray(numbers, np.float64), equal_nan=True))


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
