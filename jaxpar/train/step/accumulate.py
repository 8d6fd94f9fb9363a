"""The loss and the gradient of a global batch, one microbatch at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.base.config import Config
from jaxpar.base.layout.plan import (
    Plan,
    deferred_sum_axes,
    gradient_dtype,
    plan_without_batch_axes,
)
from jaxpar.base.layout.sharding import Axes, state_axes
from jaxpar.models import AnyModel, Batch, Model, OwnModel, Params, in_parts
from jaxpar.parallel import pipeline
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.cross_entropy import LossSums, LossWeights
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.padding import TokenCounts, count_tokens
from jaxpar.train.batch import cut_microbatches
from jaxpar.train.experiment import Experiment
from jaxpar.train.state import gradient_axes


def gradients(
    experiment: Experiment, params: Params, batch: Batch, key: jax.Array | None
) -> tuple[LossSums, Params]:
    """Compute the summed loss of a global batch and its float32 gradient, one of
    `train.accumulation` microbatches at a time.

    The gradient is that of the parameters that are trained (`Model.trained`), and no other is made.
    They are sums and not means, so that dividing by the total token count weighs every token alike,
    however they were split; the losses of routers take their weight from the counts of the whole
    batch (see `Model.loss`). Where each device can add up its own, devices are summed after the
    last microbatch (`deferred_sum_axes`).

    Args:
      experiment: what is trained.
      params: all its parameters.
      batch: the global batch [B, S].
      key: what dropout is drawn by; None = there is none.
    """
    model = experiment.model
    plan = experiment.plan
    accumulation = experiment.config.train.accumulation
    counts = count_tokens(batch) if model.config.experts else None
    how = _How(model, plan, accumulation, loss_weights(experiment.config), counts)
    looks_at_all = bool(model.config.experts) or isinstance(model, OwnModel)
    over = deferred_sum_axes(plan, accumulation, key is not None or looks_at_all)
    if not over:
        return _accumulate(how, params, batch, key)
    one = plan_without_batch_axes(plan, over)
    axes = (jax.tree.map(lambda _: (), _no_sums(model, batch)), gradient_axes(model))

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x.astype(jnp.float32), over).astype(x.dtype)

    def local(params: Params, batch: Batch) -> tuple[LossSums, Params]:
        parts = _accumulate(how._replace(plan=one), params, batch, None)
        with jax.named_scope("accumulate"):
            return manual(lambda parts: jax.tree.map(total, parts), one, (axes,), axes)(parts)

    # Axes of one device are manual too: if no other axis is left, XLA has nothing to split around a
    # kernel.
    here = {
        *over,
        *(axis for axis, size in plan.mesh.shape.items() if size == 1),
    }
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(P(), P(over)),
        out_specs=P(),
        axis_names=here,
        check_vma=False,
    )(params, dict(batch))


class _How(NamedTuple):
    """How the loss of a batch is made.

    Attributes:
      model: what has it.
      plan: how it runs.
      accumulation: how many microbatches the batch is cut into.
      weights: those of the losses beside the likelihood.
      counts: the tokens of the whole batch, by which routers' losses are weighed.
    """

    model: AnyModel
    plan: Plan
    accumulation: int
    weights: LossWeights
    counts: TokenCounts | None


def _accumulate(
    how: _How, params: Params, batch: Batch, key: jax.Array | None
) -> tuple[LossSums, Params]:
    """Add up the losses and gradients of the microbatches of a batch."""
    model = how.model
    plan = how.plan
    if how.accumulation == 1:
        return _of_microbatch(how, params, batch, key)

    def add(
        total: tuple[LossSums, Params], item: tuple[Batch, jax.Array]
    ) -> tuple[tuple[LossSums, Params], None]:
        rows, index = item
        own_key = None if key is None else jax.random.fold_in(key, index)
        more, more_grads = _of_microbatch(how, params, rows, own_key)
        with jax.named_scope("accumulate"):
            sums, grads = total
            grads = jax.tree.map(
                lambda x, y: (x + on_device(y)).astype(x.dtype),
                grads,
                more_grads,
            )
            return (jax.tree.map(jnp.add, sums, more), grads), None

    def zeros(param: jax.Array, axes: Axes) -> jax.Array:
        return plan.constrain(
            jnp.zeros(param.shape, gradient_dtype(axes, plan)),
            state_axes(axes),
        )

    no_gradient = jax.tree.map(zeros, model.trained(params), model.trained(model.axes))
    nothing = (_no_sums(model, batch), no_gradient)
    microbatches = cut_microbatches(batch, how.accumulation, plan)
    total, _ = jax.lax.scan(add, nothing, (microbatches, jnp.arange(how.accumulation)))
    return total


def _no_sums(model: AnyModel, batch: Batch) -> LossSums:
    """Zeros for every sum that the loss of a microbatch has."""
    zero = jnp.zeros((), jnp.float32)
    learns_hidden = isinstance(model, Model) and model.learns_hidden(batch)
    return LossSums(
        loss=zero,
        nll=zero,
        tokens=zero,
        routed=RouterSums(zero, zero) if model.config.experts else None,
        hidden=zero if learns_hidden else None,
    )


def _of_microbatch(
    how: _How, params: Params, rows: Batch, key: jax.Array | None
) -> tuple[LossSums, Params]:
    """Compute the summed loss of one microbatch and its gradient."""
    model = how.model
    plan = how.plan
    weights = how.weights
    counts = how.counts
    if plan.size("stage") > 1:
        staged = in_parts(model, "mesh.stage")
        return pipeline.gradients(staged, params, rows, plan, key, weights, counts=counts)

    def loss(trained: Params) -> tuple[jax.Array, LossSums]:
        merged = model.merge(params, trained)
        sums = model.loss(merged, rows, plan, key, weights, counts)
        return sums.loss, sums

    (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(model.trained(params))
    return sums, grads


def dropout_key(config: Config, step: jax.Array) -> jax.Array | None:
    """Return the key of a step's dropout, by the number of steps before it; None = no dropout."""
    if not config.model.dropout:
        return None
    return jax.random.fold_in(jax.random.key(config.train.seed), step)


def loss_weights(config: Config) -> LossWeights:
    """Return the weights of the losses that a config adds to the likelihood."""
    train = config.train
    distill = config.distill
    return LossWeights(
        train.z_loss,
        train.balance_loss,
        train.router_z_loss,
        train.label_smoothing,
        distill.alpha if distill.teacher else 0.0,
        distill.temperature,
        distill.hidden_weight,
    )
