"""Cross-entropy of the output layer without all of its logits: only some of the scores exist at a
time.

The gradient is made in the forward pass, while the scores are there (the idea of Hsu et al. 2024,
arXiv:2410.10989, section 3.2), and only the gradients of x and of the matrix are kept. In one form,
scores are made once, for some tokens at a time; for every such chunk the matrix is read and its
float32 gradient is added to. In the other, scores are made for some of the vocabulary at a time:
that slice of the matrix is gathered, and its gradient is made once, summed and scattered, before
the next slice. A token's softmax is then known only after the last slice, so scores are made twice:
four matmuls where three would do. `tiling` chooses the cheaper form.

Shapes: B batch, S sequence, T tokens of a chunk, N chunks or slices, D embed, V vocab.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.arguments import require_number, require_whole
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.sharding import Layout, LogicalAxis, PyTree, require_layout, state_axes
from jaxpar.kernels.attention.dispatch import say_once
from jaxpar.parallel.collectives import first_row, further_split, gather, manual, reduce, split_over
from jaxpar.parallel.cross_entropy.loss_terms import (
    LIKELIHOOD,
    HeadWeights,
    LossOptions,
    LossSums,
    LossWeights,
    Seen,
    SoftTargets,
    Targets,
    gradient_of_scores,
    join_devices,
    join_parts,
    make_scores,
    nothing_seen,
    see,
    sum_loss,
    teacher_targets,
)
from jaxpar.parallel.linear import GATHERED, STORED, gather_weight, require_head

__all__ = [
    "LIKELIHOOD",
    "LossSums",
    "LossWeights",
    "SoftTargets",
    "linear_cross_entropy",
    "teacher_targets",
    "tiling",
]

_HEAD: tuple[LogicalAxis, ...] = ("vocab", "embed")
_BIAS: tuple[LogicalAxis, ...] = ("vocab",)
_WEIGHTED = (*GATHERED[:2], None)
"""The logical axes of soft targets."""
_ROWS = 128  # chunks of more tokens than this are multiples of it: a matmul unit's rows
_SCORES = 2**27  # bytes of scores at a time: with more, no matmul is faster
_CHUNK = 1024  # tokens: in smaller chunks the matrix's gradient costs more than making scores twice


_SUMS: PyTree = LossSums((), (), ())  # pyright: ignore[reportArgumentType]


def linear_cross_entropy(
    x_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    labels_BS: Int[Array, "B S"],
    layout: Layout,
    *,
    bias_V: Float[Array, " V"] | None = None,
    vocab_size: int = 0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    soft: SoftTargets | None = None,
    alpha: float = 1.0,
    temperature: float = 1.0,
    loss_mib: int = 4096,
) -> LossSums:
    """Compute the summed cross-entropy of `x @ head.T + bias` against the labels, or against k
    weighted entries of the vocabulary a token; a token whose label is below zero does not count.

    With `soft` targets a token's loss is (1 - alpha) times that of its label, plus alpha times
    `temperature` squared times their cross-entropy at that temperature, whose gradients are then as
    large at any temperature (Hinton et al. 2015, arXiv:1503.02531, section 2).

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: the vocabulary matrix, with logical axes ("vocab", "embed"); its rows past
        `vocab_size` are padding.
      labels_BS: for each token the entry of the vocabulary that should follow.
      layout: mesh, rules and compute dtype.
      bias_V: what is added to the score of each entry, with the logical axis "vocab"; None =
        nothing is.
      vocab_size: the true vocabulary; 0 = all rows.
      z_loss: weight of the squared log-normaliser (arXiv:2204.02311, section 5).
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = as
        they are.
      label_smoothing: the share of a label's mass that is spread evenly over the true vocabulary,
        the label among it; padding gets none.
      soft: weighted entries of the vocabulary, whose weights are taken as they are: what they lack
        to one is left out. None = the labels alone.
      alpha: the share of the soft targets in the loss; without them it has no effect.
      temperature: what scores are divided by before the softmax that is held against the soft
        targets; without them it has no effect.
      loss_mib: how many MiB of a device the loss may hold: see `tiling`.

    Returns:
      Float32 sums over the labels that count, the same on every device; `nll` is that of the labels
      without smoothing.

    Raises:
      UserError: the rules split tokens and vocabulary over the same mesh axis, or an argument is
        out of its range.
    """
    require_layout(layout, "linear_cross_entropy")
    layout.sharding((*GATHERED[:2], "vocab"), name="loss")
    require_head("linear_cross_entropy", x_BSD, head_VD, layout, bias_V)
    layout.sharding(GATHERED[:2], labels_BS.shape, "labels")
    if labels_BS.shape != x_BSD.shape[:2] or not jnp.issubdtype(labels_BS.dtype, jnp.integer):
        raise UserError(
            f"linear_cross_entropy takes an integer label for each token {x_BSD.shape[:2]}, and "
            "was given "
            f"{labels_BS.dtype} of shape {labels_BS.shape}"
        )
    if soft is not None:
        soft = _require_soft(soft, labels_BS)
    require_whole("linear_cross_entropy", "vocab_size", vocab_size, least=0, most=head_VD.shape[0])
    require_number("linear_cross_entropy", "z_loss", z_loss, least=0)
    require_number("linear_cross_entropy", "softcap", softcap, least=0)
    require_number("linear_cross_entropy", "label_smoothing", label_smoothing, least=0, most=1)
    require_number("linear_cross_entropy", "alpha", alpha, least=0, most=1)
    require_number("linear_cross_entropy", "temperature", temperature, above=0)
    require_number("linear_cross_entropy", "loss_mib", loss_mib, above=0)
    how = LossOptions(
        vocab_size or head_VD.shape[0],
        z_loss,
        softcap,
        loss_mib,
        label_smoothing,
        alpha,
        temperature,
    )
    head = HeadWeights(head_VD, bias_V)
    sums = cast(LossSums, _sums(layout, how, x_BSD, head, Targets(labels_BS, soft)))
    return LossSums(sums.loss, jax.lax.stop_gradient(sums.nll), sums.tokens)


def _require_soft(soft: SoftTargets, labels_BS: Array) -> SoftTargets:
    """The soft targets in the form that is computed with; what is none is refused."""
    ids_BSk, weights_BSk = soft
    fits = ids_BSk.ndim == 3 and ids_BSk.shape[:2] == labels_BS.shape
    if not fits or ids_BSk.shape != weights_BSk.shape:
        raise UserError(
            "linear_cross_entropy takes soft targets with ids and weights [*labels.shape, k], with "
            f"labels of shape {labels_BS.shape}, and was given ids of shape {ids_BSk.shape} and "
            f"weights of shape {weights_BSk.shape}"
        )
    floats = jnp.issubdtype(weights_BSk.dtype, jnp.floating)
    if not (jnp.issubdtype(ids_BSk.dtype, jnp.integer) and floats):
        raise UserError(
            "linear_cross_entropy takes integer ids and float weights of soft targets, and was "
            f"given {ids_BSk.dtype} and {weights_BSk.dtype}"
        )
    weights_BSk = jax.lax.stop_gradient(weights_BSk.astype(jnp.float32))
    return SoftTargets(ids_BSk.astype(jnp.int32), weights_BSk)


def _sums_and_gradients(
    layout: Layout,
    how: LossOptions,
    x_BSD: Array,
    head: HeadWeights,
    targets: Targets,
    wanted: bool,
) -> tuple[LossSums, tuple[Array, HeadWeights] | None]:
    """Compute the sums and, where they are wanted, the gradients of x and of the head."""

    def local(
        x_BSD: Array, head: HeadWeights, targets: Targets
    ) -> tuple[LossSums, tuple[Array, HeadWeights] | None]:
        rows_BS = targets.labels.shape
        count_T = targets.labels.size
        x_TD = gather(x_BSD.astype(layout.dtype), STORED, GATHERED, layout).reshape(count_T, -1)
        of_tokens = jax.tree.map(lambda x: x.reshape(count_T, *x.shape[2:]), targets)
        tiles = tiling(len(x_TD), len(head.matrix), x_TD.shape[1], layout, how.loss_mib)
        if tiles.slices == 1:
            by = _by_chunks
            count = tiles.chunks
        else:
            by = _by_slices
            count = tiles.slices
        sums, gradients = by(x_TD, head, of_tokens, count, layout, how, wanted)
        axes = split_over(GATHERED[:2], layout)
        if axes:
            sums = jax.lax.psum(sums, axes)
        if gradients is None:
            return sums, None
        dx_BSD = gradients[0].reshape(*rows_BS, -1)
        dx_BSD = reduce(dx_BSD, layout.mesh_axes("vocab"), GATHERED, STORED, layout)
        dhead = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients[1], head)
        return sums, (dx_BSD.astype(x_BSD.dtype), dhead)

    bias_axes = None if head.bias is None else _BIAS
    dhead_axes = HeadWeights(state_axes(_HEAD), bias_axes)
    outs = (_SUMS, (STORED, dhead_axes) if wanted else None)
    weighted = None
    if targets.soft is not None:
        weighted = SoftTargets(_WEIGHTED, _WEIGHTED)  # pyright: ignore[reportArgumentType]
    axes = Targets(GATHERED[:2], weighted)  # pyright: ignore[reportArgumentType]
    run = manual(local, layout, (STORED, HeadWeights(_HEAD, bias_axes), axes), outs)
    return run(x_BSD, head, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(
    layout: Layout,
    how: LossOptions,
    x_BSD: Array,
    head: HeadWeights,
    targets: Targets,
) -> LossSums:
    return _sums_and_gradients(layout, how, x_BSD, head, targets, wanted=False)[0]


def _sums_backward(layout, how, gradients, cotangents):
    dx_BSD, dhead = jax.tree.map(
        lambda gradient: (gradient * cotangents.loss).astype(gradient.dtype), gradients
    )
    return dx_BSD, dhead, None


_sums.defvjp(partial(_sums_and_gradients, wanted=True), _sums_backward)


class Tiling(NamedTuple):
    """The number of chunks of a device's tokens, and the number of slices of its rows of the
    vocabulary matrix.
    """

    chunks: int
    slices: int


def tiling(
    tokens: int,
    rows: int,
    embed: int,
    layout: Layout,
    loss_mib: int,
) -> Tiling:
    """Choose the cheaper form of the loss, and one that holds no more than `loss_mib`, as far as
    that is possible.

    Each chunk of tokens reads the matrix twice, and reads and writes its float32 gradient: 12 bytes
    per entry. Slices make scores twice, at 2 FLOPs per token and entry, and gather the matrix
    again. Where a chip does 160 to 300 FLOPs in the time of a byte of its memory
    (`jaxpar.meshes.chips`), the two are equal at about `_CHUNK` tokens per chunk.

    The loss holds the scores and, where the matrix is split over `embed` too, the gathered part of
    it with its float32 gradient. In that case slices save this memory as well; otherwise chunks are
    made larger instead.

    Args:
      tokens: the number of tokens of one device.
      rows: the number of rows of the vocabulary matrix that one device scores.
      embed: the width D of the matrix, whole.
      layout: mesh, rules and compute dtype.
      loss_mib: how many MiB of a device the loss may hold.

    Returns:
      The numbers of chunks and slices, of which one is 1.
    """
    most = loss_mib * 2**20
    moved = further_split(state_axes(_HEAD), (_HEAD[0], None), layout)
    if moved:
        of_row = embed * (layout.dtype.itemsize + 4)
    else:
        of_row = 0
    left = most - rows * of_row
    fitting = max(min(left, _SCORES if moved else max(_SCORES, 4 * rows * _CHUNK)), 0) // (4 * rows)
    by_chunks = Tiling(-(-tokens // max(fitting // _ROWS * _ROWS, _ROWS)), 1)
    if fitting >= min(tokens, _CHUNK) or not moved:
        return by_chunks
    divisors = [
        n for n in range(2, rows + 1) if rows % n == 0 and rows // n >= min(rows // 2, _ROWS)
    ]
    fits = (
        n
        for n in divisors
        if rows // n * (of_row + 4 * tokens) <= most and 4 * tokens * rows // n <= _SCORES
    )
    slices = next(fits, 0)
    if not slices and left >= 4 * rows * min(tokens, _ROWS):
        return by_chunks
    slices = slices or max(divisors, default=1)
    instead = f"in place of chunks of {fitting} tokens: memory.loss_mib is {loss_mib}"
    say_once(f"loss by {slices} slices of the vocabulary, scores made twice, {instead}")
    return Tiling(1, slices)


# By chunks of a device's tokens. Here and below, inside `manual`: gradients of x have still to be
# summed over the devices that split the vocabulary, and those of the matrix are as they are stored.


def _by_chunks(
    x_TD: Array,
    head: HeadWeights,
    targets: Targets,
    chunks: int,
    layout: Layout,
    how: LossOptions,
    wanted: bool,
) -> tuple[LossSums, tuple[Array, HeadWeights] | None]:
    used_VD = gather_weight(head.matrix, _HEAD, layout)
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
        return (total, HeadWeights(dhead_VD, dbias_V)), jnp.matmul(
            dlogits_TV, used_VD, preferred_element_type=layout.dtype
        )

    nothing = jnp.zeros(())
    if wanted:
        dhead_zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), used)
    else:
        dhead_zeros = None
    zeros: PyTree = LossSums(nothing, nothing, nothing), dhead_zeros
    (total, dhead), dx_NTD = jax.lax.scan(add, zeros, _chunks(x_TD, targets, chunks))
    if not wanted:
        return total, None
    tokens = split_over(GATHERED[:2], layout)
    dhead_VD = reduce(dhead.matrix, tokens, ("vocab", None), state_axes(_HEAD), layout)
    dbias_V = _summed_bias(dhead.bias, tokens)
    dx_TD = dx_NTD.reshape(-1, x_TD.shape[1])[: len(x_TD)]
    return total, (dx_TD, HeadWeights(dhead_VD, dbias_V))


def _bias_gradient(dbias_V: Array | None, dlogits_TV: Array) -> Array | None:
    """Add what some tokens say of the bias to its gradient; None where there is no bias."""
    if dbias_V is None:
        return None
    return dbias_V + jnp.sum(dlogits_TV, axis=0)


def _summed_bias(dbias_V: Array | None, tokens: tuple[MeshAxis, ...]) -> Array | None:
    """The gradient of the bias over the devices that have other tokens."""
    if dbias_V is None or not tokens:
        return dbias_V
    return jax.lax.psum(dbias_V, tokens)


def _chunks(x_TD: Array, targets: Targets, N: int) -> tuple[Array, Targets]:
    """Cut tokens into N equal chunks [N, T, ...]; the last is filled up with tokens that do not
    count.
    """

    def cut(x_T: Array, filler: int = 0) -> Array:
        missing = -len(x_T) % N
        others = [(0, 0)] * (x_T.ndim - 1)
        padded = jnp.pad(x_T, ((0, missing), *others), constant_values=filler)
        return padded.reshape(N, -1, *x_T.shape[1:])

    return cut(x_TD), Targets(cut(targets.labels, -1), jax.tree.map(cut, targets.soft))


# By slices of the vocabulary.


def _by_slices(
    x_TD: Array,
    head: HeadWeights,
    targets: Targets,
    slices: int,
    layout: Layout,
    how: LossOptions,
    wanted: bool,
) -> tuple[LossSums, tuple[Array, HeadWeights] | None]:
    rows = len(head.matrix) // slices
    tokens = split_over(GATHERED[:2], layout)
    first_rows_N = first_row("vocab", len(head.matrix), layout) + rows * jnp.arange(slices)
    parts = _Slice(
        jax.tree.map(lambda x: x.reshape(slices, rows, *x.shape[1:]), head), first_rows_N
    )

    def add(seen: Seen, part: _Slice) -> tuple[Seen, None]:
        used = part.head._replace(matrix=gather_weight(part.head.matrix, _HEAD, layout))
        scores = make_scores(x_TD, used, part.first, how.vocab_size, how.softcap)
        return join_parts(seen, see(scores, targets, how), how), None

    seen, _ = jax.lax.scan(add, nothing_seen(targets, how), parts)
    sums, pull = sum_loss(join_devices(seen, layout, how), targets, how)
    if not wanted:
        return sums, None

    def pull_slice(dx_TD: Array, part: _Slice) -> tuple[Array, HeadWeights]:
        used = part.head._replace(matrix=gather_weight(part.head.matrix, _HEAD, layout))
        scores = make_scores(x_TD, used, part.first, how.vocab_size, how.softcap)
        dlogits_TV = gradient_of_scores(scores, targets, pull, how)
        dbias_V = None if part.head.bias is None else jnp.sum(dlogits_TV, axis=0)
        dlogits_TV = dlogits_TV.astype(layout.dtype)
        # Rows come last: a scatter over the first dim stays a scatter in this loop; XLA:TPU makes
        # others all-reduces.
        dhead_DV = jnp.matmul(x_TD.T, dlogits_TV, preferred_element_type=jnp.float32)
        dx_TD += jnp.matmul(dlogits_TV, used.matrix, preferred_element_type=jnp.float32)
        stored = state_axes(_HEAD)[::-1]
        dhead_DV = reduce(dhead_DV, tokens, (None, _HEAD[0]), stored, layout)
        return dx_TD, HeadWeights(dhead_DV, dbias_V)

    dx_TD, dhead_N = jax.lax.scan(pull_slice, jnp.zeros(x_TD.shape, jnp.float32), parts)
    dhead_NDV = dhead_N.matrix
    dhead_VD = dhead_NDV.swapaxes(1, 2).reshape(-1, dhead_NDV.shape[1])
    dbias_V = None if dhead_N.bias is None else _summed_bias(dhead_N.bias.reshape(-1), tokens)
    return sums, (dx_TD.astype(layout.dtype), HeadWeights(dhead_VD, dbias_V))


class _Slice(NamedTuple):
    """A device's slices of the vocabulary, or one of them."""

    head: HeadWeights
    """Rows of the matrix as they are stored, [N, V / N, D], and the bias, or those of one slice."""
    first: Array
    """The first of these rows in the whole vocabulary."""
