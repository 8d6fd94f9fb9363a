"""Matmuls of rows by the weights of their experts, with the gradient written out, as
`jaxpar.parallel.linear` has them for a single weight.

The rows of a device are gathered over the axes that split `mlp`, and put in the order of their
experts; partial sums over `mlp` are put back in the order of the rows, and summed and scattered.

Shapes: D embed, F mlp, E experts of a device, M buffers, R rows, I and O a weight's dims.
"""

from __future__ import annotations

from jaxtyping import Array

from jaxpar.base.layout.fit_heads import drop_axes
from jaxpar.base.layout.sharding import Axes, Layout, PyTree, state_axes
from jaxpar.kernels.grouped_matmul import (
    expert_order,
    grouped_matmul,
    grouped_weight_gradient,
    inverse,
)
from jaxpar.kernels.weight_forms import WeightForm
from jaxpar.parallel.collectives import gather, manual_vjp, reduce, split_over
from jaxpar.parallel.experts.routers import ROWS
from jaxpar.parallel.linear import GATHERED, gather_weight, used_axes
from jaxpar.parallel.linear.weight_view import Weight, form_of, pull, read, stored_array

_USED: Axes = ("batch", "seq", None, None)
_HIDDEN: Axes = ("batch", "seq", None, "mlp")
UP: Axes = ("experts", "embed", "mlp")
DOWN: Axes = ("experts", "mlp", "embed")


def column_products(
    layout: Layout, x: Array, counts: Array, weights: tuple[Weight, ...]
) -> tuple[Array, ...]:
    """Multiply rows by several weights [E, D, F] of their experts, which share a gather of rows.

    Args:
      x: the rows of each device, laid out as `ROWS`.
      counts: how many of the rows are for each expert, from each device.
      weights: the weights, or views of them.

    Returns:
      The products, rows in the order of the experts, split over `mlp`. The products of empty rows
      mean nothing, and are not read.
    """
    views = [form_of(weight) for weight in weights]
    arrays = tuple(stored_array(weight) for weight in weights)

    def forward(x: Array, counts: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        counts_ME = _counts_used(counts, layout)
        used = [_use(weight, form, UP, layout) for weight, form in zip(weights, views, strict=True)]
        x_RD = _rows_to(counts_ME, x.astype(layout.dtype), layout)
        return tuple(grouped_matmul(x_RD, weight, counts_ME)[None, None] for weight in used)

    def backward(
        x: Array, counts: Array, weights: tuple[Array, ...], dys: tuple[Array, ...]
    ) -> PyTree:
        counts_ME = _counts_used(counts, layout)
        x_RD = _rows_to(counts_ME, x, layout)
        products = []
        dweights = []
        for dy, weight, form in zip(dys, weights, views, strict=True):
            dy_RF = dy[0, 0]
            used = _use(weight, form, UP, layout)
            products.append(grouped_matmul(dy_RF, used, counts_ME, transposed=True))
            dweights.append(_weight_gradient(x_RD, dy_RF, counts_ME, weight, form, UP, layout))
        dx = _rows_from(counts_ME, sum(products[1:], products[0]), layout)
        return dx, None, tuple(dweights)

    in_axes = (ROWS, ROWS, (UP,) * len(weights))
    out_axes = (_HIDDEN,) * len(weights)
    return manual_vjp(forward, backward, layout, in_axes, out_axes)(x, counts, arrays)


def row_product(layout: Layout, hidden: Array, counts: Array, weight: Weight) -> Array:
    """Multiply hidden rows by a weight [E, F, D] of their experts, and sum over `mlp`.

    Args:
      hidden: products that `column_products` returned, in the order of the experts.
      counts: how many of the rows are for each expert, from each device.
      weight: the weight, or a view of it.

    Returns:
      The sums, in the order and the layout of the rows that `column_products` was given.
    """
    form = form_of(weight)

    def forward(hidden: Array, counts: Array, weight: Array) -> Array:
        counts_ME = _counts_used(counts, layout)
        used = _use(weight, form, DOWN, layout)
        return _rows_from(counts_ME, grouped_matmul(hidden[0, 0], used, counts_ME), layout)

    def backward(hidden: Array, counts: Array, weight: Array, dy: Array) -> PyTree:
        counts_ME = _counts_used(counts, layout)
        used = _use(weight, form, DOWN, layout)
        dy_RD = _rows_to(counts_ME, dy, layout)
        dhidden = grouped_matmul(dy_RD, used, counts_ME, transposed=True)[None, None]
        dweight = _weight_gradient(hidden[0, 0], dy_RD, counts_ME, weight, form, DOWN, layout)
        return dhidden, None, dweight

    in_axes = (_HIDDEN, ROWS, DOWN)
    run = manual_vjp(forward, backward, layout, in_axes, ROWS)
    return run(hidden, counts, stored_array(weight))


def _use(weight: Array, form: WeightForm | None, axes: Axes, layout: Layout) -> Array:
    """Inside `manual`: return the weights of a device's experts as they are multiplied."""
    return gather_weight(read(weight, form, 1, outer=1), axes, layout)


def _weight_gradient(
    x_RI: Array,
    dy_RO: Array,
    counts_ME: Array,
    weight: Array,
    form: WeightForm | None,
    axes: Axes,
    layout: Layout,
) -> Array:
    """Inside `manual`: compute the gradient of a weight, summed and laid out as a gradient."""
    # All tokens of an expert are on its device, except those along axes that do not split experts.
    others = drop_axes(split_over(GATHERED[:2], layout), layout.mesh_axes("experts"))
    own_EIO = grouped_weight_gradient(x_RI, dy_RO, counts_ME)
    summed = reduce(own_EIO, others, used_axes(axes), state_axes(axes), layout)
    return pull(summed, form, 1, 1).astype(weight.dtype)


def _counts_used(counts: Array, layout: Layout) -> Array:
    """Inside `manual`: return the counts [M, E] of the rows as they are used, where the sequence is
    gathered.
    """
    return gather(counts, ROWS, _USED, layout).reshape(
        -1,
        counts.shape[-1],
    )


def _rows_to(counts_ME: Array, x: Array, layout: Layout) -> Array:
    """Inside `manual`: gather a device's rows [1, 1, R, D] and put them in the order of the
    experts.
    """
    x_RD = gather(x, ROWS, _USED, layout).reshape(
        -1,
        x.shape[-1],
    )
    order = expert_order(counts_ME, len(x_RD))
    return x_RD if order is None else x_RD[order]


def _rows_from(counts_ME: Array, y_RD: Array, layout: Layout) -> Array:
    """Inside `manual`: put partial sums over `mlp` back in the order of the rows, and sum and
    scatter them: the transpose of `_rows_to`.
    """
    if (order := expert_order(counts_ME, len(y_RD))) is not None:
        y_RD = y_RD[inverse(order)]
    parts = layout.size("residual_seq") // layout.size("seq")
    return reduce(
        y_RD.reshape(1, parts, -1, y_RD.shape[-1]), layout.mesh_axes("mlp"), _USED, ROWS, layout
    )
