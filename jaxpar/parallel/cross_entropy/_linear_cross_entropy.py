"""Cross-entropy of the output layer without all of its logits: only some of the scores exist at a
time.

The gradient is computed in the forward pass, while the scores are there (the idea of Hsu et al.
2024, arXiv:2410.10989, section 3.2), and only the gradients of x and of the matrix are kept. This
module has the op with its checks and its gradient; `in_pieces` has the computation of each device.

Shapes: B batch, S sequence, T tokens, D embed, V vocab, k weighted entries of a token.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import Axes, Layout, PyTree, require_layout, state_axes
from jaxpar.base.number_checks import require_number, require_whole
from jaxpar.parallel.collectives import gather, manual, reduce, split_over
from jaxpar.parallel.cross_entropy.choose_tiling import HEAD, tiling
from jaxpar.parallel.cross_entropy.in_pieces import Gradients, sums_by_chunks, sums_by_slices
from jaxpar.parallel.cross_entropy.loss_terms import (
    HeadWeights,
    LossOptions,
    LossSums,
    SoftTargets,
    Targets,
)
from jaxpar.parallel.linear import GATHERED, STORED, require_head

_BIAS: Axes = ("vocab",)
_WEIGHTED: Axes = (*GATHERED[:2], None)
"""The logical axes of soft targets."""
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

    With `soft` targets a token's loss is (1 - alpha) times its label's cross-entropy, plus alpha
    times `temperature` squared times the targets' cross-entropy at that temperature, whose
    gradients are then as large at any temperature (Hinton et al. 2015, arXiv:1503.02531,
    section 2).

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: the vocabulary matrix, with logical axes ("vocab", "embed"); its rows past
        `vocab_size` are padding.
      labels_BS: for each token the entry of the vocabulary that should follow.
      layout: mesh, rules and compute dtype.
      bias_V: the bias that is added to each entry's score, with the logical axis "vocab"; None =
        nothing is added.
      vocab_size: the size of the true vocabulary; 0 = all rows.
      z_loss: the weight of the squared log-normaliser (arXiv:2204.02311, section 5).
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 =
        they are taken as they are.
      label_smoothing: the share of a label's mass that is spread evenly over the true vocabulary,
        the label among it; padding gets none.
      soft: weighted entries of the vocabulary. Their weights are taken as they are, and need not
        add up to one. None = the labels alone.
      alpha: the share of the soft targets in the loss; without them it has no effect.
      temperature: the divisor of the scores before the softmax that is compared with the soft
        targets; without them it has no effect.
      loss_mib: how many MiB of a device's memory the loss may take (`choose_tiling.tiling`).

    Returns:
      Float32 sums over the labels that count, the same on every device; `nll` is the sum for the
      labels without smoothing.

    Raises:
      UserError: the rules split tokens and vocabulary over the same mesh axis, or an argument is
        out of its range.
    """
    require_layout(layout, "linear_cross_entropy")
    layout.sharding((*GATHERED[:2], "vocab"), name="loss")
    require_head("linear_cross_entropy", x_BSD, head_VD, layout, bias_V)
    _require_labels(labels_BS, x_BSD.shape[:2], layout)
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


def _require_labels(labels_BS: Array, tokens: tuple[int, ...], layout: Layout) -> None:
    """Refuse labels that are not one integer for each token."""
    layout.sharding(GATHERED[:2], labels_BS.shape, "labels")
    if labels_BS.shape != tokens or not jnp.issubdtype(labels_BS.dtype, jnp.integer):
        raise UserError(
            f"linear_cross_entropy takes an integer label for each token {tokens}, and was given "
            f"{labels_BS.dtype} of shape {labels_BS.shape}"
        )


def _require_soft(soft: SoftTargets, labels_BS: Array) -> SoftTargets:
    """Return the soft targets in the form that is computed with, and refuse those that do not fit
    the labels.
    """
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
) -> tuple[LossSums, Gradients | None]:
    """Compute the sums and, where they are wanted, the gradients of x and of the head."""

    def local(
        x_BSD: Array, head: HeadWeights, targets: Targets
    ) -> tuple[LossSums, Gradients | None]:
        rows_BS = targets.labels.shape
        count_T = targets.labels.size
        x_TD = gather(x_BSD.astype(layout.dtype), STORED, GATHERED, layout).reshape(count_T, -1)
        of_tokens = jax.tree.map(lambda x: x.reshape(count_T, *x.shape[2:]), targets)
        tiles = tiling(len(x_TD), len(head.matrix), x_TD.shape[1], layout, how.loss_mib)
        if tiles.slices == 1:
            by = sums_by_chunks
            count = tiles.chunks
        else:
            by = sums_by_slices
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
    dhead_axes = HeadWeights(state_axes(HEAD), bias_axes)
    outs = (_SUMS, (STORED, dhead_axes) if wanted else None)
    weighted = None
    if targets.soft is not None:
        weighted = SoftTargets(_WEIGHTED, _WEIGHTED)  # pyright: ignore[reportArgumentType]
    axes = Targets(GATHERED[:2], weighted)  # pyright: ignore[reportArgumentType]
    run = manual(local, layout, (STORED, HeadWeights(HEAD, bias_axes), axes), outs)
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
