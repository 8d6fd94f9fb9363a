"""Seconds of each task of a compiled program, from JAX's own profiler."""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.stages import Compiled

from jaxpar.hlo.read import read_program
from jaxpar.hlo.tasks import Program, Task, walk

Instruction = tuple[str, str]
"""(module, name) as the profiler says them: `("jit_step", "dot.3")`."""

State, Given = TypeVar("State"), TypeVar("Given")
"""Pytrees of arrays."""


class Ready(NamedTuple):
    """A compiled program and its tasks."""

    program: Program
    tasks: dict[Instruction, Task]
    run: Callable[[], None]
    """One execution, waited for."""
    seconds: float
    """Of an execution, roughly."""
    stats: Any
    """`compiled.memory_analysis()`, whose type jaxlib does not give away."""


def warm(compiled: Compiled, start: Callable[[], object]) -> Ready:
    """A compiled program that `start` starts, run twice; the arrays that `start` returns are waited for."""
    text = compiled.as_text() or ""
    module = text.removeprefix("HloModule ").partition(",")[0]
    program = read_program(text)
    tasks = {(module, task.name): task for task, _ in walk(program.nodes)}

    def run() -> None:
        jax.block_until_ready(start())

    run()
    return Ready(program, tasks, run, time_once(run), compiled.memory_analysis())


def ready_step(step: Callable[[State, Given], tuple[State, Any]], state: State, given: Given, name: str) -> Ready:
    """A training step `(state, given) -> (state, results)` as a module of this name; a run goes on from the last."""

    def named(state: State, given: Given) -> tuple[State, Any]:
        return step(state, given)

    named.__name__ = name
    compiled = jax.jit(named, donate_argnums=0).lower(state, given).compile()

    def start() -> object:
        nonlocal state
        state, results = compiled(state, given)
        return results

    return warm(compiled, start)


def time_once(action: Callable[[], object]) -> float:
    """Seconds an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def fastest(ready: Sequence[Ready], each: float) -> dict[Instruction, float]:
    """Seconds of the fastest execution of every task, each program run for about `each` seconds, twice at least."""

    def run_all() -> None:
        for item in ready:
            for _ in range(int(np.clip(each / item.seconds, 2, 20))):
                item.run()

    return {name: min(times) for name, times in durations(run_all).items()}


def durations(action: Callable[[], object], keep: Path | None = None) -> dict[Instruction, list[float]]:
    """Seconds of every execution of every instruction that runs in an action, on a GPU of each of its kernels.

    Args:
      action: what is profiled.
      keep: a folder for the profile, which TensorBoard and Perfetto read; None = it is not kept.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with contextlib.nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(str(folder), profiler_options=options):
            action()
        file = max(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the bindings, on Python 3.13
            return _durations(jax.profiler.ProfileData.from_file(str(file)))


def _durations(profile: jax.profiler.ProfileData) -> dict[Instruction, list[float]]:
    """Where a device has a plane of its own, the host's events of the same names are only the starts of its kernels.

    A compiler that is loaded for absent hardware (libtpu) has a plane too, in which nothing runs.
    """
    planes = list(profile.planes)
    return _of_planes([plane for plane in planes if plane.name.startswith("/device:")]) or _of_planes(planes)


def _of_planes(planes: Sequence[jax.profiler.ProfilePlane]) -> dict[Instruction, list[float]]:
    """An instruction that XLA:CPU hands to other threads is over with the event `end: NAME`, tied to it by a number."""
    started, ends = [], {}
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        if "hlo_op" in stats:
            started.append((event.start_ns, event.start_ns + event.duration_ns, stats))
        elif event.name.startswith("end: ") and "_c" in stats:
            ends[stats["_c"]] = event.start_ns
    found: dict[Instruction, list[float]] = defaultdict(list)
    for start, end, stats in started:
        over = max(end, ends.get(stats.get("_p"), end))
        found[str(stats.get("hlo_module")), str(stats["hlo_op"])].append(1e-9 * (over - start))
    return found
