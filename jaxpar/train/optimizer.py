"""Builds AdamW with a decay mask and a learning-rate schedule from the config, with optax."""

from __future__ import annotations

import jax
import numpy as np
import optax

from jaxpar.base.config import TrainConfig
from jaxpar.base.plan import is_matrix
from jaxpar.base.sharding import is_axes
from jaxpar.models import Params


def learning_rate(train: TrainConfig) -> optax.Schedule:
    """Return the learning rate by step (0-based): a linear warm-up, then cosine, warm-up-stable-decay, or constant.

    cosine: half a cosine from `learning_rate` to `min_learning_rate` over the remaining steps (arXiv:1608.03983).
    wsd: constant (stable), then linear to `min_learning_rate` over the last `decay_steps` (arXiv:2404.06395).
    """
    peak, floor, warmup, steps = train.learning_rate, train.min_learning_rate, train.warmup_steps, train.steps
    # Step 0 is the first of warmup + 1 equal rises, so no step is spent at rate zero.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if train.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif train.schedule == "cosine":
        after = optax.cosine_decay_schedule(
            peak, max(train.decay_steps or steps - warmup, 1), floor / peak if peak else 0.0
        )
    else:
        decay = train.decay_steps or max(steps // 5, 1)
        hold = max(steps - warmup - decay, 0)
        after = optax.join_schedules([optax.constant_schedule(peak), optax.linear_schedule(peak, floor, decay)], [hold])
    return optax.join_schedules([ramp, after], [warmup])


def schedule_note(before: TrainConfig, now: TrainConfig, step: int) -> str:
    """Say what a new number of steps does to the learning rate of a run that goes on after `step`; empty = nothing."""
    if before.steps == now.steps:
        return ""
    note = f"train.steps {before.steps} -> {now.steps}: the {now.schedule} schedule now ends there"
    old, new = (float(np.asarray(learning_rate(train)(step))) for train in (before, now))
    if step == 0 or abs(old - new) < 1e-3 * new:
        return note
    return f"{note}, and the learning rate goes on at {new:.2e} where it would have been {old:.2e}"


def decay_mask(axes: Params) -> Params:
    """Tell from `Model.axes` which parameters decay: matrices from or to the embed dim, but not norms or biases."""
    return jax.tree.map(is_matrix, axes, is_leaf=is_axes)


def make_optimizer(train: TrainConfig, axes: Params) -> optax.GradientTransformation:
    """Make AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with decay on matrices only; `update` does clipping."""
    return optax.adamw(
        learning_rate(train), train.beta1, train.beta2, train.eps,
        weight_decay=train.weight_decay, mask=decay_mask(axes),
    )  # fmt: skip
