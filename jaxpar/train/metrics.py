"""Measures a run's throughput, MFU and device memory, traces a few of its steps, and writes its
metrics: into `metrics.jsonl`, and where sinks are asked for to TensorBoard, Weights & Biases or
MLflow, which are imported then."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.stages import Compiled

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError, read_json, reading
from jaxpar.base.hardware import peak_flops
from jaxpar.base.ranges import MOST_STEPS
from jaxpar.base.runtime import write_whole, writing
from jaxpar.base.toml import flatten
from jaxpar.hlo.read import read_program
from jaxpar.hlo.tasks import Loop, Node, Place, Task


def mfu(
    tokens_per_second: float, flops_per_token: float, devices: list[jax.Device], dtype: str
) -> float | None:
    """Return the model FLOPs utilisation in [0, 1], or None where the peak is not known, and always
    on CPU.
    """
    if devices[0].platform == "cpu":
        peak = None
    else:
        peak = peak_flops(devices[0].device_kind, dtype)
    if peak:
        return tokens_per_second * flops_per_token / (peak * len(devices))
    return None


def device_memory(devices: list[jax.Device]) -> int | None:
    """Return the largest peak of bytes in use over this process's devices; None if the backend does
    not say (CPU).
    """
    stats = [
        device.memory_stats() for device in devices if device.process_index == jax.process_index()
    ]
    peaks = [
        entry["peak_bytes_in_use"] for entry in stats if entry and "peak_bytes_in_use" in entry
    ]
    return max(peaks, default=None)


class Meter:
    """Measures the speed of the steps after `step` by the clock, without the time spent aside from
    training; `dtype` is that of the matmuls."""

    def __init__(
        self,
        step: int,
        flops_per_token: float,
        devices: list[jax.Device],
        dtype: str,
    ):
        self._flops = flops_per_token
        self._devices = devices
        self._dtype = dtype
        self._step, self._time, self._spent = (
            step,
            time.perf_counter(),
            dict.fromkeys(("waiting", "aside"), 0.0),
        )
        self.trained = 0.0
        """The seconds that all steps took until the last reading."""

    @contextmanager
    def timed(self, what: Literal["waiting", "aside"]) -> Iterator[None]:
        """Count the time inside as waiting for data, or as spent aside from training (an
        evaluation, a save).
        """
        began = time.perf_counter()
        yield
        self._spent[what] += time.perf_counter() - began

    def read(self, step: int, tokens: float) -> dict[str, float | None]:
        """Return the speed since the last reading, with so many `tokens` computed in each step,
        whether their labels count or not; what a device does not say is None."""
        now = time.perf_counter()
        elapsed = max(now - self._time - self._spent["aside"], 1e-9)
        steps = step - self._step
        rate = tokens * steps / elapsed
        on_cpu = self._devices[0].platform == "cpu"
        waited = min(self._spent["waiting"] / elapsed, 1.0)
        self._step, self._time, self._spent = (
            step,
            now,
            dict.fromkeys(
                ("waiting", "aside"),
                0.0,
            ),
        )
        self.trained += elapsed
        return {
            "tokens_per_second": rate,
            "step_seconds": elapsed / steps,
            "tflops_per_device": None if on_cpu else rate * self._flops / len(self._devices) / 1e12,
            "mfu": mfu(rate, self._flops, self._devices, self._dtype),
            "device_memory": device_memory(self._devices),
            "data_wait": waited,
        }


Row = dict[str, float]
Report = Callable[[int, Row], None]
"""A function that takes each row of metrics.jsonl: the step, and what was measured at it."""


class MetricsLog:
    """Writes `metrics.jsonl`, one object a line, flushed at once. On resume it drops the lines of
    steps to run again, and moves those that cannot be read to `metrics_damaged.jsonl`.

    It is a context manager. The run goes on after `first_step`. Where it is not `active` (on all
    processes but the first) it writes nothing. `sinks` get each row too, and so does `report`, on
    every process. `say` takes a line where something was moved aside.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int = 0,
        active: bool = True,
        sinks: Sequence[Sink] = (),
        report: Report | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._file = None
        self._sinks = sinks
        self._report = report
        if active:
            path = folder / METRICS
            found = _read_lines(path)
            if found.damaged:
                aside = folder / _DAMAGED
                if aside.exists():
                    before = aside.read_bytes()
                else:
                    before = b""
                write_whole(aside, before + b"".join(line + b"\n" for line in found.damaged))
                count = len(found.damaged)
                last = found.damaged[-1][:40]
                say(
                    f"warning: damaged lines of {path} were moved to {aside.name}: {count}, the "
                    f"last is {last!r}"
                )
            kept = [row for row in found.rows if row["step"] <= first_step]
            write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._path = path
            with writing(path):
                self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float | None) -> None:
        """Write one line with the step and what was measured at it; values that are None are
        left out.
        """
        known = {key: value for key, value in values.items() if value is not None}
        if self._file is not None:
            with writing(self._path):
                self._file.write(json.dumps({"step": step, **known}) + "\n")
                self._file.flush()
        for sink in self._sinks:
            sink.write(step, known)
        if self._report is not None:
            self._report(step, known)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for sink in self._sinks:
            sink.close(error is not None)
        if self._file is None:
            return
        try:
            with writing(self._path):
                self._file.close()  # which writes what a full disk had left unwritten
        except UserError:
            if error is None:  # else the first error is the one to tell
                raise


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`; one that cannot be read, or that a crash cut
    short, is left out.
    """
    return _read_lines(folder / METRICS).rows


METRICS = "metrics.jsonl"
_DAMAGED = "metrics_damaged.jsonl"


class _Lines(NamedTuple):
    """The rows of a file of metrics, in order, and the lines that are damaged, as they are."""

    rows: list[dict[str, Any]]
    damaged: list[bytes]


def _read_lines(path: Path) -> _Lines:
    found = _Lines([], [])
    with reading(path):
        content = path.read_bytes() if path.exists() else b""
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        row = _row_of(line)
        if row is not None:
            found.rows.append(row)
        elif line.strip():
            # Where the end of a line is what was damaged, the line has several rows. A row has no
            # object inside.
            inside = [
                row for text in re.findall(rb"{[^{}]*}", line) if (row := _row_of(text)) is not None
            ]
            found.rows.extend(inside)
            # a last line without an end is one that a crash cut short
            if number < len(lines) or inside:
                found.damaged.append(line)
    return found


def _row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line of metrics; None where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(_is_number(value) for value in row.values()):
        return None
    step = row.get("step")
    if type(step) is int and 1 <= step <= MOST_STEPS:
        return row
    return None


def _is_number(value: object) -> bool:
    """Whether it is a number as a row has it: NaN is one, of a run that diverged, and one of 400
    digits is none.
    """
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def read_sink_ids(folder: Path) -> dict[str, str | None]:
    """Read the ids by which a run goes on in its sinks, by their names; a UserError where the file
    is damaged.
    """
    file = folder / "sinks.json"
    if file.exists():
        return read_json(file, dict.fromkeys(_OPEN, str | None))
    return {}


Opened = tuple[Callable[[int, Row], object], Callable[[bool], object], str | None]
"""Functions that write a row of a step and that end the run, failed or not; and the run's id."""


class Sink:
    """Writes rows in a thread of its own, so that no step waits for a network.

    A row that fails is said, kept, and sent again with the next: the run goes on, because
    metrics.jsonl has every row. `name` is one of `metrics.sinks`; the run goes on after
    `first_step`, also there, by the id in `sinks.json`. A UserError says that the library is not
    installed, or cannot begin its run.
    """

    def __init__(
        self, name: str, config: Config, folder: Path, first_step: int, say: Callable[[str], None]
    ):
        self._name, self._say, self._rows = name, say, deque[tuple[int, Row]]()
        ids: dict[str, Any] = read_sink_ids(folder)
        try:
            self._write, self._end, ids[name] = _OPEN[name](
                config, folder, first_step, ids.get(name)
            )
        except ImportError as error:
            raise UserError(
                f"metrics.sinks={name} needs the extra: pip install 'jaxpar[{name}]'"
            ) from error
        # whatever a library raises where there is no login, server or such a run
        except Exception as error:
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


def _tensorboard(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    from tensorboardX import SummaryWriter

    board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
    lines = [f"| {key} | {value} |" for key, value in flatten(config).items()]
    board.add_text("config", "\n".join(["| setting | value |", "|---|---|", *lines]), first_step)
    return (
        lambda step, row: [board.add_scalar(*item, step) for item in row.items()],
        lambda failed: board.close(),
        "",
    )


def _wandb(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
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


def _mlflow(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
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

    def write(step: int, row: Row) -> None:
        now = int(1000 * time.time())
        client.log_batch(
            run_id,
            [Metric(key, value, now, step) for key, value in row.items()],
        )

    return write, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"), run_id


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def _line(error: Exception) -> str:
    """The first line of an error's text, which may be a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class Profile:
    """Traces `steps` on this process's devices into `profile/` of a run that goes on after the step
    `done`, by JAX's profiler, which XProf opens, and has the line of the model of every
    instruction.

    Steps that are traced already are not traced again: the same command resumes a run. Steps that
    are done and were not traced are refused with a UserError, which names the steps of `advice`
    instead.
    """

    def __init__(self, steps: range, folder: Path, done: int, advice: str = ""):
        self._folder = folder / "profile"
        self._running = False
        self.file = self._folder / f"steps_{steps.start}_{steps.stop - 1}.json"
        left = range(max(steps.start, done + 1), steps.stop)
        if steps and not left and not self.file.exists():
            instead = advice or f"{done + 2}:{done + 6}"
            raise UserError(f"metrics.profile: the run goes on after step {done}, try {instead}")
        self.first, self.last = (left[0], left[-1]) if left and not self.file.exists() else (0, 0)

    def start(self) -> None:
        """Begin the trace, without Python's own calls, which would slow the steps."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._running = True

    def close(self) -> None:
        """End the trace and write it, if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def write_lines(self, compiled: Compiled, devices: list[jax.Device]) -> None:
        """Write beside the trace where in the model each instruction of the step is."""
        program = read_program(compiled.as_text() or "")
        trace = max(
            self._folder.rglob("*.xplane.pb"),
            key=lambda file: file.stat().st_mtime,
        )
        found = {
            "steps": [self.first, self.last],
            "trace": str(trace.relative_to(self._folder)),
            "module": program.name,
            "device_kind": devices[0].device_kind,
            "devices": len(devices),
            "traced": jax.local_device_count(),
            "lines": {
                name: [place.scope, place.source, place.phase]
                for name, place in _places(program.nodes)
            },
        }
        write_whole(self.file, json.dumps(found) + "\n")


def _places(nodes: tuple[Node, ...]) -> Iterator[tuple[str, Place]]:
    """Yield the name and place of every instruction that takes time; a wait is where what it waits
    for was started.
    """
    for node in nodes:
        if isinstance(node, Loop):
            yield from _places(node.body)
        elif isinstance(node, Task):
            yield node.name, node.place
        elif isinstance(task := nodes[node.task], Task):
            yield node.name, task.place
