"""Fresh parameters of a whole model; the parameters of the blocks are stacked on a leading layers
dim.

A layer's random numbers come from a key of its own, whatever place it has in the stack, so that a
model begins alike under any plan.

Shapes: L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxpar.base.config import ModelConfig
from jaxpar.models.hidden import PROJECTIONS, Projections
from jaxpar.models.part_protocols import Maker, Params
from jaxpar.models.query_layer import query_key_of
from jaxpar.models.split import init_part

_OWN_KEY = 2**20
"""The number that is folded into the key of a model for its projections; the query layer has
another.
"""


def init_parameters(
    config: ModelConfig,
    makers: Mapping[str, Maker],
    projections: Projections | None,
    key: jax.Array,
    order: Sequence[int] | None,
) -> Params:
    """Make fresh parameters of all parts, as `Model.init` documents.

    Args:
      makers: the maker of each part, by its name; `query` where there is a query layer.
      projections: the projections through which the model learns a teacher's hidden states; None =
        it learns none.
      key: the key of all random numbers.
      order: the layer at each place of the stack, where -1 = zeros; None = their own order.
    """
    embed_key, blocks_key, head_key = jax.random.split(key, 3)
    found = {
        "embed": init_part(config, "embed", makers["embed"], embed_key),
        "blocks": _init_blocks(config, makers["blocks"], blocks_key, order),
        "head": init_part(config, "head", makers["head"], head_key),
    }
    if "query" in makers:
        found["query"] = init_part(config, "query", makers["query"], query_key_of(key))
    return found | init_projections(config, projections, key)


def _init_blocks(
    config: ModelConfig, maker: Maker, key: jax.Array, order: Sequence[int] | None
) -> Params:
    """Make the parameters of the blocks, stacked in an order."""
    layer_keys = jax.random.split(key, config.layers)
    init_stack = jax.vmap(lambda layer_key: init_part(config, "blocks", maker, layer_key))
    if order is None:
        return init_stack(layer_keys)
    places = jnp.asarray(order)
    stacked = init_stack(layer_keys[jnp.maximum(places, 0)])
    if min(order) >= 0:
        return stacked

    def without_empty_places(x_L: jax.Array) -> jax.Array:
        there = (places >= 0).reshape(-1, *[1] * (x_L.ndim - 1))
        return x_L * there

    return jax.tree.map(without_empty_places, stacked)


def init_projections(
    config: ModelConfig, projections: Projections | None, key: jax.Array
) -> Params:
    """Make fresh projections, as `Model.init_projections` documents."""
    if projections is None:
        return {}
    own_key = jax.random.fold_in(key, _OWN_KEY)
    return {PROJECTIONS: projections.init(own_key, config.embed)}
