"""`jax_enable_x64`, which many shells have on: a step computes in the dtypes of `[precision]`, and
what it could not go on from is not saved.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from traced_steps import config_of, staged

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import devices_needed
from jaxpar.train.experiments import make_experiment
from jaxpar.train.runs.checkpoints import require_same_form
from jaxpar.train.step import make_eval_step, make_train_step, step_shapes

STEPS: dict[str, Config] = {
    "accumulates": config_of("llama", accumulation=2, compute="bfloat16", fsdp=2, tensor=2),
    "loss in pieces": override(config_of("gpt2", fsdp=2), {"memory.loss_mib": 1}),
    "stages": staged(config_of("llama", stage=2, data=2), "1f1b", 4),
    "experts": override(config_of("llama", fsdp=2, expert=2), {"model.experts": 4}),
    "experts choose": override(
        config_of("llama", fsdp=2, expert=2),
        {"model.experts": 4, "model.router": "expert_choice"},
    ),
    "dropout": override(config_of("gpt2", fsdp=2), {"model.dropout": 0.1}),
    "offloaded": override(config_of("gpt2", remat="full", fsdp=2), {"memory.optimizer": "offload"}),
    "muon": override(config_of("gpt2", fsdp=2), {"optimizer.name": "muon"}),
    "adafactor": override(config_of("gpt2", context=2), {"optimizer.name": "adafactor"}),
}


def traced_step(config: Config) -> jax.stages.Traced:
    made = make_experiment(config, jax.devices()[: devices_needed(config.mesh)])
    return make_train_step(made).trace(*step_shapes(made))


def dtypes(tree: Any) -> list[str]:
    return [str(leaf.dtype) for leaf in jax.tree.leaves(tree)]


def wide_arrays(step: jax.stages.Traced) -> set[str]:
    """The float64 arrays of a step; a Python number is one of no dims until it meets an array."""
    return set(re.findall(r"f64\[\d[^]]*\]", str(step.jaxpr)))


QUICK = ("accumulates", "experts")
"""Each has scalars that the other has not; the rest is slow."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STEPS],
)
def test_a_step_computes_in_the_dtypes_of_precision(name: str) -> None:
    usual = traced_step(STEPS[name])
    with jax.enable_x64(True):
        found = traced_step(STEPS[name])
    assert dtypes(found.out_info) == dtypes(usual.out_info)
    assert not wide_arrays(found)


def test_an_evaluation_does_too() -> None:
    config = config_of("llama", accumulation=2, fsdp=2)
    with jax.enable_x64(True):
        made = make_experiment(config, jax.devices()[:2])
        step = make_eval_step(made)
        state, batch = step_shapes(made)
        found = step.trace(state.params, batch)
    assert dtypes(found.out_info) == ["float32", "float32"]
    assert not wide_arrays(found)


def test_a_state_of_other_dtypes_is_not_saved() -> None:
    shapes = {"mu": jax.ShapeDtypeStruct((2,), jnp.float32)}
    require_same_form({"mu": jnp.ones(2, jnp.float32)}, shapes, "the state after step 3")
    with jax.enable_x64(True):
        wide = {"mu": jnp.ones(2, jnp.float64)}
    with pytest.raises(
        UserError, match=r"after step 3 is not saved.*mu is float64\[2\] and was fl"
    ):
        require_same_form(wide, shapes, "the state after step 3")
