"""The plan's collectives of whole training steps, beside what three compilers make of them.

By hand: tests/plan/test_communication.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import pytest
from tiers import needs_cuda, needs_libtpu, some
from traced_steps import Sent, asked_here, compiled, config_of, over, sent, staged

from jaxpar.base.config import Config, MemoryConfig, load_config
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.plan import Overlap
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.models import Model
from jaxpar.rehearse.requested_collectives import requested_collectives
from jaxpar.rehearse.targets import load_target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.step import make_train_step, step_shapes


@pytest.mark.slow
def test_scan_and_unrolled_send_the_same_when_blocks_are_recomputed():
    for family in ("gpt2", "llama"):
        scan, unrolled = (
            asked_here(config_of(family, "full", scan, fsdp=4, tensor=2)) for scan in (True, False)
        )
        assert sent(*scan) == sent(*unrolled)


def test_one_device_sends_nothing():
    assert asked_here(config_of("llama")) == (
        [],
        dict.fromkeys(asked_here(config_of("llama"))[1], 1),
    )


@pytest.mark.slow
def test_many_unrolled_layers_are_counted_in_seconds():
    layers = 12
    config = load_config("gpt2_1558m")
    model = replace(config.model, scan_layers=False, layers=layers)
    memory = MemoryConfig(policy="full")
    config = replace(config, model=model, memory=memory, mesh=MeshSpec(fsdp=8))
    plan = make_plan(config, jax.devices())
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    step = make_train_step(experiment).trace(*step_shapes(experiment))
    began = time.process_time()
    found = requested_collectives(step.jaxpr, plan.mesh)
    assert time.process_time() - began < 3
    assert (
        sum(one.count for one in found if one.kind == "reduce-scatter")
        >= layers * 6 * config.train.accumulation
    )


# As compiled.

OWN = 0.02
"""Share of all that is sent which XLA adds by itself: norms and biases, which no op of the plan
moves.
"""

SCALARS = 100
"""Bytes sent for the sums of the loss; they too are sent after the last microbatch."""


def assert_sent_as_asked(
    asked: Sent,
    made: Sent,
    saved: Mapping[Any, float] | None = None,
) -> None:
    """Each kind over the same axes; XLA's own within their share of the whole. `saved` is what it
    may leave out.
    """
    whole = sum(asked.values())
    assert whole > 0
    for key, size in asked.items():
        if size > SCALARS:
            least = size - (saved or {}).get(key, 0.0)
        else:
            least = 0.0
        assert least * (1 - 1e-9) <= made[key] <= size + OWN * whole, (key, size, made[key])
    assert sum(made.values()) <= (1 + OWN) * whole
    assert sum(size for key, size in made.items() if key not in asked) <= OWN * whole


def tables(config: Config) -> float:
    """Bytes of the gradients of what is looked up and of the head, on one device along tensor."""
    model = config.model
    rows = -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple
    return 4.0 * model.embed * 2 * rows / config.mesh.tensor + (
        4.0 * model.embed * model.max_seq_len
    )


def summed_later(config: Config, asked: Sent, peels: bool = False) -> Sent:
    """What XLA may save on sums of gradients: the two uses of a tied table are added before they
    are sent, and a sum over data that is only added up over microbatches is sent after the last.
    Where devices add up their own (data), so are two tables' sums over fsdp, which stand outside of
    the loop over layers. Those of a pipeline's ends are added up over ticks."""
    mesh = config.mesh
    ends = config.train.accumulation * tables(config) * config.model.tied_head
    if mesh.data > 1 and not config.model.tied_head:
        ends = (config.train.accumulation - 1) * (
            tables(config) - 4.0 * config.model.embed * config.model.max_seq_len
        )
    if mesh.stage > 1:
        ends = (
            config.train.accumulation
            * tables(config)
            * (config.pipeline.microbatches + mesh.stage - 1)
        )
    peeled = dict[Any, float]()
    if mesh.stage > 1 and peels:
        ticks = config.pipeline.microbatches + mesh.stage - 1
        of_ticks = (
            over("all-gather", "fsdp"),
            over("all-gather", "tensor"),
            over("ppermute", "stage"),
        )
        peeled = {key: asked[key] / ticks for key in of_ticks}
    scattered = over("reduce-scatter", "fsdp")
    summed = over("all-reduce", "data")
    return {
        **peeled,
        scattered: ends * (mesh.fsdp - 1) / mesh.fsdp,
        summed: ends / mesh.fsdp * 2 * (mesh.data - 1) / mesh.data
        + asked[summed] * (1 - 1 / config.train.accumulation),
    }


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama", "full", fsdp=4, tensor=2),
        config_of("gpt2", "full", compute="bfloat16", data=2, fsdp=2, tensor=2),
        pytest.param(config_of("gpt2", "full", data=8), marks=pytest.mark.slow),
        config_of("llama", "full", data=2, tensor=4),
    ],
    ids=[
        "llama, fsdp x tensor",
        "gpt2, data x fsdp x tensor, bfloat16 as float32",
        "gpt2, data",
        "kv heads copied",
    ],
)
def test_a_step_sends_what_it_asks_for(config):
    assert_sent_as_asked(*compiled(config))


RINGS = Overlap("ring", "bidirectional")
ZERO1 = ShardingRules(embed=(), state_embed=("data",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        replace(
            config_of("llama", "full", data=2, fsdp=4),
            rules=ShardingRules(state_embed=("fsdp", "data")),
        ),
        pytest.param(
            replace(config_of("llama", "full", fsdp=4, tensor=2), overlap=RINGS),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            replace(config_of("gpt2", data=4, tensor=2), rules=ZERO1, overlap=RINGS),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["HSDP, state further split", "rings", "ZeRO-1, rings"],
)
def test_a_step_of_other_rules_and_forms_sends_what_it_asks_for(config):
    assert_sent_as_asked(*compiled(config))


@pytest.mark.slow
def test_a_pipeline_of_two_chunks_sends_what_it_asks_for():
    config = staged(
        config_of("gpt2", stage=2, data=4), "interleaved", 4, pipeline_virtual=2, train_batch=16
    )
    asked, made = compiled(config)
    assert_sent_as_asked(asked, made, summed_later(config, asked))


@pytest.mark.slow
def test_a_step_here_gathers_once_what_every_microbatch_needs():
    """XLA:CPU moves gathers of the weights out of the loop over microbatches, and sends less than
    is asked for.
    """
    asked, made = compiled(
        config_of(
            "gpt2",
            scan=False,
            accumulation=2,
            data=2,
            fsdp=4,
        )
    )
    gathers = over("all-gather", "fsdp")
    assert made[gathers] == pytest.approx(asked[gathers] / 2, rel=0.02)
    assert_sent_as_asked(asked, made, {gathers: asked[gathers] / 2})


# 512 wide: XLA:TPU all-reduces whole what would be scattered in pieces narrower than a tile's 128
# lanes.
ABSENT_FAST = config_of("llama", "full", compute="bfloat16", embed=512, fsdp=4, tensor=2)
ABSENT = [
    (
        "llama, data x fsdp x tensor",
        config_of(
            "llama",
            compute="bfloat16",
            embed=512,
            data=2,
            fsdp=2,
            tensor=2,
        ),
    ),
    (
        "llama, unrolled, remat",
        config_of(
            "llama",
            "full",
            False,
            compute="bfloat16",
            embed=512,
            fsdp=4,
            tensor=2,
        ),
    ),
    (
        "llama, data x fsdp, accumulation",
        config_of("llama", "full", True, 2, "bfloat16", 512, data=2, fsdp=4),
    ),
    (
        "gpt2, fsdp x tensor",
        config_of("gpt2", "full", compute="bfloat16", embed=512, fsdp=4, tensor=2),
    ),
    (
        "gpt2, data x fsdp, unrolled, accumulation",
        config_of("gpt2", "none", False, 2, "bfloat16", 512, data=2, fsdp=4),
    ),
    ("gpt2, data", config_of("gpt2", "full", compute="bfloat16", embed=512, data=8)),
    (
        "llama, stages",
        staged(
            config_of(
                "llama",
                "full",
                compute="bfloat16",
                embed=512,
                stage=2,
                fsdp=2,
                tensor=2,
            ),
            "1f1b",
            4,
        ),
    ),
]


def assert_compiles_as_asked(config: Config, target: str) -> None:
    asked, made = compiled(config, target)
    peels = jax.__version_info__ >= (0, 11) and load_target(target).platform == "cuda"
    assert_sent_as_asked(asked, made, summed_later(config, asked, peels))


@needs_libtpu
def test_a_step_for_absent_tpus_sends_what_it_asks_for():
    assert_compiles_as_asked(ABSENT_FAST, "v5e-8")


@needs_libtpu
def test_rings_for_absent_tpus_send_what_they_ask_for():
    assert_compiles_as_asked(replace(ABSENT_FAST, overlap=RINGS), "v5e-8")


@needs_libtpu
@pytest.mark.slow
def test_zero1_for_absent_tpus_sends_what_it_asks_for():
    config = replace(
        config_of("llama", "full", compute="bfloat16", embed=1024, data=8), rules=ZERO1
    )
    assert_compiles_as_asked(config, "v5e-8")


@needs_cuda
def test_a_step_for_absent_gpus_sends_what_it_asks_for():
    assert_compiles_as_asked(ABSENT_FAST, "h100x8")


@needs_libtpu
@pytest.mark.parametrize(
    "name",
    some(dict(ABSENT), 2, pytest.mark.long),
)
@pytest.mark.parametrize(
    "target",
    some(("v5e-8", "v5p-8"), 2, pytest.mark.long),
)
def test_more_steps_for_absent_tpus_send_what_they_ask_for(name, target):
    assert_compiles_as_asked(dict(ABSENT)[name], target)


@needs_cuda
@pytest.mark.parametrize(
    "name",
    some(dict(ABSENT), 2, pytest.mark.long),
)
def test_more_steps_for_absent_gpus_send_what_they_ask_for(name):
    assert_compiles_as_asked(dict(ABSENT)[name], "h100x8")
