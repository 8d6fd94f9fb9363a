"""The hidden states of a teacher, which a model learns through projections: linear maps from its
own width to the teacher's, which are trained beside it and are no part of it (Romero et al. 2015,
arXiv:1412.6550).

Shapes: B batch, S sequence, D embed, P pairs of layers, T the teacher's width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.config.hidden_pairs import HiddenPair
from jaxpar.base.layout.sharding import Axes, PyTree
from jaxpar.parallel.ops import Ops

PROJECTIONS = "distill"
"""The name of the projections among the parameters, beside those of a model's parts."""
_TINY = 1e-6
"""What is added to a mean of squares, so that a stream of zeros stays one."""


class Projections(NamedTuple):
    """The projections of a model.

    Attributes:
      pairs: the layers of the model and of its teacher.
      width: the teacher's.
    """

    pairs: tuple[HiddenPair, ...]
    width: int

    def axes(self) -> dict[str, Axes]:
        """The logical axes of each projection, by its name."""
        return {pair.name: ("embed", None) for pair in self.pairs}

    def init(self, key: Array, embed: int) -> dict[str, Float[Array, "D T"]]:
        """Make fresh projections, which keep the size of what they project.

        Args:
          key: the key of their random numbers.
          embed: the model's width.
        """
        keys = jax.random.split(key, len(self.pairs))
        shape = (embed, self.width)
        return {
            pair.name: jax.random.normal(one, shape, jnp.float32) / math.sqrt(embed)
            for pair, one in zip(self.pairs, keys, strict=True)
        }


def normed_states(streams: Sequence[Float[Array, "B S T"]]) -> Float[Array, "B S P T"]:
    """Divide each token's features by the root of their mean square, so that a pair weighs the
    same whatever the size of its stream.

    Args:
      streams: the residual streams of a teacher.

    Returns:
      What a model learns of them, in float32.
    """
    x_BSPT = jnp.stack(streams, axis=2).astype(jnp.float32)
    squares = jnp.mean(x_BSPT**2, axis=-1, keepdims=True)
    return x_BSPT * jax.lax.rsqrt(squares + _TINY)


def hidden_loss(
    projections: dict[str, PyTree],
    pairs: Sequence[HiddenPair],
    streams: Sequence[Float[Array, "B S D"]],
    wanted_BSPT: Float[Array, "B S P T"],
    labels_BS: Int[Array, "B S"],
    ops: Ops,
) -> Float[Array, ""]:
    """Compute the summed distance of a model's hidden states from its teacher's.

    A token's distance is the mean square over the teacher's features and over the pairs: 1 where
    the projections give zeros.

    Args:
      projections: the parameters, by the names of the pairs.
      pairs: the pairs of layers.
      streams: the model's residual stream of each pair, in its layout.
      wanted_BSPT: what a teacher's `normed_states` are, through which no gradient flows.
      labels_BS: a token with a label below zero does not count.
      ops: the ops of a plan.

    Returns:
      The sum over the tokens that count.
    """
    wanted_BSPT = jax.lax.stop_gradient(wanted_BSPT).astype(jnp.float32)
    distance_BS = jnp.zeros(labels_BS.shape, jnp.float32)
    for place, (pair, x_BSD) in enumerate(zip(pairs, streams, strict=True)):
        found_BST = ops.column_linear(x_BSD, projections[pair.name], (None,), None, "residual_seq")
        gap_BST = found_BST.astype(jnp.float32) - wanted_BSPT[:, :, place]
        distance_BS += jnp.mean(gap_BST**2, axis=-1)
    return jnp.sum(jnp.where(labels_BS >= 0, distance_BS, 0.0)) / len(pairs)
