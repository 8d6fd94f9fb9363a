"""The most likely entries of the vocabulary for each token, with no array of all scores.

Scores exist for some tokens, or for some of the vocabulary, at a time, as in the loss
(`cross_entropy.tiling`).

Shapes: B batch, S sequence, T tokens, N chunks or slices, D embed, V vocab, k entries of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import Axes, Layout, require_layout
from jaxpar.base.number_checks import require_number, require_whole
from jaxpar.kernels.attention.call import MASKED
from jaxpar.parallel.collectives import first_row, gather, manual
from jaxpar.parallel.cross_entropy.choose_tiling import HEAD, tiling
from jaxpar.parallel.cross_entropy.loss_terms import HeadWeights, make_scores
from jaxpar.parallel.linear import GATHERED, STORED, gather_weight, require_head

_ENTRIES: Axes = (*GATHERED[:2], None)


class TopK(NamedTuple):
    """The k most likely entries of each token, the most likely first; among equals the lower number
    first.

    Attributes:
      ids: the entries' numbers in the vocabulary.
      log_probs: their log-probabilities in the whole vocabulary, float32.
    """

    ids: Int[Array, "B S k"]
    log_probs: Float[Array, "B S k"]


class _Found(NamedTuple):
    """The largest scores of some tokens in a part of the vocabulary, and sums over all scores."""

    ids_Tk: Array
    scores_Tk: Array
    most_T: Array
    total_T: Array
    """The sum of exp(score - most_T)."""


class _How(NamedTuple):
    """The options of `linear_top_k`, which are known while tracing."""

    k: int
    vocab_size: int
    softcap: float


def linear_top_k(
    x_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    k: int,
    layout: Layout,
    *,
    vocab_size: int = 0,
    softcap: float = 0.0,
    loss_mib: int = 4096,
) -> TopK:
    """Find the k largest scores of `x @ head.T` for each token, as log-probabilities.

    It has no gradient.

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: the vocabulary matrix, with logical axes ("vocab", "embed"); its rows past
        `vocab_size` are padding, and are no entries.
      k: how many entries are found, at most the size of the vocabulary.
      layout: mesh, rules and compute dtype.
      vocab_size: the size of the true vocabulary; 0 = all rows.
      softcap: scores become `softcap * tanh(score / softcap)`; 0 = they are taken as they are.
      loss_mib: how many MiB of a device's memory the scores may take (`choose_tiling.tiling`).

    Returns:
      The entries and their log-probabilities, with logical axes ("batch", "seq", None).

    Raises:
      UserError: the arrays do not fit together or to the mesh, or a number is out of its range.
    """
    require_layout(layout, "linear_top_k")
    layout.sharding((*GATHERED[:2], "vocab"), name="scores")
    require_head("linear_top_k", x_BSD, head_VD, layout)
    require_whole("linear_top_k", "vocab_size", vocab_size, least=0, most=head_VD.shape[0])
    require_number("linear_top_k", "softcap", softcap, least=0)
    require_number("linear_top_k", "loss_mib", loss_mib, above=0)
    entries = vocab_size or head_VD.shape[0]
    require_whole("linear_top_k", "k", k, least=1)
    if k > entries:
        raise UserError(f"linear_top_k: k={k} is more than the {entries} entries that there are")
    how = _How(k, entries, softcap)

    def local(x_BSD: Array, head_VD: Array) -> TopK:
        x_BSD = gather(x_BSD.astype(layout.dtype), STORED, GATHERED, layout)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[2])
        tiles = tiling(len(x_TD), len(head_VD), x_TD.shape[1], layout, loss_mib)
        if tiles.slices == 1:
            found = _by_chunks(x_TD, head_VD, tiles.chunks, layout, how)
        else:
            found = _by_slices(x_TD, head_VD, tiles.slices, layout, how)
        log_probs_Tk = found.scores_Tk - (found.most_T + jnp.log(found.total_T))[:, None]
        rows = x_BSD.shape[:2]
        return TopK(found.ids_Tk.reshape(*rows, k), log_probs_Tk.reshape(*rows, k))

    outs = TopK(_ENTRIES, _ENTRIES)  # pyright: ignore[reportArgumentType]
    return manual(local, layout, (STORED, HEAD), outs)(x_BSD, head_VD)


def _by_chunks(x_TD: Array, head_VD: Array, chunks: int, layout: Layout, how: _How) -> _Found:
    """Find the largest scores of some tokens at a time, in the whole vocabulary."""
    used_VD = gather_weight(head_VD, HEAD, layout)
    first = first_row("vocab", len(used_VD), layout)

    def find(x_TD: Array) -> _Found:
        return _join_devices(_find(x_TD, used_VD, first, how), layout, how)

    padded_TD = jnp.pad(x_TD, ((0, -len(x_TD) % chunks), (0, 0)))
    found_N = jax.lax.map(find, padded_TD.reshape(chunks, -1, x_TD.shape[1]))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: len(x_TD)], found_N)


def _by_slices(x_TD: Array, head_VD: Array, slices: int, layout: Layout, how: _How) -> _Found:
    """Find the largest scores of all tokens, in some of the vocabulary at a time."""
    rows = len(head_VD) // slices
    first_rows_N = first_row("vocab", len(head_VD), layout) + rows * jnp.arange(slices)

    def add(found: _Found, part: tuple[Array, Array]) -> tuple[_Found, None]:
        head_VD, first = part
        used_VD = gather_weight(head_VD, HEAD, layout)
        return _join(found, _find(x_TD, used_VD, first, how), how), None

    T = len(x_TD)
    nothing = _Found(
        jnp.zeros((T, how.k), jnp.int32),
        jnp.full((T, how.k), -jnp.inf, jnp.float32),
        jnp.full((T,), MASKED, jnp.float32),
        jnp.zeros((T,), jnp.float32),
    )
    parts = (head_VD.reshape(slices, rows, -1), first_rows_N)
    return _join_devices(jax.lax.scan(add, nothing, parts)[0], layout, how)


def _find(x_TD: Array, head_VD: Array, first: Array | int, how: _How) -> _Found:
    """Find the largest scores of a part of the vocabulary."""
    head = HeadWeights(head_VD, None)
    logits_TV = make_scores(x_TD, head, first, how.vocab_size, how.softcap).logits_TV
    scores_Tk, places_Tk = jax.lax.top_k(logits_TV, min(how.k, logits_TV.shape[1]))
    # A part of fewer rows than k fills up with what is never among the largest.
    filling = ((0, 0), (0, how.k - places_Tk.shape[1]))
    most_T = scores_Tk[:, 0]
    return _Found(
        jnp.pad(places_Tk + first, filling),
        jnp.pad(scores_Tk, filling, constant_values=-jnp.inf),
        most_T,
        jnp.sum(jnp.exp(logits_TV - most_T[:, None]), axis=-1),
    )


def _join(found: _Found, new: _Found, how: _How) -> _Found:
    """Join the results of two parts of the vocabulary, of which `new` is the later."""
    most_T = jnp.maximum(found.most_T, new.most_T)
    total_T = found.total_T * jnp.exp(found.most_T - most_T)
    total_T += new.total_T * jnp.exp(new.most_T - most_T)
    ids_TK = jnp.concatenate([found.ids_Tk, new.ids_Tk], axis=1)
    scores_TK = jnp.concatenate([found.scores_Tk, new.scores_Tk], axis=1)
    return _Found(*_largest(ids_TK, scores_TK, how), most_T, total_T)


def _join_devices(found: _Found, layout: Layout, how: _How) -> _Found:
    """Join the results of the devices that split the vocabulary, in its order."""
    axes = layout.mesh_axes("vocab")
    if not axes:
        return found
    most_T = jax.lax.pmax(found.most_T, axes)
    total_T = jax.lax.psum(found.total_T * jnp.exp(found.most_T - most_T), axes)
    ids_TK = jax.lax.all_gather(found.ids_Tk, axes, axis=1, tiled=True)
    scores_TK = jax.lax.all_gather(found.scores_Tk, axes, axis=1, tiled=True)
    return _Found(*_largest(ids_TK, scores_TK, how), most_T, total_T)


def _largest(ids_TK: Array, scores_TK: Array, how: _How) -> tuple[Array, Array]:
    """Return the k largest of some scores, with their entries."""
    scores_Tk, places_Tk = jax.lax.top_k(scores_TK, how.k)
    return jnp.take_along_axis(ids_TK, places_Tk, axis=1), scores_Tk
