"""The smallest model, batch and mesh that keep what a plan can get wrong: `verify` runs them in place of a config.

Same family, rules, remat, precision, packing and mesh axes; few layers and narrow dims, each a multiple of the pieces
it is split into, and an odd one where it can be, so that no shard is a power of two by accident.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from jaxpar.base.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MetricsConfig,
    ModelConfig,
    TrainConfig,
    rules_of,
)  # fmt: skip
from jaxpar.base.heads import fit_rules
from jaxpar.base.mesh import (
    DcnSpec,
    MeshAxis,
    MeshSpec,
    axis_sizes,
    describe,
    devices_needed,
    resolve,
    total_sizes,
)  # fmt: skip
from jaxpar.base.plan import Overlap, Pipeline
from jaxpar.base.sharding import LogicalAxis, ShardingRules, named_axes
from jaxpar.parallel.pipeline import layers_of, microbatches

SIMULATED = 8  # CPU devices where the mesh leaves the number open; a mesh that asks for up to twice as many gets them
MOST_ACCUMULATION = 4  # more microbatches repeat what these do
_FEW = 4  # virtual stages have two layers each, more than so many have one
_ROWS = 40  # of the vocabulary tables, at least


class Least(NamedTuple):
    """The least that a sequence and a head may be shrunk to; ops that depend on their size must stay what they are.

    Attributes:
      seq_len: tokens.
      head_dim: features.
      block: a sequence is a multiple of this.
    """

    seq_len: int = 12
    head_dim: int = 6
    block: int = 1


# The smallest for plain attention, then one with two chunks of queries, then one whole tile of a TPU kernel.
LEAST = (Least(), Least(seq_len=513), Least(seq_len=128, head_dim=128, block=128))


class Shrunk(NamedTuple):
    """A small config with the plan of a large one, and what was changed, a sentence each."""

    config: Config
    notes: tuple[str, ...]


def shrink(config: Config, mesh: MeshSpec, least: Least = LEAST[0]) -> Shrunk:
    """A small model and batch on `mesh`, which is the config's own or what `fit_mesh` made of it.

    Steps, learning rate, data source and whatever else has no part in a gradient are reset to their defaults.
    """
    sizes = total_sizes(mesh)
    asked = asked_sizes(config, mesh)
    rules = rules_of(config, asked)
    chunks = _chunks(config, rules, sizes)
    seq_split = math.lcm(chunks, *(pieces(axis, rules, sizes) for axis in ("seq", "residual_seq")))
    # Three tokens a chunk: a single one would hide a wrong order inside it.
    least_seq = max(least.seq_len, 3 * chunks if chunks > 1 else 0)
    data = DataConfig(seq_len=odd_multiple(least_seq, math.lcm(seq_split, least.block)), pack=config.data.pack)
    heads, kv_heads = _few_heads(config, sizes, asked)
    layers, pipeline, piped = _shrink_pipeline(config, sizes, asked)
    model, notes = _shrink_model(config, sizes, data.seq_len, least.head_dim, heads, kv_heads, layers)
    accumulation = min(config.train.accumulation, MOST_ACCUMULATION)
    if accumulation < config.train.accumulation:
        notes.append(f"train.accumulation {config.train.accumulation} -> {accumulation}")
    overlap, chosen = _explicit(config.overlap)
    notes += chosen
    notes += piped
    # Two sequences a shard (and a half): a batch dim of one would hide a wrong order inside a shard.
    rows = 2 * overlap.parts * pieces("batch", config.rules, sizes)
    staged = pieces("stage", config.rules, sizes) > 1
    batch = rows * accumulation * (pipeline.microbatches if staged else 1)
    train = TrainConfig(batch=batch, accumulation=accumulation, seed=config.train.seed, z_loss=config.train.z_loss,
                        balance_loss=config.train.balance_loss, router_z_loss=config.train.router_z_loss)  # fmt: skip
    small = dataclasses.replace(
        config, model=model, data=data, train=train, mesh=mesh, overlap=overlap, pipeline=pipeline,
        checkpoint=CheckpointConfig(), metrics=MetricsConfig(),
    )  # fmt: skip
    return Shrunk(small, tuple(notes))


def asked_sizes(config: Config, mesh: MeshSpec) -> dict[MeshAxis, int]:
    """Devices along each axis of the config's own mesh, where an axis of -1 has those of `mesh`."""
    filled = {axis: getattr(mesh, axis) for axis, size in axis_sizes(config.mesh).items() if size == -1}
    return total_sizes(dataclasses.replace(config.mesh, **filled))


def pieces(axis: LogicalAxis, rules: ShardingRules, sizes: dict[MeshAxis, int]) -> int:
    """Into how many the rules split a logical axis on a mesh of these sizes."""
    return math.prod(sizes[mesh_axis] for mesh_axis in named_axes(axis, rules))


def _chunks(config: Config, rules: ShardingRules, sizes: dict[MeshAxis, int]) -> int:
    """Into how many the sequence of q, k and v is cut: two for each device where they are in zigzag order."""
    devices = pieces("attention_seq", rules, sizes)
    return devices if devices == 1 or config.context.strategy == "ulysses" else 2 * devices


def _few_heads(config: Config, sizes: dict[MeshAxis, int], asked: dict[MeshAxis, int]) -> tuple[int, int]:
    """The fewest heads and kv heads that lie on this mesh as the config's do on its own.

    As many query heads per kv head, if that can be. Where kv heads are copied or heads not split there, they are here;
    preferably fewer than devices if they are there, and with one kv head or several on a device.
    """
    model = config.model
    kv_heads = model.kv_heads or model.heads
    group, rules = model.heads // kv_heads, rules_of(config, asked)
    # Ulysses deals out the heads of a device, and its kv heads whole where they are enough.
    dealt = pieces("attention_seq", rules, sizes) if config.context.strategy == "ulysses" else 1
    whole_kv = dealt if kv_heads // pieces("kv_heads", rules, asked) % pieces("attention_seq", rules, asked) == 0 else 1
    splits = pieces("heads", rules, sizes) * dealt, pieces("kv_heads", rules, sizes) * whole_kv
    unit = math.lcm(*(pieces(axis, config.rules, sizes) for axis in ("heads", "kv_heads")), *splits)

    def fits(H: int, K: int) -> bool:
        even = H % splits[0] == 0 and K % splits[1] == 0
        return even and fit_rules(config.rules, H, K, sizes)[0] == rules

    def situation(H: int, K: int, sizes: dict[MeshAxis, int]) -> tuple[bool, bool]:
        devices, copied = pieces("heads", rules, sizes), rules.heads != rules.kv_heads
        return pieces("heads", config.rules, sizes) > H, copied and math.lcm(K, devices) > devices

    groups = [group * times for times in range(1, unit + 1 if model.kv_heads else 2)]
    pairs = [(K * group, K) for group in groups for K in range(min(2, kv_heads), 2 * unit + 3)]
    wanted = situation(model.heads, kv_heads, asked)
    # Of those alike the first: the smallest group, then the fewest heads.
    return max((pair for pair in pairs if fits(*pair)), key=lambda pair: situation(*pair, sizes) == wanted)


def _shrink_model(
    config: Config, sizes: dict[MeshAxis, int], S: int, least_head_dim: int, H: int, K: int, layers: int
) -> tuple[ModelConfig, list[str]]:
    model = config.model

    def split(axis: LogicalAxis) -> int:
        return pieces(axis, config.rules, sizes)

    head_dim = model.head_dim or model.embed // model.heads
    h = _multiple(least_head_dim, math.lcm(2, split("head_dim")))  # RoPE pairs the features of a head
    whole = math.lcm(split("embed"), split("state_embed"))
    D = odd_multiple(round(H * h * model.embed / (model.heads * head_dim)), whole)
    E = _fewer_experts(model, split("experts"))
    vocab = math.lcm(4, split("vocab"))
    rows = odd_multiple(_ROWS, vocab)
    padded = model.vocab_size % model.vocab_multiple != 0
    small = dataclasses.replace(
        model,
        layers=layers,
        embed=D,
        heads=H,
        kv_heads=K if model.kv_heads else 0,
        head_dim=h,
        mlp=odd_multiple(round(D * model.mlp / model.embed), split("mlp")),
        experts=E,
        capacity_factor=E / model.experts_per_token if model.capacity_factor else 0.0,
        vocab_size=rows - vocab // 2 - 1 if padded else rows,
        vocab_multiple=vocab,
        window=_shrink_window(model.window, config.data.seq_len, S),
        max_seq_len=S if config.data.seq_len == model.max_seq_len else S + 3,
        dropout=0.0,
    )
    names = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "experts", "vocab_size", "window")
    before, after = ([getattr(sizes, name) for name in names] for sizes in (model, small))
    changed = [f"{name} {a} -> {b}" for name, a, b in zip(names, before, after, strict=True) if a not in (0, b)]
    notes = [f"model shrunk: {', '.join(changed)}, sequence {config.data.seq_len} -> {S}"]
    if model.dropout:
        notes.append(f"model.dropout {model.dropout} -> 0: each microbatch draws its own, so there is no one answer")
    if model.capacity_factor:
        notes.append(
            f"model.capacity_factor {model.capacity_factor} -> {small.capacity_factor}: room for all, since which "
            "tokens are dropped depends on the layout"
        )
    return small, notes


def _shrink_pipeline(
    config: Config, sizes: dict[MeshAxis, int], asked: dict[MeshAxis, int]
) -> tuple[int, Pipeline, list[str]]:
    """The fewest layers and microbatches that keep what a pipeline does: an odd number of layers stays odd, stages of
    unequal layers stay so, and every slot of a buffer is used twice if it is at all."""
    before, stages = (pieces("stage", config.rules, these) for these in (asked, sizes))
    pipeline, layers = config.pipeline, config.model.layers
    if before == 1:
        return _multiple(2 + layers % 2, pieces("layers", config.rules, sizes)), pipeline, []
    counts, v = layers_of(layers, before, pipeline).counts, pipeline.virtual
    parts, few = stages * v, 2 if stages * v <= _FEW else 1
    if max(counts) == min(counts):
        small = (few,) * parts
    elif len(counts) == parts:
        small = tuple(1 + (count > min(counts)) for count in counts)
    else:
        small = (1, 2, *[1] * (parts - 2))
    M = microbatches(config, asked)
    over = M % before  # as many more than a multiple of the stages, or some more
    least = 3 * stages + (over if stages == before else min(over, 1))
    least = min(M, least if before <= M else max(stages - 1, 1))
    notes = [f"pipeline.microbatches {M} -> {least}"] if least < M else []
    return sum(small), replace(pipeline, microbatches=least, layers=small), notes


def _explicit(overlap: Overlap) -> tuple[Overlap, list[str]]:
    """What is left to choose is set to the form with the most that could go wrong: all give the same answer."""
    most = {"gather": "bidirectional", "scatter": "bidirectional", "domino": "on"}
    forced: Any = {name: form for name, form in most.items() if getattr(overlap, name) == "auto"}
    notes = [f"overlap.{name} auto -> {form}: all forms must give the same answer" for name, form in forced.items()]
    return dataclasses.replace(overlap, **forced), notes


def _shrink_window(window: int, before: int, after: int) -> int:
    """As long a part of the sequence as it was, but at least a third; 0 = none."""
    return 0 if window == 0 else max(-(-after // 3), round(window * after / before))


def _fewer_experts(model: ModelConfig, split: int) -> int:
    """Two on a device, and more than a token chooses; as many as there are where those are too many."""
    fewer = _multiple(max(2 * split, model.experts_per_token + 1), split)
    return min(fewer, model.experts) if model.experts % split == 0 else fewer


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def odd_multiple(least: int, of: int) -> int:
    """The smallest odd multiple of `of` that is at least `least`."""
    times = -(-least // of)
    return (times + 1 - times % 2) * of


def fit_mesh(spec: MeshSpec, devices: int) -> MeshSpec | None:
    """The spec for at most `devices` devices: as it is where they are enough (-1 filled in), else with smaller axes.

    Every axis above 1 stays above 1 (-1 counts as such), first the largest are kept larger; slices are dropped where
    the axes fit only without. None where even 2 along each does not fit.

    Raises:
      UserError: a size that is no size, or two axes of -1.
    """
    sizes, needed = axis_sizes(spec), devices_needed(spec)
    resolve(spec, needed)
    if needed <= devices:
        return _with(spec, {axis: devices // needed if size == -1 else size for axis, size in sizes.items()}, spec.dcn)
    slices = asdict(spec.dcn)
    wanted = {axis: math.inf if size == -1 else size for axis, size in sizes.items()}
    dcn = {axis: min(count, 2) for axis, count in slices.items()}
    small = {axis: min(size, 2) for axis, size in wanted.items()}
    if math.prod(small.values()) * math.prod(dcn.values()) > devices:
        wanted = {axis: size * slices[axis] for axis, size in wanted.items()}
        dcn, small = dict.fromkeys(dcn, 1), {axis: min(size, 2) for axis, size in wanted.items()}
    if math.prod(small.values()) * math.prod(dcn.values()) > devices:
        return None
    while 2 * math.prod(small.values()) * math.prod(dcn.values()) <= devices:
        room = {axis: wanted[axis] / size for axis, size in small.items() if size > 1}
        axis = max(room, key=room.__getitem__, default=None)
        if axis is None or room[axis] < 2:
            break
        small[axis] *= 2
    return _with(spec, {axis: int(size) for axis, size in small.items()}, DcnSpec(**dcn))


def _with(spec: MeshSpec, sizes: Mapping[Any, int], dcn: DcnSpec) -> MeshSpec:
    return dataclasses.replace(spec, **sizes, dcn=dcn)


def mesh_note(asked: MeshSpec, used: MeshSpec, here: int) -> str | None:
    """What to say when the mesh that is verified is not the one that was asked for; None when it is."""
    if -1 not in axis_sizes(asked).values() and total_sizes(asked) == total_sizes(used):
        return None
    before = describe({axis: size * getattr(asked.dcn, axis) for axis, size in axis_sizes(asked).items()})
    if devices_needed(asked) <= here:
        return f"mesh {before} is {describe(total_sizes(used))} here"
    return (
        f"SMALLER MESH: {before} needs {devices_needed(asked)} devices and {here} are here, so this verifies "
        f"{describe(total_sizes(used))}: the same axes, not the same sizes"
    )


def simulated_devices(spec: MeshSpec) -> int:
    """How many CPU devices to simulate for a mesh: what it needs, within reason; enough for 2 along each axis."""
    if -1 not in axis_sizes(spec).values() and devices_needed(spec) <= 2 * SIMULATED:
        return devices_needed(spec)
    for count in (SIMULATED, 2 * SIMULATED, 4 * SIMULATED):
        fitted = fit_mesh(spec, count)
        if fitted is not None and all(1 not in (size, 0) for size in _free_axes(spec, fitted)):
            return count
    return 8 * SIMULATED


def _free_axes(spec: MeshSpec, fitted: MeshSpec) -> list[int]:
    """What the axes of -1 became."""
    return [getattr(fitted, axis) for axis, size in axis_sizes(spec).items() if size == -1]
