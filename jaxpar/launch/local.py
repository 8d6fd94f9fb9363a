"""The work of each process of a run: a config is settled and, if asked, verified; then trained,
with pictures of its memory and its loss."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import jax
from jax.stages import Compiled

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.console import console, count_text
from jaxpar.base.errors import Say, UserError
from jaxpar.base.machine import memory_of
from jaxpar.base.process.multihost import run_together
from jaxpar.plan import resolve
from jaxpar.plan.memory_account import memory_account, out_of_memory
from jaxpar.rehearse.report.memory import CompiledBytes
from jaxpar.show.tables import memory_table
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.goodput import Account
from jaxpar.train.guard.failures import peer_errors
from jaxpar.train.hooks import Hook
from jaxpar.train.loop import STEP, OutOfMemory, Result, Run, open_run
from jaxpar.train.metrics import METRICS, read_metrics
from jaxpar.train.run_data import with_run_data
from jaxpar.train.runs.bucket import run_here, send
from jaxpar.verify.of_config import require

_EVERY = 60.0  # seconds between two drawings of loss.png


def train_config(
    config: Config,
    folder: str | Path,
    verify: bool = False,
    hooks: Sequence[Hook] = (),
    began: float | None = None,
) -> Result:
    """Train as `jaxpar train` does: settle what the config leaves open for the devices at hand,
    verify the plan if asked, and train it.

    Args:
      folder: the run folder, which is made if it is absent; or its URL in a bucket.
      verify: whether to compare the plan with one device before, and to train only if it is equal.
      hooks: further hooks of the run.
      began: when `train.max_time` began to count, by `time.monotonic`; None = now.

    Raises:
      UserError: `train.run` refuses the config; for too little memory it says what would fit.
    """
    began = time.monotonic() if began is None else began
    with peer_errors(), closing(Account(began)) as account:
        here = run_here(folder)
        # what is wrong with the layout or the data is said before a budget is solved
        experiment = make_experiment(config)
        main = jax.process_index() == 0
        say = console().print if main else lambda line: None
        experiment, _ = with_run_data(experiment, here, say)
        settled = resolve(experiment, say=say)
        if verify:
            run_together(lambda: require(settled, settled.devices, say))
        try:
            with (
                open_run(settled, here, account=account, began=began) as run,
                ThreadPoolExecutor(1) as beside,  # its picture is written while the folder is held
            ):
                picture = _LossPicture(run, beside, say)
                result = run.train([_MemoryFile(run), picture, *hooks])
                if main and (here / METRICS).exists():
                    picture.draw().result()
                    account.close()
                    send(here)
                    say(f"wrote {here / 'loss.png'}")
            return result
        except OutOfMemory as error:
            if error.where != STEP:
                raise
            parts = memory_account(error.experiment, error.experiment.platform)
            say(memory_table(parts))
            has = memory_of(error.experiment.devices[0])
            raise UserError(out_of_memory(error.said, parts, error.experiment, has)) from error


class _MemoryFile(Hook):
    """A hook that writes where the bytes of a step are, as predicted and by the compiler, and what
    a device has.
    """

    def __init__(self, run: Run):
        self._run = run

    def on_compiled(self, compiled: Compiled) -> None:
        said = compiled.memory_analysis()
        if not said:
            return
        experiment = self._run.experiment
        platform = experiment.platform
        account = {
            "predicted": [part._asdict() for part in memory_account(experiment, platform)],
            "compiled": CompiledBytes.of(said, platform)._asdict(),
            "device_has": memory_of(experiment.devices[0]),
        }
        write_whole(self._run.folder / "memory.json", json.dumps(account, indent=1) + "\n")


class _LossPicture(Hook):
    """A hook that draws loss.png every minute, in a thread beside the steps of the first
    process.
    """

    def __init__(self, run: Run, beside: Executor, say: Say):
        self._run = run
        self._beside = beside
        self._say = say
        self._drawn = time.monotonic()

    def on_row(self, step: int, row: dict[str, float]) -> None:
        if jax.process_index() == 0 and time.monotonic() - self._drawn > _EVERY:
            self._drawn = time.monotonic()
            self.draw()

    def draw(self) -> Future[None]:
        """Have the other thread draw the picture."""
        return self._beside.submit(self._draw)

    def _draw(self) -> None:
        folder = self._run.folder
        try:
            _draw_loss(self._run.experiment, folder)
        except Exception as error:  # a picture is no reason to end a run
            self._say(f"warning: no {folder / 'loss.png'}: {error}")


def _draw_loss(experiment: Experiment, folder: Path) -> None:
    """Draw loss.png of a run folder from its metrics."""
    from jaxpar.show.figures import loss_figure, save_figure  # matplotlib, which no step waits for

    parameters = count_text(experiment.model.parameter_count())
    title = f"{folder.name}: {experiment.config.model.family}, {parameters} parameters"
    known = {"unigram entropy": experiment.unigram_entropy}
    save_figure(loss_figure(read_metrics(folder), title, known), folder / "loss.png")
