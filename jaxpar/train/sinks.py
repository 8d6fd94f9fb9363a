"""Where the rows of metrics.jsonl go besides: TensorBoard, Weights & Biases, MLflow. Each is imported when it is asked.

Projects, entities and servers are those of the libraries' own environment variables (docs/metrics.md). A resumed run
goes on in the same run of theirs, whose id is kept in `sinks.json`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.runtime import write_whole
from jaxpar.base.toml import flatten

Write, Close = Callable[[int, Mapping[str, float]], object], Callable[[bool], object]


class Sink:
    """Writes rows in a thread of its own, so that no step waits for a network.

    What fails is said once, and its rows are kept and sent again with the next one: the run goes on, because
    metrics.jsonl has every row.

    Args:
      name: one of `metrics.sinks`.
      config, folder: those of the run, which goes on after `first_step`.
      say: is called with the lines about failures.

    Raises:
      UserError: the library is not installed, or it cannot begin its run.
    """

    def __init__(self, name: str, config: Config, folder: Path, first_step: int, say: Callable[[str], None]):
        self.name, self._say = name, say
        self._rows, self._failing = deque[tuple[int, Mapping[str, float]]](), False
        ids = json.loads((folder / _IDS).read_text()) if (folder / _IDS).exists() else {}
        try:
            self._write, self._close, run_id = _OPEN[name](config, folder, first_step, ids.get(name))
        except ImportError as error:
            raise UserError(f"metrics.sinks={name} needs the extra: pip install 'jaxpar[{name}]'") from error
        except Exception as error:  # whatever a library raises where there is no login, server or such a run
            raise UserError(f"metrics.sinks={name} cannot begin its run: {_line(error)}") from error
        if run_id:
            write_whole(folder / _IDS, json.dumps(ids | {name: run_id}) + "\n")
        self._thread = ThreadPoolExecutor(1)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Send a row, after those that are still unsent."""
        self._rows.append((step, row))
        self._thread.submit(self._send)

    def _send(self) -> None:
        try:
            while self._rows:
                self._write(*self._rows[0])
                self._rows.popleft()
            self._failing = False
        except Exception as error:
            if not self._failing:
                kept = "the run goes on, metrics.jsonl has every row, and this one is sent again with the next"
                self._say(f"warning: {self.name} does not take step {self._rows[0][0]} ({_line(error)}): {kept}")
            self._failing = True

    def close(self, failed: bool) -> None:
        """Send what is left, once, and end the run there; `failed` says whether an error ended it here."""
        self._thread.shutdown(cancel_futures=True)  # each sends all rows, so one is as good as many
        self._send()
        if self._rows:
            self._say(f"warning: {self.name} lacks the rows from step {self._rows[0][0]}; metrics.jsonl has them")
        try:
            self._close(failed)
        except Exception as error:
            self._say(f"warning: {self.name} did not end its run: {_line(error)}")


def _tensorboard(_: Config, folder: Path, first_step: int, __: str | None) -> tuple[Write, Close, str | None]:
    from tensorboardX import SummaryWriter

    board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(step: int, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            board.add_scalar(key, value, step)

    return write, lambda failed: board.close(), None


def _wandb(config: Config, folder: Path, _: int, run_id: str | None) -> tuple[Write, Close, str | None]:
    import wandb

    run = wandb.init(id=run_id, resume="allow", name=folder.name, dir=folder, config=flatten(config))
    # By a step of their own the rows of steps that run again after a crash are taken; W&B drops a step of its own that
    # goes back.
    run.define_metric("*", step_metric="step")
    return lambda step, row: run.log({"step": step, **row}), lambda failed: run.finish(int(failed)), run.id


def _mlflow(config: Config, folder: Path, _: int, run_id: str | None) -> tuple[Write, Close, str | None]:
    import mlflow
    from mlflow.entities import Metric

    run = mlflow.start_run(run_id=run_id, run_name=folder.name)
    values = {key: str(value) for key, value in flatten(config).items()}
    mlflow.log_params({key: value for key, value in values.items() if key not in run.data.params})
    # A parameter cannot be changed: what a resume changed is a tag.
    mlflow.set_tags({key: value for key, value in values.items() if run.data.params.get(key, value) != value})
    client, known = mlflow.MlflowClient(), run.info.run_id  # the run of `start_run` is that of this thread alone

    def write(step: int, row: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(known, [Metric(key, value, now, step) for key, value in row.items()])

    return write, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"), known


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
_IDS = "sinks.json"


def _line(error: Exception) -> str:
    """The first line of an error's text, which may be a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
