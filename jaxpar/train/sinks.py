"""Where each row of metrics goes besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, or
what a program registers. A sink's library is imported when a run asks for it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError, read_json, short
from jaxpar.base.registry import SINKS, registering
from jaxpar.base.toml import flatten

MetricsRow = dict[str, float]
"""What was measured at a step, by name."""


def read_sink_ids(folder: Path) -> dict[str, str | None]:
    """Read the ids by which a run goes on in its sinks, by their names; a UserError where the file
    is damaged.
    """
    file = folder / "sinks.json"
    if file.exists():
        return read_json(file, dict.fromkeys(SINKS.names(), str | None))
    return {}


Opened = tuple[Callable[[int, MetricsRow], object], Callable[[bool], object], str | None]
"""Functions that write a row of a step and that end the run, failed or not; and the run's id."""
Open = Callable[[Config, Path, int, str | None], Opened]
"""Begins a run in a sink, or goes on with it: of the config, the run folder, the first step, and
the id that the run has there, if it has one.
"""


@dataclass(frozen=True)
class RegisteredSink:
    """What a name of `metrics.sinks` stands for."""

    open: Open
    extra: str
    """What brings the library that it needs, for the message where that is absent."""


def register_sink(
    name: str,
    *,
    extra: str = "",
) -> Callable[[Open], Open]:
    """A decorator that makes a sink known by a name, which `metrics.sinks` then takes.

    It is put on a function that opens the sink (`Open`) and imports what it needs.

    Args:
      name: a word that no other sink has.
      extra: what to install where its library is absent, as pip is told: `jaxpar[wandb]`.
    """
    arguments = ("config", "folder", "first_step", "run_id")
    return registering(SINKS, name, lambda opened: RegisteredSink(opened, extra), arguments)


class Sink:
    """Writes rows in a thread of its own, so that no step waits for a network.

    A row that fails is said, kept, and sent again with the next: the run goes on, because
    metrics.jsonl has every row. `name` is one of `metrics.sinks`; the run goes on after
    `first_step`, also there, by the id in `sinks.json`. A UserError says that the library is not
    installed, or cannot begin its run.
    """

    def __init__(self, name: str, config: Config, folder: Path, first_step: int, say: Say):
        self._name = name
        self._say = say
        self._rows = deque[tuple[int, MetricsRow]]()
        sink: RegisteredSink = SINKS[name]
        ids: dict[str, Any] = read_sink_ids(folder)
        try:
            opened = sink.open(config, folder, first_step, ids.get(name))
        except ImportError as error:
            if sink.extra:
                needs = f"the extra: pip install '{sink.extra}'"
            else:
                needs = f"what is not installed: {_line(error)}"
            raise UserError(f"metrics.sinks={name} needs {needs}") from error
        # whatever a library raises where there is no login, server or such a run
        except Exception as error:
            raise UserError(f"metrics.sinks={name} cannot begin its run: {_line(error)}") from error
        if not _is_opened(opened):
            raise UserError(
                f"metrics.sinks={name} returns (write, end, run_id), two functions and a text or "
                f"None: it returned {short(opened)}"
            )
        self._write, self._end, ids[name] = opened
        self._thread = ThreadPoolExecutor(1)
        try:
            write_whole(folder / "sinks.json", json.dumps(ids) + "\n")
        except BaseException:
            self.close(failed=True)
            raise

    def write(self, step: int, row: MetricsRow) -> None:
        """Send a row, after those that are still unsent."""
        self._rows.append((step, row))
        self._thread.submit(self._send)

    def _send(self, end: Callable[[], object] = lambda: None) -> None:
        try:
            while self._rows:
                self._write(*self._rows[0])
                self._rows.popleft()
            end()
        except Exception as error:
            if self._rows:
                lacks = f" lacks {len(self._rows)} rows from step {self._rows[0][0]}"
            else:
                lacks = ""
            self._say(f"warning: {self._name}{lacks}, metrics.jsonl has them all: {_line(error)}")

    def close(self, failed: bool) -> None:
        """Send what is left, once, and end the run there; `failed` says whether an error ends
        it here.
        """
        self._thread.shutdown(cancel_futures=True)  # each sends all rows, so one is as good as many
        self._send(lambda: self._end(failed))


@register_sink("tensorboard", extra="jaxpar[tensorboard]")
def tensorboard_sink(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    """Event files of TensorBoard in the run folder."""
    from tensorboardX import SummaryWriter

    # events from the purged step on are hidden, and those of the step to go on after are not late
    board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
    lines = [f"| {key} | {value} |" for key, value in flatten(config).items()]
    board.add_text("config", "\n".join(["| setting | value |", "|---|---|", *lines]), first_step)
    return (
        lambda step, row: [board.add_scalar(*item, step) for item in row.items()],
        lambda failed: board.close(),
        "",
    )


@register_sink("wandb", extra="jaxpar[wandb]")
def wandb_sink(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    """A run at Weights & Biases."""
    import wandb  # pyright: ignore[reportMissingImports]

    run = wandb.init(
        id=run_id, resume="allow", name=folder.name, dir=folder, config=flatten(config)
    )
    # W&B's own step may not go back, as it does after a crash
    run.define_metric("*", step_metric="step")
    return (
        lambda step, row: run.log({"step": step, **row}),
        lambda failed: run.finish(int(failed)),
        run.id,
    )


@register_sink("mlflow", extra="jaxpar[mlflow]")
def mlflow_sink(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    """A run of MLflow."""
    import mlflow  # pyright: ignore[reportMissingImports]
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

    run = mlflow.start_run(run_id=run_id, run_name=folder.name)
    known = run.data.params
    values = {key: str(value) for key, value in flatten(config).items()}
    mlflow.log_params({key: value for key, value in values.items() if key not in known})
    # cannot change
    mlflow.set_tags({key: value for key, value in values.items() if known.get(key, value) != value})
    # the run of `start_run` is that of its thread alone
    client = mlflow.MlflowClient()
    run_id = run.info.run_id

    def write(step: int, row: MetricsRow) -> None:
        now = int(1000 * time.time())
        client.log_batch(
            run_id,
            [Metric(key, value, now, step) for key, value in row.items()],
        )

    return write, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"), run_id


def _is_opened(found: object) -> bool:
    """Whether a sink was opened as `Open` says."""
    if not isinstance(found, tuple) or len(found) != 3:
        return False
    write, end, run_id = found
    return callable(write) and callable(end) and (run_id is None or isinstance(run_id, str))


def _line(error: Exception) -> str:
    """The first line of an error's text, which may be a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
