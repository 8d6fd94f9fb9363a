"""An experiment is made of any config: on the devices that the commands take, and checked."""

from __future__ import annotations

import jax
import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.train.experiments import make_experiment, make_plan

TWO = override(Config(), {"mesh.platform": "cpu", "mesh.fsdp": 2})


def test_without_devices_it_takes_those_that_a_command_takes() -> None:
    assert make_experiment(TWO).devices == jax.devices()[:2]
    assert list(make_plan(TWO).mesh.devices.flat) == jax.devices()[:2]


def test_a_platform_that_is_not_here_is_refused_without_devices() -> None:
    with pytest.raises(UserError, match=r"mesh.platform is 'tpu'"):
        make_experiment(override(TWO, {"mesh.platform": "tpu"}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.accumulation": 0}, "train.accumulation"),
        ({"model.heads": 0}, "model.heads"),
        ({"train.learning_rate": 0.0}, "train.learning_rate"),
        ({"train.batch": 33, "train.accumulation": 2}, "try train.batch=36"),
        (
            {"train.batch": 7, "train.accumulation": 5, "mesh.data": 2, "mesh.fsdp": 2},
            "try train.batch=20$",
        ),
        (
            {"train.batch": 7, "train.accumulation": 5, "mesh.data": -1},
            r"train.batch=7 does not split into .* try train.batch=\d+$",
        ),
        (
            {"model.masks": ("full",), "data.source": "arrayrecord"},
            "model.masks=full .*data.source=arrayrecord .*data.pack",
        ),
    ],
)
def test_settings_are_checked(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_experiment(override(TWO, changes))


def test_what_only_training_reads_may_have_any_value_elsewhere() -> None:
    config = override(TWO, {"train.learning_rate": 0.0})
    assert make_experiment(config, training=False).config == config
