"""A model as the rest of the library sees it: embed, block and head, as pure functions over a plain
dict of arrays.

Shapes: B batch, S sequence, D embed, V vocab, L layers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.batch_arrays import TEACHER_HIDDEN
from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, PyTree, ShardingRules, fit_rules, is_axes, merge_trees
from jaxpar.models.families import family_of
from jaxpar.models.head import Head
from jaxpar.models.hidden import PROJECTIONS, Projections, Streams, hidden_loss
from jaxpar.models.layers import over_layers
from jaxpar.models.masks import reach
from jaxpar.models.parts import (
    HeadOutput,
    Maker,
    Params,
    Parts,
    Split,
    init_part,
    part_name,
    split_part,
    split_parts,
)
from jaxpar.models.query_layer import QueryLayer
from jaxpar.models.sparsity import require_sparse
from jaxpar.models.transformer import Block, Embed
from jaxpar.parallel.cross_entropy import (
    LIKELIHOOD,
    LossSums,
    LossWeights,
    SoftTargets,
    teacher_targets,
)
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.padding import TokenCounts, count_tokens, with_text
from jaxpar.parallel.remat import named, remat
from jaxpar.parallel.sequence_halves import ops_of_parts
from jaxpar.parallel.token_order import (
    Places,
    halves,
    in_natural_order,
    in_order,
    places_of_halves,
    whole_batch,
)

_QUERY = 2**31 - 1
"""What the key of the query layer is made with, which no layer's number is."""
Batch = Mapping[str, jax.Array]
OpsMaker = Callable[[Plan], Any]
"""Makes the ops that blocks call from a plan: `Ops`, or a class with the same methods."""
_OWN_KEY = 2**20
"""Folded into the key of a model for its projections: no number of a part or a layer."""


class Model:
    """A model of a given family and size, or of parts of one's own; it holds no arrays.

    Two models are equal if they have the same config, parts and ops, so that a model may be a
    static argument and the key of a cache.

    Attributes:
      config: its family and sizes.
      parts: what makes its embedding, its blocks and its head.
      ops: makes the ops that its parts call from a plan.
      projections: what it learns a teacher's hidden states through; None = it learns none.
      axes: the logical axes of every parameter, in a dict of the same form as the parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        embed: Maker = Embed,
        blocks: Maker = Block,
        head: Maker = Head,
        ops: OpsMaker = Ops,
        projections: Projections | None = None,
    ):
        """Take the parts, each a class of `nnx.Module` or a callable `(config, rngs)` that returns
        one; `jaxpar.models.parts` says what they are called with.

        Raises:
          UserError: a part is no such part, or the config asks for what the parts have not.
        """
        self.config = config
        self.parts = Parts(embed, blocks, head)
        self.ops = ops
        self.projections = projections
        try:
            hash((config, self.parts, ops))
        except TypeError as error:
            raise UserError(f"a part of a model is the key of caches: {error}") from error
        self._split = _split_model(config, self.parts)
        self.axes: Params = {name: copy.deepcopy(split.axes) for name, split in self._split.items()}
        self.axes["blocks"] = _stacked(self.axes["blocks"])
        if projections is not None:
            self.axes[PROJECTIONS] = projections.axes()
        if config.lora.rank and not self.trained(self.axes)["blocks"]:
            raise UserError(
                f"model.lora.rank={config.lora.rank}, and {self._split['blocks'].name} has no "
                "parameter with a dim `rank`: set it to 0"
            )
        if config.sparsity.form:
            require_sparse(config, self._split["blocks"].names, self.own_parts().get("blocks"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[ModelConfig, Parts, OpsMaker, Projections | None]:
        return self.config, self.parts, self.ops, self.projections

    has_blocks = True
    """Whether it is made of an embedding, blocks and a head."""

    def fit_rules(
        self, rules: ShardingRules, sizes: Mapping[str, int]
    ) -> tuple[ShardingRules, list[str]]:
        """Fit rules to more devices than heads.

        Args:
          rules: the rules.
          sizes: the number of devices along each mesh axis.

        Returns:
          The rules that fit, and a line for the log about each change.
        """
        return fit_rules(rules, self.config.heads, self.config.kv_head_count, sizes)

    def with_config(self, config: ModelConfig, ops: OpsMaker | None = None) -> Model:
        """Make the same model with other sizes, and perhaps other ops.

        Args:
          config: the sizes.
          ops: makes the ops of a plan; None = the model's own.

        Returns:
          The model; itself where both are its own.

        Raises:
          UserError: the config asks for what the parts have not.
        """
        ops = ops or self.ops
        if (config, ops) == (self.config, self.ops):
            return self
        return Model(config, *self.parts, ops, self.projections)

    def with_projections(self, projections: Projections | None) -> Model:
        """Make the same model, with other projections beside its parameters.

        Args:
          projections: what it learns a teacher's hidden states through; None = it learns none.

        Returns:
          The model; itself where these are its own.
        """
        if projections == self.projections:
            return self
        return Model(self.config, *self.parts, self.ops, projections)

    @property
    def numbers_layers(self) -> bool:
        """Whether a block is told the number of its layer: one of ours is where the family's first
        layer differs, one of anyone else's if it takes `layer`.
        """
        if self.parts.blocks is Block:
            return not family_of(self.config).first_norm
        return "layer" in self._split["blocks"].takes

    def require_documents(self) -> None:
        """Refuse several documents in a row, as `data.pack` has them, where the blocks would mix
        them.

        Raises:
          UserError: the blocks take no `segments_BS`.
        """
        blocks = self._split["blocks"]
        if "segments_BS" not in blocks.takes:
            raise UserError(
                f"packed documents, and {blocks.name} takes no `segments_BS`: set data.pack=false"
            )

    def init(
        self,
        key: jax.Array,
        order: Sequence[int] | None = None,
    ) -> Params:
        """Make fresh float32 parameters, blocks stacked on a leading layers dim; the same on any
        mesh (to an ulp).

        Args:
          key: the key of all random numbers.
          order: the layer at each place of that dim, where -1 = zeros; None = layers in their own
            order.

        Returns:
          The parameters, in the tree of `shapes(order)`.
        """
        embed_key, blocks_key, head_key = jax.random.split(key, 3)
        layer_keys = jax.random.split(blocks_key, self.config.layers)
        blocks = jax.vmap(lambda layer_key: self._init_part("blocks", layer_key))
        stacked = blocks(
            layer_keys if order is None else layer_keys[jnp.maximum(jnp.asarray(order), 0)]
        )
        if order is not None and min(order) < 0:
            there = jnp.asarray(order) >= 0
            stacked = jax.tree.map(
                lambda x: (
                    x
                    * there.reshape(
                        -1,
                        *[1] * (x.ndim - 1),
                    )
                ),
                stacked,
            )
        part = self._init_part
        made = {
            "embed": part("embed", embed_key),
            "blocks": stacked,
            "head": part("head", head_key),
        }
        if self.config.query_layer:
            made["query"] = init_part(self.config, "query", QueryLayer, query_key_of(key))
        return made | self.init_projections(key)

    def init_projections(self, key: jax.Array) -> Params:
        """Make fresh projections.

        Args:
          key: the key of all random numbers of the model, as for `init`.

        Returns:
          What `init` has of them: nothing where the model learns no hidden states.
        """
        if self.projections is None:
            return {}
        own_key = jax.random.fold_in(key, _OWN_KEY)
        return {PROJECTIONS: self.projections.init(own_key, self.config.embed)}

    def _init_part(self, name: str, key: jax.Array) -> Params:
        return init_part(self.config, name, getattr(self.parts, name), key)

    def shapes(self, order: Sequence[int] | None = None) -> Params:
        """Describe the parameters without making them.

        Args:
          order: as for `init`.

        Returns:
          The parameters as float32 ShapeDtypeStructs.
        """
        return jax.tree.map(
            lambda shape: shape, _shapes(self, None if order is None else tuple(order))
        )

    def trained(self, tree: Params) -> Params:
        """Pick the part of the parameters that is trained: all of it, or LoRA's matrices alone.

        Args:
          tree: a tree of the parameters' form.

        Returns:
          The part, in a tree of the form of that part.
        """
        if not self.config.lora.rank:
            return tree
        return {"blocks": _with_rank(tree["blocks"], self.axes["blocks"])}

    @staticmethod
    def merge(params: Params, trained: Params) -> Params:
        """Return the parameters with those that are `trained` in place of their own."""
        return merge_trees(params, trained)

    def own_parts(self) -> dict[str, str]:
        """Return the names of the parts that are not the library's, by what they are."""
        library = Parts(Embed, Block, Head)
        return {
            part: part_name(maker)
            for part, maker in self.parts._asdict().items()
            if maker != getattr(library, part)
        }

    def parameter_names(self) -> list[str]:
        """Return the names of all parameters in the order in which the parts declare them, which is
        that of the forward pass here (but LoRA's come last in a block)."""
        names = [f"{part}.{name}" for part, one in self._split.items() for name in one.names]
        return names + [f"{PROJECTIONS}.{name}" for name in self.axes.get(PROJECTIONS, ())]

    def embed(
        self,
        params: Params,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
        plan: Plan,
        key: jax.Array | None = None,
        types_BS: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Turn tokens into the residual stream.

        Args:
          params: the parameters, of which those of `embed` are read.
          tokens_BS: the ids of the tokens.
          positions_BS: their places in their documents.
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.
          types_BS: the types of the tokens; None = they have none, or all are of type 0.

        Returns:
          The residual stream, in its layout and the compute dtype.

        Raises:
          UserError: types are given, and the embedding takes none.
        """
        split = self._split["embed"]
        if types_BS is not None and "types_BS" not in split.takes:
            raise UserError(
                f"the batch has token_types, and {split.name} takes no `types_BS`: leave them out"
            )
        with jax.named_scope("embed"):
            return split(
                params["embed"],
                tokens_BS,
                positions_BS=positions_BS,
                ops=self.ops(plan),
                key=key,
                types_BS=types_BS,
            )

    def block(
        self,
        layer: Params,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        plan: Plan,
        key: jax.Array | None = None,
        kind: int = 0,
        text_BS: Bool[Array, "B S"] | None = None,
        ops: Any = None,
        number: Int[Array, ""] | int | None = None,
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Run one block.

        Args:
          layer: one slice of `params["blocks"]`.
          x_BSD: the residual stream, in its layout.
          positions_BS: the places of the tokens in their documents.
          segments_BS: the documents of the tokens; None = each row is one.
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.
          kind: the number of the layer modulo `config.kinds`.
          text_BS: which tokens are text; None = all are.
          ops: what the block calls; None = the model's ops of the plan.
          number: the number of the layer, where `numbers_layers`.

        Returns:
          The stream after the block, and its router's sums over the tokens that are text; None
          where it has no router.

        Raises:
          UserError: the block returns another shape or dtype than it is given, or there are
            documents and it takes none.
        """
        split = self._split["blocks"]
        if segments_BS is not None:
            self.require_documents()
        with jax.named_scope("block"):
            # Here and not in the block, so that every block's input can be offloaded.
            x_BSD = named(x_BSD, "block_input")
            found = split(
                layer,
                x_BSD,
                positions_BS=positions_BS,
                segments_BS=segments_BS,
                ops=ops or self.ops(plan),
                key=key,
                kind=kind,
                text_BS=text_BS,
                layer=number,
            )
            y_BSD, routed = found if isinstance(found, tuple) else (found, None)
        if not hasattr(y_BSD, "dtype"):
            raise UserError(
                f"{split.name} made {short(y_BSD)} of a stream: a block returns the array that the "
                "next one is given"
            )
        if (y_BSD.shape, y_BSD.dtype) != (x_BSD.shape, x_BSD.dtype):
            raise UserError(
                f"{split.name} made {y_BSD.dtype}{list(y_BSD.shape)} of "
                f"{x_BSD.dtype}{list(x_BSD.shape)}: a block returns the shape and dtype that it is "
                "given (y.astype(x.dtype))"
            )
        return y_BSD, routed

    def head(self, params: Params, x_BSD: Float[Array, "B S D"], plan: Plan) -> HeadOutput:
        """Run what follows the last block, up to the scores.

        Args:
          params: the parameters; its blocks are not read.
          x_BSD: the residual stream after the last block.
          plan: says how it runs on several devices.

        Returns:
          What is scored, the vocabulary matrix that multiplies it, and its bias.
        """
        with jax.named_scope("head"):
            found = self._split["head"](
                params["head"],
                x_BSD,
                embedding_VD=params["embed"].get("tokens"),
                ops=self.ops(plan),
            )
        return HeadOutput(*found)

    def hidden_states(
        self, params: Params, batch: Batch, plan: Plan, key: jax.Array | None = None
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Run the model up to the head.

        Args:
          params: the parameters.
          batch: as for `loss`, but `in_order`; it may have `text` (see `Places`).
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.

        Returns:
          The residual stream after the last block and, for a model with routers, their sums as
          means over the layers.

        Raises:
          UserError: as for `block`.
        """
        found = self.streams(params, batch, plan, key)
        return found.last, found.routed

    def streams(
        self,
        params: Params,
        batch: Batch,
        plan: Plan,
        key: jax.Array | None = None,
        after: tuple[int, ...] = (),
    ) -> Streams:
        """Run the model up to the head, and keep the residual stream after some of its layers.

        Args:
          params: the parameters.
          batch: as for `hidden_states`.
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.
          after: after how many layers a stream is kept, each at least 1.

        Returns:
          The streams.

        Raises:
          UserError: as for `block`.
        """
        tokens_BS = batch["tokens"]
        positions_BS = batch["positions"]
        segments_BS = batch.get("segments")
        embed_key, blocks_key = (None, None) if key is None else jax.random.split(key)
        types_BS = batch.get("token_types")
        x_BSD = self.embed(params, tokens_BS, positions_BS, plan, embed_key, types_BS)
        places = Places(positions_BS, segments_BS, batch.get("text"))
        found = self._run_blocks(params["blocks"], x_BSD, places, plan, blocks_key, after)
        if not self.config.query_layer:
            return found
        return found._replace(last=self.query(params, found.last, places, plan, blocks_key))

    def blocks(
        self,
        layers: Params,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        plan: Plan,
        key: jax.Array | None = None,
        text_BS: Bool[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Run all blocks in turn.

        Args:
          layers: `params["blocks"]`, or slices of it.
          x_BSD: the residual stream, in its layout.
          positions_BS: the places of the tokens in their documents.
          segments_BS: the documents of the tokens; None = each row is one.
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.
          text_BS: which tokens are text; None = all are.

        Returns:
          The stream after the last block, and the means of the routers' sums over the layers; None
          where there are no routers.

        Raises:
          UserError: as for `block`.
        """
        places = Places(positions_BS, segments_BS, text_BS)
        found = self._run_blocks(layers, x_BSD, places, plan, key)
        return found.last, found.routed

    def _run_blocks(
        self,
        layers: Params,
        x_BSD: Float[Array, "B S D"],
        places: Places,
        plan: Plan,
        key: jax.Array | None,
        after: tuple[int, ...] = (),
    ) -> Streams:
        """Run all blocks in turn; see `blocks` and `streams`."""
        count = len(jax.tree.leaves(layers)[0])
        if key is None:
            layer_keys = None
        else:
            layer_keys = jax.random.split(key, count)
        between = sorted({number for number in after if number < count})
        if self.numbers_layers or between:
            numbers = jnp.arange(count)
        else:
            numbers = None
        halved = places_of_halves(places, plan)

        def body(carry, layer, kind):
            xs, kept = carry
            layer_params, layer_key, number = layer
            here = jax.tree.map(on_device, layer_params)
            told = number if self.numbers_layers else None
            xs, routed = self.layer(here, xs, halved, plan, layer_key, kind, told)
            kept = [
                jax.tree.map(partial(jnp.where, number + 1 == one), xs, before)
                for one, before in zip(between, kept, strict=True)
            ]
            return (xs, kept), routed

        first = halves(x_BSD, STORED, plan)
        # What is kept has its place from the first layer on, and every pass may fill it.
        (xs, kept), routed = over_layers(
            self.config,
            body,
            (first, [first] * len(between)),
            (layers, layer_keys, numbers),
            plan,
        )
        last = whole_batch(xs, STORED, plan)
        by_number = {
            one: whole_batch(parts, STORED, plan) for one, parts in zip(between, kept, strict=True)
        }
        streams = tuple(by_number.get(one, last) for one in after)
        return Streams(last, jax.tree.map(jnp.mean, routed), streams)

    def query(
        self,
        params: Params,
        x_BSD: Float[Array, "B S D"],
        places: Places,
        plan: Plan,
        key: jax.Array | None = None,
    ) -> Float[Array, "B S D"]:
        """Run the query layer, which follows the last block where `config.query_layer` is set.

        Args:
          params: the parameters, of which those of `query` are read.
          x_BSD: the residual stream after the last block, in its layout.
          places: the places and documents of the tokens.
          plan: says how it runs on several devices, and what it keeps for its backward.
          key: the dropout key of the blocks; None = no dropout.

        Returns:
          The stream that the head takes.
        """
        if key is not None:
            key = query_key_of(key)
        part_places = places_of_halves(places, plan)

        def run(layer: Params, xs: tuple[Array, ...]) -> tuple[Array, ...]:
            part_ops = ops_of_parts(self.ops(plan), plan)
            return tuple(
                self._query_part(layer, x_BSD, place, ops, key)
                for x_BSD, place, ops in zip(xs, part_places, part_ops, strict=True)
            )

        xs = halves(x_BSD, STORED, plan)
        ys = remat(run, plan, False)(params["query"], xs)
        return whole_batch(ys, STORED, plan)

    def _query_part(
        self, layer: Params, x_BSD: Array, place: Places, ops: Any, key: jax.Array | None
    ) -> Array:
        """Run the query layer on one of the `halves` of a batch."""
        with jax.named_scope("query_layer"):
            return self._split["query"](
                layer,
                named(x_BSD, "block_input"),
                positions_BS=place.positions,
                segments_BS=place.segments,
                ops=ops,
                key=key,
                kind=self._query_kind,
            )

    @property
    def _query_kind(self) -> int:
        """The kind of the query layer: that of a layer after the last."""
        return self.config.layers % self.config.kinds

    def layer(
        self,
        layer: Params,
        xs: tuple[Array, ...],
        places: Sequence[Places],
        plan: Plan,
        key: jax.Array | None,
        kind: int = 0,
        number: Int[Array, ""] | int | None = None,
    ) -> tuple[tuple[Array, ...], RouterSums | None]:
        """Run one block on the `halves` of a batch in turn.

        Args:
          layer: one slice of `params["blocks"]`.
          xs: the residual stream of each half.
          places: the places of the tokens of each half.
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.
          kind: as for `block`.
          number: as for `block`.

        Returns:
          The streams after the block, and the router's sums over both halves.

        Raises:
          UserError: as for `block`.
        """
        parts = [
            self.block(
                layer,
                x_BSD,
                place.positions,
                place.segments,
                plan,
                key,
                kind,
                place.text,
                ops,
                number,
            )
            for x_BSD, place, ops in zip(
                xs, places, ops_of_parts(self.ops(plan), plan), strict=True
            )
        ]
        return tuple(x_BSD for x_BSD, _ in parts), jax.tree.map(
            lambda *sums: sum(sums), *(sums for _, sums in parts)
        )

    def loss(
        self,
        params: Params,
        batch: Batch,
        plan: Plan,
        key: jax.Array | None = None,
        weights: LossWeights = LIKELIHOOD,
        counts: TokenCounts | None = None,
    ) -> LossSums:
        """Compute the summed next-token loss of a batch.

        The losses of routers are means over the tokens that are text (`jaxpar.parallel.padding`),
        of which the sum has one for each label that counts: divided by those, it is the mean
        likelihood plus the weighted means.

        Args:
          params: the parameters, in the layout of the plan.
          batch: int32 arrays [B, S]: `tokens`, `labels` (one below zero does not count), and for
            packed documents `positions` and `segments`; `token_types`, where the model has any; and
            of a teacher its most likely entries (`jaxpar.base.batch_arrays`), which count by
            `weights.alpha`.
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.
          weights: the weights of the terms that are added to the likelihood.
          counts: the tokens of the whole step, of which the batch is a microbatch; None = it is all
            of the step.

        Returns:
          The sums over the batch.

        Raises:
          UserError: the sequence or the arrays do not fit the plan, or as for `block`.
        """
        if self.config.experts:
            told = with_text(batch)
        else:
            told = batch
        ordered = in_order(told, plan, plan.context.strategy, plan.overlap.cuts_sequence)
        after = self._layers_learned(ordered)
        x_BSD, routed, streams = self.streams(params, ordered, plan, key, after)
        soft = teacher_targets(ordered, weights.temperature)
        sums = self.score(params, x_BSD, ordered["labels"], plan, weights, soft)
        if after:
            far = self._distance(params, streams, ordered, plan)
            sums = sums._replace(loss=sums.loss + weights.hidden * far)
        if routed is None:
            return sums
        if counts is None:
            counts = count_tokens(batch)
        means = weights.balance_loss * routed.balance + weights.router_z_loss * routed.z
        loss = sums.loss + counts.labels_per_token * means
        return sums._replace(loss=loss, routed=jax.lax.stop_gradient(routed))

    def _layers_learned(self, batch: Batch) -> tuple[int, ...]:
        """After how many layers the streams are that are held against a teacher's."""
        if self.projections is None or TEACHER_HIDDEN not in batch:
            return ()
        return tuple(pair.after(self.config.layers) for pair in self.projections.pairs)

    def _distance(
        self, params: Params, streams: tuple[Array, ...], batch: Batch, plan: Plan
    ) -> Float[Array, ""]:
        """The summed distance of the streams from a teacher's, in a batch that has them."""
        assert self.projections is not None
        with jax.named_scope("distill"):
            return hidden_loss(
                params[PROJECTIONS],
                self.projections.pairs,
                streams,
                batch[TEACHER_HIDDEN],
                batch["labels"],
                self.ops(plan),
            )

    def score(
        self,
        params: Params,
        x_BSD: Float[Array, "B S D"],
        labels_BS: Int[Array, "B S"],
        plan: Plan,
        weights: LossWeights,
        soft: SoftTargets | None = None,
    ) -> LossSums:
        """Compute the summed loss of the last block's output, without the routers' part.

        Args:
          params: the parameters; its blocks are not read.
          x_BSD: the residual stream after the last block.
          labels_BS: for each token the one that follows; one below zero does not count.
          plan: says how it runs on several devices.
          weights: the weights of the terms that are added to the likelihood.
          soft: a teacher's weighted entries of the vocabulary; None = there is no teacher.

        Returns:
          The sums over the labels that count.
        """
        head = self.head(params, x_BSD, plan)
        sizes = self.config
        with jax.named_scope("loss"):
            return self.ops(plan).linear_cross_entropy(
                head.x_BSD,
                head.table_VD,
                labels_BS,
                sizes.vocab_size,
                weights.z_loss,
                sizes.logit_softcap,
                label_smoothing=weights.label_smoothing,
                **head.biases,
                soft=soft,
                alpha=weights.alpha,
                temperature=weights.temperature,
            )

    def logits(
        self,
        params: Params,
        batch: Batch,
        plan: Plan,
    ) -> Float[Array, "B S V"]:
        """Compute next-token scores of the true vocabulary.

        Args:
          params: the parameters, in the layout of the plan.
          batch: as for `loss`; it needs no labels.
          plan: says how it runs on several devices.

        Returns:
          The float32 scores [B, S, V], in the tokens' own order, with V = `config.vocab_size`.

        Raises:
          UserError: as for `loss`.
        """
        order = plan.context.strategy, plan.overlap.cuts_sequence
        x_BSD, _ = self.hidden_states(params, in_order(batch, plan, *order), plan)
        head = self.head(params, x_BSD, plan)
        sizes = self.config
        scores_BSV = self.ops(plan).logits(
            head.x_BSD, head.table_VD, sizes.vocab_size, sizes.logit_softcap, **head.biases
        )
        return in_natural_order(scores_BSV[..., : sizes.vocab_size], plan, *order)

    def parameter_count(self) -> int:
        """Count the parameters, without the padding of the vocabulary."""
        return sum(self._count(name) for name in self._split)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the model FLOPs of one training token, forward and backward, without recompute: the
        numerator of MFU.

        They are 6 per parameter that multiplies plus 12 L H h S for attention, as in PaLM
        (arXiv:2204.02311, appendix B). Tables that are only looked up do not multiply, and of the
        experts only those that a token is sent to do. Causal attention is counted whole, so that
        figures can be compared; of a sparser mask only its reach is counted. A frozen parameter
        beside LoRA counts 4 and not 6, since its gradient is not made. An entry of a sparse matrix
        that does not multiply counts 2 and not 6, since its gradient is made all the same, and 0
        where a fixed pattern leaves it out. All parameters of a block and a head are taken to
        multiply, and each block to attend as the config says, also where they are of one's own.

        Args:
          seq_len: the length of a sequence, in tokens.

        Returns:
          FLOPs for one token.
        """
        config = self.config
        multiplying = self._count("blocks") + self._count("head") - self._idle_experts()
        tables = [axes for axes, _ in self._leaves("head") if "vocab" in axes and len(axes) > 1]
        if not tables:  # the head is tied
            multiplying += config.vocab_size * config.embed
        multiplying -= self._left_out()
        if config.query_layer:
            looked_up = config.max_seq_len * config.embed
            multiplying += self._count("query") - looked_up
        if config.lora.rank:
            pairs = jax.tree.leaves(self.trained(self.shapes()))
            trained = sum(math.prod(x.shape) for x in pairs)
            multiplying = (4 * multiplying + 2 * trained) / 6
        if self.projections is not None:
            multiplying += len(self.projections.pairs) * config.embed * self.projections.width
        words = [config.masks[i % config.kinds] for i in range(config.layers + config.query_layer)]
        keys = sum(reach(word, seq_len) for word in words)
        return 6.0 * multiplying + 12.0 * config.heads * config.head_size * keys

    def _leaves(self, part: str) -> list[tuple[Axes, tuple[int, ...]]]:
        """The logical axes and the shape of every parameter of a part."""
        axes = jax.tree.leaves(self.axes[part], is_leaf=is_axes)
        shapes = jax.tree.leaves(self.shapes()[part])
        return [(names, x.shape) for names, x in zip(axes, shapes, strict=True)]

    def _count(self, part: str) -> int:
        """Count the parameters of a part, without the padding of the vocabulary."""
        vocab = self.config.vocab_size
        return sum(
            math.prod(shape) // shape[axes.index("vocab")] * vocab
            if "vocab" in axes
            else math.prod(shape)
            for axes, shape in self._leaves(part)
        )

    def _left_out(self) -> float:
        """Count the entries of sparse matrices that do not multiply, by the share of their FLOPs
        that this saves: 4 of 6 where they have a gradient.
        """
        config = self.config
        sparsity = config.sparsity
        axes = self.axes["blocks"]
        shapes = self.shapes()["blocks"]
        entries = 0.0
        for name in sparsity.names(tuple(axes)):
            size = math.prod(shapes[name].shape)
            if "experts" in axes[name]:
                size *= config.experts_per_token / config.experts
            entries += size
        saved = 4 / 6 if sparsity.trains_all else 1.0
        return entries * (1 - sparsity.density) * saved

    def _idle_experts(self) -> int:
        """Count the parameters of the experts that a token is not sent to."""
        config = self.config
        of_experts = sum(
            math.prod(shape) for axes, shape in self._leaves("blocks") if "experts" in axes
        )
        return of_experts * (config.experts - config.experts_per_token) // max(config.experts, 1)


def query_key_of(key: jax.Array) -> jax.Array:
    """Return the key of the query layer, given that of a model's parameters, or of the dropout of
    its blocks.
    """
    return jax.random.fold_in(key, _QUERY)


def _split_model(config: ModelConfig, parts: Parts) -> dict[str, Split]:
    """Take the parts of a model apart, in the order of its forward pass."""
    found = dict(split_parts(config, parts))
    if config.query_layer:
        head = found.pop("head")
        found |= {"query": split_part(config, "query", QueryLayer), "head": head}
    return found


# Cached, because a budget asks for the same model some hundred times.
@lru_cache(maxsize=64)
def _shapes(model: Model, order: tuple[int, ...] | None) -> Params:
    return jax.eval_shape(
        lambda key: model.init(key, order),
        jax.random.key(0),
    )


def _stacked(axes: PyTree) -> PyTree:
    """The logical axes of a layer's parameters, stacked over layers."""
    if isinstance(axes, dict):
        return {name: _stacked(one) for name, one in axes.items()}
    return ("layers", *axes)


def _with_rank(tree: PyTree, axes: PyTree) -> PyTree:
    """The part of a dict of dicts whose logical axes have a `rank`."""
    if not isinstance(axes, dict):
        return tree if "rank" in axes else {}
    found = {name: _with_rank(tree[name], axes[name]) for name in axes}
    return {name: part for name, part in found.items() if not (isinstance(part, dict) and not part)}
