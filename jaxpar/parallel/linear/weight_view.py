"""Views of stored matrices, by which a linear or an expert multiplies by another form of a weight
than the one that is stored.

    y = parallel.column_linear(x, parallel.WeightView(w, NOfM(2, 4)), ("mlp",), layout)

A linear takes a view wherever it takes an array. It makes the form of each device's own part,
before that part is cast and gathered, forward and backward; so nothing is kept beside the stored
matrix, and nothing more is sent.

Shapes: I and O a linear's flattened dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from jax import Array

from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import Axes, Layout
from jaxpar.kernels.weight_forms import WeightForm


@dataclass(frozen=True, eq=False)
class WeightView:
    """A stored matrix and the form in which it multiplies.

    Attributes:
      stored: the array, of any dims.
      form: the form that is made of the array; None = it multiplies as it is stored.
      name: the model's name of the matrix, for ops that look at the inputs of each matrix.
    """

    stored: Array
    form: WeightForm | None
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored matrix."""
        return self.stored.shape


Weight: TypeAlias = Array | WeightView


def stored_array(weight: Weight) -> Array:
    """Return the stored array of a weight that may be a view."""
    if isinstance(weight, WeightView):
        return weight.stored
    return weight


def form_of(weight: Weight) -> WeightForm | None:
    """Return the form of a weight that may be a view; None = it multiplies as it is stored."""
    if isinstance(weight, WeightView):
        return weight.form
    return None


def read(weight: Array, form: WeightForm | None, ins: int, outer: int = 0) -> Array:
    """Make the form of a matrix, or of a device's part of it.

    Args:
      weight: [*outer, *in, *out].
      form: the form; None = the matrix multiplies as it is stored.
      ins: how many of its dims are summed over.
      outer: how many dims stand before the dims in, such as the dim of experts.

    Returns:
      The array that multiplies, of the same shape and dtype.
    """
    if form is None:
        return weight
    return form.read(_as_matrices(weight, ins, outer)).reshape(weight.shape)


def pull(gradient: Array, form: WeightForm | None, ins: int, outer: int = 0) -> Array:
    """Turn the gradient of the array that multiplies, which `read` made, into the gradient of the
    stored matrix, or of a device's part of it.

    Args:
      gradient: [*outer, *in, *out].
      form: the form; None = the matrix multiplies as it is stored.
      ins: how many of its dims are summed over.
      outer: how many dims stand before the dims in, such as the dim of experts.

    Returns:
      The gradient, of the same shape and dtype.
    """
    if form is None:
        return gradient
    return form.pull(_as_matrices(gradient, ins, outer)).reshape(gradient.shape)


def _as_matrices(weight: Array, ins: int, outer: int) -> Array:
    """Merge the dims in and the dims out of a weight into one dim each."""
    split = outer + ins
    rows = math.prod(weight.shape[outer:split])
    columns = math.prod(weight.shape[split:])
    return weight.reshape(*weight.shape[:outer], rows, columns)


def require_units(
    form: WeightForm | None,
    shape: tuple[int, ...],
    axes: Axes,
    layout: Layout,
    ins: int,
    outer: int = 0,
    what: str = "a weight",
) -> None:
    """Refuse a layout in which entries that are read together lie on several devices: the form
    would then depend on the layout.

    Args:
      form: the form of the matrix; None = no entries are read together.
      shape: the shape of the whole matrix.
      axes: the logical axes of the matrix.
      layout: mesh and rules.
      ins: how many of the dims are summed over.
      outer: how many dims stand before the dims in, such as the dim of experts.
      what: the matrix's name in the message.

    Raises:
      UserError: a device has no whole number of units.
    """
    if form is None:
        return
    sides = (
        (form.unit[0], range(outer, outer + ins)),
        (form.unit[1], range(outer + ins, len(shape))),
    )
    for unit, dims in sides:
        together = _neighbours(shape, axes, layout, dims, what)
        if together % unit:
            over = " x ".join(str(axes[dim]) for dim in dims)
            raise UserError(
                f"{what} of form {form.name} is read in units of {unit} along {over}, and a device "
                f"has {together} neighbours there: split it over fewer devices, or choose sizes of "
                f"which each device has a multiple of {unit}"
            )


def _neighbours(shape: tuple[int, ...], axes: Axes, layout: Layout, dims: range, what: str) -> int:
    """Count the entries of some dims, merged, that lie in a row on a device as they do in the whole
    matrix.
    """
    part = layout.sharding(axes, shape, what).shard_shape(shape)
    count = 1
    for dim in reversed(dims):
        count *= part[dim]
        if part[dim] < shape[dim]:
            break
    return count
