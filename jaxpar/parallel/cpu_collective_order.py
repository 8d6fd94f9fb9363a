"""Collectives kept in one order on XLA:CPU, by a number that each waits for and hands on.

XLA:CPU starts collectives in the order of its schedule, but counts a loop or a branch as started as
soon as its first op is. What is inside may then run beside a later collective, unless that one
depends on the loop's result. All collectives of a `shard_map` share one channel there, so two
devices that reach two of them in different orders exchange each other's data, or wait for ever.
GPUs and TPUs run a loop to its end before the op that follows it, and need none of this.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpar.base.layout.sharding import Layout, PyTree
from jaxpar.parallel.collectives import manual, platform_of

Tree = TypeVar("Tree")


def first_order_token(layout: Layout) -> jax.Array | None:
    """Make the order token that waits for nothing; None where the layout's devices keep collectives
    in order by themselves.
    """
    if platform_of(layout) == "cpu":
        return jnp.int32(0)
    return None


def order_token_after(
    order_token: jax.Array | None, arrays: PyTree, axes: PyTree, layout: Layout
) -> jax.Array | None:
    """Return an order token that is ready after these arrays: an op whose arrays are held back by
    it (`ready_after`) runs after the ops that made them.

    Args:
      order_token: the token before, or None.
      arrays: results of ops that may hold collectives.
      axes: the logical axes of each array.

    Returns:
      An int32 zero that is ready only after the arrays; None where `order_token` is None.
    """
    if order_token is None:
        return None

    def local(order_token: jax.Array, arrays: PyTree) -> jax.Array:
        for array in jax.tree.leaves(arrays):
            bits = jax.lax.bitcast_convert_type(
                array[(0,) * array.ndim].astype(jnp.float32), jnp.int32
            )
            # it holds for every square, but XLA does not know
            order_token = jnp.where(bits * bits & 3 < 2, order_token, 1)
        return order_token

    return manual(local, layout, ((), axes), ())(order_token, arrays)


def ready_after(x: Tree, order_token: jax.Array | None) -> Tree:
    """Hold arrays back until an order token is ready.

    Args:
      x: a tree of arrays.
      order_token: the result of `order_token_after`; None = the arrays need not wait.

    Returns:
      The same arrays.
    """
    if order_token is None:
        return x
    return jax.tree.map(
        lambda x: jnp.where(order_token == 0, x, jnp.zeros_like(x)),
        x,
    )
