"""LoRA: what it computes, what is trained, what it refuses, and that every layout gives the same
gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import experiment_of
from tiers import some

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model
from jaxpar.models.hf.peft import export_adapter
from jaxpar.models.lora import merge_lora
from jaxpar.models.views import base_config
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.state_memory import state_bytes
from jaxpar.train.step import init_state, make_train_step
from jaxpar.verify.of_config import checks as verify
from jaxpar.verify.of_config.random_inputs import random_batch, random_params

ALL = ["q", "k", "v", "out", "up", "down"]
SMALL: dict[str, Any] = {
    "model.vocab_size": 61,
    "model.layers": 2,
    "model.embed": 24,
    "model.heads": 4,
    "model.mlp": 40,
    "model.max_seq_len": 16,
    "data.seq_len": 16,
    "train.batch": 4,
    "model.lora.rank": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"model.family": "gpt2", "model.lora.targets": ALL},
    "llama": {"model.family": "llama", "model.kv_heads": 2, "model.lora.targets": [*ALL, "gate"]},
    "mixtral": {"model.family": "llama", "model.experts": 4, "model.lora.targets": ["k", "out"]},
}


def config_of(family: str, **changes: Any) -> Config:
    return override(Config(), SMALL | FAMILIES[family] | changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pairs_add_their_product_to_the_matrices(family: str) -> None:
    """The loss is that of W + (alpha / rank) A B; both in float32, where only the order of sums
    differs.
    """
    config = config_of(family)
    model = Model(config.model)
    one = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
    params = jax.tree.map(jnp.asarray, random_params(model))
    batch = {name: jnp.asarray(rows) for name, rows in random_batch(config).items()}
    got = model.loss(params, batch, one)
    merged = merge_lora(params, config.model)
    want = Model(base_config(config.model)).loss(merged, batch, one)
    assert jax.tree.structure(merged) == jax.tree.structure(
        Model(base_config(config.model)).shapes()
    )
    np.testing.assert_allclose(got.loss, want.loss, rtol=2e-5)


@pytest.mark.slow
def test_a_step_changes_the_pairs_alone_and_keeps_state_for_nothing_else() -> None:
    """Frozen matrices may be bfloat16, LoRA's are float32; at the start B is zero, so the loss is
    the base model's.
    """
    config = config_of(
        "llama",
        **{"precision.params": "bfloat16", "mesh.tensor": 2, "mesh.fsdp": 2, "mesh.data": 2},
    )
    plan = make_plan(config)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state = init_state(experiment)
    before = jax.device_get(state.params)
    base = Model(base_config(config.model))
    batch = put_batch(random_batch(config), plan)
    without = {name: leaf for name, leaf in state.params["blocks"].items() if name != "lora"}
    loss_of_base = jax.jit(lambda params: base.loss(params, batch, plan).nll)
    frozen = loss_of_base(state.params | {"blocks": without})
    pairs = jax.tree.leaves(before["blocks"]["lora"])
    assert len(pairs) == 14 and {leaf.dtype for leaf in pairs} == {np.dtype("float32")}
    assert before["blocks"]["q"].dtype == jnp.bfloat16
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in pairs)
    held = state_bytes(experiment_of(config, plan), "cpu")
    assert held.gradients.device < held.optimizer.device < held.parameters.device
    step = make_train_step(experiment)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], frozen / metrics["tokens"], rtol=1e-6)
    state, _ = step(state, batch)  # in the first step A has no gradient, because B is zero
    after = jax.device_get(state.params)
    for part, arrays in before.items():
        for path, old in jax.tree_util.tree_leaves_with_path(arrays):
            new = after[part]
            for key in path:
                new = new[key.key]
            assert np.array_equal(old, new) == ("lora" not in str(path)), path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.lora.rank": -1}, "model.lora.rank=-1 is below 0"),
        ({"model.lora.alpha": 0.0}, r"model.lora.alpha=0.0 is not in \[0.001, 1e\+06\]"),
        (
            {"model.lora.targets": ["q_proj"]},
            "'q_proj'.* q, k, v, out",
        ),
        (
            {"model.lora.targets": ["gate"], "model.experts": 4},
            "gate is a matrix .*q, k, v, out",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Model(check(config_of("llama", **changes)).model)


def test_model_flops_of_frozen_parameters_are_four_each() -> None:
    config = config_of("llama").model
    model = Model(config)
    base = Model(base_config(config))
    pairs = model.parameter_count() - base.parameter_count()
    attention = 12 * config.layers * config.embed * 16
    matmuls = base.flops_per_token(16) - attention
    assert model.flops_per_token(16) == pytest.approx(matmuls * 4 / 6 + 6 * pairs + attention)


LAYOUTS = {
    "kv copies, sequence parallel": ("llama", {"mesh.tensor": 4, "mesh.fsdp": 2}),
    "context, rings, domino": (
        "llama",
        {
            "mesh.tensor": 2,
            "mesh.context": 2,
            "mesh.fsdp": 2,
            "overlap.gather": "ring",
            "overlap.scatter": "bidirectional",
            "overlap.domino": "on",
            "model.kv_heads": 0,
        },
    ),
    "stages": ("gpt2", {"mesh.stage": 2, "mesh.tensor": 2, "mesh.data": 2, "train.batch": 8}),
    "ZeRO-1, accumulated": (
        "gpt2",
        {
            "mesh.data": 2,
            "mesh.fsdp": 4,
            "rules.state_embed": ["fsdp", "data"],
            "train.accumulation": 2,
            "train.batch": 16,
        },
    ),
    "experts": ("mixtral", {"mesh.expert": 2, "mesh.tensor": 2, "mesh.fsdp": 2, "train.batch": 8}),
    "more devices than heads": ("llama", {"mesh.tensor": 8, "memory.policy": "full"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(LAYOUTS, every=3))
def test_every_layout_gives_the_gradients_of_one_device(name: str) -> None:
    family, changes = LAYOUTS[name]
    found = verify.verify(config_of(family, **{"model.heads": 4, "train.batch": 8} | changes))
    assert found.equal, found
    assert found.checks[0].rows and all("lora" in row.name for row in found.checks[0].rows)


def test_an_adapter_of_what_transformers_does_not_know_is_not_exported(tmp_path: Path) -> None:
    lora = {"model.family": "llama", "model.lora.rank": 2, "model.lora.targets": ("q",)}
    model = Model(override(Config(), lora | {"model.sublayers": "parallel"}).model)
    params = model.shapes()
    with pytest.raises(UserError, match="sublayers"):
        export_adapter(params, model, tmp_path / "adapter", "base")
    assert not (tmp_path / "adapter").exists()
