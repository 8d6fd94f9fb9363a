"""The optimizer's step under a plan is held against the one on one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from traced_steps import config_of

from jaxpar.base.config import override
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.update import Updated
from jaxpar.train.optimizer.updated_part import Part
from jaxpar.verify.comparison import Answer, by_name
from jaxpar.verify.of_config import updates
from jaxpar.verify.of_config.losses_and_gradients import Case
from jaxpar.verify.of_config.random_inputs import random_batch, random_params

ZERO1 = {"rules.state_embed": ("fsdp", "data"), "data.seq_len": 16, "model.vocab_size": 64}


def case(name: str, **changes: Any) -> tuple[Case, Answer]:
    """A case, and gradients that both sides take."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    config = override(config_of("llama", **mesh), ZERO1 | {"optimizer.name": name} | changes)
    model = Model(config.model)
    params = random_params(model)
    grads = by_name(random_params(model, seed=1))
    answer = Answer(
        np.ones(1), {key: 100 * grad[None] for key, grad in grads.items()}, tokens=np.float32(100)
    )
    batch = random_batch(config)
    return Case(config, model, jax.devices(), params, batch, lambda: None), answer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_an_optimizer_moves_parameters_as_on_one_device(name: str) -> None:
    verdict = updates.compare_updates(*case(name))
    assert verdict.equal, verdict.difference
    assert 0 < max(row.error for row in verdict.rows) < updates.UPDATE / 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lion", "schedule_free"])
def test_a_host_moves_parameters_as_one_device_does(name: str) -> None:
    verdict = updates.compare_updates(*case(name, **{"memory.optimizer": "host"}))
    assert verdict.equal, verdict.difference
    error = max(row.error for row in verdict.rows)
    assert error < updates.UPDATE / 5
    # Lion's steps are signs, which jax 0.12 gives equal to the bit
    assert error > 0 or (name == "lion" and jax.__version_info__ >= (0, 11))


def test_a_step_that_differs_on_a_mesh_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = updates.update

    def wrong(part: Part, sums: LossSums, optimizer: Optimizer, plan: Plan) -> Updated:
        if plan.mesh.size > 1:
            part.grads["blocks"]["q"] = -part.grads["blocks"]["q"]
        return right(part, sums, optimizer, plan)

    monkeypatch.setattr(updates, "update", wrong)
    verdict = updates.compare_updates(*case("sgd"))
    assert not verdict.equal
    assert [row.name for row in verdict.wrong] == ["blocks.q"]
    assert "1 of 12 parameters move otherwise; most of all blocks.q" in verdict.difference
