"""The forward pass up to the head: the embedding, the blocks in turn, and the query layer where
there is one.

Two things run through all of it. Where a plan cuts a batch in two halves, so that one computes
while the other communicates (`overlap.domino`), a layer runs on each in turn: its streams, places
and ops have one entry for each half, and otherwise a single one. And the streams after some of the
layers may be kept, which a model holds against its teacher's.

Shapes: B batch, S sequence, D embed, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.plan import Plan
from jaxpar.models.layers import over_layers
from jaxpar.models.parts import HeadOutput, Params
from jaxpar.models.query_layer import query_key_of
from jaxpar.models.split import Split, SplitModel
from jaxpar.parallel.domino import LayerInfo, Places, halves, places_of_halves, whole_batch
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.remat import named, remat
from jaxpar.parallel.sequence_halves import run_parts

Batch = Mapping[str, jax.Array]


class Streams(NamedTuple):
    """What a model makes of a batch up to its head.

    Attributes:
      last: the residual stream after the last block, or after the query layer.
      routed: the routers' sums as means over the layers; None where there are no routers.
      after: the residual streams that were asked for.
    """

    last: Float[Array, "B S D"]
    routed: RouterSums | None
    after: tuple[Float[Array, "B S D"], ...] = ()


def run_to_head(
    model: SplitModel,
    params: Params,
    batch: Batch,
    plan: Plan,
    key: jax.Array | None,
    after: tuple[int, ...],
) -> Streams:
    """Run a model on a batch that is `in_order`, up to its head; see `Model.streams`."""
    places = Places(batch["positions"], batch.get("segments"), batch.get("text"))
    if key is None:
        embed_key = None
        blocks_key = None
    else:
        embed_key, blocks_key = jax.random.split(key)
    x_BSD = run_embed(
        model,
        params,
        batch["tokens"],
        places.positions,
        plan,
        embed_key,
        batch.get("token_types"),
    )
    found = run_blocks(model, params["blocks"], x_BSD, places, plan, blocks_key, after)
    if "query" not in model.parts:
        return found
    last = run_query_layer(model, params, found.last, places, plan, blocks_key)
    return found._replace(last=last)


def run_embed(
    model: SplitModel,
    params: Params,
    tokens_BS: Int[Array, "B S"],
    positions_BS: Int[Array, "B S"],
    plan: Plan,
    key: jax.Array | None,
    types_BS: Int[Array, "B S"] | None,
) -> Float[Array, "B S D"]:
    """Turn tokens into the residual stream; see `Model.embed`.

    Raises:
      UserError: types are given, and the embedding takes none.
    """
    embed = model.parts["embed"]
    if types_BS is not None and "types_BS" not in embed.takes:
        raise UserError(
            f"the batch has token_types, and {embed.name} takes no `types_BS`: leave them out"
        )
    with jax.named_scope("embed"):
        return embed(
            params["embed"],
            tokens_BS,
            positions_BS=positions_BS,
            ops=model.ops(plan),
            key=key,
            types_BS=types_BS,
        )


def run_blocks(
    model: SplitModel,
    layers: Params,
    x_BSD: Float[Array, "B S D"],
    places: Places,
    plan: Plan,
    key: jax.Array | None,
    after: tuple[int, ...] = (),
) -> Streams:
    """Run all blocks in turn.

    Args:
      model: the model.
      layers: the parameters of the blocks, stacked.
      x_BSD: the residual stream before the first, in its layout.
      places: the places and documents of the tokens.
      plan: says how it runs on several devices.
      key: the dropout key; None = no dropout.
      after: after how many layers a stream is kept, each at least 1.

    Returns:
      The streams.

    Raises:
      UserError: as for `run_block`.
    """
    L = len(jax.tree.leaves(layers)[0])
    layer_keys = None if key is None else jax.random.split(key, L)
    between = sorted({number for number in after if number < L})
    # Counted only where somebody asks, since the number is an operand of every layer.
    numbers = jnp.arange(L) if model.numbers_layers or between else None
    places_of_parts = places_of_halves(places, plan)
    blocks = model.parts["blocks"]

    def body(carry, of_layer, kind):
        xs, kept = carry
        stored, layer_key, number = of_layer
        layer = jax.tree.map(on_device, stored)
        info = LayerInfo(layer_key, kind, number if model.numbers_layers else None)
        xs, routed = run_layer(blocks, layer, xs, places_of_parts, model.ops(plan), plan, info)
        kept = [
            jax.tree.map(partial(jnp.where, number + 1 == one), xs, before)
            for one, before in zip(between, kept, strict=True)
        ]
        return (xs, kept), routed

    first = halves(x_BSD, STORED, plan)
    # What is kept has its place from the first layer on, and every pass may fill it.
    carry = (first, [first] * len(between))
    (xs, kept), routed = over_layers(model.config, body, carry, (layers, layer_keys, numbers), plan)
    last = whole_batch(xs, STORED, plan)
    by_number = {
        one: whole_batch(parts, STORED, plan) for one, parts in zip(between, kept, strict=True)
    }
    streams = tuple(by_number.get(one, last) for one in after)
    return Streams(last, jax.tree.map(jnp.mean, routed), streams)


def run_layer(
    blocks: Split,
    layer: Params,
    xs: tuple[Array, ...],
    places: Sequence[Places],
    ops: Ops,
    plan: Plan,
    info: LayerInfo,
) -> tuple[tuple[Array, ...], RouterSums | None]:
    """Run one block on the `halves` of a batch in turn.

    Args:
      blocks: the block.
      layer: its parameters, one slice of those that are stacked.
      xs: the residual stream of each half.
      places: the places of the tokens of each half.
      ops: what the block calls.
      plan: says what the halves are.
      info: what the layer is told of itself.

    Returns:
      The streams after the block, and the router's sums over both halves.

    Raises:
      UserError: as for `run_block`.
    """

    def run(
        x_BSD: Array, place: Places, ops: Ops
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        return run_block(blocks, layer, x_BSD, place, ops, info)

    found = run_parts(run, xs, places, ops, plan)
    streams = tuple(x_BSD for x_BSD, _ in found)
    sums = [routed for _, routed in found]
    return streams, jax.tree.map(lambda *of_halves: sum(of_halves), *sums)


def run_block(
    blocks: Split,
    layer: Params,
    x_BSD: Float[Array, "B S D"],
    place: Places,
    ops: Ops,
    info: LayerInfo,
) -> tuple[Float[Array, "B S D"], RouterSums | None]:
    """Run one block; see `Model.block`.

    Raises:
      UserError: the block returns another shape or dtype than it is given, or there are documents
        and it takes none.
    """
    if place.segments is not None:
        require_documents(blocks)
    with jax.named_scope("block"):
        # Here and not in the block, so that every block's input can be offloaded.
        x_BSD = named(x_BSD, "block_input")
        found = blocks(
            layer,
            x_BSD,
            positions_BS=place.positions,
            segments_BS=place.segments,
            ops=ops,
            key=info.key,
            kind=info.kind,
            text_BS=place.text,
            layer=info.number,
        )
    y_BSD, routed = found if isinstance(found, tuple) else (found, None)
    if not hasattr(y_BSD, "dtype"):
        raise UserError(
            f"{blocks.name} made {short(y_BSD)} of a stream: a block returns the array that the "
            "next one is given"
        )
    if (y_BSD.shape, y_BSD.dtype) != (x_BSD.shape, x_BSD.dtype):
        raise UserError(
            f"{blocks.name} made {y_BSD.dtype}{list(y_BSD.shape)} of "
            f"{x_BSD.dtype}{list(x_BSD.shape)}: a block returns the shape and dtype that it is "
            "given (y.astype(x.dtype))"
        )
    return y_BSD, routed


def require_documents(blocks: Split) -> None:
    """Refuse several documents in a row where blocks would mix them.

    Raises:
      UserError: the blocks take no `segments_BS`.
    """
    if "segments_BS" not in blocks.takes:
        raise UserError(
            f"packed documents, and {blocks.name} takes no `segments_BS`: set data.pack=false"
        )


def run_query_layer(
    model: SplitModel,
    params: Params,
    x_BSD: Float[Array, "B S D"],
    places: Places,
    plan: Plan,
    key: jax.Array | None,
    ops: Ops | None = None,
) -> Float[Array, "B S D"]:
    """Run the query layer on the stream after the last block; see `Model.query`."""
    if key is not None:
        key = query_key_of(key)
    kind = model.config.layers % model.config.kinds  # that of a layer after the last
    places_of_parts = places_of_halves(places, plan)

    def run_half(layer: Params, x_BSD: Array, place: Places, ops: Ops) -> Array:
        with jax.named_scope("query_layer"):
            return model.parts["query"](
                layer,
                named(x_BSD, "block_input"),
                positions_BS=place.positions,
                segments_BS=place.segments,
                ops=ops,
                key=key,
                kind=kind,
            )

    def run(layer: Params, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        of_plan = ops or model.ops(plan)
        return tuple(run_parts(partial(run_half, layer), xs, places_of_parts, of_plan, plan))

    xs = halves(x_BSD, STORED, plan)
    ys = remat(run, plan, False)(params["query"], xs)
    return whole_batch(ys, STORED, plan)


def run_head(
    model: SplitModel, params: Params, x_BSD: Float[Array, "B S D"], plan: Plan
) -> HeadOutput:
    """Run what follows the last block, up to the scores; see `Model.head`."""
    with jax.named_scope("head"):
        found = model.parts["head"](
            params["head"],
            x_BSD,
            embedding_VD=params["embed"].get("tokens"),
            ops=model.ops(plan),
        )
    return HeadOutput(*found)
