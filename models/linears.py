"""The matrices of a block as they multiply: a block reads its weights by these functions alone.

Shapes: B batch, S sequence, D embed, I hidden dims, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from flax import nnx
from jaxtyping import Array, Float

from jaxpar.base.layout.sharding import Axes, LogicalAxis
from jaxpar.kernels.weight_forms import WeightForm
from jaxpar.models.lora import LoraPair
from jaxpar.models.parameters import declared_axes
from jaxpar.parallel.linear.weight_view import Weight, WeightView
from jaxpar.parallel.ops import Ops


class Linear(NamedTuple):
    """A matrix of a block as it multiplies: the form in which its entries are read, and the bias
    and the LoRA pair whose product are added to its own product.
    """

    weight: nnx.Param
    bias: nnx.Param | None = None
    pair: LoraPair | None = None
    form: WeightForm | None = None
    name: str = ""

    @property
    def view(self) -> WeightView:
        """The view that an op multiplies by."""
        return WeightView(self.weight[...], self.form, self.name)

    @property
    def axes(self) -> tuple[LogicalAxis | None, ...]:
        """The logical axes of the weight."""
        return cast(tuple[LogicalAxis | None, ...], declared_axes(self.weight))

    @property
    def bias_array(self) -> Array | None:
        """The bias, if there is one."""
        if self.bias is None:
            return None
        return self.bias[...]


def column_linears(
    x_BSD: Float[Array, "B S D"],
    linears: Sequence[Linear],
    ops: Ops,
    seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
) -> list[Array]:
    """Multiply the residual stream by matrices [D, *out]; the A's of LoRA share its gather.

    Args:
      linears: the matrices; the outputs lie as each matrix's own axes say.
      ops: the ops that the block was given.
      seq: the logical axis of the outputs' sequence, or one for each matrix.

    Returns:
      An array [B, S, *out] for each matrix.
    """
    seqs = [seq] * len(linears) if isinstance(seq, str) else list(seq)
    narrow_seqs = [
        one for linear, one in zip(linears, seqs, strict=True) if linear.pair is not None
    ]
    pairs = [linear.pair for linear in linears if linear.pair is not None]
    weights: list[Weight] = [linear.view for linear in linears]
    narrow: list[Weight] = [pair.a[...] for pair in pairs]
    outputs: list[Axes] = [linear.axes[1:] for linear in linears]
    rank: Axes = ("rank",)
    biases = [linear.bias_array for linear in linears] + [None] * len(pairs)
    axes_of_all = [*outputs, *[rank] * len(pairs)]
    seq_of_all = seq if isinstance(seq, str) else seqs + narrow_seqs
    found = ops.column_linear(x_BSD, weights + narrow, axes_of_all, biases, seq_of_all)
    low = iter(found[len(linears) :])
    ys = []
    for linear, axes, one, y in zip(linears, outputs, seqs, found, strict=False):
        if linear.pair is not None:
            y += linear.pair.expand(next(low), axes, ops, one)
        ys.append(y)
    return ys


def row_linear(
    h_BSI: Float[Array, "B S *I"], linear: Linear, ops: Ops, seq: LogicalAxis = "seq"
) -> Float[Array, "B S D"]:
    """Multiply hidden features by a matrix [*I, D] to the residual stream.

    Args:
      h_BSI: the hidden features, split over the sequence as `seq` says.
      ops: the ops that the block was given.
      seq: the logical axis of the hidden features' sequence.

    Returns:
      The summand of the residual stream [B, S, D], in its layout.
    """
    y_BSD = ops.row_linear(h_BSI, linear.view, linear.axes[:-1], linear.bias_array, seq)
    return _plus_pair(y_BSD, h_BSI, linear, ops, seq)


def row_linears(
    hs: Sequence[Array], linears: Sequence[Linear], ops: Ops, seqs: Sequence[LogicalAxis]
) -> Float[Array, "B S D"]:
    """Multiply several hidden features, each by a matrix [*I, D], and sum them with one scatter.

    Args:
      hs: the hidden features [B, S, *I].
      linears: the matrix of each.
      ops: the ops that the block was given.
      seqs: the logical axis of the sequence of each.

    Returns:
      The summand of the residual stream [B, S, D], in its layout.
    """
    y_BSD = ops.row_linear(
        list(hs),
        [linear.view for linear in linears],
        [linear.axes[:-1] for linear in linears],
        [linear.bias_array for linear in linears],
        seqs,
    )
    for h, linear, seq in zip(hs, linears, seqs, strict=True):
        y_BSD = _plus_pair(y_BSD, h, linear, ops, seq)
    return y_BSD


def _plus_pair(
    y_BSD: Array, h_BSI: Array, linear: Linear, ops: Ops, seq: LogicalAxis
) -> Float[Array, "B S D"]:
    """Add the product of the LoRA pair of a row linear, if it has one."""
    pair = linear.pair
    if pair is None:
        return y_BSD
    low_BSr = ops.row_linear(h_BSI, pair.a[...], linear.axes[:-1], None, seq, "rank")
    return y_BSD + pair.expand(low_BSr, ("embed",), ops, "residual_seq")
