"""Schedules, the decay mask, and AdamW against its equations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import Config, ModelConfig, TrainConfig, override
from jaxpar.base.config.checks import check
from jaxpar.base.config.unused_settings import idle_keys
from jaxpar.base.errors import UserError
from jaxpar.base.registry import RATES
from jaxpar.models import Model
from jaxpar.models.families import FAMILIES
from jaxpar.train.optimizer import decay_mask
from jaxpar.train.optimizer.learning_rate import learning_rate, register_rate
from jaxpar.train.optimizer.named_optimizers import config_optimizer

TRAIN = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.1)


def rates(train: TrainConfig) -> np.ndarray:
    return np.array([float(learning_rate(train)(step)) for step in range(train.steps)])


def test_cosine_rises_evenly_from_above_zero_and_falls_to_the_floor() -> None:
    found = rates(TRAIN)
    np.testing.assert_allclose(
        found[:11],
        (np.arange(11) + 1) / 11,
        rtol=1e-6,
    )
    want = [0.1 + 0.45 * (1 + math.cos(math.pi * (step - 10) / 90)) for step in range(10, 100)]
    np.testing.assert_allclose(found[10:], want, rtol=1e-5)


def test_wsd_holds_and_decays_over_the_last_steps() -> None:
    found = rates(dataclasses.replace(TRAIN, schedule="wsd", decay_steps=30))
    assert np.all(found[10:70] == 1.0)
    np.testing.assert_allclose(
        found[70:],
        1 - 0.9 * np.arange(30) / 30,
        rtol=1e-5,
    )
    assert rates(dataclasses.replace(TRAIN, schedule="wsd"))[79] == 1.0 > rates(TRAIN)[79]


@pytest.mark.parametrize("changes", [{"decay_steps": 1}, {"steps": 7, "warmup_steps": 2}])
def test_a_wsd_decay_of_one_step_is_at_the_floor_with_it(changes: dict[str, Any]) -> None:
    found = rates(dataclasses.replace(TRAIN, schedule="wsd", **changes))
    np.testing.assert_allclose(found[-2:], [1.0, 0.1], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("peak", [1e-2, 2e-5])
def test_the_rate_comes_down_to_a_share_of_its_peak_and_never_climbs(
    schedule: Any, peak: float
) -> None:
    """The default floor, with a peak that is below the old one (1e-4) and one above it."""
    train = TrainConfig(steps=200, warmup_steps=20, learning_rate=peak, schedule=schedule)
    found = np.array([float(learning_rate(train)(step)) for step in range(train.steps + 1)])
    assert np.all(np.diff(found[20:]) <= 1e-6 * peak)  # sums of float32
    np.testing.assert_allclose(
        [found.max(), found[-1]],
        [peak, 0.1 * peak],
        rtol=1e-5,
    )


def test_a_long_warm_up_leaves_wsd_a_shorter_decay() -> None:
    """A fifth of the steps is more than the warm-up leaves: it still ends at the floor."""
    train = TrainConfig(steps=100, warmup_steps=90, learning_rate=1.0, schedule="wsd")
    assert float(learning_rate(train)(100)) == pytest.approx(0.1)


def test_constant_stays() -> None:
    assert np.all(rates(dataclasses.replace(TRAIN, schedule="constant"))[10:] == 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_norms_and_biases_do_not(family: str) -> None:
    model = Model(
        ModelConfig(
            family=family,
            embed=16,
            heads=2,
            mlp=32,
            tied_head=False,
        )
    )
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(model.axes))
    decayed = {jax.tree_util.keystr(path, simple=True, separator=".") for path, yes in mask if yes}
    kept = {jax.tree_util.keystr(path, simple=True, separator=".") for path, yes in mask if not yes}
    assert {"blocks.q", "blocks.down", "embed.tokens", "head.table"} <= decayed
    assert ({"blocks.q_norm.scale", "blocks.k_norm.scale"} <= kept) == FAMILIES[family].qk_norm
    assert kept and all("bias" in name or "norm" in name for name in kept)
    assert not any("bias" in name or "norm" in name for name in decayed)


def test_a_step_is_adamw_on_clipped_gradients() -> None:
    train = dataclasses.replace(TRAIN, warmup_steps=0, schedule="constant", clip_norm=1.0)
    params = {
        "w": jnp.asarray([[1.0, -2.0]]),
        "scale": jnp.asarray([3.0]),
    }
    axes = {"w": ("embed", "mlp"), "scale": ("embed",)}
    # norm 5: clipped to a fifth
    grads = {
        "w": jnp.asarray([[3.0, 0.0]]),
        "scale": jnp.asarray([4.0]),
    }
    optimizer = config_optimizer(Config(train=train)).make(axes)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # First step: the moments' bias corrections cancel, so the step is g / (|g| + eps), that is the
    # sign.
    np.testing.assert_allclose(
        updates["w"],
        [[-1 - 0.1 * 1.0, 0.1 * 2.0]],
        atol=1e-6,
    )
    np.testing.assert_allclose(updates["scale"], [-1.0], atol=1e-6)
    second, _ = optimizer.update(
        jax.tree.map(lambda g: 10 * g, grads), optimizer.init(params), params
    )
    np.testing.assert_allclose(second["w"], updates["w"], atol=1e-6)


def test_a_schedule_of_ones_own_is_a_word_of_the_config() -> None:
    @register_rate("root", decays=False)
    def root(train: TrainConfig) -> Any:
        return lambda step: train.learning_rate / (1 + step) ** 0.5

    try:
        config = override(Config(), {"train.schedule": "root", "train.warmup_steps": 3})
        check(config)
        found = np.array([learning_rate(config.train)(n) for n in range(6)])
        np.testing.assert_allclose(
            found / config.train.learning_rate, [0.25, 0.5, 0.75, 1, 2**-0.5, 3**-0.5], rtol=1e-6
        )
        idle = dict(idle_keys(override(config, {"train.decay_steps": 5})))
        assert idle["train.decay_steps"].startswith("train.schedule has no decay")
    finally:
        RATES.remove("root")
    with pytest.raises(UserError, match=r"train\.schedule is one of"):
        check(override(Config(), {"train.schedule": "root"}))
