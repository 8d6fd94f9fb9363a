"""Stores AdamW's moments in fewer bits: in bfloat16, or as 8-bit codes in blocks that share a scale.

The 8-bit form is the blockwise quantization of Dettmers et al. 2022 (arXiv:2110.02861, section 2) with other codes.
Theirs are looked up in a table, which is slow on a TPU; these are roots, which are arithmetic. A value is taken as a
share of the largest in its block. The first moment keeps the signed square root of that share, in 127 steps either way,
and the second the fourth root, in 255 steps. Near the largest value a step is then 1.6 % of it, and a second moment
down to 1e-9 of the largest is not zero. Rounded to zero it would make the update huge, so a code is 0 for zeros only.

Shapes: a matrix [..., n] is cut along its last dim into blocks of b values; codes [..., n], scales [..., n / b].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding

from jaxpar.base.plan import Plan
from jaxpar.base.sharding import Axes
from jaxpar.models import Params

Precision = Literal["float32", "bfloat16", "int8"]
_BLOCKS = (256, 128, 64, 32)
_FIRST, _SECOND = 127, 255  # the largest codes


class Quantized(NamedTuple):
    """A moment in 8 bits: codes [..., n], int8 (first) or uint8 (second), and float32 scales [..., n / b].

    In place of the arrays it may hold ShapeDtypeStructs, shardings or flags.
    """

    codes: Any
    scales: Any


def block(n: int) -> int:
    """Return how many values along a last dim of `n` share a scale: all if no power of two from 32 divides it."""
    return next((size for size in _BLOCKS if n % size == 0), n)


def quantize(x: Array, second: bool) -> Quantized:
    """Return the codes and scales of a moment [..., n]."""
    b = block(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, b)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    share = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    if second:
        codes = jnp.round(_SECOND * jnp.sqrt(jnp.sqrt(share)))
        codes = jnp.maximum(codes, share > 0).astype(jnp.uint8)
    else:
        codes = jnp.round(_FIRST * jnp.sign(share) * jnp.sqrt(jnp.abs(share))).astype(jnp.int8)
    return Quantized(codes.reshape(x.shape), scales)


def dequantize(q: Quantized) -> Array:
    """Return the float32 values of codes [..., n]."""
    root = q.codes.astype(jnp.float32).reshape(*q.scales.shape, -1)
    if q.codes.dtype == jnp.uint8:
        share = jnp.square(jnp.square(root / _SECOND))
    else:
        share = jnp.square(root / _FIRST) * jnp.sign(root)
    return (share * q.scales[..., None]).reshape(q.codes.shape)


def scales_sharding(moment: Quantized, axes: Axes, plan: Plan) -> NamedSharding:
    """Place the scales of a moment beside their codes, but unsplit along the last dim if its blocks are too few."""
    whole = moment.codes.shape[-1] // plan.size(axes[-1]) % block(moment.codes.shape[-1])
    return plan.sharding((*axes[:-1], None if whole else axes[-1]), moment.scales.shape)


def pack_moments(state: optax.OptState, matrices: Params, precision: Precision) -> optax.OptState:
    """Convert the moments of matrices in a state of `optax.adamw` from float32 to this precision.

    `matrices` says whether each parameter is a matrix; the moments of vectors stay float32.
    """

    def pack(x: Array, matrix: bool, second: bool) -> Array | Quantized:
        if not matrix or precision == "float32":
            return x
        return x.astype(jnp.bfloat16) if precision == "bfloat16" else quantize(x, second)

    mu, nu = moments_of(state)
    return with_moments(
        state,
        jax.tree.map(partial(pack, second=False), mu, matrices),
        jax.tree.map(partial(pack, second=True), nu, matrices),
    )


def unpack_moments(state: optax.OptState) -> optax.OptState:
    """Invert `pack_moments`, as far as the bits allow."""
    return map_moments(lambda x: dequantize(x) if isinstance(x, Quantized) else x.astype(jnp.float32), state)


def moments_of(state: optax.OptState) -> tuple[Params, Params]:
    """Return the first and second moments in an optimizer's state, each as a tree like the parameters'."""
    return optax.tree.get(state, "mu"), optax.tree.get(state, "nu")


def with_moments(state: optax.OptState, mu: Params, nu: Params) -> optax.OptState:
    """Return an optimizer's state with these moments in place of its own."""
    return optax.tree.set(state, mu=mu, nu=nu)


def map_moments(
    change: Callable[..., Any], state: optax.OptState, *trees: Params, others: Callable[[Any], Any] = lambda x: x
) -> optax.OptState:
    """Return an optimizer's state with `change(moment, *leaves)` for each moment, and `others(x)` for every other leaf.

    A moment is an array, a ShapeDtypeStruct or a `Quantized`. The leaves are at its place in each of `trees`, which
    have the structure of the parameters.
    """
    moments = (
        jax.tree.map(change, moment, *trees, is_leaf=lambda x: isinstance(x, Quantized)) for moment in moments_of(state)
    )
    return with_moments(jax.tree.map(others, with_moments(state, {}, {})), *moments)
