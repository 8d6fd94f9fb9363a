"""The order of a batch's tokens where attention splits the sequence, or blocks run on its halves.

Device i of n has chunks i and 2n - 1 - i of 2n (zigzag), so that under a causal mask every device
has the same work (LLaMA 3, arXiv:2407.21783, section 3.3.2). Ulysses keeps tokens in their own
order.

Where blocks run on the two halves of each sequence, device i of the n that split the residual
stream has chunks i and n + i of 2n. So the first chunks of all devices are the first half of the
sequence, in its own order and split evenly, and their second chunks are the other half.

Shapes: B batch, S sequence, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.layout.mesh import describe
from jaxpar.base.layout.plan import Strategy
from jaxpar.base.layout.sharding import Axes, Layout, require_layout

TOKENS: Axes = ("batch", None)
"""The logical axes of a batch's arrays, which have one entry per token."""


def chunk_order(layout: Layout, strategy: Strategy, halved: bool = False) -> list[int]:
    """Tell which chunk of the sequence stands at each place.

    Args:
      layout: says which mesh axes split the sequence.
      strategy: how attention runs where the sequence is split.
      halved: whether blocks run on the two halves of each sequence, which attention does not split.

    Returns:
      The chunks' numbers: [0, 3, 1, 2] for a ring of two devices, [0, 2, 1, 3] for halves on two
      devices, [0] for no change.
    """
    if halved:
        n = layout.size("residual_seq")
        return [0] if n == 1 else [chunk for i in range(n) for chunk in (i, n + i)]
    n = layout.size("attention_seq")
    if n == 1 or strategy == "ulysses":
        return [0]
    return [chunk for i in range(n) for chunk in (i, 2 * n - 1 - i)]


def require_strategy(context: object) -> None:
    """Refuse a value that is no strategy of attention over a split sequence.

    Raises:
      UserError: there is no strategy of this name.
    """
    known = get_args(Strategy)
    if context not in known:
        if isinstance(context, str):
            hint = suggest(context, known)
        else:
            hint = ""
        raise UserError(
            f"no context strategy {short(context)}{hint}: try one of {', '.join(known)}"
        )


def inverse(order: Sequence[int]) -> list[int]:
    """Return the order that undoes an order of chunks."""
    return sorted(range(len(order)), key=order.__getitem__)


def reorder(x: Array, order: Sequence[int], dim: int) -> Array:
    """Put the chunks of one dim in another order.

    Args:
      x: an array of any shape.
      order: which chunk stands at each place; its length divides the dim.
      dim: the number of the dim.

    Returns:
      An array of the same shape.
    """
    front = x.shape[:dim]
    back = x.shape[dim + 1 :]
    return jnp.take(x.reshape(*front, len(order), -1, *back), jnp.asarray(order), axis=dim).reshape(
        x.shape
    )


def check_chunks(layout: Layout, strategy: Strategy, seq_len: int) -> None:
    """Refuse a sequence that cannot be cut into equal chunks.

    Args:
      layout: says which mesh axes split the sequence.
      strategy: how attention runs where the sequence is split.
      seq_len: the length of the whole sequence, in tokens.

    Raises:
      UserError: the sequence cannot be cut so; the message names the nearest lengths that can.
    """
    chunks = max(layout.size("attention_seq"), len(chunk_order(layout, strategy)))
    if seq_len % chunks:
        below = seq_len // chunks * chunks
        if below:
            shorter = f"data.seq_len={below} or "
        else:
            shorter = ""
        raise UserError(
            f"data.seq_len={seq_len} is not cut into {chunks} equal chunks, which {strategy} over "
            f"{context_sizes(layout)} needs: try {shorter}data.seq_len={below + chunks}"
        )


def check_halves(layout: Layout, seq_len: int) -> None:
    """Refuse a sequence whose halves cannot be split as the residual stream is, or whose halves
    would not be whole where they attend.

    Args:
      layout: says which mesh axes split the sequence.
      seq_len: the length of the whole sequence, in tokens.

    Raises:
      UserError: attention splits the sequence, or the halves cannot be split evenly; the message
        names what to try.
    """
    if layout.size("attention_seq") > 1:
        raise UserError(
            f"overlap.domino cuts each sequence in two, and attention splits it over "
            f"{context_sizes(layout)} already: try an even number of sequences for each device "
            "and domino=on, or leave domino out"
        )
    chunks = 2 * layout.size("residual_seq")
    if seq_len % chunks:
        below = seq_len // chunks * chunks
        if below:
            shorter = f"data.seq_len={below} or "
        else:
            shorter = ""
        raise UserError(
            f"overlap.domino cuts data.seq_len={seq_len} in two halves, which "
            f"{layout.size('residual_seq')} devices split evenly: try {shorter}"
            f"data.seq_len={below + chunks}, or an even number of sequences for each device"
        )


def context_sizes(layout: Layout) -> str:
    """Name the mesh axes that split the sequence in attention, with their sizes."""
    return describe({axis: layout.mesh.shape[axis] for axis in layout.mesh_axes("attention_seq")})


def in_order(
    batch: Mapping[str, Shaped[Array | np.ndarray, "B S ..."]],
    layout: Layout,
    context: Strategy = "ring",
    halved: bool = False,
) -> dict[str, Shaped[Array, "B S ..."]]:
    """Put a batch's tokens in the order in which attention, or halves, split the sequence.

    Args:
      batch: arrays [B, S, ...] by name, `tokens` among them, each sequence whole on every device.
        `positions` are made if missing.
      layout: says which mesh axes split the sequence.
      context: how attention runs where the sequence is split, as `attention` is told.
      halved: whether blocks run on the two halves of each sequence (`overlap.domino`).

    Returns:
      The arrays in the new order, with `positions`, which say where the tokens stood.

    Raises:
      UserError: the sequence cannot be cut into equal chunks, or an argument has another shape,
        dtype or type.
    """
    require_layout(layout, "in_order")
    require_strategy(context)
    if not isinstance(batch, Mapping) or "tokens" not in batch:
        if isinstance(batch, Mapping):
            found = f"the names {', '.join(map(str, batch))}"
        else:
            found = short(batch)
        raise UserError(
            'in_order takes arrays [batch, sequence] by name, "tokens" among them, and was '
            f"given {found}"
        )
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    tokens_BS = arrays["tokens"]
    order = chunk_order(layout, context, halved)
    positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    arrays = {"positions": positions_BS, **arrays}
    if len(order) == 1:
        return arrays
    if halved:
        check_halves(layout, tokens_BS.shape[1])
    else:
        check_chunks(layout, context, tokens_BS.shape[1])
    return {name: layout.constrain(reorder(x, order, 1), axes_of(x)) for name, x in arrays.items()}


def axes_of(x: Array) -> Axes:
    """Return the logical axes of one of a batch's arrays: [B, S], or [B, S, ...] where a token has
    several entries.
    """
    return (*TOKENS, *[None] * (x.ndim - 2))


def in_natural_order(
    x_BS: Shaped[Array, "B S ..."],
    layout: Layout,
    context: Strategy = "ring",
    halved: bool = False,
) -> Shaped[Array, "B S ..."]:
    """Put what a model made of a batch `in_order` back into the tokens' own order.

    The layout, the context and `halved` are those that `in_order` was given.

    Args:
      x_BS: an array whose second dim is the sequence; a token may have several entries.

    Returns:
      An array of the same shape.

    Raises:
      UserError: an argument has another shape, dtype or type.
    """
    require_layout(layout, "in_natural_order")
    require_strategy(context)
    order = chunk_order(layout, context, halved)
    if len(order) == 1:
        return x_BS
    return reorder(x_BS, inverse(order), 1)
