"""A training step compiled and ready to be timed, and its instructions timed by JAX's own
profiler.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.base.config import Config
from jaxpar.bench.measure import random_batch
from jaxpar.models import Model
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.state import TrainState
from jaxpar.train.step import init_state, make_train_step

Instruction = tuple[str, str]
"""A (module, name) pair, as the profiler reports it: `("jit_step", "dot.3")`."""


class Ready(NamedTuple):
    """A compiled training step, warm.

    Attributes:
      text: the compiled program.
      mesh: its one device.
      run: takes one step and waits for it.
      seconds: the rough seconds of a step.
      stats: the result of `compiled.memory_analysis()`.
      state: returns the state that the last step has made.
    """

    text: str
    mesh: Mesh
    run: Callable[[], None]
    seconds: float
    stats: Any
    state: Callable[[], TrainState]


def ready_step(config: Config) -> Ready:
    """The training step of a config on one device with random tokens; each run continues the
    last.
    """
    plan = make_plan(config, jax.devices()[:1])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state = init_state(experiment)
    batch = random_batch(config, plan)
    compiled = make_train_step(experiment).lower(state, batch).compile()

    def run() -> None:
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)

    run()
    return Ready(
        text=compiled.as_text() or "",
        mesh=plan.mesh,
        run=run,
        seconds=time_once(run),
        stats=compiled.memory_analysis(),
        state=lambda: state,
    )


def time_once(action: Callable[[], object]) -> float:
    """The seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def durations(
    action: Callable[[], object], keep: Path | None = None
) -> dict[Instruction, list[float]]:
    """Profile an action: the seconds of every execution of each instruction in it (on a GPU, of
    each of its kernels).

    Args:
      action: the function that is profiled.
      keep: a folder for the profile, which TensorBoard and Perfetto can read; None = it is not
        kept.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with contextlib.nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(str(folder), profiler_options=options):
            action()
        file = max(
            Path(folder).rglob("*.xplane.pb"),
            key=lambda file: file.stat().st_mtime,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the bindings warn on Python 3.13
            return _durations(jax.profiler.ProfileData.from_file(str(file)))


def _durations(profile: jax.profiler.ProfileData) -> dict[Instruction, list[float]]:
    """Read the planes of devices if anything runs in them: the host's events then only start the
    devices' kernels.

    A compiler that is loaded for absent hardware (libtpu) also has a plane, but nothing runs in it.
    """
    planes = list(profile.planes)
    return _of_planes(
        [plane for plane in planes if plane.name.startswith("/device:")]
    ) or _of_planes(planes)


def _of_planes(planes: Sequence[jax.profiler.ProfilePlane]) -> dict[Instruction, list[float]]:
    """Read some planes; where XLA:CPU hands an instruction to other threads, the event `end: NAME`
    marks its end.
    """
    started = []
    ends = {}
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
