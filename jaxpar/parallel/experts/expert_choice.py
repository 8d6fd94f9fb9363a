"""Expert choice: each expert takes the tokens of a sequence that score highest for it (Zhou et al.
2022, arXiv:2202.09368, section 3.2).

Every expert has the same number of tokens of every sequence, so nothing need balance the load. A
token may go to any number of experts, or to none. Its weights are the probabilities of a softmax
over the experts, which are not scaled. Whether a token is taken depends on those after it: in a
causal model the likelihood of a text then knows something of its future.

The paper chooses among the tokens of a batch. Here an expert chooses among those of one sequence,
so that the answer depends neither on the layout nor on the microbatches. Where a sequence is split
over devices, the scores [B, S, E] of its tokens are gathered, in float32.

Shapes: B batch, S sequence, T tokens of one device, D embed, E experts, C tokens of a sequence that
an expert takes, X devices along `experts`, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.base.layout.sharding import Axes, Layout, state_axes
from jaxpar.parallel.collectives import manual, manual_vjp, reduce, split_over
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
    """The experts' choice among the tokens of each sequence."""

    weights_BSE: Float[Array, "B S E"]
    """The probability of each expert for each token."""
    chosen_BSE: Bool[Array, "B S E"]
    """Which tokens each expert took."""
    sums: RouterSums
    """The balance is 1 for each token of text, by construction."""


class ChosenRows(NamedTuple):
    """The rows in which one device sends its choices."""

    choices: Array
    """For each row of the sent buffers the number of its token on the device times E, plus the
    number of its expert, [1, 1, R]; -1 = the row is empty."""
    counts: Array
    """How many rows come from each device for each expert that is here, [1, 1, X, E / X]."""


def capacity(tokens: int, experts: int, experts_per_token: int) -> int:
    """Count the tokens of a sequence that an expert takes.

    Args:
      tokens: the number of tokens of a sequence.
      experts_per_token: how many experts a token goes to in the mean.

    Returns:
      The number, rounded up; at most all tokens of a sequence.
    """
    return min(tokens, -(-tokens * experts_per_token // experts))


def choose_tokens(
    x_BSD: Float[Array, "B S D"],
    router_DE: Float[Array, "D E"],
    text_BS: Bool[Array, "B S"],
    layout: Layout,
    experts_per_token: int,
) -> Choice:
    """Let each expert choose the tokens of each sequence that score highest for it.

    Args:
      x_BSD: the normed residual stream, in its own layout.
      router_DE: the weight that scores the experts.
      text_BS: which tokens are text; no expert takes the others.
      experts_per_token: how many experts a token goes to in the mean.

    Returns:
      The choice. The weights and the sums have gradients.
    """
    weights_BSE, z = _probabilities(layout)(x_BSD, router_DE, text_BS)
    taken = capacity(x_BSD.shape[1], router_DE.shape[1], experts_per_token)

    def local(weights_BSE: Array, text_BS: Array) -> Array:
        along = layout.mesh_axes("residual_seq")
        scores_BSE = jnp.where(text_BS[..., None], weights_BSE, -1.0)
        length = scores_BSE.shape[1]
        if along:
            scores_BSE = jax.lax.all_gather(scores_BSE, along, axis=1, tiled=True)
        scores_BES = scores_BSE.swapaxes(1, 2)
        best_BEC = jax.lax.top_k(scores_BES, taken)[1]
        none_BES = jnp.zeros(scores_BES.shape, bool)
        chosen_BES = jnp.put_along_axis(none_BES, best_BEC, True, axis=-1, inplace=False)
        if along:
            start = jax.lax.axis_index(along) * length
            chosen_BES = jax.lax.dynamic_slice_in_dim(chosen_BES, start, length, axis=2)
        return chosen_BES.swapaxes(1, 2) & text_BS[..., None]

    choose = manual(local, layout, (STORED, STORED[:2]), STORED)
    chosen_BSE = choose(jax.lax.stop_gradient(weights_BSE), text_BS)
    balance = jnp.sum(text_BS, dtype=jnp.float32)
    return Choice(weights_BSE, chosen_BSE, RouterSums(balance, z))


def _probabilities(layout: Layout):
    """Make a function of the stream, the router and the text that returns the softmax of each
    token's scores, and the sum of squared log-normalisers over all text.
    """
    tokens = split_over(STORED[:2], layout)

    def weigh(x_BSD: Array, whole_DE: Array, text_BS: Array) -> tuple[Array, Array]:
        logits_BSE = router_logits(x_BSD, whole_DE)
        z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
        return jax.nn.softmax(logits_BSE, axis=-1), jnp.sum(z_BS * text_BS)

    def forward(x_BSD: Array, router_DE: Array, text_BS: Array) -> tuple[Array, Array]:
        weights_BSE, z = weigh(x_BSD, whole_router(router_DE, layout), text_BS)
        if tokens:
            z = jax.lax.psum(z, tokens)
        return weights_BSE, z

    def backward(
        x_BSD: Array, router_DE: Array, text_BS: Array, cotangents: tuple[Array, Array]
    ) -> tuple[Array, Array, None]:
        _, pull = jax.vjp(
            lambda x_BSD, whole_DE: weigh(x_BSD, whole_DE, text_BS),
            x_BSD,
            whole_router(router_DE, layout),
        )
        dx_BSD, dwhole_DE = pull(cotangents)
        drouter_DE = reduce(dwhole_DE, tokens, (None, None), state_axes(ROUTER), layout)
        return dx_BSD, drouter_DE.astype(router_DE.dtype), None

    in_axes: tuple[Axes, ...] = (STORED, ROUTER, STORED[:2])
    return manual_vjp(forward, backward, layout, in_axes, (STORED, SCALAR))


def find_rows(chosen_BSE: Bool[Array, "B S E"], layout: Layout, taken: int) -> ChosenRows:
    """Give every choice a row; the rows of a buffer are in the order of its experts, and then of
    the tokens.

    A buffer has room for the worst case: an expert takes at most `taken` tokens of a sequence, all
    of which may be on this device.

    Args:
      chosen_BSE: which tokens each expert took.
      taken: how many tokens of a sequence an expert takes.

    Returns:
      The rows of each device.
    """
    X = layout.size("experts")

    def local(chosen_BSE: Array) -> ChosenRows:
        B, S, E = chosen_BSE.shape
        rows = E // X * B * min(S, taken)  # of the buffer for one device
        chosen_ET = chosen_BSE.reshape(-1, E).T
        choice_ET = jnp.arange(B * S) * E + jnp.arange(E)[:, None]
        chosen_XN = chosen_ET.reshape(X, -1)
        place_XN = jnp.cumsum(chosen_XN, axis=1) - 1 + jnp.arange(X)[:, None] * rows
        slot_XN = jnp.where(chosen_XN, place_XN, X * rows)
        empty_R = jnp.full(X * rows, -1)
        choices_R = empty_R.at[slot_XN.reshape(-1)].set(choice_ET.reshape(-1), mode="drop")
        counts_XE = jnp.sum(chosen_ET, axis=1, dtype=jnp.int32).reshape(X, -1)
        return ChosenRows(choices_R[None, None], swap(counts_XE, layout)[None, None])

    outs = ChosenRows(SOURCES, ROWS)  # pyright: ignore[reportArgumentType]
    return manual(local, layout, (STORED,), outs)(chosen_BSE)


def add_answers(rows_and_weights: tuple[Array, Array], choices: Array) -> Array:
    """Weigh the results of the experts and add each to its token, in float32; a function for
    `routers.each`.
    """
    rows, weights_BSE = rows_and_weights
    B, S, E = weights_BSE.shape
    choice_R = choices[0, 0]
    filled_R = choice_R >= 0
    safe_R = jnp.maximum(choice_R, 0)
    answers_RD = jnp.where(filled_R[:, None], rows[0, 0], 0).astype(jnp.float32)
    weight_R = jnp.where(filled_R, weights_BSE.reshape(-1)[safe_R], 0)
    nothing_TD = jnp.zeros((B * S, rows.shape[-1]), jnp.float32)
    sums_TD = nothing_TD.at[safe_R // E].add(weight_R[:, None] * answers_RD)
    return sums_TD.reshape(B, S, -1).astype(rows.dtype)
