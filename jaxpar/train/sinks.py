"""Where the rows of metrics.jsonl go besides: TensorBoard, Weights & Biases, MLflow, each imported when it is asked."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError, read_json
from jaxpar.base.runtime import write_whole
from jaxpar.base.toml import flatten

Row = dict[str, float]
Opened = tuple[Callable[[int, Row], object], Callable[[bool], object], str]
"""Functions that write a row of a step and that end the run, failed or not; and the run's id."""


class Sink:
    """Writes rows in a thread of its own, so that no step waits for a network.

    A row that fails is said, kept, and sent again with the next: the run goes on, because metrics.jsonl has every row.
    `name` is one of `metrics.sinks`; the run goes on after `first_step`, also there, by the id in `sinks.json`.

    Raises:
      UserError: the library is not installed, or it cannot begin its run.
    """

    def __init__(self, name: str, config: Config, folder: Path, first_step: int, say: Callable[[str], None]):
        self._name, self._say, self._rows = name, say, deque[tuple[int, Row]]()
        ids = read_json(folder / "sinks.json") if (folder / "sinks.json").exists() else {}
        try:
            self._write, self._end, ids[name] = _OPEN[name](config, folder, first_step, ids.get(name))
        except ImportError as error:
            raise UserError(f"metrics.sinks={name} needs the extra: pip install 'jaxpar[{name}]'") from error
        except Exception as error:  # whatever a library raises where there is no login, server or such a run
            raise UserError(f"metrics.sinks={name} cannot begin its run: {_line(error)}") from error
        write_whole(folder / "sinks.json", json.dumps(ids) + "\n")
        self._thread = ThreadPoolExecutor(1)

    def write(self, step: int, row: Row) -> None:
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
            lacks = f" lacks {len(self._rows)} rows from step {self._rows[0][0]}" if self._rows else ""
            self._say(f"warning: {self._name}{lacks}, metrics.jsonl has them all: {_line(error)}")

    def close(self, failed: bool) -> None:
        """Send what is left, once, and end the run there; `failed` says whether an error ends it here."""
        self._thread.shutdown(cancel_futures=True)  # each sends all rows, so one is as good as many
        self._send(lambda: self._end(failed))


def _tensorboard(_: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    from tensorboardX import SummaryWriter

    board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
    return lambda step, row: [board.add_scalar(*item, step) for item in row.items()], lambda failed: board.close(), ""


def _wandb(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    import wandb

    run = wandb.init(id=run_id, resume="allow", name=folder.name, dir=folder, config=flatten(config))
    run.define_metric("*", step_metric="step")  # W&B's own step may not go back, as it does after a crash
    return lambda step, row: run.log({"step": step, **row}), lambda failed: run.finish(int(failed)), run.id


def _mlflow(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    import mlflow
    from mlflow.entities import Metric

    run = mlflow.start_run(run_id=run_id, run_name=folder.name)
    known, values = run.data.params, {key: str(value) for key, value in flatten(config).items()}
    mlflow.log_params({key: value for key, value in values.items() if key not in known})
    mlflow.set_tags({key: value for key, value in values.items() if known.get(key, value) != value})  # cannot change
    client, run_id = mlflow.MlflowClient(), run.info.run_id  # the run of `start_run` is that of its thread alone

    def write(step: int, row: Row) -> None:
        now = int(1000 * time.time())
        client.log_batch(run_id, [Metric(key, value, now, step) for key, value in row.items()])

    return write, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"), run_id


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def _line(error: Exception) -> str:
    """The first line of an error's text, which may be a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
