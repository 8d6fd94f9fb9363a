"""Token choice: each token goes to the k experts that score highest for it (Jiang et al. 2024,
arXiv:2401.04088, section 2.1).

The router takes a float32 softmax over all experts, keeps a token's k largest weights and scales
them to add up to one. A device routes its own tokens of the residual stream; nothing is gathered
first. No token is dropped: the rows for each device have the size of the worst case, in which all
tokens choose experts of the same device, but each of them at most min(k, experts there).

Shapes: B batch, S sequence, D embed, E experts, K chosen of a token, X devices along `experts`,
T tokens of one device, N = T K, R rows.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.layout.sharding import Layout, PyTree, state_axes
from jaxpar.kernels.grouped_matmul import inverse
from jaxpar.parallel.collectives import manual, reduce, split_over
from jaxpar.parallel.experts.routers import (
    ROUTER,
    ROWS,
    SCALAR,
    SOURCES,
    RouterSums,
    router_logits,
    swap,
    whole_router,
)
from jaxpar.parallel.linear import STORED


class Choice(NamedTuple):
    """The tokens' choice among the experts."""

    weights_BSK: Array
    """The weight of each chosen expert, float32."""
    chosen_BSK: Array
    """The experts that each token chose."""
    sums: RouterSums


class TokenPlaces(NamedTuple):
    """The rows in which one device sends its tokens."""

    sources: Array
    """The token that each row of the sent buffers copies, [1, 1, R]; -1 = the row is empty."""
    slots: Array
    """The row in which a token's choice is sent and its result comes back, [B, S, K]."""
    counts: Array
    """How many rows come from each device for each expert that is here, [1, 1, X, E / X]."""


def choose_experts(
    x_BSD: Array, router_DE: Array, text_BS: Array, layout: Layout, experts_per_token: int
) -> Choice:
    """Let each token choose its experts.

    Args:
      x_BSD: the normed residual stream, in its own layout.
      router_DE: the router, with the logical axes `ROUTER`.
      text_BS: which tokens are text; padding has no part in the router's sums.
    """
    routed = cast(tuple[Array, ...], _route(layout, experts_per_token, x_BSD, router_DE, text_BS))
    weights_BSK, chosen_BSK, balance, z = routed
    return Choice(weights_BSK, chosen_BSK, RouterSums(balance, z))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(
    layout: Layout, k: int, x_BSD: Array, router_DE: Array, text_BS: Array
) -> tuple[Array, ...]:
    """Return float32 weights [B, S, K], the chosen experts [B, S, K], and the sums of balance
    and z.
    """
    return _route_forward(layout, k, x_BSD, router_DE, text_BS)[0]


def _route_forward(layout, k, x_BSD, router_DE, text_BS):
    def local(
        x_BSD: Array,
        router_DE: Array,
        text_BS: Array,
    ) -> tuple[tuple[Array, ...], Array]:
        logits_BSE = router_logits(x_BSD, whole_router(router_DE, layout))
        chosen_BSK = jax.lax.top_k(logits_BSE, k)[1]
        choices_BSE = jnp.sum(
            jax.nn.one_hot(chosen_BSK, logits_BSE.shape[-1], dtype=jnp.float32),
            axis=2,
        )
        choices_BE = jnp.sum(choices_BSE * text_BS[..., None], axis=1)
        along = layout.mesh_axes("residual_seq")
        tokens = split_over(STORED[:2], layout)
        if along:
            choices_BE = jax.lax.psum(choices_BE, along)
        # Each token of text makes k choices; a row of padding alone makes none.
        share_BE = choices_BE / jnp.maximum(
            jnp.sum(choices_BE, axis=1, keepdims=True),
            1,
        )
        weights_BSK, *sums = _weigh(logits_BSE, chosen_BSK, share_BE, text_BS)
        balance, z = jax.lax.psum(jnp.stack(sums), tokens) if tokens else sums
        return (weights_BSK, chosen_BSK, balance, z), share_BE

    outs = ((STORED, STORED, SCALAR, SCALAR), ("batch", None))
    found, share_BE = manual(local, layout, (STORED, ROUTER, STORED[:2]), outs)(
        x_BSD, router_DE, text_BS
    )
    return found, (x_BSD, router_DE, found[1], share_BE, text_BS)


def _route_backward(layout, k, residuals, cotangents):
    def local(
        x_BSD: Array,
        router_DE: Array,
        chosen_BSK: Array,
        share_BE: Array,
        text_BS: Array,
        given: PyTree,
    ) -> tuple[Array, Array]:
        def weigh(x_BSD: Array, whole_DE: Array) -> tuple[Array, Array, Array]:
            return _weigh(router_logits(x_BSD, whole_DE), chosen_BSK, share_BE, text_BS)

        _, pull = jax.vjp(weigh, x_BSD, whole_router(router_DE, layout))
        dx_BSD, dwhole_DE = pull(given)
        drouter_DE = reduce(
            dwhole_DE, split_over(STORED[:2], layout), (None, None), state_axes(ROUTER), layout
        )
        return dx_BSD, drouter_DE.astype(router_DE.dtype)

    dweights, _, dbalance, dz = cotangents
    layouts = (
        STORED,
        ROUTER,
        STORED,
        ("batch", None),
        STORED[:2],
        (STORED, SCALAR, SCALAR),
    )
    run = manual(local, layout, layouts, (STORED, state_axes(ROUTER)))
    return *run(*residuals, (dweights, dbalance, dz)), None


_route.defvjp(_route_forward, _route_backward)


def _weigh(
    logits_BSE: Array, chosen_BSK: Array, share_BE: Array, text_BS: Array
) -> tuple[Array, Array, Array]:
    """Compute the weights of the chosen experts, and the sums of balance and z over a device's
    text, in which the experts' shares are constants.
    """
    probabilities_BSE = jax.nn.softmax(logits_BSE, axis=-1)
    weights_BSK = jnp.take_along_axis(probabilities_BSE, chosen_BSK, axis=-1)
    if weights_BSK.shape[-1] > 1:
        weights_BSK /= jnp.sum(weights_BSK, axis=-1, keepdims=True)
    balance_BS = logits_BSE.shape[-1] * jnp.sum(
        probabilities_BSE * share_BE[:, None],
        axis=-1,
    )
    z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
    return weights_BSK, jnp.sum(balance_BS * text_BS), jnp.sum(z_BS * text_BS)


def find_places(chosen_BSK: Array, experts: int, layout: Layout) -> TokenPlaces:
    """Give every choice a row; the rows of a buffer are in the order of its experts, and then of
    the tokens.
    """
    X = layout.size("experts")

    def local(chosen_BSK: Array) -> TokenPlaces:
        T = chosen_BSK.shape[0] * chosen_BSK.shape[1]
        K = chosen_BSK.shape[2]
        expert_N = chosen_BSK.reshape(-1)
        rows = T * min(K, experts // X)  # of the buffer for one device
        device_N = expert_N // (experts // X)
        rank_N = inverse(jnp.argsort(expert_N, stable=True))
        counts_XE = jnp.sum(jax.nn.one_hot(expert_N, experts, dtype=jnp.int32), axis=0).reshape(
            X, -1
        )
        filled_X = jnp.sum(counts_XE, axis=1)
        slot_N = device_N * rows + rank_N - (jnp.cumsum(filled_X) - filled_X)[device_N]
        sources_R = jnp.full(X * rows, -1).at[slot_N].set(jnp.arange(T * K) // K)
        return TokenPlaces(
            sources_R[None, None],
            slot_N.reshape(chosen_BSK.shape),
            swap(counts_XE, layout)[None, None],
        )

    outs = TokenPlaces(SOURCES, STORED, ROWS)  # pyright: ignore[reportArgumentType]
    return manual(local, layout, (STORED,), outs)(chosen_BSK)


def add_choices(rows_and_weights: tuple[Array, Array], slots_BSK: Array) -> Array:
    """Weigh the results of each token's experts and sum them, in float32."""
    rows, weights_BSK = rows_and_weights
    answers_BSKD = rows[0, 0][slots_BSK].astype(jnp.float32)
    return jnp.sum(weights_BSK[..., None] * answers_BSKD, axis=2).astype(rows.dtype)
