"""Bytes sent in closed form: beside the traced step to the byte, a sum made by hand, and compiled programs."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import pytest
from traced_steps import asked_here, compiled, config_of, over

from jaxpar.communication import Site, arrays, sent, sites
from jaxpar.config import Config, MemoryConfig, load_config
from jaxpar.mesh import MeshSpec, devices_needed
from jaxpar.models import Model
from jaxpar.rehearsal.collectives import scope_of, sent_bytes
from jaxpar.sharding import Overlap, ShardingRules
from jaxpar.step import make_plan
from jaxpar.targets import compilers, load_target, target_devices

needs_libtpu = pytest.mark.skipif("pip" in compilers()["tpu"], reason=compilers()["tpu"])

ZERO1 = ShardingRules(embed=(), state_embed=("data",))
HSDP = ShardingRules(state_embed=("fsdp", "data"))
BOTH_RINGS = Overlap("ring", "bidirectional")


def changed(config: Config, section: str = "", /, rules: Any = None, overlap: Any = None, **values: Any) -> Config:
    """A config with a field of a section replaced, and its rules or forms of overlap."""
    if section:
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    return dataclasses.replace(config, rules=rules or config.rules, overlap=overlap or config.overlap)


def with_experts(remat: str = "none", capacity_factor: float = 0.0, **more: Any) -> Config:
    sizes = {"experts": 4, "experts_per_token": 2, "capacity_factor": capacity_factor}
    config = changed(config_of("llama", remat, **more), "model", **sizes)
    return changed(config, "train", balance_loss=0.1, router_z_loss=0.1)


PLANS = {
    "llama, fsdp": config_of("llama", fsdp=8),
    "llama, data": config_of("llama", data=8),
    "llama, tensor": config_of("llama", "full", tensor=2),
    "llama, fsdp x tensor": config_of("llama", fsdp=4, tensor=2),
    "llama, fsdp x tensor, remat": config_of("llama", "full", fsdp=4, tensor=2),
    "llama, fsdp x tensor, unrolled": config_of("llama", scan=False, fsdp=4, tensor=2),
    "llama, fsdp x tensor, unrolled, remat": config_of("llama", "full", scan=False, fsdp=4, tensor=2),
    "llama, data x fsdp x tensor, bfloat16": config_of("llama", "full", compute="bfloat16", data=2, fsdp=2, tensor=2),
    "llama, data x fsdp, accumulation, remat": config_of("llama", "full", accumulation=4, data=2, fsdp=2),
    "llama, tied": changed(config_of("llama", "full", fsdp=4, tensor=2), "model", tied_head=True),
    "llama, several chunks of the loss": changed(
        changed(config_of("llama", data=2, tensor=2), "train", batch=70), "memory", loss_mib=1
    ),
    "llama, slices of the vocabulary": changed(
        changed(config_of("llama", fsdp=2, tensor=2), "model", vocab_size=4096), "memory", loss_mib=1
    ),
    "gpt2, slices of the vocabulary": changed(
        changed(config_of("gpt2", "full", fsdp=4, tensor=2), "model", vocab_size=8192), "memory", loss_mib=1
    ),
    "llama, data x context x tensor": config_of("llama", data=2, context=2, tensor=2),
    "llama, residual stream whole": changed(config_of("llama", fsdp=2, tensor=2), rules=ShardingRules(residual_seq=())),
    "llama, kv heads whole, rings": changed(
        config_of("llama", data=2, tensor=4), rules=ShardingRules(kv_heads=()), overlap=BOTH_RINGS
    ),
    "llama, rings, bfloat16, remat": changed(
        config_of("llama", "full", compute="bfloat16", fsdp=4, tensor=2), overlap=BOTH_RINGS
    ),
    "llama, ZeRO-1": changed(config_of("llama", data=8), rules=ZERO1),
    "llama, HSDP, state further split, bfloat16": changed(
        config_of("llama", "full", compute="bfloat16", data=2, fsdp=4), rules=HSDP
    ),
    "gpt2, data x fsdp": config_of("gpt2", data=2, fsdp=4),
    "gpt2, data x fsdp, bfloat16, remat": config_of("gpt2", "full", compute="bfloat16", data=2, fsdp=4),
    "gpt2, fsdp x tensor, unrolled, remat": config_of("gpt2", "full", scan=False, fsdp=2, tensor=4),
    "gpt2, data x tensor, accumulation": config_of("gpt2", accumulation=2, data=2, tensor=2),
    "gpt2, unrolled, accumulation of 3": changed(
        config_of("gpt2", scan=False, accumulation=3, fsdp=2, tensor=2), "train", batch=12
    ),
    "gpt2, untied": changed(config_of("gpt2", fsdp=4, tensor=2), "model", tied_head=False),
    "gpt2, ZeRO-1, tensor, accumulation of 3": changed(
        changed(config_of("gpt2", "full", accumulation=3, data=2, tensor=2), "train", batch=12), rules=ZERO1
    ),
    "gpt2, heads whole": changed(config_of("gpt2", tensor=8), rules=ShardingRules(heads=())),
    "gpt2, mlp over two axes": changed(
        config_of("gpt2", fsdp=4, tensor=2),
        rules=ShardingRules(embed=(), mlp=("tensor", "fsdp"), batch=("data",)),
        overlap=BOTH_RINGS,
    ),
    "gpt2, ring of the gather, unrolled": changed(
        config_of("gpt2", scan=False, fsdp=2, tensor=4), overlap=Overlap("bidirectional")
    ),
    "llama, forms by site": changed(
        config_of("llama", fsdp=2, tensor=2), overlap=Overlap("ring", "ring", heads_gather="xla", mlp_scatter="xla")
    ),
    "llama, Domino, rings": changed(
        config_of("llama", "full", fsdp=4, tensor=2), overlap=Overlap("xla", "ring", domino="on")
    ),
    "gpt2, Domino, unrolled, accumulation": changed(
        config_of("gpt2", scan=False, accumulation=2, fsdp=2, tensor=2), overlap=Overlap(domino="on")
    ),
    "llama, kv heads copied": config_of("llama", tensor=4),
    "llama, kv heads copied, data, unrolled, remat": config_of("llama", "full", scan=False, data=2, tensor=4),
    "llama, kv heads copied, fsdp, bfloat16": config_of("llama", compute="bfloat16", fsdp=2, tensor=4),
    "llama, attention over the sequence": config_of("llama", "full", tensor=8),
    "llama, attention over the sequence, rings": changed(config_of("llama", tensor=8), overlap=BOTH_RINGS),
    "gpt2, attention over the sequence, unrolled": config_of("gpt2", scan=False, accumulation=2, tensor=8),
    "llama, ring attention": config_of("llama", context=4, tensor=2),
    "llama, ring attention, remat, bfloat16": config_of("llama", "full", compute="bfloat16", context=2, fsdp=2),
    "llama, gathered attention, remat": changed(
        config_of("llama", "full", context=4, fsdp=2), "context", strategy="all_gather"
    ),
    "gpt2, Ulysses, unrolled": changed(config_of("gpt2", scan=False, context=4), "context", strategy="ulysses"),
    "llama, Ulysses, kv heads repeated, remat": changed(
        config_of("llama", "full", context=4, data=2), "context", strategy="ulysses"
    ),
    "llama, ring attention, kv heads copied, Domino": changed(
        config_of("llama", context=2, tensor=4), overlap=Overlap(domino="on")
    ),
    "experts, expert x fsdp x tensor": with_experts(expert=2, fsdp=2, tensor=2),
    "experts, remat, bfloat16": with_experts("full", compute="bfloat16", expert=4, tensor=2),
    "experts, unrolled, with a capacity": with_experts("none", 1.0, scan=False, expert=2, fsdp=2, tensor=2),
    "experts, context, with a capacity, remat": with_experts("full", 1.25, expert=2, context=2, fsdp=2),
    "experts, Domino, rings": changed(
        with_experts(expert=2, fsdp=2, tensor=2), overlap=Overlap("ring", "ring", domino="on")
    ),
    "gpt2, ring of the scatter": changed(config_of("gpt2", data=2, tensor=4), overlap=Overlap("xla", "ring")),
}


def sites_of(config: Config, target: str = "") -> list[Site]:
    model = Model(config.model)
    devices = list(target_devices(load_target(target))) if target else jax.devices()[: devices_needed(config.mesh)]
    return sites(arrays(model.shapes(), model.axes), config, make_plan(config, devices))


@pytest.mark.parametrize("name", PLANS)
def test_a_traced_step_asks_for_the_same(name):
    """To the byte, in every scope of the model."""
    found, mesh = asked_here(PLANS[name])
    traced: dict[Any, float] = defaultdict(float)
    for one in found:
        traced[scope_of(one), one.kind, one.axes] += sent_bytes(one, mesh) * one.count
    ours: dict[Any, float] = defaultdict(float)
    for site in sites_of(PLANS[name]):
        if site.asked:
            ours[site.scope, site.kind, site.axes] += site.sent
    assert ours == pytest.approx(dict(traced), rel=1e-12)


def test_by_hand_fsdp_and_tensor():
    """LLaMA, remat full, in float32: 2 layers of D=64, 4 heads and 2 kv heads of 32, 256 mlp; B=16, S=64, V=512."""
    block = 2 * 64 * (2 * 128 + 2 * 64 + 3 * 256) // 2  # entries of both blocks' matrices, along tensor=2
    table = 512 * 64 // 2
    stream = 16 // 4 * 64 * 64 * 4  # bytes of the residual stream of one of fsdp=4, gathered
    assert sent(site for site in sites_of(PLANS["llama, fsdp x tensor, remat"]) if site.asked) == {
        # Blocks for forward and backward; the embedding and the head once.
        over("all-gather", "fsdp"): (2 * block + 2 * table) * 4 * 3 / 4,
        over("reduce-scatter", "fsdp"): (block + 2 * table) * 4 * 3 / 4,
        # A layer: two inputs forward, twice two in the backward. Then the loss's input, the lookup's gradient.
        over("all-gather", "tensor"): (2 * 6 + 2) * stream / 2,
        # A layer: two outputs, one of them once more, two gradients. Then the rows looked up, the loss's gradient.
        over("reduce-scatter", "tensor"): (2 * 5 + 2) * stream / 2,
        over("all-reduce", "tensor"): 3 * 4 * (4 * 64) * 2 / 2,  # three scores of each token
        over("all-reduce", "fsdp"): 2 * 4 * 2 * 3 / 4,  # the sums of loss and tokens
    }


def test_by_hand_zero1():
    """Gradients of all matrices are scattered, every parameter is gathered, which is what an all-reduce sends."""
    config = PLANS["llama, ZeRO-1"]
    count = sum(leaf.size for leaf in jax.tree.leaves(Model(config.model).shapes()))
    vectors = 5 * config.model.embed
    assert sent(site for site in sites_of(config) if site.asked) == {
        over("reduce-scatter", "data"): (count - vectors) * 4 * 7 / 8,
        over("all-gather", "data"): count * 4 * 7 / 8,
        over("all-reduce", "data"): 2 * 4 * 2 * 7 / 8,
    }


def test_one_device_sends_nothing():
    assert sites_of(config_of("llama")) == sites_of(config_of("gpt2", "full", accumulation=2)) == []


def test_rings_send_what_collectives_send():
    """A ring takes as many bytes along as the gather or scatter it stands for, of any size of chunk."""
    plain = config_of("gpt2", fsdp=2, tensor=4)
    whole, ring = sent(sites_of(plain)), sent(sites_of(changed(plain, overlap=BOTH_RINGS)))
    assert sum(ring.values()) == sum(whole.values())
    assert ring[over("ppermute", "tensor")] > 0


def test_a_large_model_has_as_many_rows_as_a_small_one():
    """No loop over layers, devices or microbatches: a planner asks for thousands of plans."""
    large = dataclasses.replace(load_config("gpt2_1558m"), mesh=MeshSpec(fsdp=8), memory=MemoryConfig("full"))
    assert len(sites_of(large)) == len(sites_of(config_of("gpt2", "full", fsdp=8)))


# As compiled. Every kind over the same axes; what differs is XLA's:
# - it adds the two uses of a tied table before it sends their gradient, and gathers what it holds twice once;
# - all-reduces of several small arrays are merged, over the axes of all of them;
# - XLA:TPU sums whole what would be scattered in pieces narrower than a tile's 128 lanes.

OWN = 0.005
"""Share of all that is sent by which a kind may differ: norms, biases, scalars."""

COMPILED = {
    "llama, HSDP, state further split": (changed(config_of("llama", "full", data=2, fsdp=4), rules=HSDP), ""),
    "llama, rings for TPUs": (
        changed(config_of("llama", "full", compute="bfloat16", embed=512, fsdp=4, tensor=2), overlap=BOTH_RINGS),
        "v5e-8",
    ),
}
COMPILED_SLOWLY = {
    "llama, rings": (changed(config_of("llama", "full", fsdp=4, tensor=2), overlap=BOTH_RINGS), ""),
    "gpt2, ZeRO-1, ring": (
        changed(config_of("gpt2", data=4, tensor=2), rules=ZERO1, overlap=Overlap("ring", "bidirectional")), "",
    ),
    "llama, ZeRO-1 for TPUs": (
        changed(config_of("llama", "full", compute="bfloat16", embed=1024, data=8), rules=ZERO1), "v5e-8",
    ),
}  # fmt: skip


def cases(programs: dict[str, tuple[Config, str]]) -> list[Any]:
    marks = {True: needs_libtpu, False: ()}
    return [pytest.param(*case, id=name, marks=marks[bool(case[1])]) for name, case in programs.items()]


def assert_compiles_to_the_same(config: Config, target: str) -> None:
    ours, (_, made) = sent(sites_of(config, target)), compiled(config, target)
    whole = sum(made.values())
    assert whole > 0
    for key in {*ours, *made}:
        assert abs(ours.get(key, 0.0) - made.get(key, 0.0)) <= OWN * whole, (key, ours.get(key), made.get(key))
    assert sum(ours.values()) == pytest.approx(whole, rel=OWN)


@pytest.mark.parametrize(("config", "target"), cases(COMPILED))
def test_a_compiled_step_sends_the_same(config, target):
    assert_compiles_to_the_same(config, target)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "target"), cases(COMPILED_SLOWLY))
def test_more_compiled_steps_send_the_same(config, target):
    assert_compiles_to_the_same(config, target)
