"""A model whose vocabulary has grown, for a tokenizer to which tokens were added.

Shapes: V vocab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes
from jaxpar.models.model import Model
from jaxpar.models.part_protocols import Params


def grow_vocabulary(params: Params, rows: int, model: Model, plan: Plan) -> Params:
    """Give a model rows for more tokens, in its embedding and its head.

    A new row is the mean of the rows that are there, as by `resize_token_embeddings` of
    `transformers`, whose new rows differ from the mean by 3e-5 standard deviations. So a new token
    begins no likelier than the others are on average (J. Hewitt, "Initializing New Word Embeddings
    for Pretrained Language Models", 2021).

    Args:
      params: the parameters of the smaller model.
      rows: how many tokens the smaller model has, without the padding of the vocabulary.
      model: the larger model, which is the same but for its vocabulary.
      plan: the plan that says where the larger model's parameters go.

    Returns:
      The parameters of the larger model.
    """
    size = model.config.vocab_size

    def grow(x: jax.Array, whole: jax.ShapeDtypeStruct, axes: Axes) -> jax.Array:
        if "vocab" not in axes:
            return x
        dim = axes.index("vocab")
        there = jax.lax.slice_in_dim(x, 0, rows, axis=dim)
        mean = jnp.mean(there, dim, keepdims=True, dtype=jnp.float32).astype(x.dtype)
        shape = [*whole.shape]
        shape[dim] = size - rows
        padding = [(0, 0)] * x.ndim
        padding[dim] = (0, whole.shape[dim] - size)
        return jnp.pad(jnp.concatenate([there, jnp.broadcast_to(mean, shape)], dim), padding)

    shapes = {name: model.shapes()[name] for name in params}
    axes = {name: model.axes[name] for name in params}
    places = {name: plan.sharding(axes[name], shapes[name]) for name in params}
    return jax.jit(lambda params: jax.tree.map(grow, params, shapes, axes), out_shardings=places)(
        params
    )
