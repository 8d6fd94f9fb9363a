"""The programs of generation: a prefill that reads prompts, a loop that decodes token by token over
a cache of keys and values, and the scores of given tokens.

Each is a function to be jitted once for a shape. The layers are unrolled, and each has arrays of
its own, so that a token copies neither a parameter nor a cache.

Shapes: B rows, S prompt length, T slots of the cache, N new tokens, C some tokens of S, D embed,
V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model, Params
from jaxpar.parallel.attention_state import StatefulAttention, run_with_states
from jaxpar.parallel.cache import EMPTY, Cache, NewTokens, attend_cached, fill_cache
from jaxpar.parallel.domino import LayerInfo, Places
from jaxpar.parallel.ops import Ops
from jaxpar.train.generation.sampling import Sampling, draw

LayerCaches = tuple[Cache, ...]
"""The caches of a layer, one for each of its attentions."""


class DecodeSizes(NamedTuple):
    """What the programs are compiled for.

    Attributes:
      prompt: the length S of the prompts.
      new: the number N of new tokens at most.
      sampling: how a token is drawn.
    """

    prompt: int
    new: int
    sampling: Sampling


class PromptRows(NamedTuple):
    """What is continued; `number_B` are the numbers of the rows for their draws."""

    tokens_BS: Int[Array, "B S"]
    lengths_B: Int[Array, " B"]
    done_B: Bool[Array, " B"]
    number_B: Int[Array, " B"]
    stop: Int[Array, " stops"]
    seed: UInt[Array, ""]


class DecodeState(NamedTuple):
    """Where generation stands; `tokens_BN` are the new ones so far, and -1."""

    caches: list[LayerCaches]
    tokens_BN: Int[Array, "B N"]
    lengths_B: Int[Array, " B"]
    done_B: Bool[Array, " B"]
    keys_B: Key[Array, " B"]
    stop: Int[Array, " stops"]
    made: Int[Array, ""]


def prefill(
    model: Model, plan: Plan, sizes: DecodeSizes, params: Params, rows: PromptRows
) -> DecodeState:
    """Read the prompts, and draw the first new token of each."""
    S = sizes.prompt
    N = sizes.new
    tokens_BS = plan.constrain(rows.tokens_BS, ("batch", None))
    positions_BS = jnp.broadcast_to(jnp.arange(S), tokens_BS.shape)
    attend = partial(fill_cache, plan=plan, slots=S + N)
    x_BSD, caches = _run_with_caches(model, params, tokens_BS, positions_BS, plan, attend)
    if not any(caches):
        raise UserError(
            "no block calls ops.attention, so that there is no cache of what came before a token: "
            "generation needs one"
        )
    last_B1D = jnp.take_along_axis(x_BSD, rows.lengths_B[:, None, None] - 1, axis=1)
    last_B1D = plan.constrain(last_B1D, ("batch", None, None))
    scores_BV = _scores(model, params, last_B1D, plan)[:, 0]
    fold = partial(jax.random.fold_in, jax.random.key(rows.seed))
    keys_B = jax.vmap(fold)(rows.number_B)
    tokens_BN = jnp.full((len(rows.lengths_B), N), -1, jnp.int32)
    state = DecodeState(
        caches,
        tokens_BN,
        rows.lengths_B,
        rows.done_B,
        keys_B,
        rows.stop,
        jnp.int32(0),
    )
    return _add(state, scores_BV, sizes.sampling)


def decode(
    model: Model,
    plan: Plan,
    sizes: DecodeSizes,
    params: Params,
    state: DecodeState,
    limit: Array,
) -> DecodeState:
    """Draw tokens until there are `limit` of each row, or every row has met a stop token."""
    S = sizes.prompt
    slots = jnp.arange(S + sizes.new)
    n = state.lengths_B[:, None]
    places_BT = jnp.where(
        slots < S,
        jnp.where(slots < n, slots, EMPTY),
        n + slots - S,
    )

    def step(state: DecodeState) -> DecodeState:
        place_B = state.lengths_B + state.made - 1  # of the newest token, which has no cache yet
        new = NewTokens(S + state.made - 1, place_B, places_BT)
        attend = partial(attend_cached, plan=plan, new=new)
        tokens_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BN, state.made - 1, 1, axis=1)
        tokens_B1 = plan.constrain(tokens_B1, ("batch", None))
        positions_B1 = plan.constrain(place_B[:, None], ("batch", None))
        # A row that has ended has no newest token; what it computes is not used.
        tokens_B1 = jnp.maximum(tokens_B1, 0)
        x_B1D, caches = _run_with_caches(
            model, params, tokens_B1, positions_B1, plan, attend, state.caches
        )
        scores_BV = _scores(model, params, x_B1D, plan)[:, 0]
        return _add(state._replace(caches=caches), scores_BV, sizes.sampling)

    return jax.lax.while_loop(
        lambda state: (state.made < limit) & ~state.done_B.all(),
        step,
        state,
    )


def score(
    model: Model, plan: Plan, S: int, params: Params, tokens_BS: Array, labels_BS: Array
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Return the log-likelihood of each row's labels (-1 = not counted), and whether they are all
    the most likely.
    """
    tokens_BS = plan.constrain(tokens_BS, ("batch", None))
    labels_BS = plan.constrain(labels_BS, ("batch", None))
    x_BSD = _run(
        model,
        params,
        tokens_BS,
        jnp.broadcast_to(jnp.arange(S), tokens_BS.shape),
        plan,
    )
    width = math.gcd(S, 16)  # the scores of so many tokens a row are in memory at a time

    def part(
        sums: tuple[Array, Array],
        first: Array,
    ) -> tuple[tuple[Array, Array], None]:
        x_BCD = jax.lax.dynamic_slice_in_dim(x_BSD, first, width, axis=1)
        labels_BC = jax.lax.dynamic_slice_in_dim(labels_BS, first, width, axis=1)
        scores_BCV = _scores(model, params, x_BCD, plan)
        counted_BC = labels_BC >= 0
        wanted_BC1 = jnp.maximum(labels_BC, 0)[..., None]
        found_BC = jnp.take_along_axis(scores_BCV, wanted_BC1, axis=-1)[..., 0]
        found_BC -= jax.nn.logsumexp(scores_BCV, axis=-1)
        best_BC = jnp.argmax(scores_BCV, axis=-1) == labels_BC
        total_B, best_B = sums
        return (
            total_B + jnp.sum(found_BC * counted_BC, axis=1),
            best_B & jnp.all(best_BC | ~counted_BC, axis=1),
        ), None

    nothing = jnp.zeros(len(tokens_BS), jnp.float32), jnp.ones(len(tokens_BS), bool)
    return jax.lax.scan(part, nothing, jnp.arange(0, S, width))[0]


def _run(
    model: Model, params: Params, tokens_BS: Array, positions_BS: Array, plan: Plan
) -> Float[Array, "B S D"]:
    """Run tokens through the embedding and all layers of `layer_by_layer` parameters."""
    x_BSD = model.embed(params, tokens_BS, positions_BS, plan)
    ops = model.ops(plan)
    for layer in _layers(model, params, Places(positions_BS), plan):
        x_BSD = layer(x_BSD, ops)
    return x_BSD


def _run_with_caches(
    model: Model,
    params: Params,
    tokens_BS: Array,
    positions_BS: Array,
    plan: Plan,
    attend: StatefulAttention,
    caches: Sequence[LayerCaches] | None = None,
) -> tuple[Float[Array, "B S D"], list[LayerCaches]]:
    """Run tokens likewise, with attention that is given each layer's caches and leaves new ones."""
    x_BSD = model.embed(params, tokens_BS, positions_BS, plan)
    ops = model.ops(plan)
    left = []
    for number, layer in enumerate(_layers(model, params, Places(positions_BS), plan)):
        before = None if caches is None else caches[number]
        x_BSD, after = run_with_states(partial(layer, x_BSD), ops, attend, before)
        left.append(after)
    return x_BSD, left


def _layers(
    model: Model, params: Params, places: Places, plan: Plan
) -> Iterator[Callable[[Array, Ops], Array]]:
    """Yield each layer, as a function of the stream and of what it calls: the blocks, and the query
    layer where there is one.
    """

    def run_block(number: int, layer: Params, x_BSD: Array, ops: Ops) -> Array:
        info = LayerInfo(kind=number % model.config.kinds, number=number)
        return model.block(layer, x_BSD, places, plan, info, ops)[0]

    def run_query_layer(x_BSD: Array, ops: Ops) -> Array:
        return model.query(params, x_BSD, places, plan, ops=ops)

    for number, layer in enumerate(params["blocks"]):
        yield partial(run_block, number, layer)
    if model.config.query_layer:
        yield run_query_layer


def _scores(
    model: Model,
    params: Params,
    x_BSD: Array,
    plan: Plan,
) -> Float[Array, "B S V"]:
    """Return the float32 scores of the vocabulary, whole on every device of their rows."""
    head = model.head(params, x_BSD, plan)
    if "head_DV" in params:
        head = head._replace(table_VD=params["head_DV"].T)
    scores_BSV = model.ops(plan).logits(head.scores(model.config))
    return plan.constrain(scores_BSV[..., : model.config.vocab_size], ("batch", None, None))


def _add(state: DecodeState, scores_BV: Array, sampling: Sampling) -> DecodeState:
    """Draw a token of each row that has not ended, and put it at the end of its new tokens."""
    token_B = draw(scores_BV, sampling, state.keys_B, state.lengths_B + state.made)
    token_B = jnp.where(state.done_B, -1, token_B)
    tokens_BN = jax.lax.dynamic_update_slice_in_dim(
        state.tokens_BN, token_B[:, None], state.made, axis=1
    )
    done_B = state.done_B | jnp.isin(token_B, state.stop)
    return state._replace(tokens_BN=tokens_BN, done_B=done_B, made=state.made + 1)
