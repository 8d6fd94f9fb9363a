"""JAX's own profiler measures the seconds of each task of a compiled program."""

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
"""A (module, name) pair, as the profiler reports it: `("jit_step", "dot.3")`."""

State, Given = TypeVar("State"), TypeVar("Given")
"""Pytrees of arrays."""


class Ready(NamedTuple):
    """A compiled program that is ready to be timed, and its tasks."""

    program: Program
    tasks: dict[Instruction, Task]
    run: Callable[[], None]
    """Runs the program once and waits for it."""
    seconds: float
    """The rough seconds of one execution."""
    stats: Any
    """The result of `compiled.memory_analysis()`, whose type jaxlib does not make public."""


def warm(compiled: Compiled, start: Callable[[], object]) -> Ready:
    """Run a compiled program twice, so that it is warm; `start` starts it and returns the arrays to wait for."""
    text = compiled.as_text() or ""
    module = text.removeprefix("HloModule ").partition(",")[0]
    program = read_program(text)
    tasks = {(module, task.name): task for task, _ in walk(program.nodes)}

    def run() -> None:
        jax.block_until_ready(start())

    run()
    return Ready(program, tasks, run, time_once(run), compiled.memory_analysis())


def ready_step(step: Callable[[State, Given], tuple[State, Any]], state: State, given: Given, name: str) -> Ready:
    """Compile a training step `(state, given) -> (state, results)` under this name; each run continues the last."""

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
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def fastest(ready: Sequence[Ready], each: float) -> dict[Instruction, float]:
    """Return the fastest time of every task, in seconds; each program runs for about `each` seconds, at least twice."""

    def run_all() -> None:
        for item in ready:
            for _ in range(int(np.clip(each / item.seconds, 2, 20))):
                item.run()

    return {name: min(times) for name, times in durations(run_all).items()}


def durations(action: Callable[[], object], keep: Path | None = None) -> dict[Instruction, list[float]]:
    """Profile an action: the seconds of every execution of each instruction in it (on a GPU, of each of its kernels).

    Args:
      action: the function that is profiled.
      keep: a folder for the profile, which TensorBoard and Perfetto can read; None = it is not kept.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with contextlib.nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(str(folder), profiler_options=options):
            action()
        file = max(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the bindings warn on Python 3.13
            return _durations(jax.profiler.ProfileData.from_file(str(file)))


def _durations(profile: jax.profiler.ProfileData) -> dict[Instruction, list[float]]:
    """Read the planes of devices if anything runs in them: the host's events then only start the devices' kernels.

    A compiler that is loaded for absent hardware (libtpu) also has a plane, but nothing runs in it.
    """
    planes = list(profile.planes)
    return _of_planes([plane for plane in planes if plane.name.startswith("/device:")]) or _of_planes(planes)


def _of_planes(planes: Sequence[jax.profiler.ProfilePlane]) -> dict[Instruction, list[float]]:
    """Read some planes; where XLA:CPU hands an instruction to other threads, the event `end: NAME` marks its end."""
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
