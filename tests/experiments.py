"""Experiments for tests that make a plan by themselves."""

from __future__ import annotations

from typing import Any

import jax

from jaxpar.base.config import Config
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model
from jaxpar.train.experiment import Experiment
from jaxpar.verify.of_config import Setup
from jaxpar.verify.of_config.losses_and_gradients import Case


def experiment_of(config: Config, plan: Plan) -> Experiment:
    """The experiment of a config with this plan, whether or not it is the config's own."""
    return Experiment(config, Model(config.model), plan)


def case_on(config: Config, devices: list[jax.Device], *gradients: Any) -> Case:
    """The random case of a config that is small already, on these devices."""
    return Case.draw(Setup(config, Model(config.model), devices, ()), *gradients)
