"""What each process of a run does: a config settled and, if asked, verified; then trained, with
pictures of its memory and its loss."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
from jax.stages import Compiled

from jaxpar.base.config import Config, check
from jaxpar.base.console import console, count_text
from jaxpar.base.errors import UserError
from jaxpar.base.runtime import memory_of, run_together, start, write_whole
from jaxpar.data.corpus import load_corpus, unigram_entropy
from jaxpar.plan import resolve
from jaxpar.plan.budget import platform_of
from jaxpar.plan.memory_account import MemoryPart, memory_account, out_of_memory
from jaxpar.rehearse.report.memory import CompiledBytes
from jaxpar.show.tables import memory_table
from jaxpar.train.experiment import Experiment
from jaxpar.train.loop import STEP, OutOfMemory, Result, run
from jaxpar.train.metrics import Report, read_metrics
from jaxpar.train.own_tokenizer import with_own_tokenizer
from jaxpar.train.plans import make_experiment
from jaxpar.train.template_date import with_template_date
from jaxpar.verify.of_config import require

_EVERY = 60.0  # seconds between two drawings of loss.png


def train_config(
    config: Config, folder: Path, verify: bool = False, report: Report | None = None
) -> Result:
    """What `jaxpar train` does: settle what the config leaves open for the devices at hand, verify
    the plan if asked (see `TrainArgs`), and train it; every process calls `report` with each row
    (see `jaxpar.train.loop.run`).

    Raises:
      UserError: see `run`; for too little memory it says what would fit.
    """
    check(config)
    devices = start(config.mesh)
    main = jax.process_index() == 0
    say = console().print if main else lambda line: None
    # what is wrong with the layout or the data is said before a budget is solved
    experiment = make_experiment(config, devices)
    config = with_template_date(config, folder)
    data = run_together(lambda: with_own_tokenizer(config.data, folder, say))
    corpus = run_together(lambda: load_corpus(data, config.model.vocab_size))
    settled = resolve(replace(experiment, config=config, corpus=corpus), say=say)
    if verify:
        run_together(lambda: require(settled, devices, say))

    def report_memory(experiment: Experiment, compiled: Compiled) -> None:
        if memory := compiled.memory_analysis():
            parts, has = _memory_parts(experiment)
            predicted = [part._asdict() for part in parts]
            said = CompiledBytes.of(memory, platform_of(experiment.devices[0]))._asdict()
            text = json.dumps(
                {"predicted": predicted, "compiled": said, "device_has": has}, indent=1
            )
            write_whole(folder / "memory.json", text + "\n")

    entropy = unigram_entropy(corpus.train.sample)
    drawn = time.monotonic()

    def draw() -> None:
        try:
            _draw_loss(settled, folder, entropy)
        except Exception as error:  # a picture is no reason to end a run
            say(f"warning: no {folder / 'loss.png'}: {error}")

    def take_row(step: int, row: dict[str, float]) -> None:
        nonlocal drawn
        if report is not None:
            report(step, row)
        if main and time.monotonic() - drawn > _EVERY:
            drawn = time.monotonic()
            beside.submit(draw)

    try:
        with ThreadPoolExecutor(1) as beside:
            result = run(settled, folder, watch=report_memory, report=take_row)
    except OutOfMemory as error:
        if error.where != STEP:
            raise
        parts, has = _memory_parts(error.experiment)
        say(memory_table(parts))
        raise UserError(out_of_memory(error.said, parts, error.experiment, has)) from error
    if main and (folder / "metrics.jsonl").exists():
        draw()
        say(f"wrote {folder / 'loss.png'}")
    return result


def _memory_parts(experiment: Experiment) -> tuple[list[MemoryPart], int]:
    """The predicted parts of a step's memory on a device of a plan, and the bytes that the
    device has.
    """
    device = experiment.devices[0]
    return memory_account(experiment, platform_of(device)), memory_of(device)


def _draw_loss(experiment: Experiment, folder: Path, entropy: float) -> None:
    from jaxpar.show.figures import loss_figure, save_figure  # matplotlib, which no step waits for

    parameters = count_text(experiment.model.parameter_count())
    title = f"{folder.name}: {experiment.config.model.family}, {parameters} parameters"
    save_figure(
        loss_figure(read_metrics(folder), title, {"unigram entropy": entropy}), folder / "loss.png"
    )
