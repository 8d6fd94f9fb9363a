"""The loss of a device's tokens and its gradients, while only some of the scores exist at a time.

In one form, scores are computed once, for some tokens at a time; for every such chunk the matrix is
read, and its float32 gradient is read and written. In the other, scores are computed for some of
the vocabulary at a time: that slice of the matrix is gathered, and its gradient is computed once,
summed and scattered, before the next slice. A token's softmax is then known only after the last
slice, so scores are computed twice: four matmuls where three would do. `choose_tiling` chooses the
cheaper form.

All of it runs inside `manual`. The gradients of x that it returns have still to be summed over the
devices that split the vocabulary; the gradients of the matrix are laid out as they are stored.

Shapes: T tokens of a chunk, N chunks or slices, D embed, V vocab.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.sharding import Layout, PyTree, state_axes
from jaxpar.parallel.collectives import first_row, reduce, split_over
from jaxpar.parallel.cross_entropy.choose_tiling import HEAD
from jaxpar.parallel.cross_entropy.loss_terms import (
    HeadWeights,
    LossOptions,
    LossSums,
    Scores,
    Seen,
    Targets,
    gradient_of_scores,
    join_devices,
    join_parts,
    make_scores,
    nothing_seen,
    see,
    sum_loss,
)
from jaxpar.parallel.linear import GATHERED, gather_weight

Gradients = tuple[Array, HeadWeights]
"""The gradients of x and of the head."""


def sums_by_chunks(
    x_TD: Array,
    head: HeadWeights,
    targets: Targets,
    chunks: int,
    layout: Layout,
    how: LossOptions,
    wanted: bool,
) -> tuple[LossSums, Gradients | None]:
    """Sum the loss of a device's tokens, some of them at a time.

    Args:
      x_TD: the tokens' hidden states, in the compute dtype.
      head: the device's rows of the vocabulary matrix, as they are stored, and of the bias.
      targets: the labels and soft targets that the scores are compared with.
      chunks: the number of chunks of tokens.
      how: how scores become a loss.
      wanted: whether gradients are wanted.

    Returns:
      The sums over these tokens, and the gradients where they are wanted.
    """
    used_VD = gather_weight(head.matrix, HEAD, layout)
    used = HeadWeights(used_VD, head.bias)
    first = first_row("vocab", len(used_VD), layout)

    def add(carry: PyTree, chunk: tuple[Array, Targets]) -> tuple[PyTree, PyTree]:
        (total, dhead) = carry
        (x_TD, targets) = chunk
        scores = make_scores(x_TD, used, first, how.vocab_size, how.softcap)
        seen = join_devices(see(scores, targets, how), layout, how)
        sums, pull = sum_loss(seen, targets, how)
        total = jax.tree.map(jnp.add, total, sums)
        if not wanted:
            return (total, None), None
        dlogits_TV = gradient_of_scores(scores, targets, pull, how)
        dbias_V = _bias_gradient(dhead.bias, dlogits_TV)
        dlogits_TV = dlogits_TV.astype(layout.dtype)
        dhead_VD = dhead.matrix
        dhead_VD += jnp.matmul(dlogits_TV.T, x_TD, preferred_element_type=jnp.float32)
        dx_TD = jnp.matmul(dlogits_TV, used_VD, preferred_element_type=layout.dtype)
        return (total, HeadWeights(dhead_VD, dbias_V)), dx_TD

    nothing = jnp.zeros((), jnp.float32)
    if wanted:
        dhead_zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), used)
    else:
        dhead_zeros = None
    zeros: PyTree = LossSums(nothing, nothing, nothing), dhead_zeros
    (total, dhead), dx_NTD = jax.lax.scan(add, zeros, _chunks(x_TD, targets, chunks))
    if not wanted:
        return total, None
    tokens = split_over(GATHERED[:2], layout)
    dhead_VD = reduce(dhead.matrix, tokens, ("vocab", None), state_axes(HEAD), layout)
    dbias_V = _summed_bias(dhead.bias, tokens)
    dx_TD = dx_NTD.reshape(-1, x_TD.shape[1])[: len(x_TD)]
    return total, (dx_TD, HeadWeights(dhead_VD, dbias_V))


def _bias_gradient(dbias_V: Array | None, dlogits_TV: Array) -> Array | None:
    """Add the gradient that some tokens have for the bias; None where there is no bias."""
    if dbias_V is None:
        return None
    return dbias_V + jnp.sum(dlogits_TV, axis=0)


def _summed_bias(dbias_V: Array | None, tokens: tuple[MeshAxis, ...]) -> Array | None:
    """Sum the gradient of the bias over the devices that have other tokens."""
    if dbias_V is None or not tokens:
        return dbias_V
    return jax.lax.psum(dbias_V, tokens)


def _chunks(x_TD: Array, targets: Targets, N: int) -> tuple[Array, Targets]:
    """Cut tokens into N equal chunks [N, T, ...]; the last is padded with tokens that do not
    count.
    """

    def cut(x_T: Array, filler: int = 0) -> Array:
        missing = -len(x_T) % N
        others = [(0, 0)] * (x_T.ndim - 1)
        padded = jnp.pad(x_T, ((0, missing), *others), constant_values=filler)
        return padded.reshape(N, -1, *x_T.shape[1:])

    return cut(x_TD), Targets(cut(targets.labels, -1), jax.tree.map(cut, targets.soft))


def sums_by_slices(
    x_TD: Array,
    head: HeadWeights,
    targets: Targets,
    slices: int,
    layout: Layout,
    how: LossOptions,
    wanted: bool,
) -> tuple[LossSums, Gradients | None]:
    """Sum the loss of a device's tokens, some of the vocabulary at a time.

    It takes and returns what `sums_by_chunks` does, with a number of slices of the vocabulary in
    place of the number of chunks.
    """
    rows = len(head.matrix) // slices
    tokens = split_over(GATHERED[:2], layout)
    first_rows_N = first_row("vocab", len(head.matrix), layout) + rows * jnp.arange(slices)
    parts = _Slice(
        jax.tree.map(lambda x: x.reshape(slices, rows, *x.shape[1:]), head), first_rows_N
    )

    def score(part: _Slice) -> tuple[Array, Scores]:
        used = part.head._replace(matrix=gather_weight(part.head.matrix, HEAD, layout))
        return used.matrix, make_scores(x_TD, used, part.first, how.vocab_size, how.softcap)

    def add(seen: Seen, part: _Slice) -> tuple[Seen, None]:
        _, scores = score(part)
        return join_parts(seen, see(scores, targets, how), how), None

    seen, _ = jax.lax.scan(add, nothing_seen(targets, how), parts)
    sums, pull = sum_loss(join_devices(seen, layout, how), targets, how)
    if not wanted:
        return sums, None

    def pull_slice(dx_TD: Array, part: _Slice) -> tuple[Array, HeadWeights]:
        used_VD, scores = score(part)
        dlogits_TV = gradient_of_scores(scores, targets, pull, how)
        dbias_V = None if part.head.bias is None else jnp.sum(dlogits_TV, axis=0)
        dlogits_TV = dlogits_TV.astype(layout.dtype)
        # Rows come last: a scatter over the first dim stays a scatter in this loop; XLA:TPU makes
        # others all-reduces.
        dhead_DV = jnp.matmul(x_TD.T, dlogits_TV, preferred_element_type=jnp.float32)
        dx_TD += jnp.matmul(dlogits_TV, used_VD, preferred_element_type=jnp.float32)
        stored = state_axes(HEAD)[::-1]
        dhead_DV = reduce(dhead_DV, tokens, (None, HEAD[0]), stored, layout)
        return dx_TD, HeadWeights(dhead_DV, dbias_V)

    dx_TD, dhead_N = jax.lax.scan(pull_slice, jnp.zeros(x_TD.shape, jnp.float32), parts)
    dhead_NDV = dhead_N.matrix
    dhead_VD = dhead_NDV.swapaxes(1, 2).reshape(-1, dhead_NDV.shape[1])
    dbias_V = None if dhead_N.bias is None else _summed_bias(dhead_N.bias.reshape(-1), tokens)
    return sums, (dx_TD.astype(layout.dtype), HeadWeights(dhead_VD, dbias_V))


class _Slice(NamedTuple):
    """The N slices of a device's rows of the vocabulary, or one of them."""

    head: HeadWeights
    """The rows of the matrix as they are stored, [N, V / N, D], and of the bias; of one slice
    without N."""
    first: Array
    """The number of a slice's first row in the whole vocabulary."""
