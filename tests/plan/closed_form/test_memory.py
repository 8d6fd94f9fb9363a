"""The bytes of a plan by shape alone are those of the experiment's own arrays and traced blocks."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from experiments import experiment_of
from traced_steps import config_of, staged

from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import devices_needed
from jaxpar.plan.candidate import candidate_of
from jaxpar.plan.closed_form import estimate, step_shapes
from jaxpar.rehearse.targets import load_target
from jaxpar.train.activations import activations, unnamed_bytes
from jaxpar.train.experiments import make_plan
from jaxpar.train.state_memory import state_bytes

HALF: dict[str, Any] = {"compute": "bfloat16"}
PLANS = {
    "llama, fsdp x tensor": config_of("llama", "full", fsdp=4, tensor=2, **HALF),
    "gpt2, everything kept": config_of("gpt2", "none", data=2, tensor=2, **HALF),
    "llama, dots, accumulation": config_of("llama", "dots", accumulation=2, fsdp=2, **HALF),
    "gpt2, ZeRO-1, small moments": override(
        config_of("gpt2", "attention_out", data=4, **HALF),
        {"rules.state_embed": ["fsdp", "data"], "precision.moments": "bfloat16"},
    ),
    "experts": override(
        config_of("llama", "dots", expert=2, tensor=2, **HALF),
        {"model.experts": 4, "model.experts_per_token": 2},
    ),
    "stages": staged(
        config_of("llama", "full", stage=2, fsdp=2, **HALF), "1f1b", 4, pipeline_stash="blocks"
    ),
}


def experiment(config: Config) -> Any:
    devices = jax.devices()[: devices_needed(config.mesh)]
    return experiment_of(config, make_plan(config, devices))


FAST = ("llama, fsdp x tensor", "stages")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in PLANS]
)
def test_state_and_kept_activations(name):
    config = PLANS[name]
    made = experiment(config)
    found = estimate(step_shapes(config), candidate_of(config), load_target("h100x8")).bytes
    state = state_bytes(made, "cuda")
    counters = 16  # steps that the optimizer and the schedule count, which belong to no parameter
    assert found.parameters == state.parameters.device
    assert found.optimizer == pytest.approx(state.optimizer.device, abs=counters)
    assert found.gradients == state.gradients.device
    kept = sum(one.kept_bytes for one in activations(made)) + unnamed_bytes(made)
    # What has no name is counted on one device, and a part of it, such as positions, is not split.
    tolerance = 0.01 if not unnamed_bytes(made) else 0.05
    assert found.activations == pytest.approx(kept, rel=tolerance)


def test_what_is_offloaded_is_not_on_the_device():
    config = config_of("llama", "full", fsdp=2, **HALF)
    shapes = step_shapes(config)
    target = load_target("h100x2")
    here = estimate(shapes, candidate_of(config), target)
    away = candidate_of(config)._replace(keep=(("block_input", "offload"),), optimizer="offload")
    there = estimate(shapes, away, target)
    assert there.bytes.activations == 0
    assert there.bytes.host == here.bytes.activations
    assert there.bytes.optimizer < 0.1 * here.bytes.optimizer
    assert there.host > here.host == 0
