"""The training step, which adds up the gradients of microbatches and updates the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.stages import Wrapped

from jaxpar.base.config import Config
from jaxpar.models import Batch
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.padding import count_tokens
from jaxpar.train.batch import ABSENT
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer import reported_rate
from jaxpar.train.optimizer.update import Updated, update
from jaxpar.train.optimizer.updated_part import Part
from jaxpar.train.state import Shape, TrainState
from jaxpar.train.step.accumulate import dropout_key, gradients


def make_train_step(experiment: Experiment) -> Wrapped:
    """Make the jitted step `(state, batch) -> (state, metrics)`, which donates the state, unless
    the host updates it and parameters lie in host memory, too.

    Metrics are scalars: `loss` (nats a token, of the labels alone), `objective` (what is
    differentiated, where labels are smoothed or there is a teacher), `grad_norm` (before clipping),
    `learning_rate` (unless an optimizer that was given does not say it), `tokens` (labels that
    count) and `overflows` (entries of parameters, or of the optimizer's state, that would not be
    finite, and stayed as they were). With experts there are also `router_balance` (1 = all
    alike) and `router_z`, which are means over the tokens that are text and over the layers. With a
    teacher's hidden states there is `hidden_distance`, a mean over the labels: times
    `distill.hidden_weight` it is their part of the objective.

    Where a process had no rows (see `empty_batch`), the loss is NaN, and the state stays as it was,
    its step too: the other processes learn of it by the loss, and all can save what they have.
    """
    config = experiment.config
    model = experiment.model
    plan = experiment.plan
    optimizer = experiment.optimizer

    def step(
        state: TrainState[jax.Array], batch: Batch
    ) -> tuple[TrainState[jax.Array], dict[str, jax.Array]]:
        key = dropout_key(config, state.step)
        sums, grads = gradients(experiment, state.params, batch, key)
        done: jax.Array | int = 1
        if jax.process_count() > 1:
            absent = jnp.any(batch["labels"] == ABSENT)
            sums = jax.tree.map(lambda x: jnp.where(absent, jnp.nan, x), sums)
            done = jnp.where(absent, 0, 1)
        with jax.named_scope("update"):
            part = Part(
                model.trained(state.params),
                state.opt_state,
                grads,
                model.trained(model.axes),
            )
            new = update(part, sums, optimizer, plan)
        metrics = _metrics(sums, new, batch, config)
        rate = reported_rate(optimizer, state.step, state.opt_state)
        if rate is not None:
            metrics["learning_rate"] = rate
        params = model.merge(state.params, new.params)
        return TrainState(state.step + done, params, new.opt_state), metrics

    # A host computes new arrays beside the old, and XLA would copy each into the place of one that
    # was donated: over the link on GPUs, all in vain. On the device only tables are there twice.
    all_on_host = plan.optimizer == "host" and plan.parameters == "offload"
    donated = () if all_on_host else (0,)
    return jax.jit(
        step,
        in_shardings=(experiment.shardings, experiment.batch_sharding),
        out_shardings=(experiment.shardings, experiment.replicated),
        donate_argnums=donated,
        compiler_options=experiment.compiler_options,
    )


def _metrics(sums: LossSums, new: Updated, batch: Batch, config: Config) -> dict[str, jax.Array]:
    """What a step says of itself, but for its learning rate (see `make_train_step`)."""
    metrics = {
        "loss": sums.nll / sums.tokens,
        "grad_norm": new.norm,
        "tokens": sums.tokens,
    }
    if config.train.label_smoothing or config.distill.teacher:
        metrics["objective"] = sums.loss / sums.tokens
    metrics["overflows"] = new.overflows
    if sums.routed is not None:
        text = count_tokens(batch).text
        metrics["router_balance"] = sums.routed.balance / text
        metrics["router_z"] = sums.routed.z / text
    if sums.hidden is not None:
        metrics["hidden_distance"] = sums.hidden / sums.tokens
    return metrics


def step_shapes(experiment: Experiment) -> tuple[TrainState[Shape], dict[str, Shape]]:
    """Return the arguments of a training step as ShapeDtypeStructs with shardings, for tracing and
    compiling it.
    """
    return experiment.state, experiment.batch
