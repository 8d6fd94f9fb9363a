"""The rows of metrics.jsonl that are of a training step: what it measured, how fast the steps are,
and how many records and steps were bad until then.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpar.base.console import ProgressLine
from jaxpar.base.errors import Say
from jaxpar.data.corpus import Corpus
from jaxpar.data.mixture import skipped_records
from jaxpar.train.loop.timing import Timing
from jaxpar.train.metrics import MetricsLog
from jaxpar.train.opening import OpenRun


class StepRows:
    """Prints and writes what steps have measured.

    Attributes:
      last: the last step that has a row, or that was not run by this call.
      loss: the loss of the last row, in nats a token; None = there was no row.
    """

    def __init__(
        self,
        run: OpenRun,
        log: MetricsLog,
        show: ProgressLine,
        timing: Timing,
    ):
        """Take a run, where its rows are written and shown, and what measures its time."""
        self.last = run.after
        self.loss: float | None = None
        self._run = run
        self._log = log
        self._show = show
        self._timing = timing
        self._skipped = _Skipped(run.corpus, show.say)

    def write(self, step: int, measured: Mapping[str, float], bad_steps: int) -> None:
        """Write and print a step's numbers, with the speed since the last row.

        Args:
          measured: its metrics, read (see `make_train_step`).
          bad_steps: how many steps of the run were bad until then.
        """
        numbers = dict(measured)
        del numbers["overflows"]
        numbers["labels"] = numbers.pop("tokens")
        speed = self._timing.meter.read(step, self._run.experiment.tokens)
        self.last = step
        self.loss = numbers["loss"]
        if skipped := self._skipped.in_training:
            numbers["records_skipped"] = float(skipped)
        if bad_steps:
            numbers["bad_steps"] = float(bad_steps)
        self._skipped.say_more()
        left = (self._run.last - step) * (speed["step_seconds"] or 0.0)
        self._log.write(step, **numbers, **speed, **self._timing.account.row())
        self._show.step(step, numbers | speed, left)
        self._timing.account.note()

    def sync(self) -> None:
        """Wait until the rows of the steps have reached the disk, as those of a step that is saved
        must.
        """
        self._log.sync()

    def go_back(self, step: int) -> None:
        """Go on with the rows after an earlier step, from which the run goes on."""
        self.last = step
        self._timing.meter.restart(step)
        self._log.go_back(step)


class _Skipped:
    """The records that were left out, and how many of each kind were told."""

    def __init__(self, corpus: Corpus, say: Say):
        self._corpus = corpus
        self._say = say
        self._training = skipped_records(corpus.train)
        self._told = dict[int, int]()

    @property
    def in_training(self) -> int:
        """How many records of the training data were left out."""
        return sum(count.count for count in self._training)

    def say_more(self) -> None:
        """Say how many records were left out, whenever there are more; of the validation data,
        which are read again at each evaluation, once.
        """
        validation = []
        if self._corpus.val is not None:
            validation = skipped_records(self._corpus.val)
        for number, count in enumerate([*self._training, *validation]):
            told = self._told.get(number, 0)
            if count.count > told and not (told and count in validation):
                self._told[number] = count.count
                self._say(f"warning: {count.text}")
