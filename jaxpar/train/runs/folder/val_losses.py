"""The validation losses of a run's checkpoints: which step is the best. Each lies in the folder of
its step, in a file that checks itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import jax
import xxhash

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import Say, UserError, is_kind, read_json
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.folder.manifest import LOSS
from jaxpar.train.runs.folder.orbax_names import METRICS_FILE
from jaxpar.train.runs.folder.steps import steps_in

METRIC = "val_loss"
_CHECK = "check"


def lowest(losses: Mapping[int, float], steps: Iterable[int]) -> int | None:
    """Return the step with the lowest loss, or None where none of the steps has one.

    Args:
      losses: by step.
      steps: those that are asked about.
    """
    return min(
        (step for step in steps if step in losses), key=lambda step: losses[step], default=None
    )


class Losses:
    """The losses of the checkpoints in a folder, which grow while a run goes on.

    Attributes:
      known: by step.
    """

    def __init__(self, folder: Path, say: Say):
        self.known: dict[int, float] = {}
        self._folder = folder
        self._say = say
        self._said = set[int]()
        self._unwritten: dict[int, float] = {}

    def read(self) -> None:
        """Read the losses that are there. One that is damaged is none, and is said once."""
        steps = steps_in(self._folder)
        if all((self._folder / str(step) / LOSS).exists() for step in steps):
            logged = {}
        else:  # of a step whose file is lost, or not written yet
            rows = read_metrics(self._folder.parent)
            logged = {row["step"]: row[METRIC] for row in rows if METRIC in row}
        for step in steps:
            loss = self._read(step)
            if loss is None and not (self._folder / str(step) / LOSS).exists():
                loss = logged.get(step)
            if loss is not None and math.isfinite(loss):
                self.known[step] = loss

    def _read(self, step: int) -> float | None:
        place = self._folder / str(step)
        file = place / LOSS
        try:
            found = read_json(file, {METRIC: float, _CHECK: str})
        except UserError:
            if not file.exists():
                return _read_older(place)
            found = {}
        loss = found.get(METRIC)
        if loss is not None and found.get(_CHECK) == _check(step, loss):
            return loss
        if step not in self._said:
            self._said.add(step)
            self._say(f"warning: {file} is damaged: step {step} counts as never evaluated")
        return None

    def add(self, step: int, loss: float) -> None:
        """Keep the loss of a step, for `write`."""
        self.known[step] = self._unwritten[step] = loss

    def forget(self, step: int) -> None:
        """Drop the loss of a step that is about to be saved anew."""
        self.known.pop(step, None)
        self._unwritten.pop(step, None)

    def write(self) -> list[int]:
        """Write the losses of those steps that have been written to their end; the others wait for
        it.

        Returns:
          The steps.

        Raises:
          UserError: one cannot be written.
        """
        there = [step for step in self._unwritten if (self._folder / str(step)).exists()]
        for step in there:
            loss = self._unwritten.pop(step)
            if jax.process_index() == 0:
                content = {METRIC: loss, _CHECK: _check(step, loss)}
                write_whole(self._folder / str(step) / LOSS, json.dumps(content) + "\n")
        return there


def _read_older(place: Path) -> float | None:
    """The loss where earlier versions have it, unchecked."""
    with suppress(UserError):
        loss = read_json(place / METRICS_FILE).get(METRIC)
        if is_kind(loss, float):
            return loss
    return None


def _check(step: int, loss: float) -> str:
    """A hash of a loss and the step that it is of."""
    return xxhash.xxh3_128(f"{step} {loss!r}".encode()).hexdigest()
