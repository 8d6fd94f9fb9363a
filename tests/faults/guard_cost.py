"""What the guard costs beside none, in one process and in turns: `python tests/faults/guard_cost.py`.

Each turn runs some steps without a guard, then as many with each of its parts. Printed is the median
over the turns of the time of a part over the time of the same turn without, with the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpar.base.config import Config, TrainConfig, load_config, override
from jaxpar.base.process.runtime import start
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.guard import Guard
from jaxpar.train.guard.failures import StepNumbers
from jaxpar.train.guard.replicas import ReplicaCheck
from jaxpar.train.guard.watchdog import Watchdog
from jaxpar.train.step import init_state, make_train_step


class Steps:
    """A training that can be gone on with in several ways."""

    def __init__(self, config: Config):
        experiment = make_experiment(config)
        plan = experiment.plan
        self.several = plan.mesh.size > 1
        shape = (config.train.batch, config.data.seq_len + 1)
        ids = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
        step = make_train_step(Experiment(config, experiment.model, plan))
        self.batch = put_batch({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, plan)
        self.program = step.lower(experiment.state, experiment.batch).compile()
        self.state = init_state(Experiment(config, experiment.model, plan))
        self.replicas = ReplicaCheck(experiment.state, plan.mesh)
        self.number = 0

    def run(self, count: int, after: Callable[[StepNumbers], Any] | None) -> float:
        """Run steps as the loop does, one ahead of what is read; return the seconds of one."""
        began = time.perf_counter()
        before: dict[str, jax.Array] = {}
        told = None
        for _ in range(count):
            self.number += 1
            self.state, metrics = self.program(self.state, self.batch)
            jax.block_until_ready(before)
            if after is not None and told is not None:
                after(jax.device_get(told))
            before = metrics
            if after is not None:
                told = StepNumbers(
                    self.number, metrics["loss"], metrics["grad_norm"], metrics["overflows"]
                )
                for number in told[1:]:
                    number.copy_to_host_async()
        jax.block_until_ready(before)
        return (time.perf_counter() - began) / count


def measure_guard(config: Config, turns: int, steps: int, every: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each turn, by part of the guard; `none` is without any.

    Args:
      config: of the training. Copies are compared where several devices have some.
      turns: how often each part runs its steps.
      steps: of a part in a turn.
      every: steps from one comparison to the next.
    """
    training = Steps(config)
    guard = Guard(TrainConfig(on_nonfinite="skip", on_spike="rollback", spike_deviations=1e6))

    def compare(row: StepNumbers) -> None:
        if row.step % every == 0:
            assert not training.replicas.mismatches(training.state)

    parts: dict[str, Callable[[StepNumbers], Any] | None] = {
        "none": None,
        "each step read and judged": guard.judge,
    }
    if training.several:
        parts[f"copies compared every {every} steps"] = compare
    for after in parts.values():
        training.run(every + 1, after)  # which compiles what is to be compiled
    seconds = {name: list[float]() for name in parts}
    with Watchdog(1800.0) as watchdog:
        for _ in range(turns):
            for name, after in parts.items():
                seconds[name].append(training.run(steps, after))
                watchdog.beat()
    return seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    asked = parser.parse_args()
    config = override(
        load_config("tiny"),
        {"mesh.data": 2, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.platform": "cpu"},
    )
    start(config.mesh)
    seconds = measure_guard(config, asked.turns, asked.steps, asked.every)
    usual = statistics.median(seconds["none"])
    print(f"none: {1e3 * usual:.1f} ms a step, {asked.turns} turns of {asked.steps} steps")
    for name, times in seconds.items():
        ratios = [one / other for one, other in zip(times, seconds["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: {middle:.3f} of none ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
