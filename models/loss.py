"""The loss of a batch: the scores of the last stream held against the labels, and what is added to
it for a teacher's hidden states and for routers.

Shapes: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from jaxpar.base.batch_arrays import TEACHER_HIDDEN
from jaxpar.base.layout.plan import Plan
from jaxpar.models.forward import Batch, run_head, run_to_head
from jaxpar.models.hidden import PROJECTIONS, hidden_loss
from jaxpar.models.parts import Params
from jaxpar.models.split import SplitModel
from jaxpar.parallel.cross_entropy import LossSums, LossWeights, SoftTargets, teacher_targets
from jaxpar.parallel.ops import LossCall
from jaxpar.parallel.padding import TokenCounts, count_tokens, with_text
from jaxpar.parallel.zigzag import in_natural_order, in_order


def loss_of_batch(
    model: SplitModel,
    params: Params,
    batch: Batch,
    plan: Plan,
    key: jax.Array | None,
    weights: LossWeights,
    counts: TokenCounts | None,
) -> LossSums:
    """Compute the summed loss of a batch; see `Model.loss`."""
    told = with_text(batch) if model.config.experts else batch
    ordered = in_order(told, plan, plan.context.strategy, plan.overlap.cuts_sequence)
    after = layers_learned(model, ordered)
    found = run_to_head(model, params, ordered, plan, key, after)
    soft = teacher_targets(ordered, weights.temperature)
    sums = loss_of_stream(model, params, found.last, ordered["labels"], plan, weights, soft)
    if after:
        far = _distance(model, params, found.after, ordered, plan)
        loss = sums.loss + weights.hidden * far
        sums = sums._replace(loss=loss, hidden=jax.lax.stop_gradient(far))
    routed = found.routed
    if routed is None:
        return sums
    if counts is None:
        counts = count_tokens(batch)
    means = weights.balance_loss * routed.balance + weights.router_z_loss * routed.z
    loss = sums.loss + counts.labels_per_token * means
    return sums._replace(loss=loss, routed=jax.lax.stop_gradient(routed))


def layers_learned(model: SplitModel, batch: Batch) -> tuple[int, ...]:
    """After how many layers the streams are that are held against a teacher's."""
    if model.projections is None or TEACHER_HIDDEN not in batch:
        return ()
    return tuple(pair.after(model.config.layers) for pair in model.projections.pairs)


def _distance(
    model: SplitModel,
    params: Params,
    streams: tuple[Array, ...],
    batch: Batch,
    plan: Plan,
) -> Float[Array, ""]:
    """The summed distance of the streams from a teacher's, in a batch that has them."""
    assert model.projections is not None
    with jax.named_scope("distill"):
        return hidden_loss(
            params[PROJECTIONS],
            model.projections.pairs,
            streams,
            batch[TEACHER_HIDDEN],
            batch["labels"],
            model.ops(plan),
        )


def loss_of_stream(
    model: SplitModel,
    params: Params,
    x_BSD: Float[Array, "B S D"],
    labels_BS: Int[Array, "B S"],
    plan: Plan,
    weights: LossWeights,
    soft: SoftTargets | None,
) -> LossSums:
    """Compute the summed loss of the last stream, without the routers' part and that of hidden
    states; see `Model.score`.
    """
    head = run_head(model, params, x_BSD, plan)
    with jax.named_scope("loss"):
        call = LossCall(
            head.scores(model.config),
            labels_BS,
            z_loss=weights.z_loss,
            label_smoothing=weights.label_smoothing,
            soft=soft,
            alpha=weights.alpha,
            temperature=weights.temperature,
        )
        return model.ops(plan).linear_cross_entropy(call)


def logits_of_batch(
    model: SplitModel, params: Params, batch: Batch, plan: Plan
) -> Float[Array, "B S V"]:
    """Compute next-token scores of the true vocabulary; see `Model.logits`."""
    order = (plan.context.strategy, plan.overlap.cuts_sequence)
    told = with_text(batch) if model.config.experts else batch
    found = run_to_head(model, params, in_order(told, plan, *order), plan, None, ())
    head = run_head(model, params, found.last, plan)
    scores_BSV = model.ops(plan).logits(head.scores(model.config))
    return in_natural_order(scores_BSV[..., : model.config.vocab_size], plan, *order)
