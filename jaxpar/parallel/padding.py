"""Says which tokens of a batch are text and which are padding, and counts them: what routers'
losses are means over.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

FILLER = 0
"""The token that rows are filled up with, and the segment that what fills a packed row has."""


class TokenCounts(NamedTuple):
    """How many tokens a whole step has, of which a batch may be one of many microbatches.

    Attributes:
      labels: the tokens whose labels count, float32.
      text: the tokens that are no padding, float32.
    """

    labels: Float[Array, ""]
    text: Float[Array, ""]

    @property
    def labels_per_token(self) -> Float[Array, ""]:
        """The factor of a sum over text where the loss, a sum over labels, is divided by `labels`:
        it makes the sum's share of the quotient a mean over text."""
        return self.labels / jnp.maximum(self.text, 1)


def text_tokens(batch: Mapping[str, Shaped[Array | np.ndarray, "B S ..."]]) -> Bool[Array, "B S"]:
    """Tell which tokens are text and which are padding.

    Padding is the end of a row in which no label counts and which is filled up: with segment 0
    where the batch is packed, and with token 0 where it is not. A prompt is text, though its labels
    do not count.

    Args:
      batch: int arrays of whole rows in their natural order (before `in_order`): `tokens`, `labels`
        (one below zero does not count) and, where rows are packed, `segments`, which number the
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
    """Return a batch that says which of its tokens are `text`, as routers need to know; it is as
    for `text_tokens`.
    """
    return {**batch, "text": text_tokens(batch)}


def count_tokens(batch: Mapping[str, Shaped[Array | np.ndarray, "B S ..."]]) -> TokenCounts:
    """Count the tokens of a batch as `text_tokens` tells them apart.

    Args:
      batch: as for `text_tokens`.

    Returns:
      Two float32 numbers: how many labels count, and how many tokens are text.
    """
    labels = jnp.sum(batch["labels"] >= 0, dtype=jnp.float32)
    return TokenCounts(labels, jnp.sum(text_tokens(batch), dtype=jnp.float32))
