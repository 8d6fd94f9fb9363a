"""How a batch is laid out before a model's blocks see it: the order of its tokens, and halves of it.

Shapes: B batch, S sequence, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.plan import Plan, Strategy
from jaxpar.base.sharding import Axes, Layout
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.context import check_chunks
from jaxpar.parallel.zigzag import chunk_order, inverse, reordered

TOKENS: Axes = ("batch", None)
"""Arrays of a batch, one entry a token."""


def in_order(
    batch: Mapping[str, Int[Array, "B S"]], layout: Layout, context: Strategy = "ring"
) -> dict[str, Int[Array, "B S"]]:
    """A batch with its tokens in the order in which attention splits the sequence; `positions` says where they stood.

    Args:
      batch: int arrays [B, S] by name, `tokens` among them, each sequence whole on every device; `positions` are made
        where there are none.
      layout: mesh and rules.
      context: how attention sees a sequence that is split, as for `attention`.

    Raises:
      UserError: a sequence that is not cut into equal chunks.
    """
    tokens_BS, order = batch["tokens"], chunk_order(layout, context)
    positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    batch = {"positions": positions_BS, **batch}
    if len(order) == 1:
        return batch
    check_chunks(layout, context, tokens_BS.shape[1])
    return {name: layout.constrain(reordered(x, order, 1), TOKENS) for name, x in batch.items()}


def in_natural_order(x_BSV: Float[Array, "B S V"], layout: Layout, context: Strategy = "ring") -> Float[Array, "B S V"]:
    """What a model made of a batch `in_order`, its tokens as they were; arguments as there."""
    order = chunk_order(layout, context)
    return x_BSV if len(order) == 1 else reordered(x_BSV, inverse(order), 1)


def halves(x: Array | None, axes: Axes, plan: Plan) -> tuple[Any, ...]:
    """What a block runs on, one after the other: the array, or under Domino two halves of each device's sequences.

    Args:
      x: array [B, ...], or None.
      axes: its layout.
      plan: mesh and rules, and whether Domino is on.
    """
    if x is None or plan.overlap.parts == 1:
        return (x,) * plan.overlap.parts
    return manual(lambda x: tuple(jnp.split(x, 2)), plan, (axes,), (axes, axes))(x)


def whole_batch(parts: tuple[Array, ...], axes: Axes, plan: Plan) -> Array:
    """The inverse of `halves`."""
    if len(parts) == 1:
        return parts[0]
    return manual(lambda *parts: jnp.concatenate(parts), plan, (axes,) * len(parts), axes)(*parts)
