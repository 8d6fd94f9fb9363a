"""What a block keeps: what a policy names, no more, and where it says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from experiments import experiment_of
from traced_steps import config_of

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.activation_names import NAMES, PRESETS, Keep, actions
from jaxpar.models import Model
from jaxpar.parallel.domino import Places
from jaxpar.parallel.pipeline.residuals import choose_residuals
from jaxpar.parallel.remat import remat
from jaxpar.train.activations import activations
from jaxpar.train.experiments import make_plan

POLICIES = [name for name in PRESETS if name != "none"]


def kept_by(config: Config) -> tuple[list[Any], list[Any]]:
    """What one block's forward leaves for its backward: abstract arrays on the device, and in host
    memory.
    """
    plan = make_plan(config, jax.devices()[:1])
    model = Model(config.model)
    layer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), model.shapes()["blocks"]
    )
    x = jax.ShapeDtypeStruct(
        (2, config.data.seq_len, config.model.embed),
        jnp.float32,
    )
    positions = jnp.arange(config.data.seq_len)[None].repeat(2, 0)

    def leaves(layer: Any, x: Any) -> list[Any]:
        run = remat(
            lambda layer, x: model.layer(layer, (x,), [Places(positions)], plan)[0][0], plan
        )
        return jax.tree.leaves(jax.vjp(run, layer, x)[1])

    shapes = choose_residuals(leaves, layer, x).shapes
    host = [
        shape for shape in shapes if getattr(shape, "memory_space", None) == jax.memory.Space.Host
    ]
    return [shape for shape in shapes if shape not in host], host


def size_of(shapes: list[Any]) -> int:
    return sum(shape.size * shape.dtype.itemsize for shape in shapes)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_keeps_what_its_policy_names(family, policy):
    """To the byte, as `show` lists it."""
    config = override(config_of(family, policy), {"train.batch": 2})
    listed = activations(experiment_of(config, make_plan(config, jax.devices()[:1])))
    on_device, host = kept_by(config)
    assert not host
    assert size_of(on_device) == sum(one.bytes for one in listed if one.action == "save") > 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_offloaded_is_in_host_memory_and_nowhere_else(family):
    names = {
        "memory.keep.block_input": "offload",
        "memory.keep.attention_out": "offload",
        "memory.keep.up": "save",
    }
    config = override(config_of(family, "full"), {"train.batch": 2} | names)
    listed = {
        one.name: one.bytes
        for one in activations(
            experiment_of(config, make_plan(config, jax.devices()[:1])),
        )
    }
    on_device, host = kept_by(config)
    assert size_of(host) == listed["block_input"] + listed["attention_out"]
    assert size_of(on_device) == listed["up"]


def test_policies_differ_and_name_what_there_is():
    assert len({frozenset(names) for names in PRESETS.values()}) == len(PRESETS)
    assert all(names <= set(NAMES) and "block_input" in names for names in PRESETS.values())
    assert list(vars(Keep())) == list(NAMES)
    assert actions("full", Keep(gate="offload"))["gate"] == "offload"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gpt2",
            {"memory.keep.gate": "save"},
            "gpt2 .* has no activation of that name: it has block_input",
        ),
        ("llama", {"memory.keep.expert_out": "offload"}, "has no activation of that name"),
        ("llama", {"memory.keep.block_input": "recompute"}, "save or offload it"),
    ],
)
def test_what_cannot_be_kept_is_refused(family, changes, message):
    with pytest.raises(UserError, match=message):
        make_plan(override(config_of(family), changes), jax.devices()[:1])


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match=r"memory\.keep\.gat \(did you mean 'memory\.keep\.gate'"):
        override(Config(), {"memory.keep.gat": "save"})
    with pytest.raises(UserError, match=r"memory\.policy is one of none, full"):
        override(Config(), {"memory.policy": "everything"})
