"""Small training steps, traced and compiled, and what their collectives send: shared by tests of
whole programs.

"Sent" is what one device sends in a step by a bandwidth-optimal algorithm, as
`Collective.sent_bytes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxpar.base.config import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
    override,
)
from jaxpar.base.layout.mesh import MeshSpec, devices_needed
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.models import Model
from jaxpar.rehearse.report.collectives import axes_of, sent_bytes
from jaxpar.rehearse.requested_collectives import Requested, requested_collectives
from jaxpar.rehearse.targets import load_target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.step import make_train_step, step_shapes

Sent = dict[tuple[str, frozenset[str]], float]


def config_of(
    family: str,
    remat: str = "none",
    scan: bool = True,
    accumulation: int = 1,
    compute: str = "float32",
    embed: int = 64,
    **mesh: int,
) -> Config:
    """Two layers, each size its own."""
    kv = {"kv_heads": 2} if family == "llama" else {}
    model = ModelConfig(
        family,
        vocab_size=500,
        vocab_multiple=128,
        layers=2,
        embed=embed,
        heads=4,
        head_dim=32,
        mlp=256,
        max_seq_len=64,
        scan_layers=scan,
        tied_head=family == "gpt2",
        **kv,
    )
    return Config(
        model=model,
        data=DataConfig(seq_len=64),
        train=TrainConfig(batch=16, accumulation=accumulation),
        mesh=MeshSpec(**mesh),
        memory=MemoryConfig(policy=remat),  # pyright: ignore[reportArgumentType]
        precision=PrecisionConfig(compute=compute),  # pyright: ignore[reportArgumentType]
    )


def staged(config: Config, name: str, microbatches: int, **more: Any) -> Config:
    """With a pipeline of 4 layers that keeps a stage's input, two sequences a microbatch and shard;
    `more` are other values: `model_layers=5`."""
    values = {"pipeline.schedule": name, "pipeline.microbatches": microbatches, "model.layers": 4}
    values["pipeline.stash"] = "stage"
    values["train.batch"] = (
        2 * microbatches * config.mesh.data * config.mesh.fsdp * config.mesh.expert
    )
    return override(
        config, values | {key.replace("_", ".", 1): value for key, value in more.items()}
    )


def traced(
    config: Config, devices: list[jax.Device]
) -> tuple[Any, list[Requested], dict[str, int]]:
    """The traced step, what it asks for, and the mesh."""
    plan = make_plan(config, devices)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    step = make_train_step(experiment).trace(*step_shapes(experiment))
    said: list[str] = []
    found = requested_collectives(step.jaxpr, plan.mesh, said.append)
    allowed = {
        f"{tick}_tick: of 2 branches the one that sends most is counted"
        for tick in ("forward", "backward")
    }
    assert set(said) <= (allowed if plan.size("stage") > 1 else set())
    return step, found, dict(plan.mesh.shape)


def asked_here(config: Config) -> tuple[list[Requested], dict[str, int]]:
    _, found, mesh = traced(
        config,
        jax.devices()[: devices_needed(config.mesh)],
    )
    return found, mesh


def sent(found: Iterable[Requested], mesh: Mapping[str, int]) -> Sent:
    total: Sent = defaultdict(float)
    for one in found:
        total[one.kind, one.axes] += sent_bytes(one, mesh) * one.count
    return total


def over(kind: str, *axes: str) -> tuple[str, frozenset[str]]:
    return kind, frozenset(axes)


FAST = {"cpu": {"xla_backend_optimization_level": "0"}}  # of machine code: the HLO is the same


def compiled(config: Config, target: str = "") -> tuple[Sent, Sent]:
    """What the plan asks for, and what the compiled program sends."""
    platform = load_target(target).platform if target else "cpu"
    if target:
        devices = load_target(target).devices()
    else:
        devices = jax.devices()[: devices_needed(config.mesh)]
    step, found, mesh = traced(config, devices)
    text = (
        step.lower(lowering_platforms=(platform,))
        .compile(compiler_options=FAST.get(platform))
        .as_text()
    )
    made: Sent = defaultdict(float)
    for task, count in walk(read_program(text).nodes):
        if task.collective:
            key = task.collective.kind, frozenset(axes_of(task.collective, mesh))
            made[key] += task.collective.sent_bytes * count
    if platform == "cpu":  # XLA:CPU sends bfloat16 arrays as float32
        found = [
            replace(one, bytes=2 * one.bytes) if one.dtype == "bfloat16" else one for one in found
        ]
    return sent(found, mesh), made
