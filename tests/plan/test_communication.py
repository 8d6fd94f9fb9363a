"""Bytes sent in closed form: beside the traced step to the byte, a sum made by hand, and compiled programs."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from tiers import MARKS, some
from traced_steps import asked_here, compiled, config_of, over, staged

from jaxpar.base.config import Config, MemoryConfig, load_config, override
from jaxpar.base.mesh import MeshSpec, devices_needed
from jaxpar.base.plan import Overlap
from jaxpar.base.sharding import ShardingRules
from jaxpar.models import Model
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.plan.communication import Site, arrays, sent, sites
from jaxpar.plan.communication.stages import ticks_of
from jaxpar.rehearse.report.collectives import scope_of, sent_bytes
from jaxpar.rehearse.targets import load_target
from jaxpar.train.plans import make_plan
from jaxpar.train.state import param_shapes

ZERO1 = ShardingRules(embed=(), state_embed=("data",))
HSDP = ShardingRules(state_embed=("fsdp", "data"))
BOTH_RINGS = Overlap("ring", "bidirectional")


def changed(config: Config, section: str = "", /, rules: Any = None, overlap: Any = None, **values: Any) -> Config:
    """A config with a field of a section replaced, and its rules or forms of overlap."""
    if section:
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    return dataclasses.replace(config, rules=rules or config.rules, overlap=overlap or config.overlap)


def kept(config: Config, **choices: str) -> Config:
    return override(config, {f"memory.keep.{name}": choice for name, choice in choices.items()})


def in_bfloat16(config: Config) -> Config:
    return changed(config, "precision", compute="bfloat16", params="bfloat16", gradients="bfloat16")


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
    "gpt2, ZeRO-1, parameters and sums in bfloat16": in_bfloat16(
        changed(config_of("gpt2", "full", data=2, tensor=2), rules=ZERO1)
    ),
    "gpt2, data x fsdp": config_of("gpt2", data=2, fsdp=4),
    "gpt2, data x fsdp, bfloat16, remat": config_of("gpt2", "full", compute="bfloat16", data=2, fsdp=4),
    "gpt2, fsdp x tensor, unrolled, remat": config_of("gpt2", "full", scan=False, fsdp=2, tensor=4),
    "gpt2, data x tensor, accumulation": config_of("gpt2", accumulation=2, data=2, tensor=2),
    "gpt2, data x tensor, accumulation, dropout": changed(
        config_of("gpt2", accumulation=2, data=2, tensor=2), "model", dropout=0.1
    ),
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
    "llama, attention_out": config_of("llama", "attention_out", context=2, fsdp=2, tensor=2),
    "llama, block_inputs, bfloat16": config_of("llama", "block_inputs", compute="bfloat16", fsdp=4, tensor=2),
    "llama, selective, ring attention, unrolled": config_of("llama", "selective", scan=False, context=4, tensor=2),
    "llama, dots": config_of("llama", "dots", data=2, fsdp=2, tensor=2),
    "gpt2, dots, gathered attention": changed(
        config_of("gpt2", "dots", context=4, fsdp=2), "context", strategy="all_gather"
    ),
    "gpt2, block_inputs, Ulysses, Domino": changed(
        changed(config_of("gpt2", "block_inputs", context=2, tensor=2), "context", strategy="ulysses"),
        overlap=Overlap(domino="on"),
    ),
    "llama, full but gate and up": kept(config_of("llama", "full", fsdp=4, tensor=2), gate="save", up="save"),
    "llama, none but a key, accumulation": kept(config_of("llama", accumulation=2, data=2, tensor=2), k="recompute"),
    "gpt2, offloaded": kept(
        config_of("gpt2", "full", fsdp=2, tensor=2), block_input="offload", mlp_input="offload", up="offload"
    ),
    "experts, dots": with_experts("dots", expert=2, fsdp=2, tensor=2),
    "experts, full but answers": kept(with_experts("full", 1.25, expert=4, tensor=2), expert_out="save"),
    "experts, rows made again": kept(with_experts(expert=2, tensor=2), expert_input="recompute", gate="recompute"),
}


UNEVEN = {"model_layers": 5, "pipeline_layers": (1, 2, 1, 1)}
STAGED = {
    "1F1B, fsdp x tensor, a stage's input": staged(config_of("llama", "full", stage=2, fsdp=2, tensor=2), "1f1b", 4),
    "1F1B, fsdp x tensor, everything": staged(config_of("llama", stage=2, fsdp=2, tensor=2), "1f1b", 4),
    "1F1B, inputs of blocks, 4 stages, uneven, bfloat16": staged(
        config_of("gpt2", "full", compute="bfloat16", stage=4, fsdp=2), "1f1b", 8, pipeline_stash="blocks", **UNEVEN
    ),
    "1F1B, fewer microbatches than stages": staged(config_of("gpt2", "full", stage=4, fsdp=2), "1f1b", 3),
    "1F1B, a layer a stage, accumulation, ZeRO-1": changed(
        staged(config_of("llama", accumulation=2, stage=2, data=4), "1f1b", 3, model_layers=2, train_batch=48),
        rules=ZERO1,
    ),
    "GPipe, context, tokens that do not divide": staged(
        config_of("gpt2", stage=4, context=2), "gpipe", 5, data_seq_len=20
    ),
    "GPipe, unrolled, Domino, accumulation": changed(
        staged(config_of("gpt2", "full", False, 2, stage=2, fsdp=2, tensor=2), "gpipe", 2, train_batch=16),
        overlap=Overlap("ring", domino="on"),
    ),
    "interleaved, tied, slices of the vocabulary": staged(
        config_of("gpt2", "full", stage=2, fsdp=2, tensor=2), "interleaved", 4, pipeline_virtual=2, memory_loss_mib=1,
        model_vocab_size=8192,
    ),
    "interleaved, untied, 4 stages, uneven": staged(
        config_of("gpt2", stage=4, data=2), "interleaved", 6, pipeline_virtual=2, model_tied_head=False, model_layers=9,
        pipeline_layers=(1, 1, 1, 1, 2, 1, 1, 1),
    ),
    "looped, Ulysses, fsdp": staged(
        config_of("llama", "full", stage=2, context=2, fsdp=2), "looped", 4, pipeline_virtual=2,
        context_strategy="ulysses", pipeline_stash="blocks",
    ),
    "looped, 4 stages, rings, tied, accumulation": changed(
        staged(config_of("llama", accumulation=2, stage=4, tensor=2), "looped", 4, pipeline_virtual=2, model_layers=8,
               model_tied_head=True, train_batch=16),
        overlap=BOTH_RINGS,
    ),
    "ZB-H1, fsdp x tensor, everything": staged(config_of("llama", stage=2, fsdp=2, tensor=2), "zb_h1", 4),
    "ZB-H1, fsdp x tensor, a stage's input": staged(
        config_of("gpt2", "full", stage=2, fsdp=2, tensor=2), "zb_h1", 5
    ),
    "ZB-H1, ring attention, inputs of blocks, kv heads copied": staged(
        config_of("llama", "full", stage=2, tensor=4), "zb_h1", 3, pipeline_stash="blocks"
    ),
    "ZB-H1, gathered attention, 4 stages": staged(
        config_of("llama", "full", stage=4, context=2), "zb_h1", 6, context_strategy="all_gather"
    ),
    "1F1B, attention_out, of blocks": staged(
        config_of("llama", "attention_out", stage=2, tensor=2, context=2), "1f1b", 4, pipeline_stash="blocks"
    ),
    "ZB-H1, dots, of blocks": staged(
        config_of("gpt2", "dots", stage=2, fsdp=2, tensor=2), "zb_h1", 4, pipeline_stash="blocks"
    ),
    "1F1B, block_inputs, a stage's input": staged(
        config_of("llama", "block_inputs", stage=2, fsdp=2, tensor=2), "1f1b", 4
    ),
    "1F1B, offloaded inputs of blocks": kept(
        staged(config_of("llama", "full", stage=2, tensor=2), "1f1b", 4, pipeline_stash="blocks"), block_input="offload"
    ),
    "1F1B, ZeRO-1, parameters and sums in bfloat16": in_bfloat16(
        changed(staged(config_of("gpt2", "full", stage=2, data=2, tensor=2), "1f1b", 4), rules=ZERO1)
    ),
    "1F1B, experts": staged(with_experts("full", stage=2, expert=2, fsdp=2), "1f1b", 4),
    "ZB-H1, experts, tensor": staged(with_experts(stage=2, expert=2, tensor=2), "zb_h1", 4),
    "ZB-H1, experts with a capacity, a stage's input": staged(
        with_experts("full", 1.25, stage=2, expert=2, tensor=2), "zb_h1", 4
    ),
}  # fmt: skip


def sites_of(config: Config, target: str = "") -> list[Site]:
    model = Model(config.model)
    devices = load_target(target).devices() if target else jax.devices()[: devices_needed(config.mesh)]
    plan = make_plan(config, devices)
    return sites(arrays(param_shapes(model, plan), model.axes), config, plan)


def assert_asks_for_the_same(config: Config) -> None:
    found, mesh = asked_here(config)
    traced: dict[Any, float] = defaultdict(float)
    for one in found:
        traced[scope_of(one), one.kind, one.axes] += sent_bytes(one, mesh) * one.count
    ours: dict[Any, float] = defaultdict(float)
    for site in sites_of(config):
        if site.asked:
            ours[site.scope, site.kind, site.axes] += site.sent
    assert ours == pytest.approx(dict(traced), rel=1e-12)


@pytest.mark.parametrize("name", some(PLANS, 3))
def test_a_traced_step_asks_for_the_same(name):
    """To the byte, in every scope of the model."""
    assert_asks_for_the_same(PLANS[name])


@pytest.mark.parametrize("name", some(STAGED, 3))
def test_a_traced_pipeline_asks_for_the_same(name):
    assert_asks_for_the_same(STAGED[name])


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


def test_by_hand_zero1_of_parameters_in_bfloat16():
    """What is gathered after the update is as wide as it is stored: matrices two bytes, vectors four."""
    config = in_bfloat16(PLANS["llama, ZeRO-1"])
    count = sum(leaf.size for leaf in jax.tree.leaves(Model(config.model).shapes()))
    vectors = 5 * config.model.embed
    (gathered,) = (site for site in sites_of(config) if site.what == "updated parameters")
    assert gathered.sent == ((count - vectors) * 2 + vectors * 4) * 7 / 8


def test_by_hand_stages():
    """LLaMA in 2 stages of 2 layers, 1F1B of 4 microbatches: 5 ticks forward and 5 backward, 10 runs of a layer. A
    stage keeps its input; a microbatch is B=4, S=64, D=64; 4 heads and 2 kv heads of 32, 256 mlp, V=512."""
    block = 64 * (2 * 128 + 2 * 64 + 3 * 256) // 2  # entries of a block's matrices, along tensor=2
    table = 512 * 64 // 2
    stream = 4 // 2 * 64 * 64 * 4  # bytes of the residual stream of one of fsdp=2, gathered
    assert sent(site for site in sites_of(STAGED["1F1B, fsdp x tensor, a stage's input"]) if site.asked) == {
        # Blocks forward, again before the backward, and in it; the lookup in 5 ticks, the loss in 4.
        over("all-gather", "fsdp"): (10 * 3 * block + (5 + 4) * table) * 4 / 2,
        over("reduce-scatter", "fsdp"): (10 * block + (5 + 4) * table) * 4 / 2,
        # A layer: two inputs forward, two again, twice two in the backward. A stage has half of the tokens of a loss.
        over("all-gather", "tensor"): (10 * (2 + 2 + 4) + 5 + 4 / 2) * stream / 2,
        # Two outputs, two again, one of them once more, two gradients.
        over("reduce-scatter", "tensor"): (10 * (2 + 2 + 3) + 5 + 4 / 2) * stream / 2,
        over("all-reduce", "tensor"): 4 * 3 * 4 * (2 * 64 / 2) * 2 / 2,
        over("all-reduce", "fsdp"): 4 * 2 * 4 * 2 / 2,
        over("ppermute", "stage"): (5 + 5) * stream / 2,
        over("reduce-scatter", "stage"): 4 * stream / 2 / 2,
        over("all-gather", "stage"): 4 * stream / 2 / 2,
        over("all-reduce", "stage"): 2 * 4 + (2 * table / 2 + 64 / 2) * 4,  # two sums; two tables, the last norm
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped", "zb_h1"])
def test_ends_are_counted_at_least_as_often_as_they_run(name):
    v = 3 if name in ("interleaved", "looped") else 1
    for P, M in [(2, 2), (4, 5), (4, 16), (8, 24)]:
        ticks, segments = ticks_of(name, P, M, v), program(schedule(name, P, M, v)).segments
        rows = [(kind, row) for segment in segments for kind, row in segment.ticks.items()]
        lookups = sum(row.some_end.sum() for kind, row in rows if kind == "forward")
        losses = sum(row.some_score.sum() for _, row in rows)
        assert lookups == losses == M
        assert M <= ticks.scores <= ticks.forward and M <= ticks.embeds <= ticks.forward
        assert M <= ticks.embedded <= ticks.backward
        assert ticks.both <= min(ticks.embeds, ticks.scores)
        if v == 1:
            assert (ticks.forward, ticks.backward, ticks.weight) == (M + P - 1, M + P - 1, M * (name == "zb_h1"))


def test_one_device_sends_nothing():
    assert sites_of(config_of("llama")) == sites_of(config_of("gpt2", "full", accumulation=2)) == []


def test_rings_send_what_collectives_send():
    """A ring takes as many bytes along as the gather or scatter it stands for, of any size of chunk."""
    plain = config_of("gpt2", fsdp=2, tensor=4)
    whole, ring = sent(sites_of(plain)), sent(sites_of(changed(plain, overlap=BOTH_RINGS)))
    assert sum(ring.values()) == sum(whole.values())
    assert ring[over("ppermute", "tensor")] > 0


def test_a_large_model_has_as_many_rows_as_a_small_one():
    """No loop over layers or devices, and a schedule is read once: a planner asks for thousands of plans."""
    large = dataclasses.replace(load_config("gpt2_1558m"), mesh=MeshSpec(fsdp=8), memory=MemoryConfig("full"))
    small = changed(config_of("gpt2", "full", fsdp=8), "model", vocab_size=8192)
    assert len(sites_of(large)) == len(
        sites_of(changed(small, "memory", loss_mib=1))
    )  # both by slices of the vocabulary
    stages = staged(dataclasses.replace(large, mesh=MeshSpec(stage=4, fsdp=2)), "1f1b", 8, train_batch=256)
    assert len(sites_of(stages)) == len(sites_of(staged(config_of("gpt2", "full", stage=4, fsdp=2), "1f1b", 8)))


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
    "gpt2, interleaved, data": (
        staged(config_of("gpt2", stage=2, data=4), "interleaved", 4, pipeline_virtual=2, train_batch=16), "",
    ),
}  # fmt: skip
COMPILED_SLOWLY = {
    "llama, rings": (changed(config_of("llama", "full", fsdp=4, tensor=2), overlap=BOTH_RINGS), ""),
    "gpt2, ZeRO-1, ring": (
        changed(config_of("gpt2", data=4, tensor=2), rules=ZERO1, overlap=Overlap("ring", "bidirectional")), "",
    ),
    "llama, 1F1B for GPUs": (
        staged(config_of("llama", "full", compute="bfloat16", embed=512, stage=2, fsdp=4), "1f1b", 4), "h100x8",
    ),
    "llama, ZeRO-1 for TPUs": (
        changed(config_of("llama", "full", compute="bfloat16", embed=1024, data=8), rules=ZERO1), "v5e-8",
    ),
}  # fmt: skip


def cases(programs: dict[str, tuple[Config, str]]) -> list[Any]:
    def marks(target: str) -> Any:
        return MARKS[load_target(target).platform] if target else ()

    return [pytest.param(*case, id=name, marks=marks(case[1])) for name, case in programs.items()]


def assert_compiles_to_the_same(config: Config, target: str) -> None:
    assert_same(sent(sites_of(config, target)), compiled(config, target)[1])


def assert_same(ours: Mapping[Any, float], made: Mapping[Any, float]) -> None:
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


@pytest.mark.slow
def test_a_compiled_step_gathers_once_the_tables_that_every_microbatch_needs():
    """XLA:CPU moves both gathers out of the loop over microbatches, where each device adds up its own gradients."""
    config = config_of("llama", "full", accumulation=2, data=2, fsdp=4)
    found, gathers = sites_of(config), over("all-gather", "fsdp")
    tables = [site.sent for site in found if site.kind == "all-gather" and site.what.endswith("table")]
    ours = sent(found)
    assert len(tables) == 2
    assert_same({**ours, gathers: ours[gathers] - sum(tables) / 2}, compiled(config)[1])
