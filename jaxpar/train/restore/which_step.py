"""The choice of the checkpoint of a run that is read: the one that is asked for, the best or the
newest, without those that are damaged or that a run beside removes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import TypeVar

import jax

from jaxpar.base.errors import UserError
from jaxpar.base.process.multihost import (
    number_from_first,
    run_on_first,
    run_together,
    told_by_first,
)
from jaxpar.train.runs.checkpoints import Checkpoints, warn
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint
from jaxpar.train.runs.folder.run_identity import require_tokenizer_files
from jaxpar.train.runs.folder.steps import CHECKPOINTS
from jaxpar.train.runs.stores import StoreOf, store_of

Read = TypeVar("Read")
_TRIES = 100
"""The number of checkpoints that are tried before it is said that a run removes them too fast."""
_REMOVAL_SECONDS = 2.0
"""The time within which the files of a step that a run removes are gone."""


def read_whole_step(
    folder: Path,
    step: int,
    read: Callable[[Checkpoints, int], Read],
    store: StoreOf = store_of,
) -> tuple[int, Read]:
    """Read a checkpoint of a run that is not damaged. All processes must call this together.

    A damaged checkpoint is left out with a note, and the one that is chosen without it is taken.
    While a checkpoint is read it is marked, so that a run that trains beside keeps it; where that
    run has removed it all the same, another is taken.

    Args:
      step: the step of the checkpoint; 0 = the best, or the newest where none was evaluated.
      read: reads a step of the run's checkpoints.
      store: makes the store that keeps them.

    Returns:
      The step, and the result of `read`.

    Raises:
      DamagedCheckpoint: the checkpoint of `step` is damaged, or all are.
      UserError: there is no such checkpoint, or it cannot be read.
    """
    checkpoints = Checkpoints(folder / CHECKPOINTS, store=store)
    damaged = set[int]()
    for _ in range(_TRIES):
        chosen = number_from_first(run_together(lambda: _choose(checkpoints, step, damaged)))
        with checkpoints.store.in_use(chosen):
            problem = _find_damage(checkpoints, chosen)
            if problem is None:
                try:
                    return chosen, read(checkpoints, chosen)
                except DamagedCheckpoint as error:
                    # Of several processes all would have to find this.
                    if jax.process_count() > 1:
                        raise
                    problem = error
        if told_by_first(_is_removed(checkpoints, chosen)):
            warn(f"the run in {folder} has removed step {chosen} meanwhile")
        elif step:
            raise problem
        else:
            damaged.add(chosen)
            warn(f"warning: {problem}: it is left out")
    raise UserError(
        f"a run removes the checkpoints of {folder} faster than they are read: try again"
    )


def _find_damage(checkpoints: Checkpoints, step: int) -> DamagedCheckpoint | None:
    """Compare a step, and the tokenizer beside the checkpoints, with what was saved. All processes
    find the same.

    Raises:
      UserError: the tokenizer is not the one that was saved.
    """

    def compare() -> DamagedCheckpoint | None:
        try:
            manifest = checkpoints.require_whole(step)
        except DamagedCheckpoint as error:
            return error
        require_tokenizer_files(checkpoints.folder.parent, manifest, warn)
        return None

    problem = run_on_first(compare)
    if not told_by_first(problem is not None):
        return None
    return problem or DamagedCheckpoint(f"the first process finds step {step} damaged")


def _choose(checkpoints: Checkpoints, step: int, damaged: Container[int]) -> int:
    """Choose the step that is asked for, or the best of those that are not damaged, or the newest.

    Raises:
      UserError: there is no such step.
    """
    steps = checkpoints.steps()
    if step and step not in steps:
        raise UserError(
            f"{checkpoints.folder} has no step {step}: it has {', '.join(map(str, steps))}"
        )
    if step:
        return step
    left = [one for one in steps if one not in damaged]
    if not left:
        what = "checkpoint that is whole" if steps else "finished checkpoint"
        raise UserError(f"{checkpoints.folder} has no {what}")
    best = checkpoints.best(without=damaged)
    return left[-1] if best is None else best


def _is_removed(checkpoints: Checkpoints, step: int) -> bool:
    """Return whether a checkpoint goes away, as one that a run is removing does soon."""
    until = time.monotonic() + _REMOVAL_SECONDS
    while step in checkpoints.steps():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
