"""The parts that column and row linears are both made of: the layouts of a residual stream, the
checks of arguments, and the steps of their forwards and backwards on one device.

Shapes: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Form
from jaxpar.base.layout.sharding import Axes, Layout, kv_copy_axes, state_axes
from jaxpar.kernels.weight_forms import WeightForm
from jaxpar.parallel.collectives import gather, own_piece, platform_of, reduce, split_over
from jaxpar.parallel.linear.zero_blocks import Factor, find_zero_blocks

STORED: Axes = ("batch", "residual_seq", None)
GATHERED: Axes = ("batch", "seq", None)
ATTENDED: Axes = ("batch", "attention_seq", None)
Overlapping = Form | tuple[Form, Form]
"""One form for both gathers and scatters, or a form for each."""


def both_forms(overlap: Overlapping) -> tuple[Form, Form]:
    """Return the form of the gathers and the form of the scatters."""
    if isinstance(overlap, tuple):
        return overlap
    return (overlap, overlap)


def places_of_alike(keys: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Group the places of equal keys, in the order in which the keys come first."""
    places: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return list(places.items())


def require_head(
    what: str, x_BSD: Array, head_VD: Array, layout: Layout, bias_V: Array | None = None
) -> None:
    """Refuse hidden states and a head that do not fit together.

    Args:
      what: the name of the op, with which a message begins.

    Raises:
      UserError: the mesh does not divide an array, the two differ in D, or the bias has another
        length than the matrix.
    """
    require_bias(what, bias_V, head_VD.shape[:1])
    layout.sharding(STORED, x_BSD.shape, "x")
    layout.sharding(("vocab", "embed"), head_VD.shape, "head")
    require_width(what, x_BSD.shape, head_VD.shape[::-1], 1)


def require_width(
    what: str,
    given: Sequence[int],
    weight: Sequence[int],
    dims: int,
) -> None:
    """Refuse an input whose last `dims` dims are not the first dims of the weight."""
    if tuple(given[len(given) - dims :]) != tuple(weight[:dims]):
        raise UserError(
            f"{what}: an input of shape {tuple(given)} does not fit a weight whose first "
            f"{'dim is' if dims == 1 else 'dims are'} {', '.join(map(str, weight[:dims]))}"
        )


def require_bias(what: str, bias: Any, out: Sequence[int]) -> None:
    """Refuse a bias of another shape than its weight's output dims: it would be added at other
    places.
    """
    shape = getattr(bias, "shape", None)
    if bias is not None and shape != tuple(out):
        if shape is not None:
            found = f"one of shape {tuple(shape)}"
        else:
            found = f"a value of type {type(bias).__name__}"
        raise UserError(
            f"{what}: a bias has the shape of the weight's output dims, {tuple(out)}, and was "
            f"given {found}: "
            f"give an array of shape {tuple(out)}"
        )


def used_axes(axes: Axes) -> Axes:
    """Return the logical axes with which a weight is multiplied: it is whole over `embed`."""
    return tuple(None if axis == "embed" else axis for axis in axes)


def gather_weight(weight: Array, axes: Axes, layout: Layout) -> Array:
    """Inside `manual`: cast a weight and then gather it, so that half the bytes travel."""
    return gather(weight.astype(layout.dtype), axes, used_axes(axes), layout)


def factor_of(
    weight: Array,
    form: WeightForm | None,
    ins: int,
    layout: Layout,
    swapped: bool,
    in_order: bool = True,
) -> Factor:
    """Inside `manual`: return the factor that a device multiplies by, with a map of its blocks of
    zeros for kernels that skip them.

    Args:
      weight: [*in, *out], gathered and in the form in which it multiplies.
      form: the form; None = the weight multiplies as it is stored.
      ins: how many of the dims are dims in.
      swapped: whether the factor is the transpose [*out, *in].
      in_order: whether the weight has whole units of the form, in their order.
    """
    if swapped:
        weight = _swap_dims(weight, ins)
        ins = weight.ndim - ins
    return find_zero_blocks(weight, form, ins, layout, swapped=swapped, whole=in_order)


def _swap_dims(weight: Array, split: int) -> Array:
    """Turn a weight [*in, *out], of which the first `split` dims are dims in, into [*out, *in]."""
    return jnp.transpose(
        weight,
        (*range(split, weight.ndim), *range(split)),
    )


def own_kv_heads(weight: Array, dim: int | None, layout: Layout) -> Array:
    """Inside `manual`: pick from a weight of kv heads those that this device's query heads attend
    with.
    """
    if dim is None:
        return weight
    axes = kv_copy_axes(layout)
    devices = layout.pieces(axes)
    times = devices // math.gcd(devices, weight.shape[dim])
    return own_piece(jnp.repeat(weight, times, axis=dim), axes, dim, devices)


def weight_gradient(
    x: Array, dy: Array, weight: Array, axes: Axes, used: Axes, layout: Layout, copied: int | None
) -> Array:
    """Inside `manual`: contract [B, S, *in] and [B, S, *out] over the tokens, into a weight's
    gradient that is laid out as gradients are.

    The sum is in float32, over the devices that have other tokens and those that have copies of the
    same heads.
    """
    shape = (*x.shape[2:], *dy.shape[2:])
    tokens = split_over(used[:2], layout)
    if platform_of(layout) == "tpu" and len(x) > 1:
        over = (0, 1)  # to merge the two dims, XLA would copy heads that lie [B, H, h, S]
    else:
        over = (0,)  # XLA:CPU would transpose two dims
        x, dy = (array.reshape(array.shape[0] * array.shape[1], -1) for array in (x, dy))
    dweight = jax.lax.dot_general(
        x, dy, ((over, over), ((), ())), preferred_element_type=jnp.float32
    ).reshape(shape)
    if copied is not None:
        whole = jax.ShapeDtypeStruct(
            (*shape[:copied], weight.shape[copied], *shape[copied + 1 :]), jnp.float32
        )
        (dweight,) = jax.linear_transpose(
            lambda weight: own_kv_heads(weight, copied, layout), whole
        )(dweight)
        tokens += kv_copy_axes(layout)
    return reduce(dweight, tokens, used_axes(axes), state_axes(axes), layout).astype(weight.dtype)


def plus_bias(y: Array, bias: Array | None, axes: Axes, layout: Layout) -> Array:
    """Add the bias [*out], which has the logical axes `axes`, to [B, S, *out], whose kv heads may
    be copies. Both the sum and the bias's gradient are computed in float32.
    """
    if bias is None:
        return y
    if "kv_heads" in axes and kv_copy_axes(layout):
        dim = axes.index("kv_heads")
        bias = jnp.repeat(
            bias,
            y.shape[2 + dim] // bias.shape[dim],
            axis=dim,
        )
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)
