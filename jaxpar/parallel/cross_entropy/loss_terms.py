"""The terms of a token's loss, where only some of the vocabulary's scores are there at a time.

The loss of a token with scores z, label y, weights w of some entries, and n entries in the
vocabulary is

    (1 - alpha) [lse(z) - (1 - epsilon) z_y - epsilon / n sum_v z_v]
      + alpha T^2 [sum_k w_k lse(z / T) - sum_k w_k z_k / T]
      + z_loss lse(z)^2

with label smoothing epsilon (Szegedy et al. 2015, arXiv:1512.00567, section 7) and a teacher's
weights at temperature T (Hinton et al. 2015, arXiv:1503.02531, section 2). Every term is a sum over
the vocabulary, or a log-sum-exp, so that the terms of parts of the vocabulary are computed one
after another, or on one device each, and joined.

Shapes: B batch, S sequence, T tokens, V entries of the vocabulary, D embed, k weighted entries of
a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.batch_arrays import TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.layout.sharding import Layout, PyTree
from jaxpar.kernels.attention.call import MASKED, cap_scores, through_cap
from jaxpar.parallel.experts import RouterSums


class LossSums(NamedTuple):
    """Sums over the tokens that count, so that microbatches and shards add up exactly.

    Attributes:
      loss: the sum that is differentiated, in nats: the negative log-likelihood, and where they are
        asked for label smoothing, a teacher's part, the z-loss, `routed` and `hidden`.
      nll: the negative log-likelihood of the labels in nats; no gradient flows through it.
      tokens: how many labels count.
      routed: the router's means over the layers, which the loss includes, weighted; None in a model
        without experts.
      hidden: the distance of hidden states from a teacher's, which the loss includes, weighted;
        None where no teacher's hidden states are learned.
    """

    loss: Float[Array, ""]
    nll: Float[Array, ""]
    tokens: Float[Array, ""]
    routed: RouterSums | None = None
    hidden: Float[Array, ""] | None = None


class LossWeights(NamedTuple):
    """The weights of the terms beside the likelihood, as the fields of
    `jaxpar.base.config.TrainConfig` and `DistillConfig` of these names explain them.
    """

    z_loss: float = 0.0
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    label_smoothing: float = 0.0
    alpha: float = 0.0
    temperature: float = 1.0
    hidden: float = 0.0


LIKELIHOOD = LossWeights()  # nothing is added to it


class SoftTargets(NamedTuple):
    """Weighted entries of the vocabulary for each token: a part of a distribution.

    The weights of a token need not add up to one. The mass that they lack pulls at no score, and
    the token counts for as much less. The weights of an entry that is named twice add up, and an id
    below zero or past the vocabulary has no weight.

    Attributes:
      ids: the entries' numbers in the vocabulary.
      weights: float32; no gradient flows through them.
    """

    ids: Int[Array, "B S k"]
    weights: Float[Array, "B S k"]


def teacher_targets(batch: Mapping[str, Array], temperature: float) -> SoftTargets | None:
    """Make soft targets of a teacher's most likely entries: its distribution at a temperature, over
    those entries alone.

    The mass of the other entries is left out, and the weights are scaled to a sum of one: the loss
    is least where the student has the teacher's odds between the entries, and nothing elsewhere.

    Args:
      batch: the arrays of a batch, [B, S, ...].
      temperature: the divisor of the teacher's scores.

    Returns:
      The targets; None where the batch has none of a teacher.
    """
    if TEACHER_IDS not in batch:
        return None
    weights_BSk = jax.nn.softmax(batch[TEACHER_LOG_PROBS] / temperature, axis=-1)
    return SoftTargets(batch[TEACHER_IDS], weights_BSk)


class Targets(NamedTuple):
    """The targets that the scores of some tokens are compared with: [B, S] and [B, S, k], or [T]
    and [T, k].
    """

    labels: Array
    soft: SoftTargets | None


class HeadWeights(NamedTuple):
    """The weights that make the scores, or their gradients, or their logical axes; the bias is None
    where there is none.
    """

    matrix: PyTree
    bias: PyTree


class LossOptions(NamedTuple):
    """The options by which scores become a loss. `linear_cross_entropy` explains the fields, its
    arguments.
    """

    vocab_size: int
    z_loss: float
    softcap: float
    loss_mib: int
    label_smoothing: float
    alpha: float
    temperature: float


class Scores(NamedTuple):
    """The scores of some tokens for a part of the vocabulary."""

    logits_TV: Array
    """Float32, and `MASKED` where the vocabulary is padded."""
    first: Array | int
    """The number of the first entry in the whole vocabulary."""

    @property
    def entries_V(self) -> Array:
        """The entries' numbers in the whole vocabulary."""
        return self.first + jnp.arange(self.logits_TV.shape[1])


class Seen(NamedTuple):
    """Sums over the scores of each token in a part of the vocabulary.

    Attributes:
      most: the largest score.
      total: the sum of exp(score - most).
      label: the score of the label.
      soft_total: the sum of exp((score - most) / temperature); None where that is not needed.
      soft: the weighted sum of the scores of the soft targets; None where there are none.
      all: the sum of the scores; None without label smoothing.
    """

    most: Array
    total: Array
    label: Array
    soft_total: Array | None
    soft: Array | None
    all: Array | None


class Pull(NamedTuple):
    """The values of each token from which the gradient of the scores is computed, once the whole
    vocabulary has been seen.

    Attributes:
      counts: 1 for a token that counts, 0 for another.
      lse: the log-sum-exp of the scores.
      dlse: the gradient of the loss by `lse`.
      soft_lse: the log-sum-exp of the scores over the temperature; None where that is not needed.
      dsoft_lse: the gradient of the loss by `soft_lse`.
    """

    counts: Array
    lse: Array
    dlse: Array
    soft_lse: Array | None
    dsoft_lse: Array | None


def make_scores(
    x_TD: Array,
    head: HeadWeights,
    first: Array | int,
    vocab_size: int,
    softcap: float,
) -> Scores:
    """Compute the float32 scores of the rows of a head, the first of which is the entry `first`."""
    logits_TV = jnp.matmul(x_TD, head.matrix.T, preferred_element_type=jnp.float32)
    if head.bias is not None:
        logits_TV += head.bias.astype(jnp.float32)
    scores = Scores(cap_scores(logits_TV, softcap), first)
    there = scores.entries_V < vocab_size
    return scores._replace(logits_TV=jnp.where(there, scores.logits_TV, MASKED))


def see(scores: Scores, targets: Targets, how: LossOptions) -> Seen:
    """Sum over a part of the vocabulary for each token."""
    logits_TV = scores.logits_TV
    most_T = jnp.max(logits_TV, axis=-1)
    below_TV = logits_TV - most_T[:, None]
    # The label's score is a masked sum, not a gather, which stays local to each vocabulary shard.
    is_label_TV = scores.entries_V == targets.labels[:, None]
    soft_T = None
    soft_total_T = None
    all_T = None
    if targets.soft is not None:
        own = _own_targets(scores, targets.soft, how)
        there_Tk = jnp.minimum(own.ids, logits_TV.shape[1] - 1)
        scores_Tk = jnp.take_along_axis(logits_TV, there_Tk, axis=1)
        soft_T = jnp.sum(own.weights * scores_Tk, axis=-1)
        if how.temperature != 1:
            soft_total_T = jnp.sum(jnp.exp(below_TV / how.temperature), axis=-1)
    if how.label_smoothing:
        there_V = scores.entries_V < how.vocab_size
        all_T = jnp.sum(jnp.where(there_V, logits_TV, 0), axis=-1)
    return Seen(
        most_T,
        jnp.sum(jnp.exp(below_TV), axis=-1),
        jnp.sum(jnp.where(is_label_TV, logits_TV, 0), axis=-1),
        soft_total_T,
        soft_T,
        all_T,
    )


def nothing_seen(targets: Targets, how: LossOptions) -> Seen:
    """Make the sums over no part of the vocabulary, with which summing begins."""
    zeros_T = jnp.zeros(targets.labels.shape, jnp.float32)
    soft = targets.soft is not None
    return Seen(
        zeros_T + MASKED,
        zeros_T,
        zeros_T,
        zeros_T if soft and how.temperature != 1 else None,
        zeros_T if soft else None,
        zeros_T if how.label_smoothing else None,
    )


def join_parts(seen: Seen, new: Seen, how: LossOptions) -> Seen:
    """Join the sums over two parts of the vocabulary."""
    most_T = jnp.maximum(seen.most, new.most)
    both = (_relative_to(most_T, one, how) for one in (seen, new))
    return jax.tree.map(jnp.add, *both)._replace(most=most_T)


def join_devices(seen: Seen, layout: Layout, how: LossOptions) -> Seen:
    """Join the sums of the devices that split the vocabulary."""
    axes = layout.mesh_axes("vocab")
    if not axes:
        return seen
    most_T = jax.lax.pmax(seen.most, axes)
    return jax.lax.psum(_relative_to(most_T, seen, how)._replace(most=None), axes)._replace(
        most=most_T
    )


def _relative_to(most_T: Array, seen: Seen, how: LossOptions) -> Seen:
    """Make the sums of exponentials relative to another score."""
    below_T = seen.most - most_T
    soft_total_T = seen.soft_total
    if soft_total_T is not None:
        soft_total_T = soft_total_T * jnp.exp(below_T / how.temperature)
    return seen._replace(total=seen.total * jnp.exp(below_T), soft_total=soft_total_T)


def sum_loss(seen: Seen, targets: Targets, how: LossOptions) -> tuple[LossSums, Pull]:
    """Sum the loss of tokens of which the whole vocabulary has been seen."""
    lse_T = seen.most + jnp.log(seen.total)
    counts_T = (targets.labels >= 0).astype(jnp.float32)
    nll_T = lse_T - seen.label
    loss_T = nll_T
    dlse_T = 1.0
    soft_lse_T = None
    dsoft_lse_T = None
    if seen.all is not None:
        # Both terms are relative to the log-sum-exp, as the masses add up to one.
        even_T = lse_T - seen.all / how.vocab_size
        loss_T = (1 - how.label_smoothing) * nll_T + how.label_smoothing * even_T
    if targets.soft is not None and seen.soft is not None:
        T = how.temperature
        mass_T = _mass(targets.soft, how)
        soft_lse_T = lse_T
        if seen.soft_total is not None:
            soft_lse_T = seen.most / T + jnp.log(seen.soft_total)
        soft_loss_T = T**2 * (mass_T * soft_lse_T - seen.soft / T)
        loss_T = (1 - how.alpha) * loss_T + how.alpha * soft_loss_T
        dlse_T = 1 - how.alpha
        dsoft_lse_T = counts_T * how.alpha * T * mass_T
    loss = jnp.sum(counts_T * (loss_T + how.z_loss * jnp.square(lse_T)))
    sums = LossSums(loss, jnp.sum(counts_T * nll_T), jnp.sum(counts_T))
    dlse_T = counts_T * (dlse_T + 2 * how.z_loss * lse_T)
    return sums, Pull(counts_T, lse_T, dlse_T, soft_lse_T, dsoft_lse_T)


def gradient_of_scores(scores: Scores, targets: Targets, pull: Pull, how: LossOptions) -> Array:
    """Compute the gradient of a part's scores [T, V], before their soft cap."""
    logits_TV = scores.logits_TV
    is_label_TV = scores.entries_V == targets.labels[:, None]
    dlogits_TV = pull.dlse[:, None] * jnp.exp(logits_TV - pull.lse[:, None])
    alpha = 0.0 if targets.soft is None else how.alpha
    label_T = pull.counts * ((1 - alpha) * (1 - how.label_smoothing))
    dlogits_TV -= jnp.where(is_label_TV, label_T[:, None], 0)
    if how.label_smoothing:
        even_T = pull.counts * ((1 - alpha) * how.label_smoothing / how.vocab_size)
        there_V = scores.entries_V < how.vocab_size
        dlogits_TV -= jnp.where(there_V, even_T[:, None], 0)
    if targets.soft is not None and pull.soft_lse is not None and pull.dsoft_lse is not None:
        T = how.temperature
        soft_TV = jnp.exp(logits_TV / T - pull.soft_lse[:, None])
        dlogits_TV += pull.dsoft_lse[:, None] * soft_TV
        own = _own_targets(scores, targets.soft, how)
        pulled_Tk = pull.counts[:, None] * (alpha * T) * own.weights
        rows_T1 = jnp.arange(len(logits_TV))[:, None]
        dlogits_TV = dlogits_TV.at[rows_T1, own.ids].add(-pulled_Tk, mode="drop")
    return through_cap(dlogits_TV, logits_TV, how.softcap)


def _own_targets(scores: Scores, soft: SoftTargets, how: LossOptions) -> SoftTargets:
    """Number the soft targets by their places in this part of the vocabulary; the targets of other
    parts stand just past its end, without weight.
    """
    rows = scores.logits_TV.shape[1]
    places_Tk = soft.ids - scores.first
    own_Tk = _has_weight(soft, how) & (places_Tk >= 0) & (places_Tk < rows)
    return SoftTargets(jnp.where(own_Tk, places_Tk, rows), jnp.where(own_Tk, soft.weights, 0))


def _has_weight(soft: SoftTargets, how: LossOptions) -> Array:
    return (soft.ids >= 0) & (soft.ids < how.vocab_size)


def _mass(soft: SoftTargets, how: LossOptions) -> Array:
    """Sum the weights of each token."""
    return jnp.sum(jnp.where(_has_weight(soft, how), soft.weights, 0), axis=-1)
