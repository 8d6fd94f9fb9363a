"""Halves of a batch, on which a block runs in turn, so that one computes while the other
communicates (`overlap.domino`).

They are halves of a device's sequences, or of each sequence where a device has a single one. The
tokens of such a batch are `in_order` (`token_order`), and `sequence_halves` has the ops of halves
of sequences.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.zigzag import TOKENS


class Places(NamedTuple):
    """What a block is told of the tokens of a batch, or of one of its `halves`.

    Attributes:
      positions: int [B, S], where a token stands in its document.
      segments: int [B, S], the number of its document; None = one in each row.
      text: bool [B, S], false for padding, which routers leave out of their sums; None = all are
        text.
    """

    positions: Int[Array, "B S"]
    segments: Int[Array, "B S"] | None = None
    text: Bool[Array, "B S"] | None = None


class LayerInfo(NamedTuple):
    """What a layer is told of itself.

    Attributes:
      key: the key of its dropout; None = no dropout.
      kind: its number modulo `config.kinds`, which says which of the masks is its own.
      number: its number, which is not known while the program is traced; None = it is not told.
    """

    key: Array | None = None
    kind: int = 0
    number: Int[Array, ""] | int | None = None


def places_of_halves(places: Places, plan: Plan) -> list[Places]:
    """Return the places of the `halves` of a batch that is `in_order`."""
    parts = (halves(x_BS, TOKENS, plan) for x_BS in places)
    return [Places(*half) for half in zip(*parts, strict=True)]


def halves(
    x: Array | None,
    axes: Axes,
    plan: Plan,
) -> tuple[Any, ...]:
    """Cut an array into what a block runs on in turn: under Domino two halves of each device's
    sequences, or of each sequence, if they are `in_order`.

    Args:
      x: an array whose first dims are the batch and the sequence, or None.
      axes: its logical axes.
      plan: says whether Domino is on, and what it cuts.

    Returns:
      The two halves, or the array alone; for None as many times None.

    Raises:
      UserError: `overlap.domino` is still `auto`.
    """
    if x is None or plan.overlap.parts == 1:
        return (x,) * plan.overlap.parts
    if plan.overlap.cuts_sequence:
        pieces = _pieces_of_sequence(axes, plan)

        def cut(x: Array) -> tuple[Array, ...]:
            return _halves_of_sequence(x, pieces)
    else:

        def cut(x: Array) -> tuple[Array, ...]:
            return tuple(jnp.split(x, 2))

    return manual(cut, plan, (axes,), (axes, axes))(x)


def _pieces_of_sequence(axes: Axes, plan: Plan) -> int:
    """How many devices' pieces of the residual stream's sequence an array of these axes has."""
    return plan.size("residual_seq") // plan.size(axes[1])


def _halves_of_sequence(x: Array, pieces: int) -> tuple[Array, Array]:
    """The first halves of all pieces of dim 1, and the second halves."""
    B, S, *rest = x.shape
    chunks = x.reshape(B, pieces, 2, S // (2 * pieces), *rest)
    first = chunks[:, :, 0].reshape(B, S // 2, *rest)
    second = chunks[:, :, 1].reshape(B, S // 2, *rest)
    return first, second


def whole_batch(parts: tuple[Array, ...], axes: Axes, plan: Plan) -> Array:
    """Undo `halves`.

    Args:
      parts: what it returned.
      axes: the logical axes of the array.
      plan: the plan that it was given.

    Returns:
      The whole array.
    """
    if len(parts) == 1:
        return parts[0]
    if plan.overlap.cuts_sequence:
        pieces = _pieces_of_sequence(axes, plan)

        def join(*parts: Array) -> Array:
            return _of_halves_of_sequence(parts, pieces)
    else:

        def join(*parts: Array) -> Array:
            return jnp.concatenate(parts)

    return manual(join, plan, (axes,) * len(parts), axes)(*parts)


def _of_halves_of_sequence(parts: Sequence[Array], pieces: int) -> Array:
    """Undo `_halves_of_sequence`."""
    B, half, *rest = parts[0].shape
    chunks = [part.reshape(B, pieces, half // pieces, *rest) for part in parts]
    return jnp.stack(chunks, axis=2).reshape(B, 2 * half, *rest)
