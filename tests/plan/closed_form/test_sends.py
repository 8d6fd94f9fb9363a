"""What a plan sends by shape alone is what its traced step sends: by kind and mesh axes, in bytes."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

import jax
import pytest
from experiments import experiment_of
from traced_steps import config_of, staged

from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import devices_needed
from jaxpar.base.layout.plan import Overlap
from jaxpar.hlo.program.tasks import sent_bytes
from jaxpar.plan.candidate import candidate_of
from jaxpar.plan.closed_form import step_shapes
from jaxpar.plan.closed_form.sends import sends_of_step
from jaxpar.plan.communication import bytes_by_collective, step_collectives
from jaxpar.train.activations import activations
from jaxpar.train.experiments import make_plan

EXPERTS = {"model.experts": 4, "model.experts_per_token": 2}
ZERO1 = {"rules.state_embed": ["fsdp", "data"]}
HALF: dict[str, Any] = {"compute": "bfloat16"}
QUICK = {
    "llama, fsdp x tensor, full": config_of("llama", "full", fsdp=4, tensor=2, **HALF),
}
SLOW = {
    "gpt2, fsdp x data, accumulation": config_of(
        "gpt2", "dots", accumulation=2, fsdp=2, data=2, **HALF
    ),
    "llama, ring attention": config_of("llama", "full", context=4, fsdp=2, **HALF),
    "llama, stages": staged(
        config_of("llama", "full", stage=2, fsdp=2, tensor=2, **HALF), "1f1b", 4
    ),
    "llama, fsdp x tensor, none": config_of("llama", fsdp=4, tensor=2, **HALF),
    "llama, fsdp x data, dots": config_of("llama", "dots", fsdp=2, data=2, **HALF),
    "gpt2, attention_out": config_of("gpt2", "attention_out", fsdp=2, tensor=2, **HALF),
    "gpt2, block_inputs": config_of("gpt2", "block_inputs", fsdp=2, tensor=2, **HALF),
    "gemma2, full": config_of("gemma2", "full", fsdp=2, tensor=2, **HALF),
    "gpt2, ZeRO-1": override(
        config_of("gpt2", "full", accumulation=2, data=4, tensor=2, **HALF), ZERO1
    ),
    "llama, ZeRO-1 and fsdp": override(
        config_of("llama", "full", accumulation=2, data=2, fsdp=2, **HALF), ZERO1
    ),
    "llama, kv heads copied": config_of("llama", "dots", tensor=4, **HALF),
    "llama, more devices than heads": config_of("llama", "dots", tensor=8, **HALF),
    "gpt2, Ulysses": override(
        config_of("gpt2", "full", context=4, **HALF), {"context.strategy": "ulysses"}
    ),
    "experts": override(config_of("llama", "none", expert=2, **HALF), EXPERTS),
    "experts, fsdp": override(config_of("llama", "full", expert=2, fsdp=2, **HALF), EXPERTS),
    "experts, tensor": override(config_of("llama", "dots", expert=4, tensor=2, **HALF), EXPERTS),
    "parallel sublayers": override(
        config_of("llama", "full", fsdp=4, tensor=2, **HALF), {"model.sublayers": "parallel"}
    ),
    "gpt2, stages that keep all": staged(
        config_of("gpt2", "none", stage=2, data=2, **HALF), "1f1b", 4, pipeline_stash="blocks"
    ),
}
SMALL = 4096
"""Bytes of a step in which sums of losses and of routers, which no formula has, may differ: a few
numbers for each token of these tiny models."""


def formula(config: Config) -> dict[Any, float]:
    candidate = candidate_of(config)
    total = defaultdict[Any, float](float)
    for one in sends_of_step(step_shapes(config), candidate):
        devices = math.prod(candidate.size(axis) for axis in one.axes)
        total[one.kind, one.axes] += one.times * sent_bytes(one.kind, int(one.bytes), devices)
    return total


def traced(config: Config) -> dict[Any, float]:
    plan = make_plan(config, jax.devices()[: devices_needed(config.mesh)])
    return bytes_by_collective(step_collectives(experiment_of(config, plan)))


def check(config: Config) -> None:
    found = formula(config)
    wanted = traced(config)
    for key in {*found, *wanted}:
        assert found[key] == pytest.approx(wanted.get(key, 0.0), abs=SMALL, rel=1e-3), key


@pytest.mark.parametrize("name", QUICK)
def test_a_step_sends_what_the_formula_says(name):
    check(QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_families_and_meshes_send_what_the_formula_says(name):
    check(SLOW[name])


def test_layers_and_tokens_scale_what_is_sent():
    """Twice the layers send twice as much of weights, twice the sequences of activations."""
    config = config_of("llama", "full", fsdp=2, tensor=2, **HALF)
    candidate = candidate_of(config)
    shapes = step_shapes(config)
    deeper = dataclasses.replace(shapes, layers=2 * shapes.layers)
    longer = shapes.with_batch(2 * shapes.batch)

    def total(of: Any, what: str) -> float:
        sends = sends_of_step(of, candidate)
        return sum(one.times * one.bytes for one in sends if one.what == what)

    tables = 2 * shapes.vocab * shapes.embed // 2 * shapes.dtype_bytes  # lookup and head
    blocks = total(shapes, "weights") - tables
    assert total(deeper, "weights") - tables == pytest.approx(2 * blocks)
    assert total(longer, "weights") == total(shapes, "weights")
    assert total(longer, "stream") > 1.9 * total(shapes, "stream")


# What is made again.

AGAIN = {
    "llama, fsdp x tensor": config_of("llama", fsdp=4, tensor=2),
    "gpt2, tensor, Domino, bfloat16": dataclasses.replace(
        config_of("gpt2", compute="bfloat16", data=2, tensor=2),
        overlap=Overlap("xla", "ring", domino="on"),
    ),
    "llama, ring attention": config_of("llama", context=4, fsdp=2),
    "gpt2, Ulysses": override(config_of("gpt2", context=4), {"context.strategy": "ulysses"}),
    "experts": override(
        config_of("llama", expert=2, tensor=2), {"model.experts": 4, "model.experts_per_token": 2}
    ),
}


FAST = ("llama, fsdp x tensor", "experts")
SLOWER = ("llama, ring attention",)
TIERS = [
    pytest.param(
        name, marks=[] if name in FAST else pytest.mark.slow if name in SLOWER else pytest.mark.long
    )
    for name in AGAIN
]


@pytest.mark.slow
@pytest.mark.parametrize("name", TIERS)
def test_what_is_sent_again_is_what_the_step_then_sends_more(name):
    """Of whole steps that keep everything, and everything but one activation."""
    config = override(AGAIN[name], {"memory.policy": "full"})
    plan = make_plan(config, jax.devices()[: devices_needed(config.mesh)])
    names = [one.name for one in activations(experiment_of(config, plan))]
    everything = {f"memory.keep.{name}": "save" for name in names}
    whole = override(config, everything)
    found = 0.0
    for one in names:
        if one == "block_input":
            continue
        without = override(whole, {f"memory.keep.{one}": "recompute"})
        again = sum(formula(without).values()) - sum(formula(whole).values())
        if again or one in ("q", "mlp_hidden"):
            wanted = sum(traced(without).values()) - sum(traced(whole).values())
            assert again == pytest.approx(wanted, abs=SMALL, rel=1e-3), one
            found += again
    assert found > 0, "else the test says nothing"
