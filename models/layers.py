"""Layers one after another: in a loop over their stacked parameters, or unrolled.

Shapes: L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.base.config import ModelConfig
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree
from jaxpar.parallel.remat import remat


def over_layers(
    config: ModelConfig,
    body: Callable[[Any, Any, int], tuple[Any, Any]],
    carry: Any,
    xs: PyTree,
    plan: Plan,
) -> tuple[Any, Any]:
    """Run a body over stacked layers, each of which keeps the activations that the plan says for
    its backward.

    The layers run in one scan, or unrolled where `config.scan_layers` is false. Layers of several
    kinds are scanned in groups of one of each, and the layers that are left over are unrolled.

    Args:
      body: a function `(carry, x, kind) -> (carry, y)` of one layer.
      carry: the carry of the first layer, a tree of arrays.
      xs: the x of all layers, a tree of arrays [L, ...].
      plan: says which activations are kept.

    Returns:
      The last carry, and the ys of all layers stacked [L, ...].
    """
    L = len(jax.tree.leaves(xs)[0])
    p = config.kinds

    def of(kind: int, looped: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        return remat(lambda carry, x: body(carry, x, kind), plan, looped)

    if config.scan_layers and p == 1:
        return jax.lax.scan(of(0, True), carry, xs)
    grouped = L // p * p if config.scan_layers else 0
    found = []
    if grouped:
        kinds = [of(kind, True) for kind in range(p)]

        def group(carry: Any, xs: PyTree) -> tuple[Any, Any]:
            ys = []
            for kind, one in enumerate(kinds):
                carry, y = one(
                    carry,
                    jax.tree.map(lambda leaf, kind=kind: leaf[kind], xs),
                )
                ys.append(y)
            return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *ys)

        if grouped == L:
            whole = xs
        else:
            whole = jax.tree.map(lambda leaf: leaf[:grouped], xs)
        carry, ys = jax.lax.scan(
            group,
            carry,
            jax.tree.map(
                lambda x: x.reshape(L // p, p, *x.shape[1:]),
                whole,
            ),
        )
        found.append(
            jax.tree.map(
                lambda y: y.reshape(grouped, *y.shape[2:]),
                ys,
            )
        )
    for i in range(grouped, L):
        carry, y = of(i % p, False)(
            carry,
            jax.tree.map(lambda leaf, i=i: leaf[i], xs),
        )
        found.append(jax.tree.map(lambda y: y[None], y))
    return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *found)
