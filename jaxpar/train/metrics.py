"""Measurements of a run: throughput, MFU and device memory. They
are written into `metrics.jsonl`, and where sinks are asked for to these too (`train.sinks`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import jax

from jaxpar.base.atomic_write import sync, write_whole, writing
from jaxpar.base.errors import Say, UserError, reading
from jaxpar.base.hardware import peak_flops
from jaxpar.base.ranges import MOST_STEPS
from jaxpar.train.sinks import MetricsRow, Sink


def mfu(
    tokens_per_second: float, flops_per_token: float, devices: list[jax.Device], dtype: str
) -> float | None:
    """Compute the model FLOPs utilisation in [0, 1], or None where the peak is not known, and
    always on CPU.
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
    """A clock for the speed of the steps after `step`, without the time spent aside from training;
    `dtype` is the dtype of the matmuls.
    """

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
        self._begin(step, time.perf_counter())
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

    def restart(self, step: int) -> None:
        """Measure the steps after another one, from now on."""
        self._begin(step, time.perf_counter())

    def _begin(self, step: int, now: float) -> None:
        self._step = step
        self._time = now
        self._spent = {"waiting": 0.0, "aside": 0.0}

    def read(self, step: int, tokens: float) -> dict[str, float | None]:
        """Return the speed since the last reading, with so many `tokens` computed in each step,
        whether their labels count or not; what a device does not say is None."""
        now = time.perf_counter()
        elapsed = max(now - self._time - self._spent["aside"], 1e-9)
        steps = step - self._step
        rate = tokens * steps / elapsed
        on_cpu = self._devices[0].platform == "cpu"
        waited = min(self._spent["waiting"] / elapsed, 1.0)
        self._begin(step, now)
        self.trained += elapsed
        return {
            "tokens_per_second": rate,
            "step_seconds": elapsed / steps,
            "tflops_per_device": None if on_cpu else rate * self._flops / len(self._devices) / 1e12,
            "mfu": mfu(rate, self._flops, self._devices, self._dtype),
            "device_memory": device_memory(self._devices),
            "data_wait": waited,
            "devices": float(len(self._devices)),
        }


Report = Callable[[int, MetricsRow], None]
"""A function that takes each row of metrics.jsonl: the step, and the values measured at it."""


class MetricsLog:
    """A writer of `metrics.jsonl`, one object a line, flushed at once. On resume it drops the lines
    of steps to run again, and moves lines that cannot be read to `metrics_damaged.jsonl`.

    It is a context manager. The run is resumed after `first_step`. Where it is not `active` (on all
    processes but the first) it writes nothing. `sinks` get each row too. `report` is called with
    each before it is written, on every process, and may add to it. `say` takes a line where
    something was moved aside.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int = 0,
        active: bool = True,
        sinks: Sequence[Sink] = (),
        report: Report | None = None,
        say: Say = lambda line: None,
    ):
        self._file: IO[str] | None = None
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
            self._path = path
            self._file = self._begin_after(first_step, found.rows)

    def _begin_after(self, step: int, rows: Sequence[dict[str, Any]]) -> IO[str]:
        """Keep the rows up to a step, and open the file for those after it."""
        kept = [row for row in rows if row["step"] <= step]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        with writing(self._path):
            return self._path.open("a", encoding="utf-8")

    def go_back(self, step: int) -> None:
        """Drop the rows after a step that the run goes back to; a sink keeps them."""
        if self._file is not None:
            with writing(self._path):
                self._file.close()
            self._file = self._begin_after(step, _read_lines(self._path).rows)

    def write(self, step: int, **values: float | None) -> None:
        """Write one line with the step and the values measured at it; values that are None are left
        out.
        """
        known = {key: value for key, value in values.items() if value is not None}
        try:
            if self._report is not None:
                self._report(step, known)
        finally:  # what was measured is written, whatever a program's function says of it
            self._write(step, known)

    def _write(self, step: int, known: MetricsRow) -> None:
        if self._file is not None:
            with writing(self._path):
                self._file.write(json.dumps({"step": step, **known}) + "\n")
                self._file.flush()
        for sink in self._sinks:
            sink.write(step, known)

    def sync(self) -> None:
        """Wait until the lines have reached the disk, as the lines of saved steps must.

        Raises:
          UserError: the lines cannot be written.
        """
        if self._file is not None:
            with writing(self._path):
                self._file.flush()
                sync(self._path)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        failed = error is not None
        with ExitStack() as stack:  # the last of these first, and each of them whatever fails
            if self._file is not None:
                stack.callback(self._close_file, self._file, failed)
            for sink in reversed(self._sinks):
                stack.callback(sink.close, failed)

    def _close_file(self, file: IO[str], failed: bool) -> None:
        try:
            # closing writes what a full disk had left unwritten
            with writing(self._path), closing(file):
                self.sync()
        except UserError:
            if not failed:  # else the first error is the one to tell
                raise


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`; a line that cannot be read, or that a crash cut
    short, is left out.
    """
    return _read_lines(folder / METRICS).rows


METRICS = "metrics.jsonl"
_DAMAGED = "metrics_damaged.jsonl"


class _Lines(NamedTuple):
    """The rows of a file of metrics, in order, and the damaged lines, as they are."""

    rows: list[dict[str, Any]]
    damaged: list[bytes]


def _read_lines(path: Path) -> _Lines:
    found = _Lines([], [])
    with reading(path):
        if path.exists():
            content = path.read_bytes()
        else:
            content = b""
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
    """Parse a line of metrics; None where it is no row."""
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
    """Return whether a value is a number that a row may have: NaN is one, as in a run that
    diverged, and an integer of 400 digits is none.
    """
    return type(value) is float or (type(value) is int and abs(value) < 2**63)
