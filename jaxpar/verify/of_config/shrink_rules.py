"""The rules by which each setting of a config is made small, with their reasons (`RULES`).

A rule asks the `Whole` config, and the small one as the rules before have left it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jaxpar.base.config import Config, rules_of
from jaxpar.base.config.hidden_pairs import read_pairs
from jaxpar.base.config.pruning import Pruning
from jaxpar.base.layout.mesh import MeshSpec, total_sizes
from jaxpar.base.layout.plan import Pipeline
from jaxpar.base.layout.sharding import LogicalAxis
from jaxpar.kernels.masks import looks_back
from jaxpar.models.masks import layer_masks, shrink_mask
from jaxpar.parallel.linear.ring_matmul import ring_forms
from jaxpar.parallel.pipeline import microbatches
from jaxpar.verify.of_config.few_heads import few_heads
from jaxpar.verify.of_config.few_layers import few_layers, few_masks
from jaxpar.verify.of_config.sizes import AxisSizes, asked_sizes, multiple_of, odd_multiple, pieces

MOST_ACCUMULATION = 4
"""The most microbatches; more would only repeat what these do."""
_TOP_K = 5
"""The entries of a teacher."""
_HIDDEN_WIDTH = 7
"""The features of a teacher's hidden states."""
_VOCAB = 40
"""The least rows of the vocabulary tables."""


class Least(NamedTuple):
    """The least that a sequence and a head may be shrunk to, because some ops are chosen by these
    sizes.
    """

    seq_len: int = 12
    head_dim: int = 6
    block: int = 1  # the sequence length is a multiple of this


LEAST = (
    Least(),
    Least(seq_len=128, head_dim=128, block=128),
)
"""The first is the smallest for plain attention, the second has a TPU kernel's tile."""


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
        """The dim of a device's microbatch that Domino cuts, on the mesh that was asked for; where
        that is left open, what it can cut."""
        asked = self.config.overlap.domino
        if asked in ("off", "sequence"):
            return asked
        train = self.config.train
        sequences = train.microbatch
        if self.asked["stage"] > 1:
            sequences //= microbatches(self.config, self.asked)
        rows = sequences // pieces("batch", self.config.rules, self.asked)
        looking_back = all(looks_back(mask) for mask in layer_masks(self.config.model))
        cuttable = asked == "on" or (self.chunks == 1 and looking_back)
        if rows % 2 and cuttable:
            return "sequence"
        return "on"

    @cached_property
    def few_heads(self) -> tuple[int, int]:
        """The numbers of heads and kv heads of the small model."""
        return few_heads(self.config, self.sizes, self.asked)

    @cached_property
    def few_layers(self) -> tuple[int, Pipeline]:
        """The number of layers of the small model, and the pipeline that they go through."""
        return few_layers(self.config, self.sizes, self.asked)


def _seq_len(whole: Whole, small: Config) -> int:
    """Return a multiple of the pieces of the sequence, with three tokens in each chunk of the
    context.
    """
    fewest = whole.least.seq_len
    if whole.chunks > 1:
        fewest = max(fewest, 3 * whole.chunks)
    split = whole.split("seq", "residual_seq")
    if whole.domino == "sequence":  # each half is like a sequence of its own
        split = 2 * math.lcm(whole.split("residual_seq"), whole.least.block)
    return odd_multiple(fewest, math.lcm(whole.chunks, split, whole.least.block))


def _few_shares(pruning: Pruning, layers: int) -> tuple[float, ...]:
    """Return as many shares by depth as there are, or as there are layers."""
    number = min(len(pruning.sparsity_by_depth), layers)
    return tuple(pruning.sparsity_at(i, number) for i in range(number))


def _block(whole: Whole, small: Config) -> tuple[int, ...]:
    """Return a block of two rows and columns at most."""
    return tuple(min(side, 2) for side in whole.config.model.sparsity.block)


def _head_dim(whole: Whole, small: Config) -> int:
    """Return an even number, because RoPE pairs the features of a head, in whole groups of N:M."""
    group = small.model.sparsity.multiple
    return multiple_of(whole.least.head_dim, math.lcm(2, group * whole.split("head_dim")))


def _embed(whole: Whole, small: Config) -> int:
    """Return about as many features, for those of all heads, as the model has."""
    model = whole.config.model
    width = model.embed / (model.heads * model.head_size)
    features = small.model.heads * small.model.head_dim
    group = small.model.sparsity.multiple
    return odd_multiple(round(features * width), group * whole.split("embed", "state_embed"))


def _mlp(whole: Whole, small: Config) -> int:
    """Return about as many features, for those of the residual stream, as the model has."""
    model = whole.config.model
    group = small.model.sparsity.multiple
    wanted = round(small.model.embed * model.mlp / model.embed)
    return odd_multiple(wanted, group * whole.split("mlp"))


def _experts(whole: Whole, small: Config) -> int:
    """Return two experts a device and more than a token chooses, but no more than the model has."""
    model = whole.config.model
    split = whole.split("experts")
    experts = multiple_of(max(2 * split, model.experts_per_token + 1), split)
    if model.experts % split == 0:
        return min(experts, model.experts)
    return experts


def _vocab_size(whole: Whole, small: Config) -> int:
    """Return at least _VOCAB rows, of which some are padding where the model's table has
    padding.
    """
    model = whole.config.model
    multiple = small.model.vocab_multiple
    rows = odd_multiple(_VOCAB, multiple)
    if model.vocab_size % model.vocab_multiple:
        return rows - multiple // 2 - 1
    return rows


def _masks(whole: Whole, small: Config) -> tuple[str, ...]:
    """Return each mask once in its turn, made for the small sequence."""
    seq_len = whole.config.data.seq_len
    words = few_masks(whole.config.model.masks)
    return tuple(shrink_mask(word, seq_len, small.data.seq_len) for word in words)


def _hidden(whole: Whole, small: Config) -> tuple[str, ...]:
    """Return the pairs of layers whose hidden states are learned, each between layers where it
    was.
    """
    many = whole.config.model.layers
    few = small.model.layers
    asked = whole.config.distill.hidden
    words = []
    for word, pair in zip(asked, read_pairs(asked), strict=True):
        if not pair.student:
            words.append(word)
        elif pair.student == many:
            words.append(f"{few}:{pair.teacher}")
        else:
            words.append(f"{max(min(pair.student, few - 1), 1)}:{pair.teacher}")
    return tuple(dict.fromkeys(words))


def _max_seq_len(whole: Whole, small: Config) -> int:
    """Return the length of the sequence, or a little more if the model's was longer."""
    if whole.config.data.seq_len == whole.config.model.max_seq_len:
        return small.data.seq_len
    return small.data.seq_len + 3


def _finest_ring(form: str) -> str:
    """Return the ring of the most parts, where the form was left to choose."""
    if form != "auto":
        return form
    rings = ring_forms()
    return max(rings, key=lambda name: len(rings[name](2)))


def _batch(whole: Whole, small: Config) -> int:
    """Return two sequences of each microbatch for each shard, or for each half of one under
    Domino.
    """
    rows = 2 * whole.split("batch")
    if small.overlap.domino == "on":
        rows *= 2
    if whole.split("stage") > 1:
        rows *= small.pipeline.microbatches
    return rows * small.train.accumulation


class Rule(NamedTuple):
    """A rule for one setting."""

    setting: str
    """The dotted key of the setting."""
    becomes: Callable[[Whole, Config], Any]
    """Makes the small value from the whole config and the small one as the rules before left it."""
    why: str


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
"""A rule may read what the rules above it have written into the small config."""
