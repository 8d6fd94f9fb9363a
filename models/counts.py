"""The number of parameters of a model, and of the FLOPs of a token in training.

Shapes: L layers, H heads, h head_dim, S sequence.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jaxpar.base.config import ModelConfig
from jaxpar.base.layout.sharding import Axes
from jaxpar.base.layout.specs import is_axes
from jaxpar.models.hidden import Projections
from jaxpar.models.lora import trained_part
from jaxpar.models.masks import reach
from jaxpar.models.part_protocols import Params


class Declared(NamedTuple):
    """The declarations of a model from which everything here is counted.

    Attributes:
      config: the sizes of the model.
      axes: the logical axes of its parameters.
      shapes: the parameters as ShapeDtypeStructs.
      projections: the projections through which it learns a teacher's hidden states; None = it
        learns none.
    """

    config: ModelConfig
    axes: Params
    shapes: Params
    projections: Projections | None


def count_parameters(declared: Declared, part: str) -> int:
    """Count the parameters of a part, without the padding of the vocabulary."""
    vocab = declared.config.vocab_size
    return sum(
        math.prod(shape) // shape[axes.index("vocab")] * vocab
        if "vocab" in axes
        else math.prod(shape)
        for axes, shape in _leaves(declared, part)
    )


def count_flops(declared: Declared, seq_len: int) -> float:
    """Count the model FLOPs of one training token, forward and backward, without recompute, by the
    rules of `Model.flops_per_token`.

    A parameter that multiplies costs 6: 2 forward, 2 for the gradient of its input and 2 for its
    own gradient. A parameter that costs less is counted as a part of a parameter.
    """
    config = declared.config
    multiplying = _count_multiplying(declared) - _left_out(declared)
    if config.lora.rank:
        multiplying = _beside_lora(declared, multiplying)
    if declared.projections is not None:
        pairs = len(declared.projections.pairs)
        multiplying += pairs * config.embed * declared.projections.width
    return 6.0 * multiplying + _attention_flops(config, seq_len)


def _count_multiplying(declared: Declared) -> int:
    """Count the parameters that multiply a token: tables that are only looked up do not, nor do
    experts that it is not sent to.
    """
    config = declared.config
    multiplying = count_parameters(declared, "blocks") + count_parameters(declared, "head")
    multiplying -= _idle_experts(declared)
    tables = [axes for axes, _ in _leaves(declared, "head") if "vocab" in axes and len(axes) > 1]
    if not tables:  # the head is tied
        multiplying += config.vocab_size * config.embed
    if config.query_layer:
        looked_up = config.max_seq_len * config.embed
        multiplying += count_parameters(declared, "query") - looked_up
    return multiplying


def _beside_lora(declared: Declared, multiplying: float) -> float:
    """Count the parameters of a model of which LoRA's pairs alone are trained: a frozen parameter
    has no gradient of its own, and counts 4 of 6.
    """
    pairs = jax.tree.leaves(trained_part(declared.shapes, declared.axes, declared.config))
    trained = sum(math.prod(x.shape) for x in pairs)
    return (4 * multiplying + 2 * trained) / 6


def _attention_flops(config: ModelConfig, seq_len: int) -> float:
    """Count the FLOPs of scores and mixed values: 12 H h for each key of each layer."""
    words = [config.masks[i % config.kinds] for i in range(config.layers + config.query_layer)]
    keys = sum(reach(word, seq_len) for word in words)
    return 12.0 * config.heads * config.head_size * keys


def _left_out(declared: Declared) -> float:
    """Count the entries of sparse matrices that do not multiply, by the share of their FLOPs that
    this saves: 4 of 6 where they have a gradient.
    """
    config = declared.config
    sparsity = config.sparsity
    axes = declared.axes["blocks"]
    shapes = declared.shapes["blocks"]
    entries = 0.0
    for name in sparsity.names(tuple(axes)):
        size = math.prod(shapes[name].shape)
        if "experts" in axes[name]:
            size *= config.experts_per_token / config.experts
        entries += size
    saved = 4 / 6 if sparsity.trains_all else 1.0
    return entries * (1 - sparsity.density) * saved


def _idle_experts(declared: Declared) -> int:
    """Count the parameters of the experts that a token is not sent to."""
    config = declared.config
    of_experts = sum(
        math.prod(shape) for axes, shape in _leaves(declared, "blocks") if "experts" in axes
    )
    return of_experts * (config.experts - config.experts_per_token) // max(config.experts, 1)


def _leaves(declared: Declared, part: str) -> list[tuple[Axes, tuple[int, ...]]]:
    """List the logical axes and the shape of every parameter of a part."""
    axes = jax.tree.leaves(declared.axes[part], is_leaf=is_axes)
    shapes = jax.tree.leaves(declared.shapes[part])
    return [(names, x.shape) for names, x in zip(axes, shapes, strict=True)]
