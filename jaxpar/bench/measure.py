"""Candidates timed in turns, so that a noisy machine is noisy for all: for `jaxpar bench` a
config's training step and the same step in PyTorch."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.base.config import Config
from jaxpar.base.errors import Say
from jaxpar.base.layout.plan import Plan
from jaxpar.bench.torch_step import OPTIMIZERS
from jaxpar.models.hf import hf_config
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.metrics import device_memory, mfu
from jaxpar.train.step import init_state, make_train_step

LEAST_SECONDS = 0.02
"""The seconds that calls are timed together for, at least, as a small kernel runs for less time
than its start takes.
"""

Cell = str | int | float | None
BenchRow = dict[str, Cell]
"""A line of a table, keyed by column."""


class Timing(NamedTuple):
    """The time of one call of a candidate, and its ratio to the first candidate in the same round;
    below 1 means faster than it. Both are medians over the rounds; `quartiles` are the ratio's."""

    seconds: float
    ratio: float
    quartiles: tuple[float, float]


def alternate(
    candidates: Mapping[str, Callable[[], object]], rounds: int, calls: int = 0
) -> dict[str, Timing]:
    """Time every candidate, one after the other, `rounds` times over; each is called once
    beforehand.

    The arrays that a call returns are waited for. A turn has `calls` calls; 0 = as many as take
    LEAST_SECONDS, at most 100.
    """
    for function in candidates.values():
        mean_seconds(function, 1)
    counts = [
        calls or int(np.clip(LEAST_SECONDS / mean_seconds(f, 1), 1, 100))
        for f in candidates.values()
    ]
    turns = list(zip(candidates.values(), counts, strict=True))
    # rounds x candidates
    seconds = np.array([[mean_seconds(*turn) for turn in turns] for _ in range(rounds)])
    quartiles = np.percentile(
        seconds / seconds[:, :1],
        (25, 50, 75),
        axis=0,
    )
    columns = zip(
        candidates,
        np.median(seconds, axis=0).tolist(),
        *quartiles.tolist(),
        strict=True,
    )
    return {
        name: Timing(median, middle, (low, high)) for name, median, low, middle, high in columns
    }


def mean_seconds(function: Callable[[], object], calls: int) -> float:
    """Measure the mean seconds of a call, over `calls` calls in a row; the arrays that the last one
    returns are waited for.
    """
    began = time.perf_counter()
    last = None
    for _ in range(calls):
        last = function()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / calls


def table(rows: Sequence[BenchRow]) -> str:
    """Write a Markdown table with every column that any row has; empty if there are no rows."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        head,
        ["---"] * len(head),
        *([_text(row.get(key)) for key in head] for row in rows),
    ]
    if head:
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return ""


def _text(value: Cell) -> str:
    if isinstance(value, float):
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.3g}"
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return value


def bench_step(
    experiment: Experiment,
    rounds: int = 15,
    steps: int = 10,
    beside_torch: bool = True,
    say: Say = lambda line: None,
) -> list[BenchRow]:
    """Time training steps of a config, and of `transformers` in PyTorch at the same shape and
    precision.

    Both do forward, backward, clipping by global norm and the optimizer's step on one batch of
    random tokens that is already in memory, and wait for the loss. PyTorch compiles its step on a
    GPU and runs it eagerly on a CPU. Its optimizer is the one of `torch.optim` with the config's
    name. Each takes `rounds` turns of `steps` steps.

    Args:
      experiment: the model, its plan, devices and optimizer.
      rounds: the turns of each side.
      steps: the steps of a turn.
      beside_torch: whether PyTorch is asked at all.
      say: is called with what there is to say: the ratio with its quartiles, or why PyTorch cannot
        run, as where it has no such optimizer; then ours is timed alone.

    Returns:
      A row for each of the two, with the milliseconds of a step.

    Raises:
      ValueError: the loss does not fall.
    """
    config = experiment.config
    devices = experiment.devices
    run = train_steps(experiment)
    tokens = experiment.tokens
    flops = experiment.model.flops_per_token(config.data.seq_len)
    first = run(1)
    candidates: dict[str, Callable[[], object]] = {"jaxpar": lambda: run(steps)}
    last: dict[str, BenchRow] = {}
    with contextlib.ExitStack() as stack:
        if beside_torch:
            try:
                require_torch_optimizer(experiment)
                theirs = stack.enter_context(torch_steps(config))
                by = str(theirs(1)["by"])
                candidates[by] = lambda: last.update({by: theirs(steps)})
            except ChildProcessError as missing:
                say(f"not beside PyTorch: {missing}")
        times = alternate(candidates, rounds, calls=1)
    peak = device_memory(devices)
    loss = run(1)
    if not loss < first:  # the loss must not be NaN either
        raise ValueError(f"the loss does not fall: {first} at first, {loss} at last")
    last["jaxpar"] = {"loss": loss, "peak, GiB": peak and peak / 2**30}
    rows: list[BenchRow] = []
    for by, timing in times.items():
        seconds = timing.seconds / steps
        used = mfu(tokens / seconds, flops, devices, config.precision.compute)
        row: BenchRow = {
            "by": by,
            "ms": 1e3 * seconds,
            "tokens/s": tokens / seconds,
            "MFU, %": used and 100 * used,
        }
        rows.append(row | last[by])
        if by != "jaxpar":
            low, high = (1 / ratio for ratio in reversed(timing.quartiles))
            turns = f"quartiles {low:.3f} to {high:.3f}, {rounds} rounds of {steps} steps"
            say(f"jaxpar / torch {1 / timing.ratio:.3f} ({turns})")
    return rows


def train_steps(experiment: Experiment) -> Callable[[int], float]:
    """Make `run(n)`, which takes n training steps on the same random tokens and returns the last
    loss, which it waits for.
    """
    batch = random_batch(experiment.config, experiment.plan)
    step = make_train_step(experiment)
    state = init_state(experiment)

    def run(n: int) -> float:
        nonlocal state
        loss: jax.Array | float = math.nan
        for _ in range(n):
            state, metrics = step(state, batch)
            loss = metrics["loss"]
        return float(jax.device_get(loss))

    return run


def random_batch(config: Config, plan: Plan) -> dict[str, jax.Array]:
    """Draw random tokens of a config's shape, the same at every call."""
    shape = (config.train.batch, config.data.seq_len + 1)
    ids = np.random.default_rng(0).integers(
        0,
        config.model.vocab_size,
        shape,
        dtype=np.int32,
    )
    return put_batch(
        {"tokens": ids[:, :-1], "labels": ids[:, 1:]},
        plan,
    )


def require_torch_optimizer(experiment: Experiment) -> None:
    """Ask that PyTorch has the optimizer of an experiment.

    Raises:
      ChildProcessError: it has not, or a program gave the optimizer.
    """
    if experiment.own_optimizer is not None:
        raise ChildProcessError("the optimizer that was given has no counterpart there")
    optimizer = experiment.config.optimizer
    if optimizer.name not in OPTIMIZERS:
        raise ChildProcessError(
            f"torch.optim has no optimizer.name={optimizer.name}: try {', '.join(OPTIMIZERS)}"
        )
    if optimizer.name == "adafactor" and optimizer.adafactor.momentum:
        raise ChildProcessError(
            f"torch.optim.Adafactor has no momentum, and optimizer.adafactor.momentum="
            f"{optimizer.adafactor.momentum:g}: try 0"
        )


def torch_steps(config: Config) -> contextlib.AbstractContextManager[Callable[[int], BenchRow]]:
    """Make `run(n)`, which takes n steps in PyTorch (`torch_process`) and returns what ran them
    (`by`), their loss and their memory.
    """
    vocab = config.model.vocab_size
    multiple = config.model.vocab_multiple
    asked = {
        "model": hf_config(config.model) | {"vocab_size": -(-vocab // multiple) * multiple},
        "vocab_size": vocab,
        "dropout": config.model.dropout,
        "train": vars(config.train),
        "optimizer": config.optimizer.name,
        "settings": vars(config.optimizer.settings),
        "seq_len": config.data.seq_len,
        "compute": config.precision.compute,
        "platform": jax.default_backend(),
    }
    return torch_process("torch_step.py", asked)


@contextlib.contextmanager
def torch_process(
    script: str,
    asked: Mapping[str, Any],
) -> Iterator[Callable[[int], BenchRow]]:
    """Run a script of this folder beside, and yield a function that sends it a number and returns
    its answer.

    It has a process of its own, since the CUDA libraries that PyTorch brings are not those of jax.

    Args:
      script: the file, which answers each line of input by a line of JSON.
      asked: what it is told first, as JSON on its command line.

    Raises:
      ChildProcessError: from the function, where torch or transformers is missing or fails.
    """
    words = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name(script)),
        json.dumps(asked),
    ]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout

    def run(number: int) -> BenchRow:
        with contextlib.suppress(BrokenPipeError):
            print(number, file=process.stdin, flush=True)
        said = json.loads(process.stdout.readline() or '{"missing": "its process ended"}')  # pyright: ignore[reportOptionalMemberAccess]
        if "missing" in said:
            raise ChildProcessError(said["missing"])
        return said

    try:
        yield run
    finally:
        process.kill()
        process.communicate()
