"""LoRA (arXiv:2106.09685): pairs of small matrices that are trained beside frozen ones.

Shapes: B batch, S sequence, r rank, L layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.layout.sharding import Axes, LogicalAxis, PyTree
from jaxpar.models.parameters import declared_axes, param_of, zeros
from jaxpar.models.part_protocols import Params
from jaxpar.parallel.ops import Ops


def lora_scale(lora: Lora) -> float:
    """Return the weight of the product of a pair (arXiv:2106.09685, section 4.1)."""
    return lora.alpha / max(lora.rank, 1)


class LoraPair(nnx.Module):
    """Two matrices, whose product is added to a frozen matrix: W + (alpha / rank) A B.

    `a` is [*inputs of W, rank] and `b` is [rank, *outputs of W]. They begin as PEFT begins them: A
    is uniform within 1 / sqrt(inputs), and B is zero.
    """

    def __init__(self, weight: nnx.Param, lora: Lora, rngs: nnx.Rngs):
        axes = declared_axes(weight)
        # one input dim, except where the matrix maps to the residual stream
        if axes[-1] == "embed":
            split = len(axes) - 1
        else:
            split = 1
        inputs = weight.shape[:split]
        outputs = weight.shape[split:]
        bound = 1 / math.sqrt(math.prod(inputs))
        uniform = partial(jax.random.uniform, minval=-bound, maxval=bound)
        self.scale = lora_scale(lora)
        a_axes = (*axes[:split], "rank")
        b_axes = ("rank", *axes[split:])
        self.a = param_of(rngs, uniform, (*inputs, lora.rank), a_axes)
        self.b = param_of(rngs, zeros, (lora.rank, *outputs), b_axes)

    def expand(
        self, low_BSr: Float[Array, "B S r"], axes: Axes, ops: Ops, seq: LogicalAxis
    ) -> Array:
        """Multiply the product of A by B, and scale it.

        Args:
          low_BSr: the product of A.
          axes: the logical axes of the output dims.
          ops: the ops that the block was given.
          seq: the logical axis of the sequence of `low_BSr` and of the output.

        Returns:
          An array [B, S, *out].
        """
        return ops.rank_linear(self.scale * low_BSr, self.b[...], axes, seq)


class LoraPairs(nnx.Dict[LoraPair]):
    """LoRA's pairs, by the names of the matrices that they stand beside."""

    def beside(self, name: str) -> LoraPair | None:
        """Return the pair of a matrix, or None where it has none."""
        return vars(self).get(name)  # `get` of Flax's Dict raises an AttributeError before 0.12.6


def lora_pairs(
    matrices: Mapping[str, nnx.Param],
    config: ModelConfig,
    rngs: nnx.Rngs,
) -> LoraPairs:
    """Make the pairs that a config asks for, by the names of their matrices.

    Args:
      matrices: the matrices of a block; the matrices of experts can have no pair.
      config: its `lora` has rank and targets; rank 0 asks for no pairs.
      rngs: the random numbers of A.

    Returns:
      The pairs by the names of their matrices; none for rank 0.

    Raises:
      UserError: a target is not among the matrices that can have a pair.
    """
    lora = config.lora
    there = [name for name in matrices if "experts" not in declared_axes(matrices[name])]
    pairs = dict[str, LoraPair]()
    for name in lora.targets if lora.rank else ():
        if name not in there:
            if name in matrices:
                why = f"{name} is a matrix of experts"
            else:
                why = f"no matrix {name!r}{suggest(name, there)}"
            raise UserError(
                f"model.lora.targets: {why}: LoRA may be beside {', '.join(there)} of this model"
            )
        if name not in pairs:
            pairs[name] = LoraPair(matrices[name], lora, rngs)
    return LoraPairs(pairs)


def trained_part(tree: Params, axes: Params, config: ModelConfig) -> Params:
    """Pick the part of the parameters that is trained: all parameters, or LoRA's pairs alone.

    Args:
      tree: a tree of the parameters' form.
      axes: the logical axes of the parameters; a matrix of a pair has the axis `rank`.
      config: its `lora` says whether there are pairs.

    Returns:
      The part, in a tree of the form of that part.
    """
    if not config.lora.rank:
        return tree
    return {"blocks": _with_rank(tree["blocks"], axes["blocks"])}


def _with_rank(tree: PyTree, axes: PyTree) -> PyTree:
    """Pick the part of a dict of dicts whose logical axes have a `rank`."""
    if not isinstance(axes, dict):
        return tree if "rank" in axes else {}
    found = {name: _with_rank(tree[name], axes[name]) for name in axes}
    return {name: part for name, part in found.items() if not (isinstance(part, dict) and not part)}


def merge_lora(params: Params, config: ModelConfig) -> Params:
    """Merge LoRA's pairs into the matrices that they stand beside: W + (alpha / rank) A B in place
    of W, A and B, computed in float32.

    Args:
      params: the parameters of a model with LoRA, or without; the arrays of W are donated.

    Returns:
      The parameters of `base_config`.
    """
    blocks = dict(params["blocks"])
    pairs = blocks.pop("lora", {})
    scale = lora_scale(config.lora)
    for name, pair in pairs.items():
        blocks[name] = _add_product(blocks[name], pair["a"], pair["b"], scale)
    return params | {"blocks": blocks}


@partial(jax.jit, donate_argnums=0, static_argnames="scale")
def _add_product(
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: float,
) -> jax.Array:
    """Add the products of pairs [L, *in, r] and [L, r, *out] to a stacked weight [L, *in, *out]."""
    product = jax.vmap(partial(jnp.tensordot, axes=1, precision="highest"))(
        a,
        b,
    )
    return (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)


_OLD_NAME = re.compile(r"(.+)_lora_([ab])")
"""The names of a pair's matrices before pairs were modules: `q_lora_a` and `q_lora_b` for
`lora.q.a` and `lora.q.b`.
"""


def with_old_names(tree: PyTree) -> PyTree:
    """Give LoRA's parameters their old names, in a tree of any leaves in the form of a model's
    parameters.
    """

    def rename(blocks: PyTree) -> PyTree:
        if not isinstance(blocks, dict):
            return blocks
        kept = {name: leaf for name, leaf in blocks.items() if name != "lora"}
        pairs = blocks["lora"].items()
        return kept | {f"{name}_lora_{x}": pair[x] for name, pair in pairs for x in pair}

    return jax.tree.map(
        rename, tree, is_leaf=lambda node: isinstance(node, dict) and "lora" in node
    )


def with_new_names(tree: PyTree) -> PyTree:
    """Give LoRA's parameters today's names, in a tree of any leaves in the form that a model's
    parameters had.
    """

    def rename(blocks: PyTree) -> PyTree:
        if not isinstance(blocks, dict):
            return blocks
        kept = dict[str, PyTree]()
        pairs = dict[str, PyTree]()
        for name, leaf in blocks.items():
            if found := _OLD_NAME.fullmatch(name):
                pairs.setdefault(found[1], {})[found[2]] = leaf
            else:
                kept[name] = leaf
        return kept | {"lora": pairs}

    def is_blocks(node: PyTree) -> bool:
        return isinstance(node, dict) and has_old_names(node)

    return jax.tree.map(rename, tree, is_leaf=is_blocks)


def has_old_names(names: Iterable[str]) -> bool:
    """Return whether some of these are LoRA's old names; the last word of a path is enough."""
    return any(_OLD_NAME.fullmatch(name) for name in names)
