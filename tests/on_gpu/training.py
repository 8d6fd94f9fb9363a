"""Trainings by `jaxpar train` on a GPU: what the loop adds to a step, what the guard costs, and
whether a run that is killed and goes on ends as the undisturbed one, to the bit.

These need what a training needs (Orbax, Grain), and are refused where it is not there.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from on_gpu.stopwatch import ready_step, time_once

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.bench.measure import BenchRow

Say = Callable[[str], None]
NEEDS = ("orbax.checkpoint", "grain", "filelock", "matplotlib", "xxhash")
"""What a training imports and `make gpu` does not ask for."""
PROGRAM = ("-P", "-m", "jaxpar.cli.main")
"""Of the jaxpar that this process has, and not of the folder that it was started in."""
FAULTS = Path(__file__).parents[1] / "faults"

ONE_GPU = ["--mesh.data=1", "--mesh.fsdp=1", "--mesh.tensor=1", "--data.max-bytes=4000000"]
GPT2 = [
    *ONE_GPU,
    "--model.layers=12",
    "--model.embed=768",
    "--model.heads=12",
    "--model.mlp=3072",
    "--model.vocab-size=50257",
    "--model.max-seq-len=1024",
    "--model.scan-layers=true",
    "--data.seq-len=1024",
    "--memory.policy=attention_out",
    "--precision.compute=bfloat16",
    "--train.batch=32",
    "--train.eval-every=0",
    "--train.final-eval-batches=1",
    "--metrics.log-every=10",
]
"""GPT-2 124M, with bytes for tokens."""
FOUR_LAYERS = [
    *ONE_GPU,
    "--model.layers=4",
    "--model.embed=512",
    "--model.heads=8",
    "--model.mlp=2048",
    "--model.max-seq-len=512",
    "--data.seq-len=512",
    "--precision.compute=bfloat16",
    "--train.batch=16",
    "--train.eval-every=0",
    "--train.final-eval-batches=1",
    "--checkpoint.every=20",
    "--metrics.log-every=1",
]
TINY = [*ONE_GPU, "--train.final-eval-batches=1", "--train.eval-every=0", "--metrics.log-every=1"]


def _faults() -> Any:
    """The module that the loops of `tests/faults` share.

    Raises:
      UserError: something that a training imports is not there.
    """
    absent = [name for name in NEEDS if not _is_there(name)]
    if absent:
        raise UserError(f"a training needs {', '.join(absent)} in this Python")
    if str(FAULTS) not in sys.path:
        sys.path.append(str(FAULTS))
    platforms = os.environ.get("JAX_PLATFORMS")
    import trainings

    # the loops read on a CPU, and say so to what they start
    if platforms is None:
        os.environ.pop("JAX_PLATFORMS", None)
    return trainings


def _is_there(name: str) -> bool:
    """Whether a module can be imported; one whose parent is absent cannot."""
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


def _platform(small: bool) -> str:
    return f"--mesh.platform={'cpu' if small else 'gpu'}"


def guard_rows(config: Config, turns: int, steps: int) -> list[BenchRow]:
    """The time of a step whose numbers are read and judged each time, beside one's without."""
    _faults()
    from guard_cost import measure_guard

    seconds = measure_guard(config, turns, steps, every=10)
    rows: list[BenchRow] = []
    for part, times in seconds.items():
        ratios = [one / other for one, other in zip(times, seconds["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "guard": part,
                "ms a step": 1e3 * statistics.median(times),
                "of none": middle,
                "quartiles": f"{low:.3f} to {high:.3f}",
            }
        )
    return rows


def loop_rows(small: bool, out: Path, say: Say) -> list[BenchRow]:
    """A training of GPT-2 124M as a user starts it, with three saves in it, twice: the second
    process finds its program compiled.
    """
    trainings = _faults()
    from jaxpar.train.metrics import read_metrics

    rows: list[BenchRow] = []
    flags = [*(TINY if small else GPT2), _platform(small)]
    steps = 12 if small else 100
    with tempfile.TemporaryDirectory() as folder:
        for turn in ("first", "again"):
            run = Path(folder) / turn
            began = time.perf_counter()
            output = _train(
                trainings,
                run,
                [*flags, f"--train.steps={steps}", f"--checkpoint.every={steps // 3}"],
            )
            wall = time.perf_counter() - began
            steady = [row for row in read_metrics(run) if "tokens_per_second" in row][1:]
            last = [row for row in read_metrics(run) if "wall_seconds" in row][-1]
            rows.append(
                {
                    "training": turn,
                    "ms a step": 1e3 * statistics.median(row["step_seconds"] for row in steady),
                    "tokens/s": statistics.median(row["tokens_per_second"] for row in steady),
                    "saving, s": last.get("badput_saving_seconds", 0.0),
                    "start-up, s": last.get("badput_startup_seconds", 0.0),
                    "compiling, s": last.get("badput_compiling_seconds", 0.0),
                    "whole, s": wall,
                }
            )
            said = [line for line in output.splitlines() if "goodput" in line]
            say(f"{turn}: {said[-1] if said else 'no line of goodput'}")
    return rows


def _train(trainings: Any, run: Path, flags: Sequence[str]) -> str:
    """Run a training to its end; return what it printed.

    Raises:
      RuntimeError: it ended by another exit code than 0.
    """
    (process,) = trainings.start(run, flags, program=PROGRAM, environment=os.environ)
    output, said = process.communicate(timeout=180)
    if process.returncode:
        print(said, file=sys.stderr)
        lines = said.strip().splitlines() or ["nothing was said"]
        raise RuntimeError(f"exit code {process.returncode}: {lines[-1]}")
    return output + said


def repeated_rows(config: Config, steps: int, say: Say) -> list[BenchRow]:
    """Steps from one state on one batch, twice in this process: whether they end in the same bits,
    and how long one takes.
    """
    ends: list[Any] = []
    seconds = 0.0
    for _ in range(2):
        step = ready_step(config)
        times = [time_once(step.run) for _ in range(steps)]
        ends.append(jax.device_get(step.state()))
        seconds = statistics.median(times)
    unlike = _unlike(*ends)
    if unlike:
        say(f"arrays that differ: {len(unlike)} of {len(jax.tree.leaves(ends[0]))}, as {unlike[0]}")
    return [
        {
            "kernel": config.kernels.attention,
            "ms a step": 1e3 * seconds,
            "the same again": "differs" if unlike else "equal to the bit",
        }
    ]


def _unlike(found: Any, wanted: Any) -> list[str]:
    """The names of the arrays of two states that differ in any bit."""
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return [
        jax.tree_util.keystr(path)
        for (path, leaf), other in zip(leaves, jax.tree.leaves(wanted), strict=True)
        if np.asarray(leaf).tobytes() != np.asarray(other).tobytes()
    ]


def killed_rows(kernel: str, small: bool, out: Path, say: Say) -> list[BenchRow]:
    """A training that runs undisturbed, the same again, and the same with SIGKILLs, as
    `tests/faults/test_kills.py` has it on a CPU.
    """
    trainings = _faults()
    steps = 30 if small else 150
    flags = [*(TINY if small else FOUR_LAYERS), _platform(small), f"--train.steps={steps}"]
    flags += ["--checkpoint.every=10"] if small else [f"--kernels.attention={kernel}"]
    draw = random.Random(0)
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        _train(trainings, whole, flags)
        wanted = trainings.end_of(whole)
        for name, kills in (("the same again", 0), ("killed", 1 if small else 3)):
            run = Path(folder) / name.replace(" ", "_")
            parts = [steps * (index + draw.random()) / (kills + 1) for index in range(kills)]
            killed_at = [_kill(trainings, run, flags, round(part)) for part in parts]
            _train(trainings, run, flags)
            differ = trainings.differences(trainings.end_of(run), wanted)
            rows.append(
                {
                    "run": name,
                    "kernel": kernel,
                    "killed at steps": ", ".join(map(str, killed_at)),
                    "end": "differs" if differ else "equal to the bit",
                }
            )
            for line in differ:
                say(f"{name}: {line[:100]} ...")
    return rows


def _kill(trainings: Any, run: Path, flags: Sequence[str], step: int) -> int:
    """Start a training, and kill it after it has told of a step; return the last that it told."""
    from jaxpar.train.metrics import read_metrics

    (process,) = trainings.start(
        run,
        flags,
        program=PROGRAM,
        environment=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 120
    last = 0
    while last < step and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
        last = max((row["step"] for row in read_metrics(run)), default=0)
    process.kill()
    process.communicate()
    return last
