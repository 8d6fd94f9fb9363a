"""The arguments of a stage, and what it looks up in them for one microbatch: tokens, places,
dropout keys.

Shapes: M microbatches, B batch, S sequence, D embed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree
from jaxpar.parallel.cross_entropy import LossWeights
from jaxpar.parallel.domino import Places, places_of_halves
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.layers import Layers
from jaxpar.parallel.pipeline.pipelined_model import Params, PipelinedModel
from jaxpar.parallel.pipeline.program import TickProgram
from jaxpar.parallel.pipeline.stage import LayerContext, read


class Task(NamedTuple):
    """The facts that all stages share: the model, how it runs, and the ticks."""

    model: PipelinedModel
    plan: Plan
    weights: LossWeights
    layers: Layers
    """How many layers each virtual stage has, and in which order they are stored."""
    program: TickProgram
    backward: bool
    """Whether gradients are asked for; if not, the program has forward ticks alone."""


class StageArrays(NamedTuple):
    """The arrays that a stage is given."""

    blocks: PyTree
    """The stacked weights of the stage's layers, [virtual x places, ...]."""
    ends: PyTree
    """The parameters of the embedding and the head."""
    rows: PyTree
    """The batch, [M, B, S]."""
    key: PyTree
    """The key of the dropout, or None."""
    order: PyTree
    """The layer at each of the stage's places, [virtual x places]; -1 = none."""
    labels_per_token: PyTree
    """The number of labels that count in the step, divided by the number of its tokens of text,
    where the model has routers."""


class MicrobatchKeys(NamedTuple):
    """The dropout keys of one microbatch, all None without dropout."""

    embed: Array | None
    """The embedding's key."""
    layers: Array | None
    """A key for each layer of the model, [layers]."""
    blocks: Array | None
    """The key from which the keys of the layers and of the query layer are made."""


class StageInputs(NamedTuple):
    """The arguments of a stage, with methods that look up what belongs to a microbatch."""

    task: Task
    arrays: StageArrays

    def row(self, i: ArrayLike) -> dict[str, Array]:
        """Return the arrays [B, S] of microbatch `i`, by name."""
        return {name: read(x, i) for name, x in self.arrays.rows.items()}

    def keys(self, i: ArrayLike) -> MicrobatchKeys:
        """Make the keys of microbatch `i`, as `Model.hidden_states` makes them."""
        if self.arrays.key is None:
            return MicrobatchKeys(None, None, None)
        embed, blocks = jax.random.split(jax.random.fold_in(self.arrays.key, i))
        layers = jax.random.split(blocks, self.task.model.config.layers)
        return MicrobatchKeys(embed, layers, blocks)

    def layer_context(self, i: ArrayLike, chunk: ArrayLike, j: ArrayLike) -> LayerContext:
        """Return the context of the layer at place `j` of a chunk for microbatch `i`."""
        row = self.row(i)
        places = places_of_halves(
            Places(row["positions"], row.get("segments"), row.get("text")), self.task.plan
        )
        layer = self.arrays.order[chunk * self.task.layers.places + j]
        keys = self.keys(i).layers
        if keys is None:
            key = None
        else:
            key = keys[jnp.maximum(layer, 0)]
        if -1 in self.task.layers.order:
            there = layer >= 0
        else:
            there = None
        number = layer if self.task.model.numbers_layers else None
        return LayerContext(places, key, there, number)

    def embed(self, ends: Params, i: ArrayLike) -> Array:
        """Compute the embedding [B, S, D] of microbatch `i` with the parameters of the ends."""
        row = self.row(i)
        types = {"types_BS": row["token_types"]} if "token_types" in row else {}
        x_BSD = self.task.model.embed(
            ends,
            row["tokens"],
            row["positions"],
            self.task.plan,
            self.keys(i).embed,
            **types,
        )
        return self.task.plan.constrain(x_BSD, STORED)

    def query(self, ends: Params, i: ArrayLike, x_BSD: Array) -> Array:
        """Run the query layer on the last block's output for microbatch `i`."""
        row = self.row(i)
        places = Places(row["positions"], row.get("segments"), row.get("text"))
        y_BSD = self.task.model.query(ends, x_BSD, places, self.task.plan, self.keys(i).blocks)
        return self.task.plan.constrain(y_BSD, STORED)

    def router_weights(self) -> RouterSums | None:
        """Return the weights of a layer's router sums in the loss, or None in a model without
        routers.

        The losses of routers are means over the layers and over the text, beside a likelihood that
        is a sum over labels (`Model.loss`).
        """
        if not self.task.model.config.experts:
            return None
        weights = self.task.weights
        share = self.arrays.labels_per_token / self.task.model.config.layers
        return RouterSums(weights.balance_loss * share, weights.router_z_loss * share)
