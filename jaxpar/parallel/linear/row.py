"""The row-parallel linear: its input is split over the dims that it sums over, and the sum is
scattered over the sequence.

Shapes: B batch, S sequence, D embed, I and O a linear's flattened dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.sharding import Axes, Layout, LogicalAxis, require_layout
from jaxpar.base.layout.specs import require_axes
from jaxpar.kernels.weight_forms import WeightForm
from jaxpar.parallel.collectives import manual_vjp, split_over
from jaxpar.parallel.linear.pieces import (
    STORED,
    Overlapping,
    both_forms,
    factor_of,
    gather_weight,
    places_of_alike,
    plus_bias,
    require_bias,
    require_width,
    used_axes,
    weight_gradient,
)
from jaxpar.parallel.linear.ring_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxpar.parallel.linear.weight_view import (
    Weight,
    form_of,
    pull,
    read,
    require_units,
    stored_array,
)
from jaxpar.parallel.linear.zero_blocks import Factor


def row_linear(
    h_BSI: Any,
    weight: Any,
    axes: Any,
    layout: Layout,
    *,
    bias: Any = None,
    seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
    to: LogicalAxis = "embed",
    overlap: Overlapping = "xla",
) -> Float[Array, "B S D"]:
    """Compute `h @ w` over split dims, or the sum of several such products, and scatter the sum
    over the sequence: Megatron's row-parallel linear (Shoeybi et al. 2019, arXiv:1909.08053).

    Args:
      h_BSI: an array [B, S, *in], split as `axes` say, or a sequence of such arrays.
      weight: an array [*in, D] with logical axes (*axes, to), or a `WeightView` of one; or one for
        each of several inputs.
      axes: the logical axes of the input dims, such as ("mlp",), or a sequence of such axes.
      layout: mesh, rules and compute dtype.
      bias: an array [D] that is added once, after the sum; or an array or None for each of several
        inputs.
      seq: the logical axis of the input's sequence, which is "attention_seq" for the output of
        attention; or one for each of several inputs. Inputs that lie alike, and are summed over the
        same devices, share a scatter.
      to: the logical axis of the output dim, which is "rank" for the first of two matrices of low
        rank.
      overlap: how the scatter, and in the backward the gather, run beside the matmuls (a word of
        `jaxpar.base.registry.FORMS`): one form for both, or a pair of the gathers' and the
        scatters'.

    Returns:
      The output [B, S, D], in the compute dtype and the residual stream's layout.

    Raises:
      UserError: there is no such form, the logical axes or rules do not fit together, a bias does
        not fit its weight, or a device has no whole number of a view's units.
    """
    require_layout(layout, "row_linear")
    if not isinstance(h_BSI, list | tuple):
        h_BSI, weight, axes, bias = (h_BSI,), (weight,), (axes,), (bias,)
    seqs = (seq,) * len(h_BSI) if isinstance(seq, str) else tuple(seq)
    biases = bias or (None,) * len(h_BSI)
    if not len(h_BSI) == len(weight) == len(axes) == len(biases) == len(seqs):
        raise UserError(
            f"row_linear was given {len(h_BSI)} inputs, {len(weight)} weights, {len(axes)} axes, "
            f"{len(biases)} biases and {len(seqs)} axes of a sequence: give one of each"
        )
    rows = [
        _row(h, one, ins, to, seq, layout)
        for h, one, ins, seq in zip(h_BSI, weight, axes, seqs, strict=True)
    ]
    keys = [(split_over(used_axes(row.ins), layout), layout.mesh_axes(row.used[1])) for row in rows]
    parts = []
    for (partial, _), places in places_of_alike(keys):
        inputs = tuple(h_BSI[i] for i in places)
        weights = tuple(stored_array(weight[i]) for i in places)
        run = _rows([rows[i] for i in places], partial, layout, overlap)
        parts.append(run(inputs, weights))
    y_BSD = functools.reduce(jnp.add, parts)
    for row, one in zip(rows, biases, strict=True):
        require_bias("row_linear", one, row.width)
        y_BSD = plus_bias(y_BSD, one, (to,), layout)
    return y_BSD


class _Row(NamedTuple):
    """The layouts of one weight of row linears and of its input."""

    ins: Axes
    """The logical axes of the input dims."""
    used: Axes
    """The layout of the sum before it is scattered."""
    stored: Axes
    """The logical axes of the weight."""
    form: WeightForm | None
    """The form in which the weight's entries are read."""
    width: tuple[int, ...]
    """The shape of the weight's output dims."""

    @property
    def split(self) -> Axes:
        """The logical axes of the input."""
        return (*self.used[:2], *self.ins)

    def use(self, weight: Array, layout: Layout, swapped: bool = False) -> Factor:
        """Inside `manual`: return the weight as it is multiplied."""
        count = len(self.ins)
        whole = gather_weight(read(weight, self.form, count), self.stored, layout)
        return factor_of(whole, self.form, count, layout, swapped)


def _row(
    h: Array, weight: Weight, ins: Axes, to: LogicalAxis, seq: LogicalAxis, layout: Layout
) -> _Row:
    """Find the layouts of one weight and its input, and refuse the two if they do not fit."""
    require_axes(ins, "row_linear")
    count = len(ins)
    row = _Row(
        tuple(ins), ("batch", seq, None), (*ins, to), form_of(weight), tuple(weight.shape[count:])
    )
    layout.sharding(row.split, h.shape, "input")
    layout.sharding(row.stored, weight.shape, "weight")
    require_units(row.form, weight.shape, row.stored, layout, count, what="weight")
    require_width("row_linear", h.shape, weight.shape, count)
    return row


def _rows(
    rows: Sequence[_Row], partial: tuple[MeshAxis, ...], layout: Layout, overlap: Overlapping
) -> Callable[[tuple[Array, ...], tuple[Array, ...]], Array]:
    """Make the function of row linears whose sum is partial over the same mesh axes, and scattered
    as one.
    """
    used = rows[0].used
    gathers, scatters = both_forms(overlap)

    def forward(hs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
        products = [
            (h.astype(layout.dtype), row.use(weight, layout))
            for row, h, weight in zip(rows, hs, weights, strict=True)
        ]
        return matmul_reduce_scatter(products, partial, used, STORED, layout, scatters)

    def backward(
        hs: tuple[Array, ...], weights: tuple[Array, ...], dy: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        swapped = [
            row.use(weight, layout, swapped=True) for row, weight in zip(rows, weights, strict=True)
        ]
        dy = dy.astype(layout.dtype)
        dy, dhs = all_gather_matmul(dy, swapped, STORED, used, layout.compute, layout, gathers)
        dweights = []
        for row, h, weight in zip(rows, hs, weights, strict=True):
            narrow = h.astype(layout.dtype)
            dweight = weight_gradient(narrow, dy, weight, row.stored, used, layout, None)
            dweights.append(pull(dweight, row.form, len(row.ins)))
        dhs = (dh.astype(h.dtype) for dh, h in zip(dhs, hs, strict=True))
        return tuple(dhs), tuple(dweights)

    of_inputs = tuple(row.split for row in rows)
    of_weights = tuple(row.stored for row in rows)
    return manual_vjp(forward, backward, layout, (of_inputs, of_weights), STORED)
