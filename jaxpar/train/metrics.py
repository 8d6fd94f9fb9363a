"""Measures a run's throughput, MFU and device memory, and writes the file of its metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax

from jaxpar.base.hardware import peak_flops
from jaxpar.train.sinks import Sink


def mfu(tokens_per_second: float, flops_per_token: float, devices: list[jax.Device], dtype: str) -> float | None:
    """Return the model FLOPs utilisation in [0, 1], or None where the peak is not known, and always on CPU."""
    peak = None if devices[0].platform == "cpu" else peak_flops(devices[0].device_kind, dtype)
    return tokens_per_second * flops_per_token / (peak * len(devices)) if peak else None


def device_memory(devices: list[jax.Device]) -> int | None:
    """Return the largest peak of bytes in use over this process's devices; None if the backend does not say (CPU)."""
    stats = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    peaks = [entry["peak_bytes_in_use"] for entry in stats if entry and "peak_bytes_in_use" in entry]
    return max(peaks, default=None)


class Meter:
    """Measures the speed of the steps after `step` by the clock, without the time spent aside from training.

    `flops_per_token` is `Model.flops_per_token`, and `dtype` is that of the matmuls.
    """

    def __init__(self, step: int, flops_per_token: float, devices: list[jax.Device], dtype: str):
        self._flops, self._devices, self._dtype = flops_per_token, devices, dtype
        self._step, self._time, self._spent = step, time.perf_counter(), dict.fromkeys(("waiting", "aside"), 0.0)
        self.trained = 0.0
        """The seconds that all steps took until the last reading."""

    @contextmanager
    def timed(self, what: Literal["waiting", "aside"]) -> Iterator[None]:
        """Count the time inside as waiting for data, or as spent aside from training (an evaluation, a save)."""
        began = time.perf_counter()
        yield
        self._spent[what] += time.perf_counter() - began

    def read(self, step: int, tokens: float) -> dict[str, float | None]:
        """Return the speed since the last reading, with `tokens` in each step; what a device does not say is None."""
        now = time.perf_counter()
        elapsed, steps = max(now - self._time - self._spent["aside"], 1e-9), step - self._step
        rate, on_cpu = tokens * steps / elapsed, self._devices[0].platform == "cpu"
        waited = min(self._spent["waiting"] / elapsed, 1.0)
        self._step, self._time, self._spent = step, now, dict.fromkeys(("waiting", "aside"), 0.0)
        self.trained += elapsed
        return {
            "tokens_per_second": rate,
            "step_seconds": elapsed / steps,
            "tflops_per_device": None if on_cpu else rate * self._flops / len(self._devices) / 1e12,
            "mfu": mfu(rate, self._flops, self._devices, self._dtype),
            "device_memory": device_memory(self._devices),
            "data_wait": waited,
        }


Report = Callable[[int, dict[str, float]], None]
"""A function that takes each row of metrics.jsonl: the step, and what was measured at it."""


class MetricsLog:
    """Writes `metrics.jsonl`, one object a line, flushed at once. On resume it drops the lines of steps to run again.

    It is a context manager. The run goes on after `first_step`. Where it is not `active` (on all processes but the
    first) it writes nothing. `sinks` get each row too, and so does `report`, on every process.
    """

    def __init__(
        self, folder: Path, first_step: int = 0, active: bool = True, sinks: Sequence[Sink] = (),
        report: Report | None = None,
    ):  # fmt: skip
        self._file, self._sinks, self._report = None, sinks, report
        if active:
            path = folder / "metrics.jsonl"
            kept = [row for row in read_metrics(folder) if row["step"] <= first_step]
            path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float | None) -> None:
        """Write one line with the step and what was measured at it; values that are None are left out."""
        known = {key: value for key, value in values.items() if value is not None}
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **known}) + "\n")
            self._file.flush()
        for sink in self._sinks:
            sink.write(step, known)
        if self._report is not None:
            self._report(step, known)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            sink.close(error is not None)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`; a last line that a crash cut short is left out."""
    path = folder / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
