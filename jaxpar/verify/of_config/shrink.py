"""Makes the smallest model and batch that keep what a plan can get wrong; `verify` runs them in
place of the config's.

Family, rules, remat, precision, packing and mesh axes stay. Layers are few and dims are narrow.
Each dim is a multiple of the pieces it is split into, and an odd one where possible, so that no
shard is a power of two by accident. The rules, and the functions that have them:

    setting                what it becomes                                        in
    data.seq_len           at least three tokens in each chunk of the context     shrink
    train.batch            two sequences a shard, or a half of one under Domino   shrink
    train.accumulation     at most MOST_ACCUMULATION                              shrink
    overlap, where "auto"  the form with the most parts                           _without_auto
    heads, kv_heads        the fewest that are split and copied like the model's  _few_heads
    layers                 an odd number stays odd, unequal stages stay unequal   _few_layers
    pipeline.microbatches  about three a stage; fewer than stages if it was so    _few_layers
    embed, mlp             about as many to a head as the model has               _narrow_model
    experts                two a device, and more than a token chooses            _narrow_model
    vocab_size             at least _VOCAB; a padded table stays padded           _narrow_model
    masks                  each one once in its turn, at the new length           _few_masks
    dropout                none                                                   _narrow_model
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxpar.base.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MetricsConfig,
    ModelConfig,
    TrainConfig,
    rules_of,
)
from jaxpar.base.mesh import MeshAxis, MeshSpec, axis_sizes, total_sizes
from jaxpar.base.plan import Overlap, Pipeline
from jaxpar.base.sharding import LogicalAxis, ShardingRules, fit_rules, named_axes
from jaxpar.base.toml import flatten
from jaxpar.models.masks import shrink_mask
from jaxpar.parallel.pipeline import layers_of, microbatches
from jaxpar.parallel.ring_matmul import ring_forms

MOST_ACCUMULATION = 4  # more microbatches would only repeat what these do
_FEW = 4  # up to this many virtual stages have two layers each; if there are more, each has one
_VOCAB = 40  # the vocabulary tables have at least this many rows
_SAID = ("model.", "data.seq_len", "train.accumulation", "overlap.", "pipeline.")

AxisSizes = Mapping[MeshAxis, int]
"""The number of devices along each mesh axis."""


class Least(NamedTuple):
    """The least that a sequence and a head may be shrunk to, because some ops are chosen by these
    sizes.
    """

    seq_len: int = 12
    head_dim: int = 6
    block: int = 1  # the sequence length is a multiple of this


# The first is the smallest for plain attention, the second has two chunks of queries, the third a
# TPU kernel's tile.
LEAST = (
    Least(),
    Least(seq_len=513),
    Least(seq_len=128, head_dim=128, block=128),
)


def shrink(
    config: Config,
    mesh: MeshSpec,
    least: Least = LEAST[0],
) -> tuple[Config, str]:
    """Make the model and batch of a config small.

    Steps, learning rate, data source and everything else that does not affect a gradient are reset
    to their defaults.

    Args:
      config: the config as it was written.
      mesh: the mesh on which it is verified, without -1.
      least: the smallest sequence and head that still choose the same ops.

    Returns:
      The config with a small model and batch on `mesh`, and a note of the changes.
    """
    sizes = total_sizes(mesh)
    asked = asked_sizes(config.mesh, mesh)
    devices = pieces("attention_seq", rules_of(config, asked), sizes)
    # The sequence of q, k and v is cut into two chunks for each device in zigzag order.
    if devices == 1 or config.context.strategy == "ulysses":
        chunks = devices
    else:
        chunks = 2 * devices
    multiples = _multiples(config, chunks, sizes, least)
    # Each chunk has three tokens, because a single one would hide a wrong order inside it.
    fewest_tokens = least.seq_len
    if chunks > 1:
        fewest_tokens = max(fewest_tokens, 3 * chunks)
    seq_len = odd_multiple(fewest_tokens, multiples["seq"])
    layers, pipeline = _few_layers(config, sizes, asked)
    model = _narrow_model(
        config, multiples, _few_heads(config, sizes, asked), layers, seq_len, least.head_dim
    )
    overlap = _without_auto(config.overlap)
    accumulation = min(config.train.accumulation, MOST_ACCUMULATION)
    # Each shard, or each half of one, has two sequences, because a single one would hide a wrong
    # order inside a shard.
    rows = 2 * overlap.parts * pieces("batch", config.rules, sizes)
    staged = pieces("stage", config.rules, sizes) > 1
    batch = rows * accumulation * (pipeline.microbatches if staged else 1)
    kept = {
        name: getattr(config.train, name)
        for name in ("seed", "z_loss", "balance_loss", "router_z_loss")
    }
    train = TrainConfig(batch=batch, accumulation=accumulation, **kept)
    small = replace(
        config,
        model=model,
        data=DataConfig(seq_len=seq_len, pack=config.data.pack),
        train=train,
        mesh=mesh,
        overlap=overlap,
        pipeline=pipeline,
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(),
    )
    return small, _note(config, small)


def _without_auto(overlap: Overlap) -> Overlap:
    """What is left to choose, set to the form in which the most could go wrong: that of the most
    parts. All forms give the same answer.
    """
    rings = ring_forms()
    finest = max(rings, key=lambda name: len(rings[name](2)))
    explicit = {"gather": finest, "scatter": finest, "domino": "on"}
    given = vars(overlap)
    return replace(
        overlap, **{name: form for name, form in explicit.items() if given[name] == "auto"}
    )


def few_rows(config: Config, mesh: MeshSpec) -> Config:
    """Return a config on `mesh` whose batch is small, for a model that cannot be shrunk.

    Each shard has two sequences, because a single one would hide a wrong order inside a shard.

    Args:
      config: the config as it was written.
      mesh: the mesh on which it is verified, without -1.

    Returns:
      The config with the same model and sequence length. Steps, data source, checkpoints and
      metrics are reset to their defaults.
    """
    accumulation = min(config.train.accumulation, MOST_ACCUMULATION)
    rows = 2 * pieces("batch", config.rules, total_sizes(mesh))
    return replace(
        config,
        data=DataConfig(seq_len=config.data.seq_len, pack=config.data.pack),
        train=TrainConfig(
            batch=rows * accumulation, accumulation=accumulation, seed=config.train.seed
        ),
        mesh=mesh,
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(),
    )


def asked_sizes(asked: MeshSpec, used: MeshSpec) -> dict[MeshAxis, int]:
    """Return the devices along each axis of the mesh that was asked for.

    Args:
      asked: the mesh of the config, in which -1 leaves an axis open.
      used: the mesh that is verified; an open axis takes its size.

    Returns:
      The number of devices along each axis, over all slices.
    """
    filled = {axis: getattr(used, axis) for axis, size in axis_sizes(asked).items() if size == -1}
    return total_sizes(replace(asked, **filled))


def pieces(axis: LogicalAxis, rules: ShardingRules, sizes: AxisSizes) -> int:
    """Return how many pieces the rules split a logical axis into on a mesh of these sizes.

    Args:
      axis: the logical axis.
      rules: the mesh axes of each logical axis.
      sizes: the devices along each mesh axis.

    Returns:
      The product of the sizes of its mesh axes; 1 where no rule splits it.
    """
    return math.prod(sizes[mesh_axis] for mesh_axis in named_axes(axis, rules))


def _multiples(
    config: Config,
    chunks: int,
    sizes: AxisSizes,
    least: Least,
) -> dict[str, int]:
    """Return what each small dim must be a multiple of, so that the mesh divides it."""

    def split(*axes: LogicalAxis) -> int:
        return math.lcm(*(pieces(axis, config.rules, sizes) for axis in axes))

    return {
        "seq": math.lcm(chunks, split("seq", "residual_seq"), least.block),
        "layers": split("layers"),
        "embed": split("embed", "state_embed"),
        "head_dim": math.lcm(2, split("head_dim")),  # RoPE pairs the features of a head
        "mlp": split("mlp"),
        "experts": split("experts"),
        "vocab": math.lcm(4, split("vocab")),
    }


def _few_heads(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, int]:
    """Return the fewest heads and kv heads with which this mesh does what the config's own does
    with the model's.

    Pairs are tried from the fewest query heads per kv head, and then from the fewest heads. The
    first that the mesh divides and whose `situation` is the model's is taken; if there is none, the
    first that has the same rules.
    """
    rules = config.rules
    model = config.model
    asked_rules = rules_of(config, asked)
    kv_heads = model.kv_head_count
    group = model.heads // kv_heads
    # Ulysses deals out the heads of a device, and also its kv heads if there are enough of them.
    if config.context.strategy == "ulysses":
        dealt = pieces("attention_seq", asked_rules, sizes)
    else:
        dealt = 1
    kv_on_device, dealt_there = (
        pieces(axis, asked_rules, asked) for axis in ("kv_heads", "attention_seq")
    )
    if kv_heads // kv_on_device % dealt_there == 0:
        kv_dealt = dealt
    else:
        kv_dealt = 1
    split = pieces("heads", asked_rules, sizes) * dealt
    kv_split = pieces("kv_heads", asked_rules, sizes) * kv_dealt

    def situation(
        heads: int,
        kv_heads: int,
        sizes: AxisSizes,
    ) -> tuple[ShardingRules, bool, bool]:
        """Return the fitted rules, whether there are more devices than heads, and whether a head
        has several copies.
        """
        fitted, _ = fit_rules(rules, heads, kv_heads, sizes)
        devices = pieces("heads", fitted, sizes)
        copied = fitted.heads != fitted.kv_heads
        return (
            fitted,
            pieces("heads", rules, sizes) > heads,
            copied and math.lcm(kv_heads, devices) > devices,
        )

    most = math.lcm(
        *(pieces(axis, rules, sizes) for axis in ("heads", "kv_heads")), split, kv_split
    )
    alike = [
        (K * group * times, K)
        for times in range(1, most + 1 if model.kv_heads else 2)
        for K in range(min(2, kv_heads), 2 * most + 3)
        if K * group * times % split == 0
        and K % kv_split == 0
        and situation(K * group * times, K, sizes)[0] == asked_rules
    ]
    wanted = situation(model.heads, kv_heads, asked)
    return next(
        (pair for pair in alike if situation(*pair, sizes) == wanted),
        alike[0],
    )


def _few_layers(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, Pipeline]:
    """Return the fewest layers and microbatches that keep what a pipeline does.

    An odd number of layers stays odd, stages with unequal numbers of layers stay unequal, and every
    slot of a buffer that is used at all is used twice.
    """
    stages_asked, stages = (pieces("stage", config.rules, these) for these in (asked, sizes))
    pipeline = config.pipeline
    layers = config.model.layers
    asked_kinds = config.model.kinds
    kinds = len(_few_masks(config.model.masks))
    if stages_asked == 1:  # an odd number of whole periods stays odd, and a rest stays a rest
        whole = kinds * (2 + layers // asked_kinds % 2) + bool(layers % asked_kinds)
        return _multiple(whole, pieces("layers", config.rules, sizes)), pipeline
    counts = layers_of(layers, stages_asked, pipeline).counts
    parts = stages * pipeline.virtual
    if max(counts) == min(counts):
        small = (2 if parts <= _FEW else 1,) * parts
    elif len(counts) == parts:
        small = tuple(1 + (count > min(counts)) for count in counts)
    else:
        small = (1, 2, *[1] * (parts - 2))
    small = tuple(kinds * count for count in small)
    if layers % asked_kinds:
        small = (*small[:-1], small[-1] - 1)
    count = microbatches(config, asked)
    # how many more than a multiple of the stages; with fewer stages one more will do
    over = count % stages_asked
    full = 3 * stages + (over if stages == stages_asked else min(over, 1))
    if count >= stages_asked:
        fewest = full
    else:
        fewest = max(stages - 1, 1)
    return sum(small), replace(pipeline, microbatches=min(count, fewest), layers=small)


def _narrow_model(
    config: Config,
    multiples: Mapping[str, int],
    heads: tuple[int, int],
    layers: int,
    seq_len: int,
    least_head_dim: int,
) -> ModelConfig:
    """Return a model with few heads and layers, whose other dims keep about their ratios to the
    heads.
    """
    model = config.model
    (H, K) = heads
    head_dim = _multiple(least_head_dim, multiples["head_dim"])
    width = model.embed / (model.heads * model.head_size)
    embed = odd_multiple(round(H * head_dim * width), multiples["embed"])
    # Each device has two experts, and there are more than a token chooses, but no more than the
    # model has.
    split = multiples["experts"]
    experts = _multiple(max(2 * split, model.experts_per_token + 1), split)
    if model.experts % split == 0:
        experts = min(experts, model.experts)
    vocab = odd_multiple(_VOCAB, multiples["vocab"])
    # the model's table has padding, so the small one has it too
    if model.vocab_size % model.vocab_multiple:
        vocab -= multiples["vocab"] // 2 + 1
    return replace(
        model,
        layers=layers,
        embed=embed,
        heads=H,
        kv_heads=K if model.kv_heads else 0,
        head_dim=head_dim,
        mlp=odd_multiple(round(embed * model.mlp / model.embed), multiples["mlp"]),
        experts=experts,
        vocab_size=vocab,
        vocab_multiple=multiples["vocab"],
        dropout=0.0,
        masks=tuple(
            shrink_mask(word, config.data.seq_len, seq_len) for word in _few_masks(model.masks)
        ),
        max_seq_len=seq_len if config.data.seq_len == model.max_seq_len else seq_len + 3,
    )


def _note(config: Config, small: Config) -> str:
    """Say which settings of the model, and of what is done with it, the small config has
    otherwise.
    """
    after = flatten(small)
    changed = [
        f"{key} {old} -> {after[key]}"
        for key, old in flatten(config).items()
        if key.startswith(_SAID) and old != after[key]
    ]
    return f"model shrunk: {', '.join(changed)}"


def _few_masks(masks: tuple[str, ...]) -> tuple[str, ...]:
    """The masks without those that are like the one before, so that each is there and they still
    take turns.
    """
    return tuple(word for i, word in enumerate(masks) if i == 0 or word != masks[i - 1])


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def odd_multiple(least: int, of: int) -> int:
    """Return the smallest odd multiple of `of` that is at least `least`."""
    times = -(-least // of)
    return (times + 1 - times % 2) * of
