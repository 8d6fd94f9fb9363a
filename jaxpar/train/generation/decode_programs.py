"""The programs of generation: a prefill that reads prompts, a loop that decodes token by token over
a cache of keys and values, and the scores of given tokens.

Each is a function to be jitted once for a shape. The layers are unrolled, and each has arrays of
its own, so that a token copies neither a parameter nor a cache.

Shapes: B rows, S prompt length, T slots of the cache, N new tokens, C some tokens of S, D embed,
V vocab.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model, Params
from jaxpar.parallel.cache import EMPTY, Cache, DecodeOps, PrefillOps
from jaxpar.parallel.domino import Places
from jaxpar.train.generation.sampling import Sampling, draw


class DecodeState(NamedTuple):
    """Where generation stands; `tokens_BN` are the new ones so far, and -1."""

    caches: list[Cache]
    tokens_BN: Int[Array, "B N"]
    lengths_B: Int[Array, " B"]
    done_B: Bool[Array, " B"]
    keys_B: Key[Array, " B"]
    stop: Int[Array, " stops"]
    made: Int[Array, ""]


def prefill(
    model: Model,
    plan: Plan,
    S: int,
    N: int,
    sampling: Sampling,
    params: Params,
    tokens_BS: Array,
    lengths_B: Array,
    done_B: Array,
    number_B: Array,
    stop: Array,
    seed: Array,
) -> DecodeState:
    """Read the prompts, and draw the first new token of each."""
    ops = PrefillOps(plan, slots=S + N)
    model = model.with_config(model.config, lambda plan: ops)
    tokens_BS = plan.constrain(tokens_BS, ("batch", None))
    positions_BS = jnp.broadcast_to(jnp.arange(S), tokens_BS.shape)
    x_BSD = _run(model, params, tokens_BS, positions_BS, plan)
    if not ops.caches:
        raise UserError(
            "no block calls ops.attention, so that there is no cache of what came before a token: "
            "generation needs one"
        )
    last_B1D = jnp.take_along_axis(x_BSD, lengths_B[:, None, None] - 1, axis=1)
    last_B1D = plan.constrain(last_B1D, ("batch", None, None))
    scores_BV = _scores(model, params, last_B1D, plan)[:, 0]
    fold = partial(jax.random.fold_in, jax.random.key(seed))
    keys_B = jax.vmap(fold)(number_B)
    tokens_BN = jnp.full((len(lengths_B), N), -1, jnp.int32)
    state = DecodeState(
        ops.caches,
        tokens_BN,
        lengths_B,
        done_B,
        keys_B,
        stop,
        jnp.int32(0),
    )
    return _add(state, scores_BV, sampling)


def decode(
    model: Model,
    plan: Plan,
    S: int,
    N: int,
    sampling: Sampling,
    params: Params,
    state: DecodeState,
    limit: Array,
) -> DecodeState:
    """Draw tokens until there are `limit` of each row, or every row has met a stop token."""
    slots = jnp.arange(S + N)
    n = state.lengths_B[:, None]
    places_BT = jnp.where(
        slots < S,
        jnp.where(slots < n, slots, EMPTY),
        n + slots - S,
    )

    def step(state: DecodeState) -> DecodeState:
        place_B = state.lengths_B + state.made - 1  # of the newest token, which has no cache yet
        ops = DecodeOps(plan, state.caches, S + state.made - 1, places_BT, place_B)
        decoding = model.with_config(model.config, lambda plan: ops)
        tokens_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BN, state.made - 1, 1, axis=1)
        tokens_B1 = plan.constrain(tokens_B1, ("batch", None))
        positions_B1 = plan.constrain(place_B[:, None], ("batch", None))
        # A row that has ended has no newest token; what it computes is not used.
        x_B1D = _run(decoding, params, jnp.maximum(tokens_B1, 0), positions_B1, plan)
        scores_BV = _scores(decoding, params, x_B1D, plan)[:, 0]
        return _add(state._replace(caches=ops.caches), scores_BV, sampling)

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
    for i, layer in enumerate(params["blocks"]):
        x_BSD, _ = model.block(
            layer,
            x_BSD,
            positions_BS,
            None,
            plan,
            kind=i % model.config.kinds,
            number=i,
        )
    if model.config.query_layer:
        x_BSD = model.query(params, x_BSD, Places(positions_BS, None, None), plan)
    return x_BSD


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
    sizes = model.config
    scores_BSV = model.ops(plan).logits(
        head.x_BSD, head.table_VD, sizes.vocab_size, sizes.logit_softcap, **head.biases
    )
    return plan.constrain(scores_BSV[..., : sizes.vocab_size], ("batch", None, None))


def _add(state: DecodeState, scores_BV: Array, sampling: Sampling) -> DecodeState:
    """Draw a token of each row that has not ended, and put it at the end of its new tokens."""
    token_B = draw(scores_BV, sampling, state.keys_B, state.lengths_B + state.made)
    token_B = jnp.where(state.done_B, -1, token_B)
    tokens_BN = jax.lax.dynamic_update_slice_in_dim(
        state.tokens_BN, token_B[:, None], state.made, axis=1
    )
    done_B = state.done_B | jnp.isin(token_B, state.stop)
    return state._replace(tokens_BN=tokens_BN, done_B=done_B, made=state.made + 1)
