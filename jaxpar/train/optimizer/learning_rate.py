"""The learning rate by step that a config asks for."""

from __future__ import annotations

import numpy as np
import optax

from jaxpar.base.config import TrainConfig


def learning_rate(train: TrainConfig) -> optax.Schedule:
    """Return the learning rate by step (0-based): a linear warm-up, then cosine,
    warm-up-stable-decay, or constant.

    cosine: half a cosine down to the floor over the remaining steps, or over `decay_steps`
    (arXiv:1608.03983). wsd: constant (stable), then linear down to the floor over the last
    `decay_steps` (arXiv:2404.06395). The floor is `min_learning_rate_ratio` of `learning_rate`. A
    decay begins at the peak and would be at the floor with the step after its last; one of a single
    step is at the floor with that step.
    """
    peak = train.learning_rate
    ratio = train.min_learning_rate_ratio
    warmup = train.warmup_steps
    steps = train.steps
    # Step 0 is the first of warmup + 1 equal rises, so no step is spent at rate zero.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if train.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif train.schedule == "cosine":
        decay = max(train.decay_steps or steps - warmup, 1)
        after = optax.cosine_decay_schedule(peak, decay, ratio)
    else:
        left = max(steps - warmup, 1)
        decay = train.decay_steps or max(min(steps // 5, left), 1)
        hold = max(left - decay, 0)
        floor = ratio * peak
        if decay > 1:
            fall = optax.linear_schedule(peak, floor, decay)
        else:  # the line's first step alone would be none
            fall = optax.constant_schedule(floor)
        after = optax.join_schedules([optax.constant_schedule(peak), fall], [hold])
    return optax.join_schedules([ramp, after], [warmup])


def schedule_note(before: TrainConfig, now: TrainConfig, step: int) -> str:
    """Say what a new number of steps does to the learning rate of a run that goes on after `step`;
    empty = nothing.
    """
    if before.steps == now.steps:
        return ""
    note = f"train.steps {before.steps} -> {now.steps}: the {now.schedule} schedule now ends there"
    old = float(np.asarray(learning_rate(before)(step)))
    new = float(np.asarray(learning_rate(now)(step)))
    if step == 0 or abs(old - new) < 1e-3 * new:
        return note
    return f"{note}, and the learning rate goes on at {new:.2e} where it would have been {old:.2e}"
