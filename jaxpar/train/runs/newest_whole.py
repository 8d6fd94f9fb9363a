"""Which checkpoint a training goes on after: the newest that is whole. Those that are newer and
damaged are moved aside.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpar.base.errors import Say, UserError
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint, Manifest, UnreadCheckpoint
from jaxpar.train.runs.folder.steps import DAMAGED, set_aside, steps_in


class Whole(NamedTuple):
    """A step that is whole.

    Attributes:
      step: its number; None = there is none.
      manifest: that of the step; None = it has none, or this process did not read it.
    """

    step: int | None = None
    manifest: Manifest | None = None


def find_newest_whole(checkpoints: Checkpoints, say: Say, may_lack: bool = False) -> Whole:
    """Find the newest step that is whole, and move those aside that are newer. For one process
    alone.

    Args:
      checkpoints: those of the run.
      say: gets a line about each step that was moved.
      may_lack: whether there may be none although there were some, as others are at hand.

    Returns:
      The step; none where the run has no checkpoint yet.

    Raises:
      UserError: all are damaged, or one cannot be read, which may be whole.
    """
    folder = checkpoints.folder
    steps = steps_in(folder)
    for step in reversed(steps):
        try:
            return Whole(step, checkpoints.require_whole(step))
        except DamagedCheckpoint as error:
            if isinstance(error.__cause__, UnreadCheckpoint):
                raise UserError(
                    f"checkpoint {folder / str(step)} cannot be read ({error.__cause__}), and may "
                    "be whole: start again once its disk answers, or move it away to go on from an "
                    "earlier one"
                ) from error
            say(set_aside(folder / str(step), str(error.__cause__)))
    if steps and not may_lack:
        raise UserError(
            f"no checkpoint of {folder.parent} is whole, and they were moved to its folder "
            f"{DAMAGED}: bring one back, or start again, which begins the run anew"
        )
    return Whole()
