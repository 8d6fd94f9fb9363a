"""Makes the smallest model and batch that keep what a plan can get wrong; `verify` runs them in
place of the config's.

Family, rules, remat, precision, packing and mesh axes stay. Layers are few and dims are narrow.
Each dim is a multiple of the pieces it is split into, and an odd one where possible, so that no
shard is a power of two by accident. `RULES` says what becomes of each setting, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jaxpar.base.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MetricsConfig,
    TrainConfig,
    rules_of,
)
from jaxpar.base.config.hidden_pairs import read_pairs
from jaxpar.base.config.pruning import Pruning
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis, MeshSpec, axis_sizes, total_sizes
from jaxpar.base.layout.plan import Pipeline
from jaxpar.base.layout.sharding import LogicalAxis, ShardingRules, fit_rules, named_axes
from jaxpar.base.toml import flatten
from jaxpar.kernels.masks import looks_back
from jaxpar.models.masks import layer_masks, shrink_mask
from jaxpar.parallel.context.ulysses import devices_sharing
from jaxpar.parallel.linear.ring_matmul import ring_forms
from jaxpar.parallel.pipeline import layers_of, microbatches

MOST_ACCUMULATION = 4  # more microbatches would only repeat what these do
_FEW = 4  # up to this many virtual stages have two layers each; if there are more, each has one
_TOP_K = 5  # entries of a teacher
_HIDDEN_WIDTH = 7  # features of its hidden states
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


@dataclass(frozen=True)
class Whole:
    """The config that is made small, and what the rules ask of it and of its meshes."""

    config: Config
    mesh: MeshSpec
    """The mesh on which it is verified, without -1."""
    least: Least

    @cached_property
    def sizes(self) -> AxisSizes:
        """The devices along each axis of the mesh on which it is verified."""
        return total_sizes(self.mesh)

    @cached_property
    def asked(self) -> AxisSizes:
        """The devices along each axis of the mesh that was asked for."""
        return asked_sizes(self.config.mesh, self.mesh)

    def split(self, *axes: LogicalAxis) -> int:
        """Return what a dim must be a multiple of, so that the mesh divides it along these axes."""
        return math.lcm(*(pieces(axis, self.config.rules, self.sizes) for axis in axes))

    @cached_property
    def chunks(self) -> int:
        """The number of chunks that the context is cut into.

        In zigzag order each device has two of q, k and v.
        """
        devices = pieces("attention_seq", rules_of(self.config, self.asked), self.sizes)
        if devices == 1 or self.config.context.strategy == "ulysses":
            return devices
        return 2 * devices

    @cached_property
    def domino(self) -> Literal["off", "on", "sequence"]:
        """What Domino cuts of a device's part of a microbatch, where the mesh that was asked for
        has it; where that is left open, what it can cut."""
        asked = self.config.overlap.domino
        if asked in ("off", "sequence"):
            return asked
        train = self.config.train
        sequences = train.batch // train.accumulation
        if self.asked["stage"] > 1:
            sequences //= microbatches(self.config, self.asked)
        rows = sequences // pieces("batch", self.config.rules, self.asked)
        looking_back = all(looks_back(mask) for mask in layer_masks(self.config.model))
        cuttable = asked == "on" or (self.chunks == 1 and looking_back)
        return "sequence" if rows % 2 and cuttable else "on"

    @cached_property
    def few_heads(self) -> tuple[int, int]:
        """The numbers of heads and kv heads of the small model."""
        return _few_heads(self.config, self.sizes, self.asked)

    @cached_property
    def few_layers(self) -> tuple[int, Pipeline]:
        """The number of layers of the small model, and the pipeline that they go through."""
        return _few_layers(self.config, self.sizes, self.asked)


def shrink(
    config: Config,
    mesh: MeshSpec,
    least: Least = LEAST[0],
) -> tuple[Config, str]:
    """Make the model and batch of a config small, by `RULES`.

    Steps, learning rate, data source and everything else that does not affect a gradient are reset
    to their defaults.

    Args:
      config: the config as it was written.
      mesh: the mesh on which it is verified, without -1.
      least: the smallest sequence and head that still choose the same ops.

    Returns:
      The config with a small model and batch on `mesh`, and a note of the changes.

    Raises:
      UserError: no small model has its heads there as the config's own lie on the whole mesh.
    """
    kept = {
        name: getattr(config.train, name)
        for name in ("seed", "z_loss", "balance_loss", "router_z_loss", "label_smoothing")
    }
    small = replace(
        config,
        data=DataConfig(pack=config.data.pack),
        train=TrainConfig(**kept),
        mesh=mesh,
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(),
    )
    whole = Whole(config, mesh, least)
    for rule in RULES:
        small = _with_setting(small, rule.setting, rule.becomes(whole, small))
    return small, _note(config, small)


def _with_setting(table: Any, setting: str, value: Any) -> Any:
    """Return a dataclass of dataclasses with one setting changed, by its dotted key."""
    name, _, inside = setting.partition(".")
    if inside:
        value = _with_setting(getattr(table, name), inside, value)
    return replace(table, **{name: value})


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


def _few_heads(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, int]:
    """Return the fewest heads and kv heads with which this mesh does what the config's own does
    with the model's.

    Pairs are tried from the fewest query heads per kv head, and then from the fewest heads. The
    first that the mesh divides and whose situation is the model's is taken; if there is none, the
    first that has the same rules.

    Raises:
      UserError: there is none with the same rules on so few devices.
    """
    rules = config.rules
    model = config.model
    asked_rules = rules_of(config, asked)
    kv_heads = model.kv_head_count
    group = model.heads // kv_heads
    dealt, kv_dealt = _dealt(config, sizes, asked)
    split = pieces("heads", asked_rules, sizes) * dealt
    kv_split = pieces("kv_heads", asked_rules, sizes) * kv_dealt
    most = math.lcm(
        *(pieces(axis, rules, sizes) for axis in ("heads", "kv_heads")), split, kv_split
    )
    alike = [
        (K * group * times, K)
        for times in range(1, most + 1 if model.kv_heads else 2)
        for K in range(min(2, kv_heads), 2 * most + 3)
        if K * group * times % split == 0
        and K % kv_split == 0
        and _situation(config, K * group * times, K, sizes).rules == asked_rules
    ]
    if not alike:
        count = math.prod(sizes.values())
        raise UserError(
            f"model.heads={model.heads} and model.kv_heads={kv_heads} lie otherwise on the {count} "
            f"devices that verify has than on the {math.prod(asked.values())} of the mesh, however "
            "few they are made: give it as many devices, such as simulated ones (--mesh.platform "
            "cpu)"
        )
    wanted = _situation(config, model.heads, kv_heads, asked)
    return next(
        (pair for pair in alike if _situation(config, *pair, sizes) == wanted),
        alike[0],
    )


def _dealt(config: Config, sizes: AxisSizes, asked: AxisSizes) -> tuple[int, int]:
    """Return over how many devices Ulysses deals out the heads of a device, and its kv heads.

    Both are dealt out only if there are enough of them. Both are 1 without Ulysses.
    """
    asked_rules = rules_of(config, asked)
    if config.context.strategy != "ulysses" or _in_groups(asked_rules, config.model.heads, asked):
        return 1, 1
    dealt = pieces("attention_seq", asked_rules, sizes)
    kv_on_device = config.model.kv_head_count // pieces("kv_heads", asked_rules, asked)
    if kv_on_device % pieces("attention_seq", asked_rules, asked) == 0:
        return dealt, dealt
    return dealt, 1


class _Situation(NamedTuple):
    """How heads lie on a mesh."""

    rules: ShardingRules
    """The fitted rules."""
    few: bool
    """Whether there are more devices than heads."""
    copied: bool
    """Whether a kv head has several copies."""
    in_groups: bool
    """Whether Ulysses shares the heads out over groups of devices."""


def _situation(config: Config, heads: int, kv_heads: int, sizes: AxisSizes) -> _Situation:
    """Return how so many heads lie on a mesh of these sizes."""
    rules = config.rules
    fitted, _ = fit_rules(rules, heads, kv_heads, sizes)
    devices = pieces("heads", fitted, sizes)
    several = math.lcm(kv_heads, devices) > devices
    return _Situation(
        rules=fitted,
        few=pieces("heads", rules, sizes) > heads,
        copied=fitted.heads != fitted.kv_heads and several,
        in_groups=config.context.strategy == "ulysses" and _in_groups(fitted, heads, sizes),
    )


def _in_groups(rules: ShardingRules, heads: int, sizes: AxisSizes) -> bool:
    """Whether a device has too few heads for all devices that split the sequence."""
    here = heads // pieces("heads", rules, sizes)
    devices = pieces("attention_seq", rules, sizes)
    return devices_sharing(here, devices) < devices


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


def _seq_len(whole: Whole, small: Config) -> int:
    """A multiple of the pieces of the sequence, with three tokens in each chunk of the context."""
    fewest = whole.least.seq_len
    if whole.chunks > 1:
        fewest = max(fewest, 3 * whole.chunks)
    split = whole.split("seq", "residual_seq")
    if whole.domino == "sequence":  # each half is like a sequence of its own
        split = 2 * math.lcm(whole.split("residual_seq"), whole.least.block)
    return odd_multiple(fewest, math.lcm(whole.chunks, split, whole.least.block))


def _few_shares(pruning: Pruning, layers: int) -> tuple[float, ...]:
    """As many shares by depth as there are, or as there are layers."""
    number = min(len(pruning.sparsity_by_depth), layers)
    return tuple(pruning.sparsity_at(i, number) for i in range(number))


def _block(whole: Whole, small: Config) -> tuple[int, ...]:
    """Blocks of two rows and columns at most."""
    return tuple(min(side, 2) for side in whole.config.model.sparsity.block)


def _head_dim(whole: Whole, small: Config) -> int:
    """An even number, because RoPE pairs the features of a head; whole groups of N:M."""
    group = small.model.sparsity.multiple
    return _multiple(whole.least.head_dim, math.lcm(2, group * whole.split("head_dim")))


def _embed(whole: Whole, small: Config) -> int:
    """About as many features to those of all heads as the model has."""
    model = whole.config.model
    width = model.embed / (model.heads * model.head_size)
    features = small.model.heads * small.model.head_dim
    group = small.model.sparsity.multiple
    return odd_multiple(round(features * width), group * whole.split("embed", "state_embed"))


def _mlp(whole: Whole, small: Config) -> int:
    """About as many features to those of the residual stream as the model has."""
    model = whole.config.model
    group = small.model.sparsity.multiple
    wanted = round(small.model.embed * model.mlp / model.embed)
    return odd_multiple(wanted, group * whole.split("mlp"))


def _experts(whole: Whole, small: Config) -> int:
    """Two a device and more than a token chooses, but no more than the model has."""
    model = whole.config.model
    split = whole.split("experts")
    experts = _multiple(max(2 * split, model.experts_per_token + 1), split)
    if model.experts % split == 0:
        return min(experts, model.experts)
    return experts


def _vocab_size(whole: Whole, small: Config) -> int:
    """At least _VOCAB rows, of which some are padding where the model's table has padding."""
    model = whole.config.model
    multiple = small.model.vocab_multiple
    rows = odd_multiple(_VOCAB, multiple)
    if model.vocab_size % model.vocab_multiple:
        return rows - multiple // 2 - 1
    return rows


def _masks(whole: Whole, small: Config) -> tuple[str, ...]:
    """Each mask once in its turn, made for the small sequence."""
    seq_len = whole.config.data.seq_len
    words = _few_masks(whole.config.model.masks)
    return tuple(shrink_mask(word, seq_len, small.data.seq_len) for word in words)


def _hidden(whole: Whole, small: Config) -> tuple[str, ...]:
    """The pairs of layers whose hidden states are learned, each between layers where it was."""
    many = whole.config.model.layers
    few = small.model.layers
    words = []
    for word, pair in zip(
        whole.config.distill.hidden, read_pairs(whole.config.distill.hidden), strict=True
    ):
        if not pair.student:
            words.append(word)
        elif pair.student == many:
            words.append(f"{few}:{pair.teacher}")
        else:
            words.append(f"{max(min(pair.student, few - 1), 1)}:{pair.teacher}")
    return tuple(dict.fromkeys(words))


def _max_seq_len(whole: Whole, small: Config) -> int:
    """As long as the sequence, or a little longer if it was longer."""
    if whole.config.data.seq_len == whole.config.model.max_seq_len:
        return small.data.seq_len
    return small.data.seq_len + 3


def _finest_ring(form: str) -> str:
    """The ring of the most parts, where the form was left to choose."""
    if form != "auto":
        return form
    rings = ring_forms()
    return max(rings, key=lambda name: len(rings[name](2)))


def _batch(whole: Whole, small: Config) -> int:
    """Two sequences of each microbatch for each shard, or for each half of one under Domino."""
    rows = 2 * whole.split("batch")
    if small.overlap.domino == "on":
        rows *= 2
    if whole.split("stage") > 1:
        rows *= small.pipeline.microbatches
    return rows * small.train.accumulation


class Rule(NamedTuple):
    """What becomes of one setting."""

    setting: str
    """Its dotted key."""
    becomes: Callable[[Whole, Config], Any]
    """Makes the small value from the whole config and the small one as the rules before left it."""
    why: str


# A rule may read what the rules above it have written into the small config.
RULES = (
    Rule(
        "data.seq_len",
        _seq_len,
        "a single token in a chunk of the context would hide a wrong order inside it",
    ),
    Rule(
        "model.layers",
        lambda whole, small: whole.few_layers[0],
        "an odd number stays odd, and stages with unequal numbers of layers stay unequal",
    ),
    Rule(
        "pruning.sparsity_by_depth",
        lambda whole, small: _few_shares(whole.config.pruning, small.model.layers),
        "the first layer and the last keep their shares, and there are no more than layers",
    ),
    Rule(
        "pipeline.layers",
        lambda whole, small: whole.few_layers[1].layers,
        "the stages have as many layers as the small model",
    ),
    Rule(
        "pipeline.microbatches",
        lambda whole, small: whole.few_layers[1].microbatches,
        "about three a stage use each slot of a buffer twice; fewer than stages stay fewer",
    ),
    Rule(
        "model.heads",
        lambda whole, small: whole.few_heads[0],
        "the fewest that the mesh splits as the mesh that was asked for splits the model's",
    ),
    Rule(
        "model.kv_heads",
        lambda whole, small: whole.few_heads[1] if whole.config.model.kv_heads else 0,
        "the fewest that are split, and copied, as the model's are",
    ),
    Rule("model.sparsity.block", _block, "blocks are small, of more rows than one"),
    Rule(
        "model.head_dim",
        _head_dim,
        "RoPE pairs features, some kernels need a whole tile, and N:M sparsity whole groups",
    ),
    Rule(
        "model.embed",
        _embed,
        "it keeps about its ratio to the heads, and each device has whole groups of N:M sparsity",
    ),
    Rule(
        "model.mlp",
        _mlp,
        "it keeps about its ratio to the residual stream, and each device has whole groups",
    ),
    Rule("model.experts", _experts, "each device has several, and a token leaves some out"),
    Rule(
        "model.shared_experts",
        lambda whole, small: min(whole.config.model.shared_experts, 2),
        "two are one MLP of another width than an expert's",
    ),
    Rule(
        "model.vocab_multiple",
        lambda whole, small: math.lcm(4, whole.split("vocab")),
        "the mesh divides the table, and there is room for padding",
    ),
    Rule("model.vocab_size", _vocab_size, "a table with padding keeps some, and no other has any"),
    Rule(
        "distill.top_k",
        lambda whole, small: min(whole.config.distill.top_k, _TOP_K),
        "a teacher's entries are several, and fewer than the vocabulary",
    ),
    Rule("distill.hidden", _hidden, "a pair is there, between the layers that are left"),
    Rule(
        "distill.hidden_width",
        lambda whole, small: min(whole.config.distill.hidden_width, _HIDDEN_WIDTH),
        "a teacher's width is another than the model's",
    ),
    Rule("model.masks", _masks, "each kind of layer is there, and they still take turns"),
    Rule("model.max_seq_len", _max_seq_len, "a longer table of positions stays longer"),
    Rule(
        "model.dropout",
        lambda whole, small: 0.0,
        "what is drawn at random differs between two layouts",
    ),
    Rule(
        "overlap.gather",
        lambda whole, small: _finest_ring(small.overlap.gather),
        "all forms give the same answer, and in the one of the most parts most could go wrong",
    ),
    Rule(
        "overlap.scatter",
        lambda whole, small: _finest_ring(small.overlap.scatter),
        "as for overlap.gather",
    ),
    Rule(
        "overlap.domino",
        lambda whole, small: whole.domino,
        "the halves of each sequence stay what it cuts, where a device has an odd number of them",
    ),
    Rule(
        "train.accumulation",
        lambda whole, small: min(whole.config.train.accumulation, MOST_ACCUMULATION),
        "more microbatches would only repeat what these do",
    ),
    Rule(
        "train.batch",
        _batch,
        "a single sequence in a shard, or in half of one, would hide a wrong order inside it",
    ),
)
