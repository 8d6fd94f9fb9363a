"""What each process of a run does: a config settled and, if asked, verified; then trained, with
pictures of its memory and its loss."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import jax
from jax.stages import Compiled

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.console import console, count_text
from jaxpar.base.errors import UserError
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
from jaxpar.train.loop import STEP, OutOfMemory, Result, run
from jaxpar.train.metrics import Report, read_metrics
from jaxpar.train.run_data import with_run_data
from jaxpar.train.runs.bucket import run_here, send
from jaxpar.verify.of_config import require

_EVERY = 60.0  # seconds between two drawings of loss.png


def train_config(
    config: Config,
    folder: str | Path,
    verify: bool = False,
    report: Report | None = None,
    began: float | None = None,
) -> Result:
    """What `jaxpar train` does: settle what the config leaves open for the devices at hand, verify
    the plan if asked (see `TrainArgs`), and train it.

    Args:
      config: every setting.
      folder: the run folder, which is made if it is absent; or its URL in a bucket.
      verify: whether to compare the plan with one device before, and to train only if it is equal.
      report: a function that every process calls with each row (see `jaxpar.train.loop.run`).
      began: when `train.max_time` began to count, by `time.monotonic`; None = now.

    Returns:
      How the run ended.

    Raises:
      UserError: see `run`; for too little memory it says what would fit.
    """
    if began is None:
        began = time.monotonic()
    with peer_errors(), closing(Account(began)) as account:
        return _train_config(config, run_here(folder), verify, report, began, account)


def _train_config(
    config: Config,
    folder: Path,
    verify: bool,
    report: Report | None,
    began: float,
    account: Account,
) -> Result:
    """The same, with an account of the process's time."""
    # what is wrong with the layout or the data is said before a budget is solved
    experiment = make_experiment(config)
    main = jax.process_index() == 0
    say = console().print if main else lambda line: None
    experiment, _ = with_run_data(experiment, folder, say)
    settled = resolve(experiment, say=say)
    if verify:
        run_together(lambda: require(settled, settled.devices, say))
    drawn = time.monotonic()

    def draw() -> None:
        try:
            _draw_loss(settled, folder)
        except Exception as error:  # a picture is no reason to end a run
            say(f"warning: no {folder / 'loss.png'}: {error}")

    def take_row(step: int, row: dict[str, float]) -> None:
        nonlocal drawn
        if report is not None:
            report(step, row)
        if main and time.monotonic() - drawn > _EVERY:
            drawn = time.monotonic()
            beside.submit(draw)

    def watch(experiment: Experiment, compiled: Compiled) -> None:
        _write_memory(experiment, compiled, folder / "memory.json")

    def finish() -> None:
        if main and (folder / "metrics.jsonl").exists():
            beside.submit(draw).result()
            account.close()
            send(folder)
            say(f"wrote {folder / 'loss.png'}")

    try:
        with ThreadPoolExecutor(1) as beside:
            return run(
                settled,
                folder,
                watch=watch,
                report=take_row,
                began=began,
                account=account,
                finish=finish,
            )
    except OutOfMemory as error:
        if error.where != STEP:
            raise
        parts = memory_account(error.experiment, error.experiment.platform)
        say(memory_table(parts))
        has = memory_of(error.experiment.devices[0])
        raise UserError(out_of_memory(error.said, parts, error.experiment, has)) from error


def _write_memory(experiment: Experiment, compiled: Compiled, file: Path) -> None:
    """Write where the bytes of a step are: as predicted, by the compiler, and what a device has."""
    said = compiled.memory_analysis()
    if not said:
        return
    platform = experiment.platform
    account = {
        "predicted": [part._asdict() for part in memory_account(experiment, platform)],
        "compiled": CompiledBytes.of(said, platform)._asdict(),
        "device_has": memory_of(experiment.devices[0]),
    }
    write_whole(file, json.dumps(account, indent=1) + "\n")


def _draw_loss(experiment: Experiment, folder: Path) -> None:
    """Draw loss.png of a run folder from its metrics."""
    from jaxpar.show.figures import loss_figure, save_figure  # matplotlib, which no step waits for

    parameters = count_text(experiment.model.parameter_count())
    title = f"{folder.name}: {experiment.config.model.family}, {parameters} parameters"
    known = {"unigram entropy": experiment.unigram_entropy}
    save_figure(loss_figure(read_metrics(folder), title, known), folder / "loss.png")
