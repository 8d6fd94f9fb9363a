"""An optimizer that a program registers is a word of the config, with settings, as ours are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from traced_steps import config_of

import jaxpar
from jaxpar import train
from jaxpar.base.config import Config, override, parse
from jaxpar.base.config.checks import check
from jaxpar.base.config.unused_settings import idle_keys
from jaxpar.base.errors import UserError
from jaxpar.base.registry import OPTIMIZERS
from jaxpar.base.toml import to_toml
from jaxpar.train.optimizer.named_optimizers import config_optimizer

CHANGES = {"optimizer.name": "signum", "optimizer.own": ["beta=0.8", "weight_decay=0.2"]}


@pytest.fixture(autouse=True)
def registered() -> Iterator[Any]:
    from strangers import own_optimizer

    yield importlib.reload(own_optimizer)
    OPTIMIZERS.remove("signum")


def test_its_settings_have_types_and_stand_in_a_file() -> None:
    text = '[optimizer]\nname = "signum"\n[optimizer.own]\nbeta = 0.8\nweight_decay = 0.2\n'
    config = check(parse(text))
    assert config == override(Config(), CHANGES) == parse(to_toml(config))
    assert vars(config.optimizer.settings) == {"beta": 0.8, "weight_decay": 0.2}
    assert config.optimizer.weight_decay == 0.2 and config.optimizer.rounds_first_moments
    assert not dict(idle_keys(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer.own": ["bta=1"]},
            r"unknown key optimizer\.own\.bta \(did you mean 'beta'\?\)",
        ),
        ({"optimizer.own": ["beta=high"]}, r"optimizer\.own\.beta is a number, found 'high'"),
        (
            {"optimizer.own": ["beta"]},
            r"optimizer\.own has 'beta': a setting is written name=value",
        ),
        (
            {"optimizer.own": ["weight_decay=100"], "train.learning_rate": 0.1},
            r"optimizer\.own\.weight_decay=100 is 1 or more: a step would take away all",
        ),
        ({"optimizer.name": "signm"}, r"is one of adamw, .*, signum, found 'signm' \(did you mean"),
    ],
)
def test_what_it_has_not_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(override(Config(), CHANGES | changes))


def test_the_tables_of_ours_have_no_effect_on_it_and_its_own_none_on_them() -> None:
    idle = dict(idle_keys(override(Config(), CHANGES | {"optimizer.lion.beta1": 0.5})))
    assert idle == {"optimizer.lion.beta1": "optimizer.name is not lion: add --optimizer.name lion"}
    idle = dict(idle_keys(override(Config(), CHANGES | {"optimizer.name": "lion"})))
    assert idle["optimizer.own"].startswith("optimizer.name has a table of its own")


def test_settings_without_defaults_are_refused() -> None:
    @dataclass(frozen=True)
    class Bare(train.OptimizerSettings):
        beta: float

    with pytest.raises(UserError, match="have no default for beta"):
        train.register_optimizer("bare", Bare)
    with pytest.raises(UserError, match="give a frozen dataclass derived from OptimizerSettings"):
        train.register_optimizer("bare", dict)  # pyright: ignore[reportArgumentType]


def _config(**mesh: int) -> Config:
    small = {"model.layers": 1, "train.steps": 4, "train.warmup_steps": 1}
    zero1 = {"rules.state_embed": ["fsdp", "data"]}
    return override(config_of("llama", **mesh), CHANGES | small | zero1)


def test_its_state_lies_as_its_parameters_do() -> None:
    experiment = jaxpar.make_experiment(_config(data=2, fsdp=2, tensor=2), jax.devices())
    shapes = experiment.state
    by_size = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves(shapes.opt_state)}
    up = shapes.params["blocks"]["up"]
    assert "data" in str(by_size[up.shape]) and "tensor" in str(by_size[up.shape])


@pytest.mark.slow
def test_it_trains_and_goes_on_from_its_run_folder(tmp_path: Path, registered: Any) -> None:
    """To the same losses as the same transformation that a program gives, on another mesh too."""
    config = _config(data=2, fsdp=2)
    four = jax.devices()[:4]
    axes = jaxpar.make_experiment(config, four).model.axes
    rate = config_optimizer(config).learning_rate
    mine = registered.signum(registered.Signum(0.8, 0.2), rate, axes)
    given = train.run(jaxpar.make_experiment(config, four, optimizer=mine), tmp_path / "given")
    first = override(config, {"train.stop_at": 2})
    train.run(jaxpar.make_experiment(first, four), tmp_path / "named")
    other = override(config, {"mesh.data": 1, "mesh.tensor": 2})
    named = train.run(jaxpar.make_experiment(other, four), tmp_path / "named")
    assert named.step == given.step == 4
    np.testing.assert_allclose(named.loss, given.loss, rtol=1e-3)
