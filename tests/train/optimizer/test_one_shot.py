"""Pruning at once: how much is left of what, that features without a norm go first, and that a mesh
gives the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.kernels.weight_forms import NOfM
from jaxpar.models import Model, Params
from jaxpar.train.batch import put_batch
from jaxpar.train.experiments import make_plan
from jaxpar.train.optimizer.one_shot import Target, prune_once
from jaxpar.verify.of_config.random_inputs import random_batch, random_params

SMALL: dict[str, Any] = {
    "model.family": "llama",
    "model.vocab_size": 61,
    "model.layers": 2,
    "model.embed": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.mlp": 64,
    "model.tied_head": False,
    "model.max_seq_len": 16,
    "data.seq_len": 16,
    "train.batch": 8,
    "mesh.platform": "cpu",
}
ONE = {"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.data": 1}


def prune(target: Target, params: Params | None = None, **changes: Any) -> tuple[Params, Params]:
    """The parameters before and after."""
    criterion = changes.pop("criterion", "wanda")
    config = override(Config(), SMALL | ONE | changes)
    model = Model(config.model)
    plan = make_plan(config)
    before = params or random_params(model)
    there = jax.device_put(before, plan.sharding(model.axes, model.shapes()))
    batch = put_batch(random_batch(config), plan)
    after = prune_once(model, there, [batch], plan, target, criterion)
    return jax.tree.map(np.asarray, before), jax.tree.map(np.asarray, after)


@pytest.mark.slow
def test_each_output_keeps_its_share_and_features_that_are_always_zero_go_first() -> None:
    config = override(Config(), SMALL | ONE)
    params = random_params(Model(config.model))
    dead = np.arange(0, 32, 4)
    params["blocks"]["mlp_norm"]["scale"][:, dead] = 0
    params["blocks"]["up"][0, :, 5] = 0  # so the hidden feature 5 of the first layer is zero
    params["blocks"]["up"][:, dead, :] *= 1e3
    before, after = prune(Target(sparsity=0.5), params)
    for name in ("q", "k", "v", "up", "gate"):
        kept = after["blocks"][name] != 0
        per_output = kept.reshape(2, 32, -1).sum(axis=1)
        assert (per_output[:, 6:] == 16).all(), name
        stays = after["blocks"][name][kept]
        np.testing.assert_array_equal(stays, before["blocks"][name][kept])
    assert not after["blocks"]["up"][:, dead].any()
    assert not after["blocks"]["down"][0, 5].any() and after["blocks"]["down"][1, 5].any()
    np.testing.assert_array_equal(before["head"]["table"], after["head"]["table"])


def test_groups_keep_n_of_m_by_magnitude_or_by_wanda() -> None:
    before, by_size = prune(Target(("down",), form=NOfM(2, 4)), criterion="magnitude")
    down = jnp.asarray(before["blocks"]["down"])
    np.testing.assert_array_equal(by_size["blocks"]["down"], NOfM(2, 4).read(down))
    np.testing.assert_array_equal(by_size["blocks"]["up"], before["blocks"]["up"])
    _, by_norm = prune(Target(("down",), form=NOfM(2, 4)))
    groups = (by_norm["blocks"]["down"] != 0).reshape(2, 16, 4, 32).sum(axis=2)
    assert (groups == 2).all()
    assert (by_norm["blocks"]["down"] != by_size["blocks"]["down"]).any()


def test_what_cannot_be_pruned_is_refused() -> None:
    with pytest.raises(UserError, match="a matrix of experts"):
        prune(Target(("up",)), **{"model.experts": 4})
    with pytest.raises(UserError, match="no matrix 'gate' in the blocks of gpt2"):
        prune(Target(("gate",)), **{"model.family": "gpt2", "model.kv_heads": 0})


@pytest.mark.slow
def test_a_mesh_prunes_the_same() -> None:
    _, one = prune(Target(sparsity=0.5))
    _, many = prune(Target(sparsity=0.5), **{"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.data": 2})
    for name in ("q", "out", "up", "down"):
        np.testing.assert_array_equal(one["blocks"][name], many["blocks"][name], err_msg=name)
