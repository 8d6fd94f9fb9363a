"""A model as the rest of the library sees it: embed, block and head, as pure functions over a plain
dict of arrays.

Here it is put together of its parts, and says what it is called with. What its methods do stands in
rooms of their own: `fresh_parameters`, `forward`, `loss` and `counts`.

Shapes: B batch, S sequence, D embed, V vocab, L layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache

import jax
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree, ShardingRules, merge_trees
from jaxpar.models.counts import Declared, count_flops, count_parameters
from jaxpar.models.embed import Embed
from jaxpar.models.families import family_of
from jaxpar.models.forward import (
    Batch,
    Streams,
    require_documents,
    run_block,
    run_blocks,
    run_embed,
    run_head,
    run_layer,
    run_query_layer,
    run_to_head,
)
from jaxpar.models.fresh_parameters import init_parameters, init_projections
from jaxpar.models.head import Head
from jaxpar.models.hidden import PROJECTIONS, Projections
from jaxpar.models.lora import trained_part
from jaxpar.models.loss import layers_learned, logits_of_batch, loss_of_batch, loss_of_stream
from jaxpar.models.parts import HeadOutput, Maker, OpsMaker, Params, Parts, part_name
from jaxpar.models.query_layer import QueryLayer
from jaxpar.models.sparsity import require_sparse
from jaxpar.models.split import Split, SplitModel, split_part, split_parts
from jaxpar.models.transformer import Block
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums, LossWeights, SoftTargets
from jaxpar.parallel.domino import LayerInfo, Places
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.padding import TokenCounts

_FIRST = LayerInfo()
"""A layer of the first kind, without dropout."""


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
        ops: OpsMaker = MeshOps,
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
        parts = _split_all(config, self.parts)
        self.axes: Params = {name: copy.deepcopy(part.axes) for name, part in parts.items()}
        self.axes["blocks"] = _stacked(self.axes["blocks"])
        if projections is not None:
            self.axes[PROJECTIONS] = projections.axes()
        numbers_layers = _numbers_layers(config, blocks, parts["blocks"])
        self._split = SplitModel(config, parts, ops, numbers_layers, projections)
        if config.lora.rank and not self.trained(self.axes)["blocks"]:
            raise UserError(
                f"model.lora.rank={config.lora.rank}, and {parts['blocks'].name} has no parameter "
                "with a dim `rank`: set it to 0"
            )
        if config.sparsity.form:
            require_sparse(config, parts["blocks"].names, self.own_parts().get("blocks"))

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
        return self._split.numbers_layers

    def require_documents(self) -> None:
        """Refuse several documents in a row, as `data.pack` has them, where the blocks would mix
        them.

        Raises:
          UserError: the blocks take no `segments_BS`.
        """
        require_documents(self._split.parts["blocks"])

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
        makers = _makers(self.config, self.parts)
        return init_parameters(self.config, makers, self.projections, key, order)

    def init_projections(self, key: jax.Array) -> Params:
        """Make fresh projections.

        Args:
          key: the key of all random numbers of the model, as for `init`.

        Returns:
          What `init` has of them: nothing where the model learns no hidden states.
        """
        return init_projections(self.config, self.projections, key)

    def shapes(self, order: Sequence[int] | None = None) -> Params:
        """Describe the parameters without making them.

        Args:
          order: as for `init`.

        Returns:
          The parameters as float32 ShapeDtypeStructs.
        """
        found = _shapes(self, None if order is None else tuple(order))
        return jax.tree.map(lambda shape: shape, found)  # a copy, since the cache keeps its own

    def trained(self, tree: Params) -> Params:
        """Pick the part of the parameters that is trained: all of it, or LoRA's matrices alone.

        Args:
          tree: a tree of the parameters' form.

        Returns:
          The part, in a tree of the form of that part.
        """
        return trained_part(tree, self.axes, self.config)

    @staticmethod
    def merge(params: Params, trained: Params) -> Params:
        """Return the parameters with those that are `trained` in place of their own."""
        return merge_trees(params, trained)

    def learns_hidden(self, batch: Batch) -> bool:
        """Whether the loss of a batch has a part for a teacher's hidden states."""
        return bool(layers_learned(self._split, batch))

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
        parts = self._split.parts.items()
        names = [f"{part}.{name}" for part, one in parts for name in one.names]
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
        return run_embed(self._split, params, tokens_BS, positions_BS, plan, key, types_BS)

    def block(
        self,
        layer: Params,
        x_BSD: Float[Array, "B S D"],
        places: Places,
        plan: Plan,
        info: LayerInfo = _FIRST,
        ops: Ops | None = None,
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Run one block.

        Args:
          layer: one slice of `params["blocks"]`.
          x_BSD: the residual stream, in its layout.
          places: the places and documents of the tokens, and which are text.
          plan: says how it runs on several devices.
          info: what the layer is told of itself; the number where `numbers_layers`.
          ops: what the block calls; None = the model's ops of the plan.

        Returns:
          The stream after the block, and its router's sums over the tokens that are text; None
          where it has no router.

        Raises:
          UserError: the block returns another shape or dtype than it is given, or there are
            documents and it takes none.
        """
        blocks = self._split.parts["blocks"]
        return run_block(blocks, layer, x_BSD, places, ops or self.ops(plan), info)

    def head(self, params: Params, x_BSD: Float[Array, "B S D"], plan: Plan) -> HeadOutput:
        """Run what follows the last block, up to the scores.

        Args:
          params: the parameters; its blocks are not read.
          x_BSD: the residual stream after the last block.
          plan: says how it runs on several devices.

        Returns:
          What is scored, the vocabulary matrix that multiplies it, and its bias.
        """
        return run_head(self._split, params, x_BSD, plan)

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
        return run_to_head(self._split, params, batch, plan, key, after)

    def blocks(
        self,
        layers: Params,
        x_BSD: Float[Array, "B S D"],
        places: Places,
        plan: Plan,
        key: jax.Array | None = None,
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Run all blocks in turn.

        Args:
          layers: `params["blocks"]`, or slices of it.
          x_BSD: the residual stream, in its layout.
          places: the places and documents of the tokens, and which are text.
          plan: says how it runs on several devices.
          key: the dropout key; None = no dropout.

        Returns:
          The stream after the last block, and the means of the routers' sums over the layers; None
          where there are no routers.

        Raises:
          UserError: as for `block`.
        """
        found = run_blocks(self._split, layers, x_BSD, places, plan, key)
        return found.last, found.routed

    def query(
        self,
        params: Params,
        x_BSD: Float[Array, "B S D"],
        places: Places,
        plan: Plan,
        key: jax.Array | None = None,
        ops: Ops | None = None,
    ) -> Float[Array, "B S D"]:
        """Run the query layer, which follows the last block where `config.query_layer` is set.

        Args:
          params: the parameters, of which those of `query` are read.
          x_BSD: the residual stream after the last block, in its layout.
          places: the places and documents of the tokens.
          plan: says how it runs on several devices, and what it keeps for its backward.
          key: the dropout key of the blocks; None = no dropout.
          ops: what the layer calls; None = the model's ops of the plan.

        Returns:
          The stream that the head takes.
        """
        return run_query_layer(self._split, params, x_BSD, places, plan, key, ops)

    def layer(
        self,
        layer: Params,
        xs: tuple[Array, ...],
        places: Sequence[Places],
        plan: Plan,
        info: LayerInfo = _FIRST,
    ) -> tuple[tuple[Array, ...], RouterSums | None]:
        """Run one block on the `halves` of a batch in turn.

        Args:
          layer: one slice of `params["blocks"]`.
          xs: the residual stream of each half.
          places: the places of the tokens of each half.
          plan: says how it runs on several devices.
          info: what the layer is told of itself.

        Returns:
          The streams after the block, and the router's sums over both halves.

        Raises:
          UserError: as for `block`.
        """
        blocks = self._split.parts["blocks"]
        return run_layer(blocks, layer, xs, places, self.ops(plan), plan, info)

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
        return loss_of_batch(self._split, params, batch, plan, key, weights, counts)

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
        return loss_of_stream(self._split, params, x_BSD, labels_BS, plan, weights, soft)

    def logits(
        self,
        params: Params,
        batch: Batch,
        plan: Plan,
    ) -> Float[Array, "B S V"]:
        """Compute next-token scores of the true vocabulary.

        Args:
          params: the parameters, in the layout of the plan.
          batch: as for `loss`; it needs no labels. Routers tell padding from text by them: without
            them only what fills up packed rows is padding.
          plan: says how it runs on several devices.

        Returns:
          The float32 scores [B, S, V], in the tokens' own order, with V = `config.vocab_size`.

        Raises:
          UserError: as for `loss`.
        """
        return logits_of_batch(self._split, params, batch, plan)

    def parameter_count(self) -> int:
        """Count the parameters, without the padding of the vocabulary."""
        declared = self._declared()
        return sum(count_parameters(declared, part) for part in self._split.parts)

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
        return count_flops(self._declared(), seq_len)

    def _declared(self) -> Declared:
        """What is counted."""
        return Declared(self.config, self.axes, self.shapes(), self.projections)


def _makers(config: ModelConfig, parts: Parts) -> dict[str, Maker]:
    """What makes each part, by its name."""
    makers: dict[str, Maker] = parts._asdict()
    if config.query_layer:
        makers["query"] = QueryLayer
    return makers


def _split_all(config: ModelConfig, parts: Parts) -> dict[str, Split]:
    """Take the parts of a model apart, in the order of its forward pass."""
    found = dict(split_parts(config, parts))
    if config.query_layer:
        head = found.pop("head")
        found |= {"query": split_part(config, "query", QueryLayer), "head": head}
    return found


def _numbers_layers(config: ModelConfig, maker: Maker, blocks: Split) -> bool:
    """Whether a block is told the number of its layer; see `Model.numbers_layers`."""
    if maker is Block:
        return not family_of(config).first_norm
    return "layer" in blocks.takes


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
