"""Prunes a trained model at once, from some text and without training: Wanda (Sun et al. 2023,
arXiv:2306.11695), and plain magnitudes.

Wanda weighs an entry by its magnitude times the norm of the feature that it multiplies, over the
tokens of the text, and compares the entries of one output, or of a group of N:M. Layers are pruned
in turn, so that the norms of each are those of a model whose earlier layers are pruned.

Shapes: B batch, S sequence, D embed, I and O a matrix's dims in and out, each taken together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.base.config.sparsity import MATRICES
from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes
from jaxpar.kernels.weight_forms import NOfM
from jaxpar.models import Batch, Model, Params
from jaxpar.models.sparsity import matrix_split
from jaxpar.parallel.domino import LayerInfo, Places
from jaxpar.parallel.linear.weight_view import WeightView
from jaxpar.parallel.ops import Ops, WrappedOps
from jaxpar.parallel.zigzag import in_order
from jaxpar.train.optimizer.ranks import largest

Criterion = Literal["wanda", "magnitude"]


class Target(NamedTuple):
    """What is left of each matrix.

    Attributes:
      matrices: the names of those that are pruned; none = all of a block.
      sparsity: the share that becomes zero: of each output for Wanda, of each matrix for
        magnitudes.
      form: N:M in place of `sparsity`.
    """

    matrices: tuple[str, ...] = ()
    sparsity: float = 0.5
    form: NOfM | None = None


class _NormOps(WrappedOps):
    """The ops of one run of a block, which also add up the squares of what each matrix
    multiplies.
    """

    def __init__(self, ops: Ops):
        super().__init__(ops)
        self.squares: dict[str, Array] = {}

    def column_linear(self, x_BSD: Array, weights: Any, axes: Any, *rest: Any, **named: Any) -> Any:
        for weight in weights:
            self._add(weight, x_BSD)
        return super().column_linear(x_BSD, weights, axes, *rest, **named)

    def row_linear(self, h_BSI: Any, weight: Any, axes: Any, *rest: Any, **named: Any) -> Array:
        self._add(weight, h_BSI)
        return super().row_linear(h_BSI, weight, axes, *rest, **named)

    def _add(self, weight: Any, x: Array) -> None:
        if isinstance(weight, WeightView):
            square = jnp.square(x.astype(jnp.float32))
            self.squares[weight.name] = jnp.sum(square, axis=(0, 1))


def prune_once(
    model: Model,
    params: Params,
    batches: Iterable[Batch],
    plan: Plan,
    target: Target,
    criterion: Criterion = "wanda",
) -> Params:
    """Set entries of a trained model's matrices to zero.

    Args:
      model: the model, without experts among the targets of Wanda: each sees other tokens.
      params: its parameters, with the model's order of layers; they are donated.
      batches: text, as `Model.loss` takes it; all batches' hidden states are held at once.
      plan: says how it runs, without stages.
      target: what is left.
      criterion: by what entries are compared.

    Returns:
      The parameters, with zeros.

    Raises:
      UserError: a target is not there, is one of experts, or has no whole groups; or there is no
        text.
    """
    names = _targets(model, target, criterion)
    text = [in_order(batch, plan, plan.context.strategy) for batch in batches]
    if not text:
        raise UserError("pruning needs text to look at, and was given no batch")
    embed = jax.jit(lambda params, tokens, places: model.embed(params, tokens, places, plan))
    streams = [embed(params, batch["tokens"], batch["positions"]) for batch in text]
    blocks = params["blocks"]
    axes = {name: model.axes["blocks"][name][1:] for name in names}

    @partial(jax.jit, static_argnames="kind")
    def run(
        layer: Params, x_BSD: Array, batch: Batch, kind: int, number: Array
    ) -> tuple[Array, dict[str, Array]]:
        ops = _NormOps(model.ops(plan))
        places = Places(batch["positions"], batch.get("segments"))
        info = LayerInfo(kind=kind, number=number)
        y_BSD, _ = model.block(layer, x_BSD, places, plan, info, ops)
        return y_BSD, ops.squares

    @jax.jit
    def pruned(layer: Params, total: dict[str, Array]) -> Params:
        return {
            name: _prune(layer[name], total.get(name), axes[name], target, criterion)
            for name in names
        }

    for number in range(model.config.layers):
        kind = number % model.config.kinds
        layer = jax.tree.map(lambda x, i=number: x[i], blocks)
        place = jnp.asarray(number)
        pairs = list(zip(streams, text, strict=True))
        seen = [run(layer, x, batch, kind, place)[1] for x, batch in pairs]
        total = jax.tree.map(lambda *norms: sum(norms), *seen)
        new = pruned(layer, total)
        for name, matrix in new.items():
            blocks = blocks | {name: _put(blocks[name], matrix, number)}
        streams = [run(layer | new, x, batch, kind, place)[0] for x, batch in pairs]
    return params | {"blocks": blocks}


@partial(jax.jit, donate_argnums=0)
def _put(stacked: Array, matrix: Array, layer: int) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, matrix, layer, 0)


def _targets(model: Model, target: Target, criterion: Criterion) -> list[str]:
    """The names of the matrices that are pruned."""
    axes = model.axes["blocks"]
    names = [name for name in target.matrices or MATRICES if name in axes]
    missing = [name for name in target.matrices if name not in axes]
    if missing or not names:
        raise UserError(
            f"no matrix {(missing or list(MATRICES))[0]!r} in the blocks of {model.config.family}: "
            f"they have {', '.join(name for name in MATRICES if name in axes) or 'none'}"
        )
    of_experts = [name for name in names if "experts" in axes[name]]
    if of_experts and criterion == "wanda":
        raise UserError(
            f"{of_experts[0]} is a matrix of experts, each of which sees other tokens, and Wanda "
            "takes the norms of all: name other matrices, or prune by magnitude"
        )
    return names


def _prune(
    weight: Array, squares: Array | None, axes: Axes, target: Target, criterion: Criterion
) -> Array:
    """Set entries of a layer's matrix, perhaps of several experts, to zero."""
    outer, ins = matrix_split(axes)
    split = outer + ins
    rows = math.prod(weight.shape[outer:split])
    columns = math.prod(weight.shape[split:])
    weight_IO = weight.astype(jnp.float32).reshape(*weight.shape[:outer], rows, columns)
    scores_IO = jnp.abs(weight_IO)
    if criterion == "wanda":
        assert squares is not None
        scores_IO = scores_IO * jnp.sqrt(squares.reshape(rows))[:, None]
    if target.form is not None:
        if rows % target.form.m or target.form.block != (1, 1):
            raise UserError(
                f"form {target.form.name} prunes single entries in groups of {target.form.m} along "
                f"a dim of {rows}, which it does not divide, or whole blocks: choose another"
            )
        kept_IO = target.form.mask(scores_IO)
    elif criterion == "wanda":
        kept = largest(
            scores_IO.swapaxes(-1, -2), jnp.float32((1 - target.sparsity) * rows), outer + 1
        )
        kept_IO = kept.swapaxes(-1, -2)
    else:
        number = jnp.float32((1 - target.sparsity) * rows * columns)
        kept_IO = largest(scores_IO, number, outer)
    return jnp.where(kept_IO.reshape(weight.shape), weight, 0)
