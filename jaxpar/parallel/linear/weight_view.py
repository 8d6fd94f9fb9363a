"""A stored matrix as it multiplies: the door through which a linear or an expert reads a weight.

    y = parallel.column_linear(x, parallel.WeightView(w, NOfM(2, 4)), ("mlp",), layout)

A linear takes a view wherever it takes an array. It makes the form of each device's own part,
before that is cast and gathered, forward and backward; so nothing is kept beside the stored matrix,
and nothing more is sent.

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
      form: what is made of it; None = it multiplies as it is stored.
      name: what the model calls it, for ops that look at what each matrix multiplies.
    """

    stored: Array
    form: WeightForm | None
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the stored matrix."""
        return self.stored.shape


Weight: TypeAlias = Array | WeightView


def stored_array(weight: Weight) -> Array:
    """The array behind a weight that may be a view."""
    if isinstance(weight, WeightView):
        return weight.stored
    return weight


def form_of(weight: Weight) -> WeightForm | None:
    """The form of a weight that may be a view; None = it multiplies as it is stored."""
    if isinstance(weight, WeightView):
        return weight.form
    return None


def read(weight: Array, form: WeightForm | None, ins: int, outer: int = 0) -> Array:
    """Make the form of a matrix, or of a device's part of it.

    Args:
      weight: [*outer, *in, *out].
      form: the form; None = it multiplies as it is stored.
      ins: how many of its dims are summed over.
      outer: how many dims stand before these, such as that of experts.

    Returns:
      What multiplies, of the same shape and dtype.
    """
    if form is None:
        return weight
    return form.read(_as_matrices(weight, ins, outer)).reshape(weight.shape)


def pull(gradient: Array, form: WeightForm | None, ins: int, outer: int = 0) -> Array:
    """Turn the gradient of what multiplies into that of the stored matrix, or of a device's part.

    Args:
      gradient: [*outer, *in, *out].
      form: as for `read`.
      ins: as for `read`.
      outer: as for `read`.

    Returns:
      The gradient, of the same shape and dtype.
    """
    if form is None:
        return gradient
    return form.pull(_as_matrices(gradient, ins, outer)).reshape(gradient.shape)


def _as_matrices(weight: Array, ins: int, outer: int) -> Array:
    """Take the dims in, and those out, of a weight together."""
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
    """Refuse a layout in which entries that are read together lie on several devices: what they
    make would depend on the layout.

    Args:
      form: the form of the matrix; None = nothing is read together.
      shape: that of the whole matrix.
      axes: its logical axes.
      layout: mesh and rules.
      ins: as for `read`.
      outer: as for `read`.
      what: what the message calls the matrix.

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
    """How many entries of some dims, taken together, lie in a row on a device as in the whole."""
    part = layout.sharding(axes, shape, what).shard_shape(shape)
    count = 1
    for dim in reversed(dims):
        count *= part[dim]
        if part[dim] < shape[dim]:
            break
    return count
