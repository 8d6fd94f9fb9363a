"""The parts that both routers need: the scores of the experts, and the exchange of rows.

Shapes: B batch, S sequence, D embed, E experts, X devices along `experts`, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.layout.sharding import Axes, Layout, PyTree
from jaxpar.parallel.collectives import gather, manual_vjp

# Rows are [devices along batch, along the sequence, R, D]: each device has its own, so its part is
# [1, 1, R, D].
ROWS: Axes = ("batch", "residual_seq", None, None)
SOURCES: Axes = ("batch", "residual_seq", None)
ROUTER: Axes = ("embed", None)
SCALAR: Axes = ()


class RouterSums(NamedTuple):
    """The router's losses, summed over the text of a batch without its padding.

    Attributes:
      balance: the load balance of each sequence, E sum_e f_e P_e, where f is the share of its
        choices that fall on an expert and P the expert's mean probability (Switch,
        arXiv:2101.03961, section 2.2); it is 1 where all are alike. It is taken sequence by
        sequence (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), each weighted by its tokens of
        text, so that it adds up over any layout.
      z: the squared log-normaliser of the router (ST-MoE, arXiv:2202.08906, section 3.3).
    """

    balance: Float[Array, ""]
    z: Float[Array, ""]


def whole_router(router_DE: Array, layout: Layout) -> Array:
    """Inside `manual`: return the whole router in float32."""
    return gather(router_DE.astype(jnp.float32), ROUTER, (None, None), layout)


def router_logits(x_BSD: Array, router_DE: Array) -> Array:
    """Score the experts for each token.

    The product is in full float32 on any device: a rounded score may choose another expert.
    """
    return jnp.matmul(
        x_BSD.astype(jnp.float32),
        router_DE,
        precision=jax.lax.Precision.HIGHEST,
    )


def swap(x: Array, layout: Layout) -> Array:
    """Inside `manual`: send the i-th of X blocks along dim 0 to the i-th device along `experts`.
    The function is its own inverse.
    """
    axes = layout.mesh_axes("experts")
    if axes:
        return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    return x


def each(
    local: Callable[..., Array], layout: Layout, in_axes: PyTree, out_axes: Axes
) -> Callable[..., Array]:
    """Return a function that runs `local(arrays, places)` on each device's part; neither it nor
    its backward sends anything.
    """

    def backward(arrays: PyTree, places: Array, cotangent: Array) -> tuple[PyTree, None]:
        return jax.vjp(lambda arrays: local(arrays, places), arrays)[1](cotangent)[0], None

    return manual_vjp(local, backward, layout, in_axes, out_axes)
