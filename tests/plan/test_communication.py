"""What a plan sends, read from its traced step: beside sums made by hand, and what making an
activation again adds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from experiments import experiment_of
from traced_steps import config_of, staged

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.layout.mesh import MeshSpec, devices_needed
from jaxpar.base.layout.plan import Overlap
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.models import Model
from jaxpar.plan.communication import (
    StepCollective,
    bytes_by_collective,
    step_collectives,
)
from jaxpar.train.experiments import make_plan

FSDP_TENSOR = config_of("llama", "full", fsdp=4, tensor=2)
ZERO1 = dataclasses.replace(
    config_of("llama", data=8),
    rules=ShardingRules(
        embed=(),
        state_embed=("data",),
    ),
)
STREAM = 16 * 64 * 64 * 4
"""Bytes of a residual stream: 16 sequences of 64 tokens, D=64, float32."""


def in_step(config: Config) -> tuple[StepCollective, ...]:
    return step_collectives(
        experiment_of(config, make_plan(config, jax.devices()[: devices_needed(config.mesh)])),
    )


def sent_by(config: Config, *scopes: str) -> dict[Any, float]:
    """What is sent in these scopes of the model, and in those below them."""
    return bytes_by_collective(
        one
        for one in in_step(config)
        if f"{one.scope}/".startswith(tuple(f"{scope}/" for scope in scopes))
    )


def over(kind: str, *axes: str) -> tuple[str, tuple[str, ...]]:
    return kind, axes


# By hand. The model has 2 layers, 4 heads of 32, D=64, 256 mlp, V=512; LLaMA 2 kv heads. B=16,
# S=64.


def test_fsdp_and_tensor():
    """LLaMA, remat full, in float32."""
    # entries of both blocks' matrices, along tensor=2
    block = 2 * 64 * (2 * 128 + 2 * 64 + 3 * 256) // 2
    table = 512 * 64 // 2
    stream = STREAM / 4  # of one of fsdp=4, gathered
    assert bytes_by_collective(in_step(FSDP_TENSOR)) == {
        # Blocks for forward and backward; the embedding and the head once.
        over("all-gather", "fsdp"): (2 * block + 2 * table) * 4 * 3 / 4,
        over("reduce-scatter", "fsdp"): (block + 2 * table) * 4 * 3 / 4,
        # A layer: two inputs forward, twice two in the backward. Then the loss's input, the
        # lookup's gradient.
        over("all-gather", "tensor"): (2 * 6 + 2) * stream / 2,
        # A layer: two outputs, one of them once more, two gradients. Then the rows looked up, the
        # loss's gradient.
        over("reduce-scatter", "tensor"): (2 * 5 + 2) * stream / 2,
        over("all-reduce", "tensor"): 3 * 4 * (4 * 64) * 2 / 2,  # three scores of each token
        over("all-reduce", "fsdp"): 2 * 4 * 2 * 3 / 4,  # the sums of loss and tokens
    }


def test_each_has_its_place_and_its_phase():
    """A block's attention, its rows: two matmuls' moves of the stream, in each direction once, the
    sum once more.
    """
    found = [
        one
        for one in in_step(FSDP_TENSOR)
        if one.scope == "block/attention" and "tensor" in one.axes
    ]
    assert [(one.phase, one.kind, one.count) for one in found] == [
        ("forward", "all-gather", 2),
        ("forward", "reduce-scatter", 2),
        ("recomputed", "all-gather", 2),
        ("recomputed", "reduce-scatter", 2),
        ("backward", "all-gather", 2),
        ("backward", "reduce-scatter", 2),
    ]
    first = found[0]
    assert (first.devices, first.bytes) == (2, STREAM // 4)
    assert (first.sent_bytes, first.step_bytes) == (STREAM / 4 / 2, 2 * STREAM / 4 / 2)
    half = in_step(override(FSDP_TENSOR, {"precision.compute": "bfloat16"}))
    assert (
        bytes_by_collective(half)[over("all-gather", "tensor")]
        == bytes_by_collective(in_step(FSDP_TENSOR))[over("all-gather", "tensor")] / 2
    )


def entries(config: Config) -> int:
    """Of all parameters, the vocabulary's padding among them."""
    return sum(leaf.size for leaf in jax.tree.leaves(Model(config.model).shapes()))


def test_zero1():
    """Gradients of all matrices are scattered, every parameter is gathered, which is what an
    all-reduce sends.
    """
    count = entries(ZERO1)
    vectors = 5 * ZERO1.model.embed
    assert bytes_by_collective(in_step(ZERO1)) == {
        over("reduce-scatter", "data"): (count - vectors) * 4 * 7 / 8,
        over("all-gather", "data"): count * 4 * 7 / 8,
        over("all-reduce", "data"): 2 * 4 * 2 * 7 / 8,
    }


def test_zero1_of_parameters_in_bfloat16():
    """What is gathered after the update is as wide as it is stored: matrices two bytes, vectors
    four.
    """
    config = override(
        ZERO1, {f"precision.{name}": "bfloat16" for name in ("compute", "params", "gradients")}
    )
    vectors = 5 * config.model.embed
    gathered = ((entries(config) - vectors) * 2 + vectors * 4) * 7 / 8
    assert sent_by(config, "update") == {over("all-gather", "data"): gathered}
    assert {one.phase for one in in_step(config) if one.kind == "all-gather"} == {"update"}


def test_gradients_are_summed_over_data_after_the_last_microbatch():
    config = config_of("gpt2", accumulation=4, data=4)
    (accumulated,) = sent_by(config, "accumulate").items()
    assert accumulated == (
        over("all-reduce", "data"),
        (entries(config) + 2) * 4 * 2 * 3 / 4,
    )
    assert bytes_by_collective(in_step(config)) == dict([accumulated])


def test_rings_send_what_collectives_send():
    """A ring takes as many bytes along as the gather or scatter it stands for, of any size of
    chunk.
    """
    plain = config_of("gpt2", fsdp=2, tensor=4)
    rings = dataclasses.replace(plain, overlap=Overlap("ring", "bidirectional"))
    whole = bytes_by_collective(in_step(plain))
    ring = bytes_by_collective(in_step(rings))
    assert sum(ring.values()) == sum(whole.values())
    assert ring[over("ppermute", "tensor")] > 0


def test_keys_and_values_of_a_split_sequence():
    """Forward and backward send k and v on to 3 others, the backward their gradients in float32
    too.
    """
    config = config_of("llama", context=4, fsdp=2)
    keys = 2 * (16 // 2) * (64 // 4) * 2 * 32 * 4  # a device's k and v: 2 heads of 32
    moves = {one: size / keys for one, size in sent_by(config, "block/attention/core").items()}
    hops = 2 * 3  # of both layers
    assert moves == {over("ppermute", "context"): 3 * hops}


def test_ulysses_swaps_the_sequence_for_heads():
    """q, k, v there and the output back; in the backward these, two gradients and the log-sum-exp;
    and three back.
    """
    config = override(config_of("gpt2", context=4), {"context.strategy": "ulysses"})
    one = 16 * (64 // 4) * 4 * 32 * 4  # q, of a device's tokens: 4 heads of 32
    swapped = 2 * (3 + 1 + 3 + 1 + 3) * one + 2 * one / 32
    assert sent_by(config, "block/attention/core") == {
        over("all-to-all", "context"): swapped * 3 / 4
    }


def test_rows_for_experts_and_back():
    """4 experts, 2 a token, on 2 devices: each has room for all rows of both. There and back,
    forward and backward.
    """
    config = override(
        config_of("llama", expert=2), {"model.experts": 4, "model.experts_per_token": 2}
    )
    rows = 2 * (16 // 2 * 64) * 2 * 64 * 4  # 2 devices' tokens, 2 choices of each, D=64
    moves = sent_by(config, "block/mlp/dispatch", "block/mlp/combine")
    assert moves == {over("all-to-all", "expert"): 2 * 4 * rows / 2}


def test_stages():
    """LLaMA in 2 stages of 2 layers, 1F1B of 4 microbatches: 5 ticks forward and 5 backward, 10
    runs of a layer. A stage keeps its input; a microbatch is B=4."""
    block = 64 * (2 * 128 + 2 * 64 + 3 * 256) // 2  # entries of a block's matrices, along tensor=2
    table = 512 * 64 // 2
    stream = 4 // 2 * 64 * 64 * 4  # bytes of the residual stream of one of fsdp=2, gathered
    assert bytes_by_collective(
        in_step(
            staged(
                config_of("llama", "full", stage=2, fsdp=2, tensor=2),
                "1f1b",
                4,
            )
        )
    ) == {
        # Blocks forward, again before the backward, and in it; the lookup and the loss of each
        # microbatch.
        over("all-gather", "fsdp"): (10 * 3 * block + (4 + 4) * table) * 4 / 2,
        over("reduce-scatter", "fsdp"): (10 * block + (4 + 4) * table) * 4 / 2,
        # A layer: two inputs forward, two again, twice two in the backward. A stage has half of the
        # tokens of a loss.
        over("all-gather", "tensor"): (10 * (2 + 2 + 4) + 4 + 4 / 2) * stream / 2,
        # Two outputs, two again, one of them once more, two gradients.
        over("reduce-scatter", "tensor"): (10 * (2 + 2 + 3) + 4 + 4 / 2) * stream / 2,
        over("all-reduce", "tensor"): 4 * 3 * 4 * (2 * 64 / 2) * 2 / 2,
        over("all-reduce", "fsdp"): 4 * 2 * 4 * 2 / 2,
        over("ppermute", "stage"): (5 + 5) * stream / 2,
        over("reduce-scatter", "stage"): 4 * stream / 2 / 2,
        over("all-gather", "stage"): 4 * stream / 2 / 2,
        # two sums; two tables, the last norm
        over("all-reduce", "stage"): 2 * 4 + (2 * table / 2 + 64 / 2) * 4,
    }


def test_one_device_sends_nothing():
    assert in_step(config_of("llama")) == in_step(config_of("gpt2", "full", accumulation=2)) == ()


def test_a_large_model_has_as_many_rows_as_a_small_one():
    large = override(
        dataclasses.replace(load_config("gpt2_1558m"), mesh=MeshSpec(fsdp=8)),
        {"memory.policy": "full"},
    )
    small = override(
        config_of("gpt2", "full", fsdp=8), {"model.vocab_size": 8192, "memory.loss_mib": 1}
    )
    assert len(in_step(override(large, {"memory.loss_mib": 1, "train.accumulation": 1}))) == len(
        in_step(small)
    )


def test_parallel_sublayers_send_half_of_what_serial_ones_do():
    """Along tensor, of the activations; the weights' moves along fsdp are the same."""
    config = config_of("llama", "none", fsdp=4, tensor=2)
    serial = sent_by(config, "block")
    found = sent_by(override(config, {"model.sublayers": "parallel"}), "block")
    for kind in ("all-gather", "reduce-scatter"):
        assert found[over(kind, "tensor")] == serial[over(kind, "tensor")] / 2
        assert found[over(kind, "fsdp")] == serial[over(kind, "fsdp")]
