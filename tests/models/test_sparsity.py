"""N:M sparsity of a model: what is stored and what multiplies, the decay of what does not, layouts
that are refused, export, and runs that go on from each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.kernels.weight_forms import NOfM
from jaxpar.launch.local import train_config as train
from jaxpar.models import Block, Model
from jaxpar.models.hf.compressed import Compressed, compress, expand, export_compressed
from jaxpar.models.hf.export import export_hf
from jaxpar.models.sparsity import read_stacked
from jaxpar.models.views import base_model, fold_views
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan
from jaxpar.train.optimizer.given_optimizer import as_optimizer
from jaxpar.train.restore import export_run, load_params
from jaxpar.train.step import init_state, make_train_step
from jaxpar.verify.of_config import checks as verify
from jaxpar.verify.of_config.random_inputs import random_batch, random_params

SMALL: dict[str, Any] = {
    "model.vocab_size": 61,
    "model.layers": 2,
    "model.embed": 32,
    "model.heads": 4,
    "model.mlp": 64,
    "model.max_seq_len": 16,
    "data.seq_len": 16,
    "train.batch": 8,
    "mesh.platform": "cpu",
    "model.sparsity.form": "2:4",
}


CYCLIC = {"model.sparsity.block": [2, 2], "model.sparsity.pattern": "cyclic"}


def config_of(**changes: Any) -> Config:
    return override(Config(), SMALL | {key.replace("__", "."): x for key, x in changes.items()})


def plan_of_one() -> Plan:
    return Plan(make_mesh(MeshSpec(), jax.devices()[:1]))


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_a_sparse_model_is_the_dense_one_of_the_entries_that_multiply(family: str) -> None:
    changes: dict[str, Any] = {"model__family": "llama" if family == "mixtral" else family}
    if family == "mixtral":
        changes |= {"model__experts": 4}
    config = config_of(**changes)
    model = Model(config.model)
    params = jax.tree.map(jnp.asarray, random_params(model))
    batch = {name: jnp.asarray(rows) for name, rows in random_batch(config).items()}
    loss = jax.jit(
        lambda model, params: model.loss(params, batch, plan_of_one()).loss, static_argnums=0
    )
    got = loss(model, params)
    dense = base_model(model)
    without = loss(dense, params)
    folded = fold_views(jax.tree.map(jnp.copy, params), model)
    assert float(jnp.mean(folded["blocks"]["up"] != 0)) == 0.5
    assert float(jnp.mean(folded["blocks"]["out"] != 0)) == 0.5
    # the same programs but for the mask, of the same numbers
    np.testing.assert_allclose(got, loss(dense, folded), rtol=1e-6)
    assert abs(float(got - without)) > 1e-3 * float(without)
    np.testing.assert_array_equal(loss(model, folded), got)  # zeros are the smallest of a group


def test_what_does_not_multiply_decays_once_a_step_before_the_optimizer() -> None:
    config = config_of(model__sparsity__decay=0.25, model__sparsity__targets=["up"])
    model = Model(config.model)
    params = jax.tree.map(jnp.asarray, random_params(model))
    grads = jax.tree.map(jnp.ones_like, params)
    optimizer = as_optimizer(optax.sgd(1.0), config).make(model.axes)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    up = params["blocks"]["up"]
    axes = model.axes["blocks"]["up"]
    left_out = up - read_stacked(up, NOfM(2, 4), axes)
    assert 0.4 < float(jnp.mean(left_out != 0)) <= 0.5
    np.testing.assert_allclose(updates["blocks"]["up"], -(1 + 0.25 * left_out), rtol=1e-6)
    np.testing.assert_array_equal(updates["blocks"]["down"], -grads["blocks"]["down"])


@pytest.mark.slow
def test_it_decays_as_much_with_microbatches_as_without() -> None:
    """Two steps of one batch: the gradients' sums differ in order only, and the decay not at all."""
    found = []
    for parts in (1, 4):
        config = config_of(model__sparsity__decay=0.1, train__accumulation=parts)
        model = Model(config.model)
        plan = make_plan(config, jax.devices()[:1])
        optimizer = optax.sgd(1.0)
        experiment = Experiment(config, model, plan, optimizer)
        state = init_state(experiment)
        step = make_train_step(experiment)
        after, _ = step(state, put_batch(random_batch(config), plan))
        found.append(np.asarray(after.params["blocks"]["up"]))
    np.testing.assert_allclose(*found, atol=1e-5)


def test_sizes_that_cut_a_group_are_refused() -> None:
    devices = jax.devices()[:8]
    with pytest.raises(UserError, match=r"blocks.q of form 2:4 .* along embed.*has 2"):
        make_experiment(config_of(model__embed=16, mesh__fsdp=8, model__mlp=64), devices)
    with pytest.raises(UserError, match=r"blocks.down of form 2:4 .* along mlp.*has 9"):
        make_experiment(config_of(model__mlp=72, mesh__tensor=8, model__heads=8), devices)
    # gradients and moments are split further than parameters (ZeRO-1)
    zero = config_of(model__embed=16, mesh__data=8, rules__state_embed=["data"])
    with pytest.raises(UserError, match="units of 4 along state_embed, and a device has 2"):
        make_experiment(zero, devices)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model__sparsity__form": "4:2"}, "is not N:M with N below M"),
        ({"model__sparsity__form": "half"}, "is not N:M"),
        ({"model__sparsity__targets": ["mlp"]}, "no matrix 'mlp'"),
        ({"model__sparsity__block": [4]}, "rows and the columns"),
        ({"model__sparsity__pattern": "cyclic"}, "cyclic is a pattern"),
        ({"model__lora__rank": 2}, "model.lora.rank=2 with model.sparsity.form=2:4"),
    ],
)
def test_what_is_no_sparsity_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        check(config_of(**changes))


def test_a_matrix_that_is_not_there_and_a_block_of_ones_own_are_refused() -> None:
    with pytest.raises(UserError, match="gpt2 has no matrix 'gate'"):
        Model(config_of(model__sparsity__targets=["gate"]).model)

    shared = {"model__experts": 4, "model__shared_experts": 1, "model__family": "llama"}
    with pytest.raises(UserError, match=r"2:4 of .*model\.shared_experts=1"):
        Model(config_of(**shared).model)
    Model(config_of(**shared, model__sparsity__targets=["q"]).model)

    class Mine(Block):
        pass

    with pytest.raises(UserError, match="Mine reads its weights"):
        Model(config_of().model, blocks=Mine)
    assert issubclass(Mine, nnx.Module)


def test_flops_are_those_of_the_entries_that_multiply() -> None:
    """Forward and the input's gradient need half the entries, the weight's gradient all."""
    model = Model(config_of().model)
    dense = base_model(model)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    saved = dense.flops_per_token(16) - model.flops_per_token(16)
    assert saved == pytest.approx(4 * matrices / 2)
    fixed = {"model__sparsity__pattern": "cyclic", "model__sparsity__block": [2, 2]}
    saved = dense.flops_per_token(16) - Model(config_of(**fixed).model).flops_per_token(16)
    assert saved == pytest.approx(6 * matrices / 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_compressed_matrix_is_its_values_and_their_places(dim: int) -> None:
    matrix = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    form = NOfM(2, 4)
    rows_first = np.moveaxis(matrix, dim, 0)
    sparse = np.moveaxis(np.asarray(form.read(jnp.asarray(rows_first))), 0, dim)
    found = compress(matrix, form, dim)
    assert found.values.shape[dim] == matrix.shape[dim] // 2 and found.indices.max() <= 3
    np.testing.assert_array_equal(expand(found, form, dim), sparse)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_compressed_folder_is_the_dense_one(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model__family": family, "model__sparsity__targets": ["up", "down"]}
    if family == "mixtral":
        changes |= {"model__family": "llama", "model__experts": 4}
    model = Model(config_of(**changes).model)
    params = jax.tree.map(jnp.asarray, random_params(model))
    export_hf(params, model, tmp_path / "dense")
    export_compressed(params, model, tmp_path / "small")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    small = load_file(tmp_path / "small" / "compressed.safetensors")
    told = json.loads((tmp_path / "small" / "config.json").read_text())["sparsity"]
    form = NOfM(told["n"], told["m"])
    for name, dim in told["summed_dims"].items():
        parts = Compressed(small.pop(f"{name}.values"), small.pop(f"{name}.indices"))
        small[name] = expand(parts, form, dim)
    assert small.keys() == dense.keys()
    assert len(told["summed_dims"]) == (4 if family == "gpt2" else 2 * 4 * 2)
    for name, array in dense.items():
        np.testing.assert_array_equal(small[name], array)
    with pytest.raises(UserError, match="a form such as 2:4"):
        export_compressed(params, base_model(model), tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form", "mesh"),
    [
        ("gpt2", "2:4", {"mesh.data": 4}),
        ("llama", "2:4", {"mesh.fsdp": 4}),
        ("llama", "1:4", {"mesh.tensor": 4}),
        ("llama", "2:4", {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.context": 2}),
        ("gpt2", "1:4", {"mesh.stage": 2, "mesh.fsdp": 2}),
        ("mixtral", "2:4", {"mesh.expert": 2, "mesh.tensor": 2}),
        ("gpt2", "2:4", {"mesh.data": 4, "rules.state_embed": ["data"]}),
        ("llama", "1:4", {"mesh.fsdp": 2, "mesh.tensor": 2, "model.sparsity.block": [2, 2]}),
        ("gpt2", "1:4", {"mesh.stage": 2, "mesh.tensor": 2} | CYCLIC),
        ("mixtral", "1:4", {"mesh.expert": 2, "mesh.fsdp": 2} | CYCLIC),
    ],
)
def test_every_layout_gives_the_gradients_and_updates_of_one_device(
    family: str, form: str, mesh: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"model.family": family}
    if family == "mixtral":
        changes = {"model.family": "llama", "model.experts": 4}
    config = override(Config(), SMALL | changes | mesh | {"model.sparsity.form": form})
    report = verify.verify(config)
    assert report.equal, str(report)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh_and_is_exported_with_its_zeros(tmp_path: Path) -> None:
    fixed = {
        "data.max_bytes": 50_000,
        "model.vocab_size": 256,
        "train.steps": 6,
        "train.warmup_steps": 0,
        "train.eval_batches": 1,
        "train.final_eval_batches": 1,
        "checkpoint.every": 3,
        "train.learning_rate": 0.01,
    }
    config = override(Config(), SMALL | fixed | {"mesh.fsdp": 2, "mesh.tensor": 2})
    whole = train(config, tmp_path / "whole")
    train(override(config, {"train.stop_at": 3}), tmp_path / "part")
    same = train(config, tmp_path / "part")
    assert same.loss == whole.loss
    train(override(config, {"train.stop_at": 3}), tmp_path / "moved")
    other = override(config, {"mesh.fsdp": 1, "mesh.data": 2, "mesh.stage": 2, "mesh.tensor": 1})
    moved = train(other, tmp_path / "moved")
    assert moved.loss == pytest.approx(whole.loss, abs=1e-5)

    export_run(config, tmp_path / "whole", tmp_path / "hf", 0, "float32")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    fc_DF = tensors["transformer.h.1.mlp.c_fc.weight"]
    proj_FD = tensors["transformer.h.1.mlp.c_proj.weight"]
    for weight in (fc_DF, proj_FD):
        groups = (weight != 0).reshape(-1, 4, weight.shape[1]).sum(axis=1)
        assert (groups <= 2).all() and groups.mean() > 1.99

    # a dense model goes on from what multiplies, a sparse one of the same form from what is stored
    dense = override(config, {"model.sparsity.form": "", "train.init": str(tmp_path / "whole")})
    from_sparse = load_params(tmp_path / "whole", make_experiment(dense))["blocks"]["up"]
    stored = load_params(tmp_path / "whole", make_experiment(config))["blocks"]["up"]
    assert float(jnp.mean(from_sparse == 0)) == 0.5
    assert float(jnp.mean(stored == 0)) < 0.01
    np.testing.assert_array_equal(from_sparse[1], fc_DF)
