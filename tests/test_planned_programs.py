"""The plan's collectives of whole training steps: by closed form, and beside what three compilers make of them.

In the closed forms: B batch, S sequence, D embed, L layers, V vocab. "Sent" is what one device sends in a step by a
bandwidth-optimal algorithm, as `Collective.sent_bytes`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import pytest

from jaxpar.config import Config, DataConfig, MemoryConfig, ModelConfig, PrecisionConfig, TrainConfig, load_config
from jaxpar.hlo.read import read_program
from jaxpar.hlo.tasks import walk
from jaxpar.mesh import MeshSpec, devices_needed
from jaxpar.models import Model
from jaxpar.planned import Planned, planned
from jaxpar.rehearsal.collectives import axes_of, in_float32, scope_of, sent_bytes
from jaxpar.step import make_plan, make_train_step, step_shapes
from jaxpar.targets import compilers, load_target, target_devices

needs_libtpu = pytest.mark.skipif("pip" in compilers()["tpu"], reason=compilers()["tpu"])
needs_cuda = pytest.mark.skipif("pip" in compilers()["cuda"], reason=compilers()["cuda"])

Sent = dict[tuple[str, frozenset[str]], float]


def config_of(
    family: str, remat: str = "none", scan: bool = True, accumulation: int = 1, compute: str = "float32",
    embed: int = 64, **mesh: int,
) -> Config:  # fmt: skip
    """Two layers, each size its own."""
    kv = {"kv_heads": 2} if family == "llama" else {}
    model = ModelConfig(
        family, vocab_size=500, vocab_multiple=128, layers=2, embed=embed, heads=4, head_dim=32, mlp=256,
        max_seq_len=64, scan_layers=scan, tied_head=family == "gpt2", **kv,
    )  # fmt: skip
    return Config(
        model=model, data=DataConfig(seq_len=64), train=TrainConfig(batch=16, accumulation=accumulation),
        mesh=MeshSpec(**mesh), memory=MemoryConfig(policy=remat),  # pyright: ignore[reportArgumentType]
        precision=PrecisionConfig(compute=compute),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def traced(config: Config, devices: list[jax.Device]) -> tuple[Any, list[Planned], dict[str, int]]:
    """The traced step, what it asks for, and the mesh."""
    plan, model = make_plan(config, devices), Model(config.model)
    step = make_train_step(model, config, plan).trace(*step_shapes(model, config, plan))
    said: list[str] = []
    found = planned(step.jaxpr, plan.mesh, said.append)
    assert said == []
    return step, found, dict(plan.mesh.shape)


def asked_here(config: Config) -> tuple[list[Planned], dict[str, int]]:
    _, found, mesh = traced(config, jax.devices()[: devices_needed(config.mesh)])
    return found, mesh


def sent(found: Iterable[Planned], mesh: Mapping[str, int]) -> Sent:
    total: Sent = defaultdict(float)
    for one in found:
        total[one.kind, one.axes] += sent_bytes(one, mesh) * one.count
    return total


def over(kind: str, *axes: str) -> tuple[str, frozenset[str]]:
    return kind, frozenset(axes)


# Closed form.


def matrices(config: Config) -> dict[str, float]:
    """Entries of the matrices of all blocks: of q and out, of k and v, and of the MLP."""
    model, size = config.model, float(config.model.layers * config.model.embed)
    wide, narrow = model.heads * model.head_dim, (model.kv_heads or model.heads) * model.head_dim
    gates = 2 if model.family == "llama" else 1
    return {"heads": size * 2 * wide, "kv_heads": size * 2 * narrow, "mlp": size * (gates + 1) * model.mlp}


def expected_of_blocks(config: Config) -> Sent:
    """What the blocks send.

    Weights are gathered over fsdp for the forward and for the backward (once for both where the blocks are not
    recomputed and stand one after another, and the compiler sees that the two are one), in the compute dtype; their
    gradients are scattered over fsdp and summed over data in float32. Along tensor the residual stream is gathered
    before attention and mlp and scattered after; backward likewise, and gathered once more for the weight gradient;
    recomputed blocks scatter again after attention (what comes after mlp no gradient needs).

    Matrices of heads or of kv heads that tensor does not divide are whole along it, and their gradients are summed over
    it too. Where it does not divide the heads, attention's linears move no activations.
    """
    mesh, train, model = config.mesh, config.train, config.model
    width = {"float32": 4, "bfloat16": 2}[config.precision.compute]
    fsdp, data, tensor = mesh.fsdp, mesh.data, mesh.tensor
    split = {
        "heads": model.heads % tensor == 0, "kv_heads": (model.kv_heads or model.heads) % tensor == 0, "mlp": True,
    }  # fmt: skip
    sizes = matrices(config)
    parts = sum(size / tensor for name, size in sizes.items() if split[name])
    wholes = sum(size for name, size in sizes.items() if not split[name])
    local, both = parts + wholes, data * tensor
    moves = 2 if split["heads"] else 1
    apart = config.memory.policy == "full" or model.scan_layers
    residual = train.batch / (data * fsdp) * config.data.seq_len * model.embed * width * model.layers
    along = residual * (tensor - 1) / tensor
    again = config.memory.policy == "full"
    return {
        over("all-gather", "fsdp"): (2 if apart else 1) * train.accumulation * local * width * (fsdp - 1) / fsdp,
        over("reduce-scatter", "fsdp"): train.accumulation * local * 4 * (fsdp - 1) / fsdp,
        over("all-reduce", "data"): train.accumulation * parts / fsdp * 4 * 2 * (data - 1) / data,
        over("all-reduce", *(("data",) if data > 1 else ()), "tensor"):
            train.accumulation * wholes / fsdp * 4 * 2 * (both - 1) / both,
        over("all-gather", "tensor"): (3 if apart else 2) * moves * along,
        over("reduce-scatter", "tensor"): (2 * moves + (again and moves == 2)) * along,
    }  # fmt: skip


BLOCKS = {
    "llama, fsdp": config_of("llama", fsdp=8),
    "llama, data": config_of("llama", data=8),
    "llama, tensor": config_of("llama", "full", tensor=2),
    "llama, fsdp x tensor": config_of("llama", fsdp=4, tensor=2),
    "llama, fsdp x tensor, remat": config_of("llama", "full", fsdp=4, tensor=2),
    "llama, fsdp x tensor, unrolled": config_of("llama", scan=False, fsdp=4, tensor=2),
    "llama, fsdp x tensor, unrolled, remat": config_of("llama", "full", scan=False, fsdp=4, tensor=2),
    "llama, data x fsdp x tensor, bfloat16": config_of("llama", "full", compute="bfloat16", data=2, fsdp=2, tensor=2),
    "llama, data x fsdp, accumulation, remat": config_of("llama", "full", accumulation=4, data=2, fsdp=2),
    "gpt2, data x fsdp": config_of("gpt2", data=2, fsdp=4),
    "gpt2, fsdp x tensor, unrolled, remat": config_of("gpt2", "full", scan=False, fsdp=2, tensor=4),
    "gpt2, data x tensor, accumulation": config_of("gpt2", accumulation=2, data=2, tensor=2),
    "llama, kv heads copied": config_of("llama", tensor=4),
    "llama, kv heads copied, data, unrolled, remat": config_of("llama", "full", scan=False, data=2, tensor=4),
    "llama, kv heads copied, fsdp, bfloat16": config_of("llama", compute="bfloat16", fsdp=2, tensor=4),
    "llama, attention over the sequence": config_of("llama", "full", tensor=8),
    "gpt2, attention over the sequence, unrolled": config_of("gpt2", scan=False, accumulation=2, tensor=8),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_the_blocks_send(name):
    config = BLOCKS[name]
    found, mesh = asked_here(config)
    of_blocks = sent([one for one in found if scope_of(one).split("/")[-2:-1] == ["block"]], mesh)
    expected = {key: size for key, size in expected_of_blocks(config).items() if size}
    assert set(of_blocks) == set(expected)
    for key, size in expected.items():
        assert of_blocks[key] == pytest.approx(size, rel=1e-9), key


def test_scan_and_unrolled_send_the_same_when_blocks_are_recomputed():
    for family in ("gpt2", "llama"):
        scan, unrolled = (asked_here(config_of(family, "full", scan, fsdp=4, tensor=2)) for scan in (True, False))
        assert sent(*scan) == sent(*unrolled)


def test_one_device_sends_nothing():
    assert asked_here(config_of("llama")) == ([], dict.fromkeys(asked_here(config_of("llama"))[1], 1))


def test_48_unrolled_layers_are_counted_in_seconds():
    config = load_config("gpt2_1558m")
    model = dataclasses.replace(config.model, scan_layers=False)
    memory = MemoryConfig(policy="full")
    config = dataclasses.replace(config, model=model, memory=memory, mesh=MeshSpec(fsdp=8))
    assert model.layers == 48
    plan, model = make_plan(config, jax.devices()), Model(config.model)
    step = make_train_step(model, config, plan).trace(*step_shapes(model, config, plan))
    began = time.process_time()
    found = planned(step.jaxpr, plan.mesh)
    assert time.process_time() - began < 3
    assert sum(one.count for one in found if one.kind == "reduce-scatter") >= 48 * 6 * config.train.accumulation


# As compiled.

FAST = {"cpu": {"xla_backend_optimization_level": "0"}}  # of machine code: the HLO is the same
OWN = 0.02
"""Share of all that is sent which XLA adds by itself: norms and biases, which no op of the plan moves."""

SCALARS = 100
"""Bytes sent for the sums of the loss; they too are sent after the last microbatch."""


def compiled(config: Config, target: str = "") -> tuple[Sent, Sent]:
    """What the plan asks for, and what the compiled program sends."""
    platform = load_target(target).platform if target else "cpu"
    devices = list(target_devices(load_target(target))) if target else jax.devices()[: devices_needed(config.mesh)]
    step, found, mesh = traced(config, devices)
    text = step.lower(lowering_platforms=(platform,)).compile(compiler_options=FAST.get(platform)).as_text()
    made: Sent = defaultdict(float)
    for task, count in walk(read_program(text).nodes):
        if task.collective:
            key = task.collective.kind, frozenset(axes_of(task.collective, mesh))
            made[key] += task.collective.sent_bytes * count
    return sent(in_float32(found) if platform == "cpu" else found, mesh), made


def assert_sent_as_asked(asked: Sent, made: Sent, saved: Mapping[Any, float] | None = None) -> None:
    """Each kind over the same axes; XLA's own within their share of the whole. `saved` is what it may leave out."""
    whole = sum(asked.values())
    assert whole > 0
    for key, size in asked.items():
        least = size - (saved or {}).get(key, 0.0) if size > SCALARS else 0.0
        assert least * (1 - 1e-9) <= made[key] <= size + OWN * whole, (key, size, made[key])
    assert sum(made.values()) <= (1 + OWN) * whole
    assert sum(size for key, size in made.items() if key not in asked) <= OWN * whole


def tables(config: Config) -> float:
    """Bytes of the gradients of what is looked up and of the head, on one device along tensor."""
    model = config.model
    rows = -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple
    return 4.0 * model.embed * 2 * rows / config.mesh.tensor + (4.0 * model.embed * model.max_seq_len)


def summed_later(config: Config, asked: Sent) -> Sent:
    """What XLA may save on sums of gradients: the two uses of a tied table are added before they are sent, and a sum
    over data that is only added up over microbatches is sent after the last."""
    mesh, tied = config.mesh, config.train.accumulation * tables(config) * config.model.tied_head
    scattered, summed = over("reduce-scatter", "fsdp"), over("all-reduce", "data")
    return {
        scattered: tied * (mesh.fsdp - 1) / mesh.fsdp,
        summed: tied / mesh.fsdp * 2 * (mesh.data - 1) / mesh.data
        + asked[summed] * (1 - 1 / config.train.accumulation),
    }


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama", "full", fsdp=4, tensor=2),
        config_of("gpt2", "full", compute="bfloat16", data=2, fsdp=2, tensor=2),
        config_of("gpt2", "full", data=8),
        config_of("llama", "full", data=2, tensor=4),
    ],
    ids=["llama, fsdp x tensor", "gpt2, data x fsdp x tensor, bfloat16 as float32", "gpt2, data", "kv heads copied"],
)
def test_a_step_sends_what_it_asks_for(config):
    assert_sent_as_asked(*compiled(config))


def test_a_step_here_gathers_once_what_every_microbatch_needs():
    """XLA:CPU moves gathers of the weights out of the loop over microbatches, and sends less than is asked for."""
    asked, made = compiled(config_of("gpt2", scan=False, accumulation=2, data=2, fsdp=4))
    gathers = over("all-gather", "fsdp")
    assert made[gathers] == pytest.approx(asked[gathers] / 2, rel=0.02)
    assert_sent_as_asked(asked, made, {gathers: asked[gathers] / 2})


# 512 wide: XLA:TPU all-reduces whole what would be scattered in pieces narrower than a tile's 128 lanes.
ABSENT_FAST = config_of("llama", "full", compute="bfloat16", embed=512, fsdp=4, tensor=2)
ABSENT = [
    ("llama, data x fsdp x tensor", config_of("llama", compute="bfloat16", embed=512, data=2, fsdp=2, tensor=2)),
    ("llama, unrolled, remat", config_of("llama", "full", False, compute="bfloat16", embed=512, fsdp=4, tensor=2)),
    ("llama, data x fsdp, accumulation", config_of("llama", "full", True, 2, "bfloat16", 512, data=2, fsdp=4)),
    ("gpt2, fsdp x tensor", config_of("gpt2", "full", compute="bfloat16", embed=512, fsdp=4, tensor=2)),
    ("gpt2, data x fsdp, unrolled, accumulation", config_of("gpt2", "none", False, 2, "bfloat16", 512, data=2, fsdp=4)),
    ("gpt2, data", config_of("gpt2", "full", compute="bfloat16", embed=512, data=8)),
]


def assert_compiles_as_asked(config: Config, target: str) -> None:
    asked, made = compiled(config, target)
    assert_sent_as_asked(asked, made, summed_later(config, asked))


@needs_libtpu
def test_a_step_for_absent_tpus_sends_what_it_asks_for():
    assert_compiles_as_asked(ABSENT_FAST, "v5e-8")


@needs_cuda
def test_a_step_for_absent_gpus_sends_what_it_asks_for():
    assert_compiles_as_asked(ABSENT_FAST, "h100x8")


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", dict(ABSENT))
@pytest.mark.parametrize("target", ["v5e-8", "v5p-8"])
def test_more_steps_for_absent_tpus_send_what_they_ask_for(name, target):
    assert_compiles_as_asked(dict(ABSENT)[name], target)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", dict(ABSENT))
def test_more_steps_for_absent_gpus_send_what_they_ask_for(name):
    assert_compiles_as_asked(dict(ABSENT)[name], "h100x8")
