"""The forward pass of a microbatch, a layer at a time, with a count of what is not finite in each
named activation.

It is the same in any layout: what is stacked over layers is taken out one by one, and the devices
of all stages run each layer together.

Shapes: B batch, S sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.layout.activation_names import NAMES
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Batch, Model, Params
from jaxpar.parallel.cross_entropy import LossSums, teacher_targets
from jaxpar.parallel.domino import LayerInfo, Places, halves, places_of_halves, whole_batch
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.padding import with_text
from jaxpar.parallel.pipeline import stored_order
from jaxpar.parallel.zigzag import in_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.guard.named_counts import Counts, count_nonfinite, with_counts
from jaxpar.train.step import loss_weights

_OUTPUT = "the output"


class _Stream(NamedTuple):
    """What the layers hand on.

    Attributes:
      xs: the residual stream of each half of the batch.
      batch: the batch in the order of the devices.
      keys: the dropout keys of the layers; None = no dropout.
    """

    xs: tuple[jax.Array, ...]
    batch: Batch
    keys: jax.Array | None


class Forward:
    """The programs of an experiment's forward pass, each of which is compiled once."""

    def __init__(self, experiment: Experiment, model: Model):
        """Take what is trained; `model` is its model, which has layers."""
        plan = experiment.plan
        self._model = model
        self._order = stored_order(plan, model.config.layers)
        self._staged = plan.size("stage") > 1
        self._plan: Plan = replace(plan, rules=replace(plan.rules, layers=(), stage=()))
        self._weights = loss_weights(experiment.config)
        self._embed = jax.jit(self._run_embed)
        self._layer = jax.jit(self._run_layer, static_argnames="kind")
        self._score = jax.jit(self._run_score)

    def first_nonfinite(self, params: Params, rows: Batch, key: jax.Array | None) -> str:
        """Run a microbatch, and say what is the first not to be finite.

        Args:
          params: all parameters, in the layout of the plan.
          rows: the microbatch, on the mesh.
          key: the key of its dropout; None = none.

        Returns:
          What to say of it; the empty string where all is finite.
        """
        ends = {name: part for name, part in params.items() if name != "blocks"}
        stream, count = self._embed(ends, dict(rows), key)
        if int(count):
            return f"the output of the embedding is not finite, in {int(count):,} entries"
        sizes = self._model.config
        for number in range(sizes.layers):
            place = number if self._order is None else self._order.index(number)
            where = jnp.int32(place), jnp.int32(number)
            kind = number % sizes.kinds
            stream, counts = self._layer(params["blocks"], stream, *where, kind=kind)
            name, count = _first_of(jax.device_get(counts))
            if count:
                what = f"{name} of layer {number}, in {count:,} entries"
                return f"the first activation that is not finite is {what}"
        sums, count = self._score(ends, stream)
        if int(count):
            return f"the input of the vocabulary's scores is not finite, in {int(count):,} entries"
        if not (np.isfinite(sums.nll) and np.isfinite(sums.loss)):
            return "all activations up to the vocabulary's scores are finite, and the loss is not"
        return ""

    def _run_embed(
        self, ends: Params, rows: Batch, key: jax.Array | None
    ) -> tuple[_Stream, jax.Array]:
        plan = self._plan
        told = with_text(rows) if self._model.config.experts else rows
        batch = in_order(told, plan, plan.context.strategy, plan.overlap.cuts_sequence)
        embed_key = None
        layer_keys = None
        if key is not None:
            embed_key, blocks_key = jax.random.split(key)
            layer_keys = jax.random.split(blocks_key, self._model.config.layers)
        types_BS = batch.get("token_types")
        tokens_BS = batch["tokens"]
        x_BSD = self._model.embed(ends, tokens_BS, batch["positions"], plan, embed_key, types_BS)
        stream = _Stream(halves(x_BSD, STORED, plan), batch, layer_keys)
        return stream, count_nonfinite(x_BSD)

    def _run_layer(
        self, blocks: Params, stream: _Stream, place: jax.Array, number: jax.Array, kind: int
    ) -> tuple[_Stream, Counts]:
        plan = self._plan
        batch = stream.batch
        given = Places(batch["positions"], batch.get("segments"), batch.get("text"))
        places = places_of_halves(given, plan)
        layer = jax.tree.map(lambda x: self._slice(x, place), blocks)
        key = None if stream.keys is None else stream.keys[number]
        told_number = number if self._model.numbers_layers else None

        def run(layer: Params, xs: tuple[jax.Array, ...], places: Any) -> tuple[jax.Array, ...]:
            info = LayerInfo(key, kind, told_number)
            after, _ = self._model.layer(layer, xs, places, plan, info)
            return after

        xs, counts = with_counts(run, layer, stream.xs, places)
        counts[_OUTPUT] = sum((count_nonfinite(x) for x in xs), start=jnp.int32(0))
        return stream._replace(xs=xs), counts

    def _slice(self, x: jax.Array, place: jax.Array) -> jax.Array:
        """A layer of what is stacked over layers. Where stages have layers of their own, each
        offers its own, so that no device gathers them all."""
        if not self._staged:
            return on_device(jax.lax.dynamic_index_in_dim(x, place, keepdims=False))
        x = on_device(x)
        here = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == place
        return jnp.sum(jnp.where(here, x, 0), 0, dtype=x.dtype)

    def _run_score(self, ends: Params, stream: _Stream) -> tuple[LossSums, jax.Array]:
        plan = self._plan
        x_BSD = whole_batch(stream.xs, STORED, plan)
        soft = teacher_targets(stream.batch, self._weights.temperature)
        labels_BS = stream.batch["labels"]
        sums = self._model.score(ends, x_BSD, labels_BS, plan, self._weights, soft)
        return sums, count_nonfinite(self._model.head(ends, x_BSD, plan).x_BSD)


def _first_of(counts: Mapping[str, Any]) -> tuple[str, int]:
    """Name which of a layer's activations is the first that is not finite, in the order in which a
    block makes them, and how many of its entries are not; 0 where all are finite."""
    for name, described in NAMES.items():
        if count := int(counts.get(name, 0)):
            return f"{name} ({described.what})", count
    return _OUTPUT, int(counts[_OUTPUT])
