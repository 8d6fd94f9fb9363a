"""What checkpoints and faults have cost a run until now, by its own account."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.train.goodput.account import GOODPUT, Life, Totals, add_up, read_lives
from jaxpar.train.goodput.intervals import Costs
from jaxpar.train.guard.time_limit import save_times
from jaxpar.train.runs.bucket import copy_of
from jaxpar.train.runs.folder.run_folder import CHECKPOINTS, finished_steps


class Measured(NamedTuple):
    """What a run has measured of itself.

    Attributes:
      totals: what its time went on.
      damaged: how many accounts are left out because they are damaged.
      costs: the mean of a save to the run folder, of its writing in the background and of the time
        to the first step, and the median of the times without a process; what was not seen is 0.
      step_seconds: the productive seconds of a step in the mean; None = none was kept.
    """

    totals: Totals
    damaged: int
    costs: Costs
    step_seconds: float | None


def measure_run(folder: Path) -> Measured:
    """Read what a run has measured of itself.

    Raises:
      UserError: it has no account, or none that is whole.
    """
    lives, damaged = read_lives(folder)
    if damaged and not lives:
        raise UserError(
            f"{folder / GOODPUT} has no account that is whole: the next call writes one"
        )
    if not lives:
        raise UserError(f"{folder} has no {GOODPUT}: a run has one from its first step on")
    totals = add_up(lives)
    save = _mean_save(lives)
    written = [_write_seconds(folder, step) for step in finished_steps(folder)]
    write = max(statistics.fmean(written or [0.0]) - save, 0.0)
    gaps = [later.began - life.ended for life, later in itertools.pairwise(lives)]
    down = max(statistics.median(gaps or [0.0]), 0.0)
    recover = statistics.fmean(_until_first_step(life) for life in lives)
    costs = Costs(save, write, recover, down)
    return Measured(totals, damaged, costs, _step_seconds(lives))


def _write_seconds(folder: Path, step: int) -> float:
    """How long a save took until its step could be gone back to, as far as it is known."""
    place = folder / CHECKPOINTS / str(step)
    began, whole = save_times(place)
    written = whole - began
    if not written or copy_of(folder) is None:
        return written
    # of a copy, the folder of a step has the time at which the bucket had all of it
    return max(written, place.stat().st_mtime - began)


def _mean_save(lives: list[Life]) -> float:
    """How long steps wait for a save to the run folder; those to the local tier are others."""
    seconds = sum(life.seconds["saving"] - life.local_seconds for life in lives)
    saves = sum(life.saves - life.local_saves for life in lives)
    return max(seconds, 0.0) / max(saves, 1)


def _until_first_step(life: Life) -> float:
    return sum(life.seconds[cause] for cause in ("startup", "restoring", "compiling"))


def _step_seconds(lives: list[Life]) -> float | None:
    steps = sum(life.step - life.lowest for life in lives)
    productive = sum(life.seconds["productive"] for life in lives)
    if steps <= 0 or not productive:
        return None
    return productive / steps
