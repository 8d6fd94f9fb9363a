"""Any layout, same answer: the training step on every data x fsdp x tensor mesh, with accumulation,
and its pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from experiments import experiment_of
from tiers import some

from jaxpar.base.config import Config, ModelConfig, PrecisionConfig, TrainConfig, override, parse
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import options_of
from jaxpar.base.layout.mesh import MeshSpec, describe, devices_needed
from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.models import Model
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.rehearse.report.collectives import axes_of
from jaxpar.rehearse.requested_collectives import requested_collectives
from jaxpar.train.batch import batch_rows, batch_shapes, put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, make_plan, plan_notes
from jaxpar.train.optimizer import decay_mask
from jaxpar.train.optimizer.named_optimizers import config_optimizer
from jaxpar.train.step import (
    compile_eval_step,
    gradients,
    init_state,
    loss_weights,
    make_eval_step,
    make_train_step,
    reorder_state,
    step_shapes,
)
from jaxpar.train.step.accumulate import deferred_sum_axes

STEPS = 20
MESHES = [
    MeshSpec(),
    *(
        MeshSpec(data=d, fsdp=f, tensor=t)
        for d, f, t in itertools.product(
            (1, 2, 4, 8),
            repeat=3,
        )
        if d * f * t == 8
    ),
]
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "vocab_multiple": 8,
    "layers": 2,
    "embed": 32,
    "heads": 8,
    "mlp": 64,
}
MODELS = {
    "gpt2": ModelConfig(family="gpt2", max_seq_len=16, **SIZES),
    "llama": ModelConfig(family="llama", kv_heads=8, tied_head=False, max_seq_len=16, **SIZES),
}


def config_of(model: str, **changes: Any) -> Config:
    train = TrainConfig(steps=STEPS, batch=8, warmup_steps=3, learning_rate=3e-3, z_loss=1e-4)
    config = Config(model=MODELS[model], train=train)
    return override(config, {"data.seq_len": 16, **changes})


def batches(
    config: Config,
    count: int,
    packed: bool = False,
) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (config.train.batch, config.data.seq_len + 1)
    found = []
    for _ in range(count):
        # Random walks: text that can be learned.
        ids = (np.cumsum(rng.integers(0, 3, shape), axis=1) % config.model.vocab_size).astype(
            np.int32
        )
        found.append(
            {
                "tokens": ids[:, :-1],
                "labels": ids[:, 1:].copy(),
            }
        )
        # unequal counts in every microbatch
        found[-1]["labels"][rng.random(found[-1]["labels"].shape) < 0.1] = -1
        if packed:
            starts = rng.random((shape[0], shape[1] - 1)) < 0.2
            found[-1]["segments"] = np.cumsum(starts, axis=1).astype(np.int32)
            found[-1]["positions"] = np.tile(
                np.arange(shape[1] - 1, dtype=np.int32),
                (shape[0], 1),
            )
    return found


@functools.cache
def fresh(model: ModelConfig) -> Any:
    return jax.device_get(jax.jit(Model(model).init)(jax.random.key(0)))


@functools.cache
def run(
    config: Config, mesh: MeshSpec, packed: bool = False, steps: int = STEPS
) -> tuple[list[float], Any]:
    config = dataclasses.replace(config, mesh=mesh)
    plan = make_plan(config, jax.devices()[: devices_needed(mesh)])
    model = Model(config.model)
    # Random initializers are slow to compile for eight devices, and test_models has them: made
    # once, moved here.
    experiment = Experiment(config, model, plan)
    params = jax.device_put(fresh(config.model), experiment.shardings.params)
    state = init_state(experiment, params)
    step = make_train_step(experiment)
    losses = []
    for rows in batches(config, steps, packed):
        state, metrics = step(state, put_batch(rows, plan))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def one_device() -> dict[str, list[float]]:
    return {model: run(config_of(model), MeshSpec())[0] for model in MODELS}


def every_mesh() -> Iterator[Any]:
    """Each mesh with both models, every mesh quick or slow; the five that are quick have each axis
    at every size between them, but for fsdp=4.
    """
    marks = (
        [],
        [pytest.mark.slow],
        [
            pytest.mark.slow,
            pytest.mark.long,
        ],
    )
    for (m, model), (n, mesh) in itertools.product(
        enumerate(MODELS),
        enumerate(MESHES),
    ):
        sizes = describe({axis: getattr(mesh, axis) for axis in ("data", "fsdp", "tensor")})
        yield pytest.param(
            model,
            mesh,
            id=f"{model}-{sizes}",
            marks=marks[(m + n) % 3] or [pytest.mark.slow] * ((m, n) in ((0, 3), (1, 5))),
        )


@pytest.mark.parametrize(("model", "mesh"), [*every_mesh()])
def test_twenty_steps_give_the_same_losses_on_every_mesh(
    model: str, mesh: MeshSpec, one_device: dict[str, list[float]]
) -> None:
    losses, _ = run(config_of(model), mesh)
    assert losses[-1] < losses[0] - 0.1
    # The same float32 sums in another order: 20 steps of AdamW spread ulps (6e-8) by a factor of
    # ten or so.
    np.testing.assert_allclose(losses, one_device[model], rtol=1e-5)


ZERO1 = {
    "data": (MeshSpec(data=8), ("data",)),
    "data and fsdp": (
        MeshSpec(data=2, fsdp=2, tensor=2),
        ("fsdp", "data"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", some(itertools.product(ZERO1, MODELS), 3), ids="-".join)
def test_a_state_that_is_split_further_than_its_parameters_gives_the_same_losses(pair, one_device):
    case, model = pair
    mesh, axes = ZERO1[case]
    accumulation = 1 if mesh.data == 8 else 2
    losses, state = run(
        config_of(model, **{"rules.state_embed": axes, "train.accumulation": accumulation}), mesh
    )
    np.testing.assert_allclose(losses, one_device[model], rtol=1e-5)
    q = state.params["blocks"]["q"]
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == q.shape]
    assert moments and all(leaf.addressable_shards[0].data.size == q.size // 8 for leaf in moments)
    assert q.addressable_shards[0].data.size == q.size // (mesh.fsdp * mesh.tensor)


def test_zero1_scatters_gradients_and_gathers_parameters_once() -> None:
    config = config_of("llama", **{"rules.state_embed": ("data",), "mesh.data": 8})
    plan = make_plan(config, jax.devices())
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    traced = make_train_step(experiment).trace(*step_shapes(experiment))
    sent = Counter[str]()
    for found in requested_collectives(traced.jaxpr, plan.mesh):
        assert found.axes == {"data"}
        sent[found.kind] += found.bytes * found.count
    # Whole arrays in float32: every parameter is gathered after its update; the norms' gradients
    # are left to XLA.
    sizes = jax.tree.map(lambda leaf: 4 * leaf.size, model.shapes())
    matrices = jax.tree.map(
        lambda size, decays: size * decays,
        sizes,
        decay_mask(model.axes),
    )
    assert sent["all-gather"] == sum(jax.tree.leaves(sizes))
    assert sent["reduce-scatter"] == sum(jax.tree.leaves(matrices))
    assert sent["all-reduce"] < 100, "the sums of the loss"


def plans_of_page(name: str, section: str = "") -> list[Plan]:
    """The plans of the TOML snippets of a page of the docs, or of one of its sections."""
    page = (Path(__file__).parents[3] / "docs" / name).read_text(encoding="utf-8")
    if section:
        text = page.partition(f"## {section}")[2].partition("\n## ")[0]
    else:
        text = page
    snippets = re.findall(r"```toml\n(.+?)```", text, re.DOTALL)
    configs = [override(parse(text, name), {"train.batch": 16}) for text in snippets]
    return [make_plan(config, jax.devices()[: devices_needed(config.mesh)]) for config in configs]


def test_the_modes_of_the_docs_are_plans() -> None:
    modes = plans_of_page("sharding.md", "Modes")
    assert [(plan.size("embed"), plan.size("state_embed")) for plan in modes] == [
        (1, 1),
        (1, 8),
        (8, 8),
        (4, 8),
        (4, 4),
    ]


def test_the_long_sequences_of_the_docs_are_plans() -> None:
    plans = plans_of_page("sharding.md", "Long sequences")
    layouts = [
        (plan.context.strategy, plan.size("attention_seq"), plan.size("embed")) for plan in plans
    ]
    assert layouts == [
        ("ring", 8, 1),
        ("ulysses", 4, 8),
        ("ring", 8, 1),
    ]


def test_the_forms_of_overlap_of_the_docs_are_plans() -> None:
    forms = [
        (plan.overlap.gather, plan.overlap.scatter, plan.overlap.domino)
        for plan in plans_of_page("sharding.md", "Overlap")
    ]
    assert forms == [
        ("xla", "bidirectional", "off"),
        ("xla", "xla", "on"),
        ("auto", "auto", "auto"),
    ]


def test_the_layouts_to_choose_from_are_plans() -> None:
    meshes = [
        {axis: size for axis, size in plan.mesh.shape.items() if size > 1}
        for plan in plans_of_page("layouts.md")
    ]
    assert meshes == [
        {"data": 8},
        {"data": 8},
        {"fsdp": 8},
        {"data": 2, "fsdp": 4},
        {"fsdp": 2, "tensor": 4},
        {"fsdp": 2, "tensor": 4},
        {"context": 4, "tensor": 2},
        {"context": 8},
        {"fsdp": 2, "expert": 4},
        {"stage": 4, "data": 2},
        {"stage": 2, "fsdp": 2, "tensor": 2},
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.seq_len": 20}, "data.seq_len=20 is not cut into 8 equal chunks"),
        ({"model.dropout": 0.1}, "model.dropout=0.1 .*context=4"),
    ],
)
def test_a_sequence_that_cannot_be_split_is_refused_before_anything_is_compiled(
    changes: Any, says: str
) -> None:
    config = override(Config(), {"mesh.context": 4, "data.seq_len": 24} | changes)
    with pytest.raises(UserError, match=says):
        make_plan(config, jax.devices()[:4])


def test_a_state_must_be_split_as_its_parameters_or_further() -> None:
    config = config_of(
        "gpt2", **{"rules.state_embed": ("data", "fsdp"), "mesh.data": 2, "mesh.fsdp": 2}
    )
    with pytest.raises(UserError, match=r"try rules.state_embed=\(fsdp, data\)$"):
        make_plan(config, jax.devices()[:4])
    config = config_of(
        "gpt2",
        **{"rules.state_embed": ("data",), "mesh.data": 3, "train.batch": 12, "model.embed": 64},
    )
    with pytest.raises(
        UserError, match=r"dim . \(state_embed\) has size .*, which data=3 does not divide"
    ):
        make_plan(config, jax.devices()[:3])


@pytest.mark.parametrize("model", some(MODELS, 2))
def test_accumulation_weighs_every_token_alike(
    model: str, one_device: dict[str, list[float]]
) -> None:
    losses, _ = run(
        config_of(model, **{"train.accumulation": 4}),
        MeshSpec(fsdp=2),
    )
    np.testing.assert_allclose(losses, one_device[model], rtol=1e-5)


def gradients_on(mesh: MeshSpec, config: Config) -> tuple[Any, Any, Any]:
    """Sums and gradients of the first batch, their plan, and the program that made them."""
    config = dataclasses.replace(config, mesh=mesh)
    plan = make_plan(config, jax.devices()[: devices_needed(mesh)])
    model = Model(config.model)
    key = jax.random.key(1) if config.model.dropout else None
    config = override(config, {"train.z_loss": 1e-4})
    experiment = Experiment(config, model, plan)
    of_batch = jax.jit(lambda params, rows: gradients(experiment, params, rows, key))
    params = jax.device_put(fresh(config.model), experiment.shardings.params)
    program = of_batch.lower(params, put_batch(batches(config, 1)[0], plan)).compile()
    return program(params, put_batch(batches(config, 1)[0], plan)), plan, program


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id=""),
        pytest.param({"model.dropout": 0.2}, id="dropout", marks=pytest.mark.slow),
        pytest.param({"precision.gradients": "bfloat16"}, id="bfloat16"),
    ],
)
def test_each_device_adds_up_its_own_microbatches(changes: dict[str, Any]) -> None:
    """One sum over `data` in a step, outside of the loop; over `fsdp`, whose devices have parts,
    one a microbatch.
    """
    config = config_of("gpt2", **{"train.accumulation": 2}, **changes)
    want, _, _ = gradients_on(MeshSpec(), config)
    found, plan, program = gradients_on(
        MeshSpec(data=2, fsdp=2, tensor=2),
        config,
    )
    # Float32 sums of a few hundred terms in another order; in bfloat16, of two microbatches,
    # rounded at 2^-9 each. Of the largest gradient of all: that of a key's bias is nothing but what
    # is rounded.
    within = 2**-8 if "precision.gradients" in changes else 1e-6
    arrays = [[np.float32(x) for x in jax.tree.leaves(tree)] for tree in (found, want)]
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(want[1]))
    for x, y in zip(*arrays, strict=True):
        np.testing.assert_allclose(x, y, rtol=within, atol=within * largest)
    sums = [
        count
        for task, count in walk(read_program(program.as_text()).nodes)
        if task.collective and "data" in axes_of(task.collective, dict(plan.mesh.shape))
    ]
    assert (max(sums) == 1) == ("model.dropout" not in changes)


def test_sums_that_wait_are_taken_over_every_axis_that_splits_the_batch_alone() -> None:
    small = {"model.layers": 1, "train.accumulation": 2}
    config = config_of("gpt2", **small, **{"rules.embed": (), "rules.state_embed": ()})
    want, _, _ = gradients_on(MeshSpec(), config)
    found, plan, _ = gradients_on(MeshSpec(data=2, fsdp=2), config)
    assert deferred_sum_axes(plan, 2, False) == ("data", "fsdp")
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(want[1]))
    # float32 sums of a few hundred terms in another order, as in the test above
    chex.assert_trees_all_close(found, want, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.slow
def test_packed_documents_give_the_same_losses_on_a_mesh(
    one_device: dict[str, list[float]],
) -> None:
    config = config_of("llama", **{"data.pack": True})
    one, _ = run(config, MeshSpec(), packed=True, steps=5)
    many, _ = run(
        config,
        MeshSpec(data=2, fsdp=2, tensor=2),
        packed=True,
        steps=5,
    )
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert max(abs(a - b) for a, b in zip(one, one_device["llama"], strict=False)) > 1e-3


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_state_and_stays_near(
    one_device: dict[str, list[float]],
) -> None:
    config = dataclasses.replace(config_of("gpt2"), precision=PrecisionConfig("bfloat16"))
    losses, state = run(config, MeshSpec(data=2, fsdp=2, tensor=2))
    want = one_device["gpt2"]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    # bfloat16 has 8 bits: each activation is off by up to 2^-9, and losses are means over a hundred
    # tokens.
    np.testing.assert_allclose(losses, want, rtol=2e-2)
    assert losses != want


@pytest.mark.slow
def test_dropout_gives_the_same_losses_on_every_mesh(one_device: dict[str, list[float]]) -> None:
    config = config_of("gpt2", **{"model.dropout": 0.2})
    one, _ = run(config, MeshSpec(), steps=5)
    many, _ = run(
        config,
        MeshSpec(data=2, fsdp=2, tensor=2),
        steps=5,
    )
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert one != one_device["gpt2"][:5]


def test_every_microbatch_drops_by_a_key_of_its_own() -> None:
    """In a model whose loss is nothing but a random number, and so its gradient."""

    def loss(
        params: Any,
        rows: Any,
        plan: Any,
        key: jax.Array,
        *_: Any,
    ) -> LossSums:
        drawn = params["scale"][0] * jax.random.uniform(key)
        return LossSums(drawn, drawn, jnp.ones(()))

    model: Any = SimpleNamespace(
        config=SimpleNamespace(experts=0), axes={"scale": ("embed",)}, loss=loss
    )
    model.trained, model.merge = (lambda tree: tree), (lambda params, trained: trained)
    config = config_of("gpt2", **{"train.accumulation": 4})
    experiment = Experiment(config, model, make_plan(config, jax.devices()[:1]))
    key = jax.random.key(3)
    rows = {"tokens": jnp.zeros((4, 8), jnp.int32)}
    sums, grads = gradients(experiment, {"scale": jnp.ones(1)}, rows, key)
    want = sum(float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(4))
    # four float32 added up
    np.testing.assert_allclose(
        [sums.loss, grads["scale"][0]],
        want,
        rtol=1e-6,
    )


@pytest.mark.slow
def test_two_runs_of_one_seed_are_equal_to_the_bit() -> None:
    config = config_of("llama", **{"model.dropout": 0.1})
    mesh = MeshSpec(data=2, fsdp=2, tensor=2)
    (losses, state), (again, state_again) = (
        run.__wrapped__(config, mesh, steps=5) for _ in range(2)
    )
    assert losses == again
    chex.assert_trees_all_equal(state, state_again)


def test_the_state_is_sharded_as_planned_and_donated() -> None:
    config = config_of("llama")
    config = dataclasses.replace(
        config,
        mesh=MeshSpec(data=2, fsdp=2, tensor=2),
    )
    plan = make_plan(config)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state = init_state(experiment)
    jax.tree.map(
        lambda leaf, want: (
            leaf.sharding.is_equivalent_to(want, leaf.ndim) or pytest.fail(str(want))
        ),
        state,
        experiment.shardings,
    )
    rows = put_batch(batches(config, 1)[0], plan)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in rows.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in batch_shapes(config, plan).items()
    }
    new, metrics = make_train_step(experiment)(state, rows)
    assert int(new.step) == 1
    assert state.params["blocks"]["q"].is_deleted()
    assert float(metrics["tokens"]) == np.sum(batches(config, 1)[0]["labels"] >= 0)
    assert batch_rows(8, plan) == list(range(8))


@pytest.mark.parametrize(
    "changes",
    some([{}, {"precision.moments": "bfloat16", "memory.optimizer": "offload"}], 2),
    ids=str,
)
def test_a_fresh_state_compiles_no_zeros(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("gpt2", **changes, **{"mesh.fsdp": 2})
    plan = make_plan(config, jax.devices()[:2])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    with jax.log_compiles():
        state = init_state(experiment)
    compiled = [line for line in caplog.messages if line.startswith("Compiling")]
    assert 1 <= len(compiled) <= 4, compiled  # all initializers together, and the key
    for leaf, want in zip(*map(jax.tree.leaves, (state, experiment.state)), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (want.shape, want.dtype, want.sharding)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((state.step, state.opt_state)))
    # To an ulp or two: less of the compiler's optimisation, the same arithmetic.
    chex.assert_trees_all_close(state.params, fresh(config.model), rtol=5e-7, atol=1e-9)


def test_evaluation_sums_the_tokens_that_count() -> None:
    config = config_of("gpt2")
    plan = make_plan(config, jax.devices()[:1])
    model = Model(config.model)
    params = model.init(jax.random.key(0))
    rows = batches(config, 1)[0]
    nll, tokens = make_eval_step(Experiment(config, model, plan))(params, put_batch(rows, plan))
    scores = np.asarray(jax.nn.log_softmax(model.logits(params, rows, plan)))
    picked = np.take_along_axis(scores, np.maximum(rows["labels"], 0)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        nll,
        -np.sum(picked[rows["labels"] >= 0]),
        rtol=1e-5,
    )
    assert tokens == np.sum(rows["labels"] >= 0)
    # In microbatches it is the same sum of float32 numbers in another order: a few ulps.
    in_four = Experiment(override(config, {"train.accumulation": 4}), model, plan)
    parts, counted = make_eval_step(in_four)(params, put_batch(rows, plan))
    np.testing.assert_allclose(parts, nll, rtol=1e-6)
    assert counted == tokens


PIPELINE = {
    "mesh.stage": 2,
    "pipeline.microbatches": 8,
    "pipeline.schedule": "interleaved",
    "pipeline.virtual": 2,
    "pipeline.stash": "stage",
    "memory.policy": "full",
    "model.layers": 4,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"model.layers": 1, "train.accumulation": 32},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"mesh.fsdp": 2, "mesh.tensor": 2, "memory.policy": "full"},
                {
                    "memory.parameters": "offload",
                    "memory.optimizer": "offload",
                    "train.accumulation": 4,
                },
                {
                    "model.family": "llama",
                    "model.experts": 4,
                    "mesh.expert": 2,
                    "train.accumulation": 4,
                },
                PIPELINE,
                PIPELINE | {"train.accumulation": 2},
            )
        ),
    ],
    ids=str,
)
def test_an_evaluation_takes_no_more_memory_than_the_training_step(changes: dict[str, Any]) -> None:
    """That is why a rehearsal and a budget look at the step alone. Hidden arrays are larger than
    the weights.
    """
    config = config_of("gpt2", **{"model.mlp": 256, "train.batch": 32} | changes)
    plan = make_plan(config, jax.devices()[: devices_needed(config.mesh)])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    shapes = step_shapes(experiment)
    trained = make_train_step(experiment).lower(*shapes).compile().memory_analysis()
    evaluated = compile_eval_step(experiment).memory_analysis()
    assert 0 < evaluated.temp_size_in_bytes < trained.temp_size_in_bytes


def test_an_evaluation_is_compiled_with_the_options_of_the_training_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of("gpt2", **{"compiler.options": ("xla_cpu_enable_fast_math=false",)})
    experiment = make_experiment(config, jax.devices()[:1])
    state, batch = step_shapes(experiment)
    lowered = make_eval_step(experiment).lower(state.params, batch)
    assert options_of(lowered) == {"xla_cpu_enable_fast_math": False}
    monkeypatch.setattr(
        "jaxpar.train.experiment.step_options", lambda *_: {"xla_of_this_mesh": True}
    )
    lowered = make_eval_step(experiment).lower(state.params, batch)
    assert options_of(lowered) == {"xla_of_this_mesh": True}


MISFITS: list[tuple[dict[str, Any], str]] = [
    (
        {"mesh.data": 8, "train.batch": 12},
        "12 sequences, which 8 data-parallel .* do not divide: try train.batch=16",
    ),
    (
        {"mesh.tensor": 8, "model.heads": 4, "rules.attention_seq": ("context",)},
        r"blocks.k: dim 2 \(heads\) has size 4, which tensor=8 does not divide",
    ),
    (
        {"mesh.tensor": 8, "rules.attention_seq": ("tensor",)},
        "attention: .*tensor=8 .*dim 1",
    ),
    (
        {"mesh.context": 2, "mesh.tensor": 4, "rules.attention_seq": ("tensor",)},
        "does not begin with",
    ),
    (
        {"mesh.tensor": 8, "data.seq_len": 12},
        r"residual stream: dim 1 \(residual_seq\) has size 12, which tensor=8",
    ),
    (
        {"mesh.tensor": 8, "data.seq_len": 8, "overlap.domino": "sequence"},
        r"cuts data.seq_len=8 in two halves, which 8 devices split evenly: try data.seq_len=16",
    ),
    (
        {"mesh.data": 4, "mesh.context": 2, "train.batch": 4, "overlap.domino": "on"},
        "over context=2",
    ),
    (
        {"mesh.data": 8, "model.masks": ("full",), "overlap.domino": "on"},
        r"Full\(\) .*second",
    ),
    (
        {"mesh.data": 8, "model.family": "llama", "model.experts": 2, "overlap.domino": "on"},
        "model.experts=2 .*whole sequences",
    ),
    ({"mesh.tensor": 8, "rules.embed": ("tensor",)}, "mesh axis tensor=8 is used twice"),
]


def test_what_the_plan_changes_is_said() -> None:
    config = config_of("gpt2", **{"mesh.tensor": 8, "model.heads": 4, "overlap.scatter": "ring"})
    plan = make_plan(config, jax.devices())
    assert (plan.rules.heads, plan.rules.attention_seq) == ((), plan.rules.residual_seq)
    assert [note.split(":")[0] for note in plan_notes(experiment_of(config, plan))] == [
        "tensor=8 does not divide 4 heads",
        "overlap.scatter",
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model.head_dim": 16}, None),
        (
            {"model.head_dim": 320},
            "splash: head_dim 320 is no multiple of 128; pallas_tpu: head_dim 320 is more than 256",
        ),
        ({"model.head_dim": 320, "kernels.attention": "chunked"}, None),  # as was asked for
        (
            {"model.dropout": 0.1},
            "splash: dropout of attention weights; pallas_tpu: dropout of attention weights",
        ),
    ],
    ids=["a kernel serves", "head_dim", "chunked by name", "dropout"],
)
def test_why_no_kernel_serves_is_said(
    changes: dict[str, Any], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpar.parallel._choose_attention.platform_of", lambda plan: "tpu")
    config = config_of("gpt2", **{"mesh.data": 8}, **changes)
    found = [
        note
        for note in plan_notes(experiment_of(config, make_plan(config, jax.devices())))
        if note.startswith("attention by")
    ]
    assert found == ([f"attention by plain XLA, in tiles, and no kernel ({why})"] if why else [])


def test_why_no_kernel_serves_parts_of_a_sequence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.parallel._choose_attention.platform_of", lambda plan: "tpu")
    config = config_of("gpt2", **{"mesh.context": 8, "model.head_dim": 320})
    plan = make_plan(config, jax.devices())
    why = "pallas_tpu: head_dim 320 is more than 256"
    assert f"attention by plain XLA, in tiles, and no kernel ({why})" in plan_notes(
        experiment_of(config, plan)
    )


@pytest.mark.parametrize(("changes", "message"), MISFITS)
def test_a_plan_that_does_not_fit_is_refused_before_compiling(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(config_of("gpt2", **changes), jax.devices())


def test_each_step_drops_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run could not show it: the same key in every step is the same key after a
    resume.
    """

    def draw(experiment: Experiment, params: Any, batch: Any, key: Any) -> Any:
        return LossSums(jnp.float32(0), jax.random.uniform(key), jnp.float32(1)), jax.tree.map(
            jnp.zeros_like, params
        )

    monkeypatch.setattr("jaxpar.train.step.train_step.gradients", draw)
    config = config_of("gpt2", **{"model.dropout": 0.1, "model.layers": 1})
    model = Model(config.model)
    plan = make_plan(config, jax.devices()[:1])
    experiment = Experiment(config, model, plan)
    state = init_state(experiment, fresh(config.model))
    step = make_train_step(experiment)
    drawn = []
    for rows in batches(config, 1) * 3:
        state, metrics = step(state, put_batch(rows, plan))
        drawn.append(float(metrics["loss"]))
    assert len(set(drawn)) == 3


def test_a_state_is_carried_to_another_order_of_layers_and_back() -> None:
    """Every leaf is another number, so that none can stand for another."""
    config = config_of("gpt2", **{"model.layers": 5})
    model = Model(config.model)
    shapes = Experiment(config, model, make_plan(config, jax.devices()[:1])).state
    count = itertools.count(1)
    # A layer's part of a stacked leaf is the layer's number, plus a hundred times that of the leaf.
    state = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 100 * next(count), leaf.dtype),
        shapes,
    )
    state = jax.tree.map(
        lambda x: x + np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) if x.ndim else x, state
    )
    there = (3, 1, -1, 0, 4, 2)
    model = Model(config.model)
    optimizer = config_optimizer(config)
    moved = reorder_state(state, None, there, model, optimizer)

    def assert_moved(tree: Any, want: Any) -> None:
        for part in ("embed", "head"):
            chex.assert_trees_all_equal(tree[part], want[part])
        leaves = zip(
            jax.tree.leaves(tree["blocks"]),
            jax.tree.leaves(want["blocks"]),
            strict=True,
        )
        for (leaf, own), (place, layer) in itertools.product(
            leaves,
            enumerate(there),
        ):
            np.testing.assert_array_equal(leaf[place], 0 if layer < 0 else own[layer])

    assert_moved(moved.params, state.params)
    for moment in ("mu", "nu"):
        assert_moved(
            optax.tree.get(moved.opt_state, moment), optax.tree.get(state.opt_state, moment)
        )
    assert moved.step == state.step
    counts, want = (
        jax.tree.leaves(optax.tree.set(of.opt_state, mu={}, nu={})) for of in (moved, state)
    )
    # of the moments' decay, and of the schedule
    assert counts == want and len({int(x) for x in counts}) == 2
    chex.assert_trees_all_equal(reorder_state(moved, there, None, model, optimizer), state)


def test_labels_are_smoothed_in_what_is_differentiated_and_not_in_the_loss_that_is_logged() -> None:
    config = config_of("gpt2", **{"train.label_smoothing": 0.3, "train.z_loss": 0.0})
    plan = make_plan(config, jax.devices()[:1])
    model = Model(config.model)
    params = fresh(config.model)
    rows = batches(config, 1)[0]

    @jax.jit
    def both(params: Any) -> tuple[jax.Array, LossSums]:
        sums = model.loss(params, rows, plan, weights=loss_weights(config))
        return model.logits(params, rows, plan), sums

    logits, sums = both(params)
    # Tolerance: float32 sums of 128 terms in another order.
    likelihoods = np.asarray(jax.nn.log_softmax(logits), np.float64)
    counts = rows["labels"] >= 0
    labels = np.maximum(rows["labels"], 0)[..., None]
    nll = -np.sum(counts * np.take_along_axis(likelihoods, labels, axis=-1)[..., 0])
    even = -np.sum(counts * np.mean(likelihoods, axis=-1))
    np.testing.assert_allclose([sums.nll, sums.loss], [nll, 0.7 * nll + 0.3 * even], rtol=1e-5)
    experiment = Experiment(config, model, plan)
    step = make_train_step(experiment)
    _, metrics = jax.eval_shape(step, *step_shapes(experiment))
    assert {"loss", "objective"} <= set(metrics)
