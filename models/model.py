"""A model as the rest of the library sees it: embed, block and head, as pure functions over a plain
dict of arrays.

The modules are split once into a graph (static) and parameters; jit, scan and shard_map see only
the parameters.

Shapes: B batch, S sequence, D embed, V vocab, L layers, r rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import PyTree
from jaxpar.models.masks import reach
from jaxpar.models.transformer import Block, Embed, Head, lora_scale
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums, LossWeights
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.padding import TokenCounts, count_tokens, with_text
from jaxpar.parallel.remat import remat
from jaxpar.parallel.token_order import (
    Places,
    halves,
    in_natural_order,
    in_order,
    places_of_halves,
    whole_batch,
)

PARTS: dict[str, Callable[[ModelConfig, nnx.Rngs], nnx.Module]] = {
    "embed": Embed,
    "blocks": Block,
    "head": Head,
}
"""The parts of a model, by their names among its parameters."""

Params: TypeAlias = dict[str, PyTree]
Batch = Mapping[str, jax.Array]


class Model:
    """A model of a given family and size; it holds no arrays.

    Attributes:
      config: its family and sizes.
      ops: makes the ops that its blocks call from a plan: `jaxpar.parallel.Ops`, or a class with
        the same methods.
      axes: the logical axes of every parameter, in a dict of the same form as the parameters.
    """

    def __init__(self, config: ModelConfig, ops: Callable[[Plan], Ops] = Ops):
        self.config = config
        self.ops = ops
        self._graphs, axes = _split(config)
        self.axes = copy.deepcopy(axes)

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
        return {
            "embed": part("embed", embed_key),
            "blocks": stacked,
            "head": part("head", head_key),
        }

    def _init_part(self, name: str, key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(PARTS[name](self.config, nnx.Rngs(key))))

    def shapes(self, order: Sequence[int] | None = None) -> Params:
        """Return the parameters as ShapeDtypeStructs; `order` is as for `init`."""
        return jax.tree.map(
            lambda shape: shape, _shapes(self.config, None if order is None else tuple(order))
        )

    def trained(self, tree: Params) -> Params:
        """Return the part of a tree of the parameters' form that is trained: all of it, or LoRA's
        matrices alone.
        """
        if not self.config.lora.rank:
            return tree
        axes = self.axes["blocks"]
        return {
            "blocks": {name: leaf for name, leaf in tree["blocks"].items() if "rank" in axes[name]}
        }

    @staticmethod
    def merge(params: Params, trained: Params) -> Params:
        """Return the parameters with those that are `trained` in place of their own."""
        return {name: part | trained.get(name, {}) for name, part in params.items()}

    def embed(
        self,
        params: Params,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
        plan: Plan,
        key: jax.Array | None = None,
    ) -> Float[Array, "B S D"]:
        """Turn tokens into the residual stream."""
        with jax.named_scope("embed"):
            return nnx.merge(self._graphs["embed"], params["embed"])(
                tokens_BS, positions_BS, self.ops(plan), key
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
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Run one block; `layer` is one slice of `params["blocks"]`, and `kind` its index modulo
        `config.kinds`. The sums are its router's, if it has one, over the tokens that are text
        (None = all are)."""
        with jax.named_scope("block"):
            module = nnx.merge(self._graphs["blocks"], layer)
            return module(x_BSD, positions_BS, segments_BS, self.ops(plan), key, kind, text_BS)

    def head(
        self, params: Params, x_BSD: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S D"], Float[Array, "V D"]]:
        """Return the final norm's output and the vocabulary matrix that multiplies it."""
        with jax.named_scope("head"):
            return nnx.merge(self._graphs["head"], params["head"])(
                x_BSD,
                params["embed"]["tokens"],
            )

    def hidden_states(
        self, params: Params, batch: Batch, plan: Plan, key: jax.Array | None = None
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Return the residual stream after the last block and, for a model with routers, their sums
        as means over the layers. The batch is as for `loss`, but `in_order`, and may have `text`
        (see `Places`)."""
        tokens_BS = batch["tokens"]
        positions_BS = batch["positions"]
        segments_BS = batch.get("segments")
        embed_key, blocks_key = (None, None) if key is None else jax.random.split(key)
        x_BSD = self.embed(params, tokens_BS, positions_BS, plan, embed_key)
        text_BS = batch.get("text")
        return self.blocks(
            params["blocks"], x_BSD, positions_BS, segments_BS, plan, blocks_key, text_BS
        )

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
        """Run all blocks in turn, and add up their routers' sums; `layers` is `params["blocks"]`,
        or slices of it.
        """
        if key is None:
            layer_keys = None
        else:
            layer_keys = jax.random.split(
                key,
                len(jax.tree.leaves(layers)[0]),
            )
        places = places_of_halves(Places(positions_BS, segments_BS, text_BS), plan)

        def body(xs, layer, kind):
            layer_params, layer_key = layer
            return self.layer(
                jax.tree.map(on_device, layer_params), xs, places, plan, layer_key, kind
            )

        xs, routed = over_layers(
            self.config, body, halves(x_BSD, STORED, plan), (layers, layer_keys), plan
        )
        return whole_batch(xs, STORED, plan), jax.tree.map(jnp.mean, routed)

    def layer(
        self,
        layer: Params,
        xs: tuple[Array, ...],
        places: Sequence[Places],
        plan: Plan,
        key: jax.Array | None,
        kind: int = 0,
    ) -> tuple[tuple[Array, ...], RouterSums | None]:
        """Run one block on the `halves` of a batch, and add up its router's sums; `places` are
        those of the halves, and `kind` is as for `block`."""
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
            )
            for x_BSD, place in zip(xs, places, strict=True)
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
          batch: int32 arrays [B, S]: `tokens`, `labels` (one below zero does not count), and for
            packed documents `positions` and `segments`.
          key: the dropout key; None = no dropout.
          weights: the weights of the terms that are added to the likelihood.
          counts: the tokens of the whole step, of which the batch is a microbatch; None = it is all
            of the step.

        Returns:
          The sums over the batch.
        """
        if self.config.experts:
            told = with_text(batch)
        else:
            told = batch
        ordered = in_order(told, plan, plan.context.strategy)
        x_BSD, routed = self.hidden_states(params, ordered, plan, key)
        sums = self.score(params, x_BSD, ordered["labels"], plan, weights)
        if routed is None:
            return sums
        if counts is None:
            counts = count_tokens(batch)
        means = weights.balance_loss * routed.balance + weights.router_z_loss * routed.z
        loss = sums.loss + counts.labels_per_token * means
        return sums._replace(loss=loss, routed=jax.lax.stop_gradient(routed))

    def score(
        self,
        params: Params,
        x_BSD: Float[Array, "B S D"],
        labels_BS: Int[Array, "B S"],
        plan: Plan,
        weights: LossWeights,
    ) -> LossSums:
        """Compute the summed loss of the last block's output, without the routers' part; `params`
        has no blocks.
        """
        x_BSD, head_VD = self.head(params, x_BSD)
        with jax.named_scope("loss"):
            sizes = self.config
            return self.ops(plan).linear_cross_entropy(
                x_BSD, head_VD, labels_BS, sizes.vocab_size, weights.z_loss, sizes.logit_softcap
            )

    def logits(
        self,
        params: Params,
        batch: Batch,
        plan: Plan,
    ) -> Float[Array, "B S V"]:
        """Compute float32 next-token scores of the true vocabulary; `batch` is as in `loss`, and
        needs no labels.
        """
        x_BSD, _ = self.hidden_states(
            params,
            in_order(batch, plan, plan.context.strategy),
            plan,
        )
        x_BSD, head_VD = self.head(params, x_BSD)
        sizes = self.config
        scores_BSV = self.ops(plan).logits(x_BSD, head_VD, sizes.vocab_size, sizes.logit_softcap)
        return in_natural_order(scores_BSV[..., : sizes.vocab_size], plan, plan.context.strategy)

    def parameter_count(self) -> int:
        """Count the parameters, without the padding of the vocabulary."""
        return _count(self.shapes()) - self._padding()

    def flops_per_token(self, seq_len: int) -> float:
        """Count the model FLOPs of one training token, forward and backward, without recompute: the
        numerator of MFU.

        They are 6 per parameter that multiplies plus 12 L H h S for attention, as in PaLM
        (arXiv:2204.02311, appendix B). Tables that are only looked up do not multiply, and of the
        experts only those that a token is sent to do. Causal attention is counted whole, so that
        figures can be compared; of a sparser mask only its reach is counted. A frozen parameter
        beside LoRA counts 4 and not 6, since its gradient is not made.
        """
        shapes = self.shapes()
        config = self.config
        multiplying = _count(shapes["blocks"]) + _count(shapes["head"]) - self._idle_experts()
        multiplying += (
            config.vocab_size * config.embed if config.tied_head else -self._padding() // 2
        )
        if config.lora.rank:
            multiplying = (4 * multiplying + 2 * _count(self.trained(shapes))) / 6
        keys = sum(reach(config.masks[i % config.kinds], seq_len) for i in range(config.layers))
        return 6.0 * multiplying + 12.0 * config.heads * config.head_size * keys

    def _idle_experts(self) -> int:
        """Count the parameters of the experts that a token is not sent to."""
        axes = self.axes["blocks"]
        blocks = self.shapes()["blocks"]
        config = self.config
        of_experts = _count([blocks[name] for name in blocks if "experts" in axes[name]])
        return of_experts * (config.experts - config.experts_per_token) // max(config.experts, 1)

    def _padding(self) -> int:
        rows = self.shapes()["embed"]["tokens"].shape[0] - self.config.vocab_size
        return rows * self.config.embed * (1 if self.config.tied_head else 2)


def over_layers(
    config: ModelConfig,
    body: Callable[[Any, Any, int], tuple[Any, Any]],
    carry: Any,
    xs: PyTree,
    plan: Plan,
) -> tuple[Any, Any]:
    """Run `body(carry, x, kind) -> (carry, y)` over layers stacked in `xs` [L, ...], each of which
    keeps for its backward what the plan says, and return the last carry and the stacked ys.

    It is one scan, or unrolled where `config.scan_layers` is false. Layers of several kinds are
    scanned in groups of one of each, and those that are left over are unrolled.
    """
    L = len(jax.tree.leaves(xs)[0])
    p = config.kinds

    def of(kind: int, looped: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        return remat(lambda carry, x: body(carry, x, kind), plan, looped)

    if config.scan_layers and p == 1:
        return jax.lax.scan(of(0, True), carry, xs)
    grouped = L // p * p if config.scan_layers else 0
    found = []
    if grouped:
        kinds = [of(kind, True) for kind in range(p)]

        def group(carry: Any, xs: PyTree) -> tuple[Any, Any]:
            ys = []
            for kind, one in enumerate(kinds):
                carry, y = one(
                    carry,
                    jax.tree.map(lambda leaf, kind=kind: leaf[kind], xs),
                )
                ys.append(y)
            return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *ys)

        if grouped == L:
            whole = xs
        else:
            whole = jax.tree.map(lambda leaf: leaf[:grouped], xs)
        carry, ys = jax.lax.scan(
            group,
            carry,
            jax.tree.map(
                lambda x: x.reshape(L // p, p, *x.shape[1:]),
                whole,
            ),
        )
        found.append(
            jax.tree.map(
                lambda y: y.reshape(grouped, *y.shape[2:]),
                ys,
            )
        )
    for i in range(grouped, L):
        carry, y = of(i % p, False)(
            carry,
            jax.tree.map(lambda leaf, i=i: leaf[i], xs),
        )
        found.append(jax.tree.map(lambda y: y[None], y))
    return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *found)


# Both are cached, because a budget asks for the same model some hundred times.
@lru_cache(maxsize=64)
def _split(config: ModelConfig) -> tuple[dict[str, nnx.GraphDef], Params]:
    """Return the graph of each part, and the logical axes of its parameters."""
    graphs = {}
    axes = {}
    for name, part in PARTS.items():
        graphs[name], state = nnx.split(nnx.eval_shape(lambda part=part: part(config, nnx.Rngs(0))))
        stacked = ("layers",) if name == "blocks" else ()
        axes[name] = nnx.to_pure_dict(
            state, lambda leaf, stacked=stacked: (*stacked, *leaf.get_metadata("axes"))
        )
    return graphs, axes


@lru_cache(maxsize=64)
def _shapes(config: ModelConfig, order: tuple[int, ...] | None) -> Params:
    return jax.eval_shape(
        lambda key: Model(config).init(key, order),
        jax.random.key(0),
    )


def _count(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def base_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model without LoRA."""
    return replace(config, lora=Lora())


def merge_lora(params: Params, config: ModelConfig) -> Params:
    """Return the parameters of `base_config`: W + (alpha / rank) A B in place of W, A and B
    (arXiv:2106.09685, section 4.1), computed in float32. The arrays of W are donated."""
    blocks = dict(params["blocks"])
    for name in config.lora.targets if config.lora.rank else ():
        pair = (blocks.pop(f"{name}_lora_{x}", None) for x in "ab")
        if (a := next(pair)) is not None:  # a target may be named twice
            blocks[name] = _add_product(blocks[name], a, next(pair), lora_scale(config))
    return params | {"blocks": blocks}


@partial(jax.jit, donate_argnums=0, static_argnames="scale")
def _add_product(
    weight: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: float,
) -> jax.Array:
    """Add the products of pairs [L, *in, r] and [L, r, *out] to a stacked weight [L, *in, *out]."""
    product = jax.vmap(partial(jnp.tensordot, axes=1, precision="highest"))(
        a,
        b,
    )
    return (weight.astype(jnp.float32) + scale * product).astype(weight.dtype)
