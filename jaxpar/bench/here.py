"""`jaxpar bench here` runs training steps on this machine, and rehearses the same compiled programs
for it: how well does a rehearsal rank steps of different models and meshes, and how far is it off?

The configs are small forms of presets, of several families, on one device and on several simulated
ones. What the machine does is measured in the same process, right before the steps, so that what
else runs on it slows both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
from jax.sharding import Mesh

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.errors import Say, UserError, suggest
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.machine import versions
from jaxpar.base.process.runtime import start
from jaxpar.bench.foresight.figures import spearman
from jaxpar.bench.measure import BenchRow, alternate, random_batch
from jaxpar.rehearse.targets import Target, target_here
from jaxpar.rehearse.timeline import simulate
from jaxpar.train.experiments import make_experiment
from jaxpar.train.step import init_state, make_train_step


class HereCase(NamedTuple):
    """A config whose step is small enough to run on any machine.

    Attributes:
      preset: the preset that it is a form of.
      changes: what differs from it, by dotted key.
    """

    preset: str
    changes: Mapping[str, Any]


_ONE = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}
_LLAMA = {
    "model.layers": 2,
    "model.head_dim": 32,
    "data.seq_len": 256,
    "mesh.platform": "cpu",
    "precision.compute": "float32",
}
CASES: dict[str, HereCase] = {
    "gpt2": HereCase("shakespeare_char_cpu", {}),
    "gpt2-wide": HereCase(
        "shakespeare_char_cpu", {"model.embed": 256, "model.mlp": 1024, "model.heads": 8}
    ),
    "gpt2-long": HereCase(
        "shakespeare_char_cpu",
        {"model.max_seq_len": 512, "data.seq_len": 512, "train.batch": 4},
    ),
    "gpt2-deep": HereCase("shakespeare_char_cpu", {"model.layers": 8}),
    "gpt2-adafactor": HereCase(
        "shakespeare_char_cpu", {"optimizer.name": "adafactor", "train.batch": 48}
    ),
    "gpt2-data2-fsdp2-tensor2": HereCase("tiny", {"train.batch": 16}),
    "gpt2-one": HereCase("tiny", {**_ONE, "train.batch": 8}),
    "gpt2-fsdp4": HereCase("tiny", {**_ONE, "mesh.fsdp": 4, "train.batch": 16}),
    "gpt2-tensor2": HereCase("tiny", {**_ONE, "mesh.tensor": 2, "train.batch": 8}),
    "gpt2-recomputed": HereCase(
        "tiny", {**_ONE, "mesh.data": 2, "memory.policy": "full", "train.batch": 32}
    ),
    "gpt2-bfloat16": HereCase("tiny", {**_ONE, "precision.compute": "bfloat16", "train.batch": 8}),
    "gpt2-stages": HereCase("tiny", {**_ONE, "mesh.stage": 2, "train.batch": 32}),
    "moe-fsdp2-expert2": HereCase(
        "tiny_moe", {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 1, "train.batch": 16}
    ),
    "bert": HereCase("tiny_bert", {}),
    "llama": HereCase(
        "llama32_1b",
        {
            **_LLAMA,
            "model.embed": 256,
            "model.heads": 8,
            "model.kv_heads": 4,
            "model.mlp": 768,
            "model.vocab_size": 8192,
            "train.batch": 4,
            "train.accumulation": 1,
            "mesh.fsdp": 1,
        },
    ),
    "llama-fsdp2-accumulated": HereCase(
        "llama32_1b",
        {
            **_LLAMA,
            "model.embed": 128,
            "model.heads": 4,
            "model.kv_heads": 2,
            "model.mlp": 384,
            "model.vocab_size": 2048,
            "train.batch": 8,
            "train.accumulation": 4,
            "mesh.fsdp": 2,
            "memory.policy": "none",
        },
    ),
}
"""The configs, by name."""
QUICK = ("gpt2-one", "gpt2-fsdp4", "gpt2-deep", "bert", "gpt2-long")
"""The configs of a quick board."""


class HereRow(TypedDict):
    """A step that was rehearsed and run."""

    name: str
    devices: int
    measured: float
    """The median seconds of a step."""
    predicted: float


class HereBoard(TypedDict):
    """The rows, and how well they agree."""

    versions: dict[str, str]
    machine: str
    rows: list[HereRow]
    rank_correlation: float | None
    """Spearman's; None for fewer than three rows."""
    median_error: float
    """The median of |predicted / measured - 1|."""


def bench_here(
    names: Sequence[str] = (), rounds: int = 15, say: Say = lambda line: None
) -> HereBoard:
    """Run training steps on this machine in turns, and rehearse them.

    Args:
      names: configs of `CASES`; none = all of them.
      rounds: the turns of each.
      say: is called with a line for each config as it is compiled, and for each measurement.

    Raises:
      UserError: there is no such config, or JAX has started with too few CPU devices.
    """
    for name in names:
        if name not in CASES:
            raise UserError(
                f"no config {name!r}{suggest(name, CASES)}: there are {', '.join(CASES)}"
            )
    configs = {name: case_config(name) for name in names or CASES}
    most = max(math.prod(_sizes(config)) for config in configs.values())
    start(MeshSpec(platform="cpu", data=most))
    steps: dict[str, _Step] = {}
    for number, (name, config) in enumerate(configs.items(), 1):
        say(f"{number}/{len(configs)}: compiling {name}")
        steps[name] = _compiled(config)
    targets = _targets([list(step.mesh.devices.flat) for step in steps.values()], say)
    say(f"running {len(steps)} steps in turns, {rounds} times")
    times = alternate({name: step.run for name, step in steps.items()}, rounds)
    rows: list[HereRow] = []
    for name, step in steps.items():
        mesh = step.mesh
        played = simulate(step.text, mesh, targets[mesh.size])
        rows.append(
            {
                "name": name,
                "devices": mesh.size,
                "measured": times[name].seconds,
                "predicted": played.seconds,
            }
        )
    return {
        "versions": versions(),
        "machine": targets[max(targets)].note,
        "rows": rows,
        "rank_correlation": spearman(
            [row["predicted"] for row in rows], [row["measured"] for row in rows]
        ),
        "median_error": statistics.median(
            abs(row["predicted"] / row["measured"] - 1) for row in rows
        ),
    }


def _targets(used: Sequence[list[jax.Device]], say: Say) -> dict[int, Target]:
    """Measure this machine now, with the most devices that are used, and calls and collectives of
    each number of devices, by that number.
    """
    lists = sorted(used, key=len, reverse=True)
    whole = target_here(lists[0], say, anew=True)
    targets = {whole.device_count: whole}
    for devices in lists:
        if len(devices) not in targets:
            targets[len(devices)] = target_here(devices, say, rates=whole.cpu)
    return targets


def case_config(name: str) -> Config:
    """Make the config of a case."""
    case = CASES[name]
    return override(load_config(case.preset), dict(case.changes))


def here_rows(board: HereBoard) -> list[BenchRow]:
    """Make the lines of a table that a person reads, the fastest step first."""
    return [
        {
            "config": row["name"],
            "devices": row["devices"],
            "measured, ms": 1e3 * row["measured"],
            "predicted, ms": 1e3 * row["predicted"],
            "predicted / measured": row["predicted"] / row["measured"],
        }
        for row in sorted(board["rows"], key=lambda row: row["measured"])
    ]


def _sizes(config: Config) -> list[int]:
    mesh = config.mesh
    return [mesh.data, mesh.fsdp, mesh.stage, mesh.context, mesh.tensor, mesh.expert]


class _Step(NamedTuple):
    """A compiled step, and a function that takes one on random tokens and returns its loss."""

    text: str
    mesh: Mesh
    run: Callable[[], jax.Array]


def _compiled(config: Config) -> _Step:
    """Compile the step of a config for devices of this machine."""
    experiment = make_experiment(config)
    shapes = (experiment.state, experiment.batch)
    program = make_train_step(experiment).trace(*shapes).lower().compile()
    batch = random_batch(config, experiment.plan)
    state = init_state(experiment)

    def run() -> jax.Array:
        nonlocal state
        state, metrics = program(state, batch)
        return metrics["loss"]

    return _Step(program.as_text() or "", experiment.plan.mesh, run)
