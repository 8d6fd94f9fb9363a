"""The reader against arithmetic: FLOPs of whole training steps, bytes of collectives, where the
work comes from.

In the closed forms: B batch, S sequence, D embed, H heads, h head_dim, F mlp, L layers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiers import needs_cuda, needs_libtpu, some

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
from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.program.tasks import Collective, Program, Task, walk
from jaxpar.hlo.read import read_program
from jaxpar.kernels.attention import chunked
from jaxpar.kernels.attention.libraries import kernel_cost
from jaxpar.kernels.attention.triton_tiles import tile_sizes_for
from jaxpar.kernels.masks import FULL, PARTIAL, Causal, Tiles, tile_states
from jaxpar.models import Model
from jaxpar.rehearse.targets import load_target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.step import make_train_step, step_shapes

FAST = {"cpu": {"xla_backend_optimization_level": "0"}}  # of machine code: the HLO is the same


def config_of(
    family: str,
    remat: str = "none",
    scan: bool = True,
    accumulation: int = 1,
    size: int = 1,
    seq_len: int = 0,
    **mesh: int,
) -> Config:
    """Two layers; `size` multiplies the widths, for compilers that want whole tiles."""
    seq_len = seq_len or 32 * size
    kv = {"kv_heads": 2} if family == "llama" else {}
    model = ModelConfig(
        family,
        vocab_size=300 * size,
        vocab_multiple=64 * size,
        layers=2,
        embed=64 * size,
        heads=4,
        head_dim=16 * size,
        mlp=192 * size,
        max_seq_len=seq_len,
        scan_layers=scan,
        tied_head=family == "gpt2",
        **kv,
    )
    return Config(
        model=model,
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(batch=16, accumulation=accumulation),
        mesh=MeshSpec(**mesh),
        memory=MemoryConfig(policy=remat),  # pyright: ignore[reportArgumentType]
        precision=PrecisionConfig(compute="float32" if size == 1 else "bfloat16"),
    )


@functools.cache
def program_of(config: Config, target: str = "") -> Program:
    """The training step compiled for a target, or the devices here."""
    if target:
        platform = load_target(target).platform
        devices = load_target(target).devices()
    else:
        platform = "cpu"
        devices = jax.devices()[: devices_needed(config.mesh)]
    plan = make_plan(config, devices)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    traced = make_train_step(experiment).trace(*step_shapes(experiment))
    lowered = traced.lower(lowering_platforms=(platform,))
    return read_program(
        text_of(lowered.compile(compiler_options=FAST.get(platform))), kernel_cost=kernel_cost
    )


def text_of(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text
    return text


# The closed form, for all devices together. A matmul of [n, k] and [k, m] is 2 n k m.


def attention_flops(config: Config, platform: str) -> tuple[float, float]:
    """Forward and backward of one layer, as the implementation that is chosen computes them: see
    `jaxpar.kernels`.
    """
    model = config.model
    S = config.data.seq_len
    matmul = 2.0 * config.train.batch * model.heads * model.head_dim  # for one query and key
    # splash: tiles that are not empty, the scores again in each of two backward kernels
    if platform == "tpu":
        tiles = Tiles(
            S,
            S,
            math.gcd(S, 1024),
            math.gcd(S, 1024),
        )
        computed = (
            matmul * tiles.block_q * tiles.block_k * np.count_nonzero(tile_states(Causal(), tiles))
        )
        return 2 * computed, 7 * computed
    if platform == "cuda":  # Triton's tiles that are not empty
        sizes = tile_sizes_for(model.head_dim, config.precision.compute, "H100")
        forward, dq, dkv = (
            products
            * matmul
            * tile.block_q
            * tile.block_k
            * np.count_nonzero(
                tile_states(
                    Causal(),
                    Tiles(S, S, tile.block_q, tile.block_k),
                )
            )
            for products, tile in zip((2, 3, 4), sizes, strict=True)
        )
        return forward, dq + dkv
    # Tiles that are not empty. The backward makes the scores again; those of a tile that is alone
    # in its list, and so in no loop, XLA takes from the forward or from the recomputation, where it
    # sees both.
    most = chunked.TILE
    tiles = Tiles(S, S, -(-S // -(-S // most.rows)), -(-S // -(-S // most.columns)))
    lists = [int(np.sum(tile_states(Causal(), tiles) == state)) for state in (PARTIAL, FULL)]
    if config.memory.policy == "full" or not config.model.scan_layers:
        shared = lists.count(1)
    else:
        shared = 0
    tile = matmul * tiles.block_q * tiles.block_k
    return 2 * sum(lists) * tile, (5 * sum(lists) - shared) * tile


def linear_flops(config: Config) -> dict[str, float]:
    """Forward, one layer, by the linear's part of the block."""
    model = config.model
    tokens = config.train.batch * config.data.seq_len
    D = model.embed
    h = model.head_dim
    F = model.mlp
    wide = model.heads * h
    narrow = (model.kv_heads or model.heads) * h
    gates = 2 if model.family == "llama" else 1
    sizes = {
        "qkv": D * (wide + 2 * narrow),
        "out": wide * D,
        "up": gates * D * F,
        "down": F * D,
    }
    return {name: 2.0 * tokens * size for name, size in sizes.items()}


def expected_flops(config: Config, platform: str = "cpu") -> dict[str, float]:
    """By phase. The backward of a matmul is two; those of the head are made in the forward, with
    the loss. Recomputed is each block but for its last matmul, whose result no gradient needs."""
    layer = linear_flops(config)
    (attention, attention_backward) = attention_flops(config, platform)
    # RoPE turns q and k by a matmul, and their gradients back
    if platform == "tpu" and config.model.family == "llama":
        model = config.model
        heads = model.heads + (model.kv_heads or model.heads)
        turns = 2.0 * config.train.batch * config.data.seq_len * heads * model.head_dim**2
        attention = attention + turns
        attention_backward = attention_backward + turns
    linears = sum(layer.values())
    L = config.model.layers
    rows = -(-config.model.vocab_size // config.model.vocab_multiple) * config.model.vocab_multiple
    head = 2.0 * config.train.batch * config.data.seq_len * rows * config.model.embed
    if config.memory.policy == "full":
        again = linears - layer["down"] + attention
    else:
        again = 0.0
    return {
        "forward": L * (linears + attention) + 3 * head,
        "backward": L * (2 * linears + attention_backward),
        "recomputed": L * again,
    }


def flops_by_phase(program: Program, devices: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for task, count in walk(program.nodes):
        found[task.origin.phase] += task.flops * count * devices
    return found


def assert_flops_as_expected(program: Program, config: Config, platform: str = "cpu") -> None:
    found = flops_by_phase(program, devices_needed(config.mesh))
    expected = expected_flops(config, platform)
    assert sum(found.values()) == pytest.approx(
        sum(expected.values()),
        rel=0.01,
    )
    # else XLA says of which phase they are
    for phase, flops in expected.items() if config.model.scan_layers else ():
        assert found[phase] == pytest.approx(flops, rel=0.01), phase
    assert program.notes == ()


CONFIGS = {
    "gpt2, scan": config_of("gpt2"),
    "gpt2, unrolled, remat": config_of("gpt2", "full", scan=False),
    "gpt2, scan, remat": config_of("gpt2", "full"),
    "gpt2, unrolled, 8 devices": config_of("gpt2", scan=False, data=2, fsdp=2, tensor=2),
    "gpt2, accumulation, remat, 8 devices": config_of(
        "gpt2", "full", accumulation=2, data=2, fsdp=2, tensor=2
    ),
    "gpt2, chunked attention": config_of("gpt2", seq_len=1024),
    "gpt2, chunked attention, remat": config_of("gpt2", "full", seq_len=1280),
    "llama, unrolled": config_of("llama", scan=False),
    "llama, scan, remat": config_of("llama", "full"),
    "llama, unrolled, remat": config_of("llama", "full", scan=False),
    "llama, accumulation": config_of("llama", accumulation=4),
    "llama, scan, remat, 8 devices": config_of("llama", "full", fsdp=4, tensor=2),
}


@pytest.mark.parametrize("name", some(CONFIGS, 12))
def test_flops_of_a_training_step(name: str) -> None:
    assert_flops_as_expected(program_of(CONFIGS[name]), CONFIGS[name])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        config_of("llama", "full", size=8, fsdp=4, tensor=2),
        config_of("gpt2", scan=False, size=8, data=8),
    ],
    ids=["llama, scan, remat", "gpt2, unrolled"],
)
def test_flops_of_a_training_step_for_absent_tpus(config: Config) -> None:
    found = program_of(config, "v5e-8")
    assert_flops_as_expected(found, config, "tpu")
    assert_places_are_known(found)
    matmuls = [task for task, _ in walk(found.nodes) if task.kind == "matmul"]
    assert all(task.cycles for task in matmuls)
    # 197e12 FLOP/s at 1.5 GHz: no matmul is faster than the chip.
    assert max(task.flops / (task.cycles or 1) for task in matmuls) < 197e12 / 1.5e9 * 1.02


@needs_cuda
def test_flops_of_a_training_step_for_absent_gpus() -> None:
    config = config_of("llama", "full", size=4, fsdp=4, tensor=2)
    # where cuDNN is installed, auto would be its kernels, which compute other tiles
    config = override(config, {"kernels.attention": "pallas_gpu"})
    found = program_of(config, "h100x8")
    assert_flops_as_expected(found, config, "cuda")
    assert_places_are_known(found)
    collectives = [task for task, _ in walk(found.nodes) if task.collective]
    # jaxlib 0.12 writes those that have nothing to go on beside as one instruction, and not as two
    asynchronous = [task.asynchronous for task in collectives]
    assert any(asynchronous) and (jax.__version_info__ >= (0, 11) or all(asynchronous))


def test_full_remat_runs_the_blocks_again_but_for_their_last_matmul() -> None:
    config = CONFIGS["llama, scan, remat"]
    found: dict[tuple[str, str], float] = defaultdict(float)
    for task, count in walk(program_of(config).nodes):
        if task.flops:
            found["/".join(task.origin.scope.split("/")[:2]), task.origin.phase] += (
                task.flops * count
            )
    assert found["block/attention", "forward"] == found["block/attention", "recomputed"] > 0
    last = config.model.layers * linear_flops(config)["down"]
    assert found["block/mlp", "forward"] - found["block/mlp", "recomputed"] == last


# Where the work comes from.


def seconds_of(task: Task) -> float:
    """Rough: what matters is which tasks are large."""
    if task.cycles:
        return task.cycles / 1e9
    return task.flops / 1e12 + task.bytes / 1e11


def assert_places_are_known(program: Program) -> None:
    """At most 2 % of the time without a scope and a line, and every matmul with both, its line a
    model's.
    """
    total = sum(seconds_of(task) * count for task, count in walk(program.nodes))
    lost = sum(
        seconds_of(t) * n for t, n in walk(program.nodes) if not (t.origin.source or t.origin.scope)
    )
    assert lost <= 0.02 * total
    for task, _ in walk(program.nodes):
        assert task.kind != "matmul" or (
            task.origin.source.startswith("models/") and task.origin.scope
        ), task


@pytest.mark.parametrize("name", some(CONFIGS, 6))
def test_places_are_known(name: str) -> None:
    assert_places_are_known(program_of(CONFIGS[name]))


@pytest.mark.parametrize("name", some(CONFIGS, 6))
def test_matmuls_are_tied_to_the_lines_that_call_them(name: str) -> None:
    """Forward, recomputed and backward alike: a call of a linear, of the attention, or of the
    loss.
    """
    spec = find_spec("jaxpar.models")
    assert spec is not None and spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    calls = {
        "block/attention": ("column_linear(", "column_linears(", "row_linear(", "attention("),
        "loss": ("linear_cross_entropy(",),
    }
    calls["block/mlp"] = calls["block/attention"][:3]
    met: Counter[str] = Counter()
    for task, _ in walk(program_of(CONFIGS[name]).nodes):
        if task.kind == "matmul":
            file, line = task.origin.source.removeprefix("models/").split(":")
            text = Path(folder, file).read_text().splitlines()[int(line) - 1]
            scope = next(scope for scope in calls if task.origin.scope.startswith(scope))
            assert any(call in text for call in calls[scope]), (task.name, text)
            met[scope] += 1
    assert set(met) == set(calls)


def test_the_update_is_told_from_the_gradients() -> None:
    scopes = {task.origin.scope for task, _ in walk(program_of(CONFIGS["gpt2, scan"]).nodes)}
    assert {"embed", "block/attention", "block/mlp", "loss", "update"} <= scopes
    phases = {
        task.origin.phase
        for task, _ in walk(program_of(CONFIGS["gpt2, scan"]).nodes)
        if task.origin.scope == "update"
    }
    assert phases == {"update"}


# Collectives whose answer is known.


MESH = {"data": 2, "tensor": 4}
SHAPE = (64, 32)
BYTES = 64 * 32 * 4


def collectives_of(function: Any, out: PartitionSpec, plan: Plan) -> list[Collective]:
    """Those of a function of one f32 array split over both axes of a 2 x 4 mesh."""
    spec = PartitionSpec("data", "tensor")
    mapped = jax.shard_map(
        function,
        mesh=plan.mesh,
        in_specs=spec,
        out_specs=out,
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(plan.mesh, spec))
    found = read_program(text_of(jax.jit(mapped).lower(x).compile()))
    return [task.collective for task, _ in walk(found.nodes) if task.collective]


def along(axes: Sequence[str]) -> set[frozenset[int]]:
    """The groups of devices along mesh axes of the 2 x 4 mesh."""
    rows = [[4 * data + tensor for tensor in range(4)] for data in range(2)]
    if set(axes) == {"tensor"}:
        return {frozenset(row) for row in rows}
    if set(axes) == {"data"}:
        return {frozenset(column) for column in zip(*rows, strict=True)}
    return {frozenset(range(8))}


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_an_all_gather(axis: str, plan_of) -> None:
    out = {"data": PartitionSpec(None, "tensor"), "tensor": PartitionSpec("data", None)}[axis]
    dim = ("data", "tensor").index(axis)
    gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis=dim, tiled=True)
    (found,) = collectives_of(gather, out, plan_of(**MESH))
    assert (found.kind, found.dtype, set(map(frozenset, found.groups))) == (
        "all-gather",
        "f32",
        along([axis]),
    )
    assert found.bytes == BYTES * MESH[axis] // 8
    assert found.sent_bytes == BYTES // 8 * (MESH[axis] - 1)


@pytest.mark.parametrize(
    "axes",
    [("data",), ("tensor",), ("data", "tensor")],
)
def test_an_all_reduce(axes: tuple[str, ...], plan_of) -> None:
    left = [None if axis in axes else axis for axis in ("data", "tensor")]
    (found,) = collectives_of(
        lambda x: jax.lax.psum(x, axes), PartitionSpec(*left), plan_of(**MESH)
    )
    assert (found.kind, set(map(frozenset, found.groups))) == ("all-reduce", along(axes))
    k = len(found.groups[0])
    assert (found.bytes, found.sent_bytes) == (BYTES // 8, 2 * BYTES / 8 * (k - 1) / k)


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_reduce_scatter(axis: str, plan_of) -> None:
    scatter = functools.partial(
        jax.lax.psum_scatter, axis_name=axis, scatter_dimension=0, tiled=True
    )
    (found,) = collectives_of(scatter, PartitionSpec("data", "tensor"), plan_of(**MESH))
    assert (found.kind, found.bytes, set(map(frozenset, found.groups))) == (
        "reduce-scatter",
        BYTES // 8,
        along([axis]),
    )


def test_a_ppermute(plan_of) -> None:
    ring = [(i, (i + 1) % 4) for i in range(4)]
    (found,) = collectives_of(
        lambda x: jax.lax.ppermute(x, "tensor", ring),
        PartitionSpec("data", "tensor"),
        plan_of(**MESH),
    )
    pairs = {(4 * data + source, 4 * data + target) for data in range(2) for source, target in ring}
    assert (found.kind, found.bytes, set(found.groups)) == ("ppermute", BYTES // 8, pairs)


def test_an_all_to_all(plan_of) -> None:
    exchange = functools.partial(
        jax.lax.all_to_all, axis_name="tensor", split_axis=0, concat_axis=1, tiled=True
    )
    (found,) = collectives_of(
        exchange,
        PartitionSpec(("data", "tensor"), None),
        plan_of(**MESH),
    )
    assert (found.kind, found.bytes) == ("all-to-all", BYTES // 8)
    assert set(map(frozenset, found.groups)) == along(["tensor"])


def test_a_loop_counts_its_collectives(plan_of) -> None:
    def ring(x: jax.Array) -> jax.Array:
        def step(carry, _):
            total, block = carry
            return (
                total + block,
                jax.lax.ppermute(
                    block,
                    "tensor",
                    [(i, (i + 1) % 4) for i in range(4)],
                ),
            ), None

        return jax.lax.scan(step, (jnp.zeros_like(x), x), None, length=4)[0][0]

    plan = plan_of(**MESH)
    spec = PartitionSpec("data", "tensor")
    mapped = jax.shard_map(
        ring,
        mesh=plan.mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(plan.mesh, spec))
    found = read_program(text_of(jax.jit(mapped).lower(x).compile()))
    assert (
        sum(task.collective.bytes * n for task, n in walk(found.nodes) if task.collective)
        == 4 * BYTES // 8
    )
