"""Which tokens of a batch are text and which are padding, and how many: routers' losses are means
over the text.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

FILLER = 0
"""The token that pads a row, and the segment of the padding of a packed row."""


class TokenCounts(NamedTuple):
    """The numbers of tokens of a whole step, of which a batch may be one of many microbatches.

    Attributes:
      labels: how many labels count, float32.
      text: how many tokens are text and not padding, float32.
    """

    labels: Float[Array, ""]
    text: Float[Array, ""]

    @property
    def labels_per_token(self) -> Float[Array, ""]:
        """The factor for a sum over text in a loss that is a sum over labels, divided by `labels`:
        it makes the sum's share of the quotient a mean over text."""
        return self.labels / jnp.maximum(self.text, 1)


def text_tokens(batch: Mapping[str, Shaped[Array | np.ndarray, "B S ..."]]) -> Bool[Array, "B S"]:
    """Tell which tokens are text and which are padding.

    Padding is the end of a row in which no label counts and every token is 0, or every segment is
    0 where the batch is packed. A prompt is text, though its labels do not count.

    Args:
      batch: int arrays of whole rows in their natural order (before `in_order`): `tokens`, `labels`
        (a label below zero does not count) and, where rows are packed, `segments`, which number the
        documents of a row from 1. Without labels a token 0 may be text, so that only segments tell
        of padding.

    Returns:
      True where a token is text.
    """
    labels_BS = batch.get("labels")
    filled_BS = batch.get("segments", batch["tokens"]) == FILLER
    if labels_BS is not None:
        kept_BS = ~filled_BS | (labels_BS >= 0)
    elif "segments" in batch:
        kept_BS = ~filled_BS
    else:
        return jnp.ones(batch["tokens"].shape, bool)
    places_S = jnp.arange(kept_BS.shape[1])
    last_B1 = jnp.max(
        jnp.where(kept_BS, places_S, -1),
        axis=1,
        keepdims=True,
    )
    return places_S <= last_B1


def with_text(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Return the batch with a further array `text`, by which routers know which tokens are no
    padding. The batch has the arrays that `text_tokens` takes.
    """
    return {**batch, "text": text_tokens(batch)}


def count_tokens(batch: Mapping[str, Shaped[Array | np.ndarray, "B S ..."]]) -> TokenCounts:
    """Count the labels that count and the tokens that are text in a batch of the arrays that
    `text_tokens` takes.
    """
    labels = jnp.sum(batch["labels"] >= 0, dtype=jnp.float32)
    return TokenCounts(labels, jnp.sum(text_tokens(batch), dtype=jnp.float32))
