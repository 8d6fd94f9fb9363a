"""The draw of the next token from the scores of the vocabulary.

Shapes: B rows, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """The temperature and the filters by which the next token is drawn; they are applied in this
    order, as in Hugging Face's `generate`.

    Attributes:
      temperature: the divisor of the scores; 0 = greedy, the most likely token.
      top_k: only this many of the most likely tokens may be drawn; 0 = all.
      top_p: only the most likely tokens that together have this probability may be drawn
        (arXiv:1904.09751).
      seed: the seed of the draws. A draw depends on it, on the number of the prompt and on the
        token's place, and on nothing else.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a value that is out of range, or has no effect, with a UserError."""
        in_range = (
            self.temperature == 0 or 1e-4 <= self.temperature <= 1e4,
            self.top_k >= 0,
            0 < self.top_p <= 1,
            0 <= self.seed < 2**32,
        )
        if not all(in_range):
            want = (
                "temperature 0 or 0.0001 to 10000, top_k >= 0, 0 < top_p <= 1 and 0 <= seed < 2**32"
            )
            raise UserError(f"sampling takes {want}, found {self}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.seed):
            raise UserError(
                "top_k, top_p and seed have no effect at temperature 0, which is greedy: set a "
                "temperature"
            )


GREEDY = Sampling()


def draw(
    scores_BV: Float[Array, "B V"], sampling: Sampling, keys_B: Array, place_B: Array
) -> Int[Array, " B"]:
    """Draw a token of each row, by the row's key and the place of the token."""
    if sampling.temperature == 0:
        return jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, place_B)
    return jax.vmap(jax.random.categorical)(keys_B, filter_scores(scores_BV, sampling)).astype(
        jnp.int32
    )


def filter_scores(scores_BV: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Divide the scores by the temperature, and set the scores of tokens that may not be drawn to
    minus infinity.
    """
    scores_BV = scores_BV / sampling.temperature
    if 0 < sampling.top_k < scores_BV.shape[1]:
        least_B1 = jax.lax.top_k(scores_BV, sampling.top_k)[0][:, -1:]
        scores_BV = jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(scores_BV, axis=-1, descending=True)
        share_BV = jax.nn.softmax(sorted_BV, axis=-1)
        # what is more likely has less than this
        kept_BV = jnp.cumsum(share_BV, axis=-1) - share_BV < sampling.top_p
        least_B1 = jnp.min(
            jnp.where(kept_BV, sorted_BV, jnp.inf),
            axis=-1,
            keepdims=True,
        )
        scores_BV = jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
    return scores_BV
