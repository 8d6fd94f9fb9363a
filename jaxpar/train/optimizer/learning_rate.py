"""The learning rate by step: a warm-up, and a schedule after it, to which a program adds its own by
a decorator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.base.config import TrainConfig
from jaxpar.base.registry import RATES, registering

Made = TypeVar("Made", bound=Callable[[TrainConfig], optax.Schedule])


@dataclass(frozen=True)
class RegisteredRate:
    """A schedule of the learning rate that `train.schedule` names.

    Attributes:
      make: makes the schedule from the settings of `[train]`: the rate by step, where step 0 is the
        first after the warm-up, at which the rate is `learning_rate`.
      decays: whether `decay_steps` and `min_learning_rate_ratio` have an effect on it.
    """

    make: Callable[[TrainConfig], optax.Schedule]
    decays: bool


def register_rate(name: str, decays: bool = True) -> Callable[[Made], Made]:
    """Register a function as a word of `train.schedule`.

        @register_rate("root", decays=False)
        def root(train):
            return lambda step: train.learning_rate / (1 + step) ** 0.5

    Args:
      decays: whether `train.decay_steps` and `train.min_learning_rate_ratio` have an effect on the
        schedule; if not, they are refused beside it.

    Returns:
      The decorator, for a function of the settings of `[train]` that returns the rate by step after
      the warm-up, as jitted code computes it.

    Raises:
      UserError: the name is no word. The decorator raises it where the function cannot be called
        so, or the name is taken.
    """
    return registering(RATES, name, lambda make: RegisteredRate(make, decays), ("train",))


@register_rate("cosine")
def cosine(train: TrainConfig) -> optax.Schedule:
    """Fall along half a cosine to the floor over the remaining steps, or over `decay_steps`
    (arXiv:1608.03983).
    """
    decay = max(train.decay_steps or train.steps - train.warmup_steps, 1)
    return optax.cosine_decay_schedule(train.learning_rate, decay, train.min_learning_rate_ratio)


@register_rate("wsd")
def warmup_stable_decay(train: TrainConfig) -> optax.Schedule:
    """Stay constant (stable), then fall linearly to the floor over the last `decay_steps`
    (arXiv:2404.06395). A decay begins at the peak and would be at the floor with the step after its
    last; a decay of a single step is at the floor with that step.
    """
    peak = train.learning_rate
    left = max(train.steps - train.warmup_steps, 1)
    decay = train.decay_steps or max(min(train.steps // 5, left), 1)
    hold = max(left - decay, 0)
    floor = train.min_learning_rate_ratio * peak
    if decay > 1:
        fall = optax.linear_schedule(peak, floor, decay)
    else:  # the line's first step alone would be none
        fall = optax.constant_schedule(floor)
    return optax.join_schedules([optax.constant_schedule(peak), fall], [hold])


@register_rate("constant", decays=False)
def constant(train: TrainConfig) -> optax.Schedule:
    """Stay at the peak for all steps."""
    return optax.constant_schedule(train.learning_rate)


def learning_rate(train: TrainConfig) -> optax.Schedule:
    """Make the learning rate by step (0-based): a linear warm-up, then `train.schedule`.

    The floor of a decay is `min_learning_rate_ratio` of `learning_rate`.
    """
    peak = train.learning_rate
    warmup = train.warmup_steps
    # Step 0 is the first of warmup + 1 equal rises, so no step is spent at rate zero.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    schedule = RATES[train.schedule].make(train)

    def after(step: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        # both are computed at every step, and a program's own is asked for none before its first
        return schedule(jnp.maximum(step, 0))

    return optax.join_schedules([ramp, after], [warmup])


def schedule_note(before: TrainConfig, now: TrainConfig, step: int) -> str:
    """Say what a new number of steps does to the learning rate of a run that is resumed after
    `step`; empty = nothing.
    """
    if before.steps == now.steps:
        return ""
    note = f"train.steps {before.steps} -> {now.steps}: the {now.schedule} schedule now ends there"
    old = float(np.asarray(learning_rate(before)(step)))
    new = float(np.asarray(learning_rate(now)(step)))
    if step == 0 or abs(old - new) < 1e-3 * new:
        return note
    return f"{note}, and the learning rate goes on at {new:.2e} where it would have been {old:.2e}"
