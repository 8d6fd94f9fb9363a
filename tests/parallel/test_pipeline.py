"""The pipeline's parts: where layers are stored, slots of buffers, ticks of the compiled program,
memory, dropout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import experiment_of

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh, total_sizes
from jaxpar.base.layout.plan import Pipeline, Plan
from jaxpar.base.layout.sharding import replicated_sharding
from jaxpar.hlo.program.tasks import Loop
from jaxpar.hlo.read import read_program
from jaxpar.models import Model
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums
from jaxpar.parallel.domino import LayerInfo
from jaxpar.parallel.pipeline import (
    executor,
    layers_of,
    microbatches,
    reorder_layers,
    schedule,
    stage_inputs,
    stored_order,
)
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.residuals import choose_residuals
from jaxpar.parallel.zigzag import TOKENS
from jaxpar.train import step
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan, plan_notes
from jaxpar.train.state import param_shapes
from jaxpar.verify.of_config.random_inputs import random_batch, random_params

SMALL = {
    "model.vocab_size": 90,
    "model.embed": 16,
    "model.heads": 2,
    "model.mlp": 24,
    "model.layers": 4,
    "data.seq_len": 10,
    "model.max_seq_len": 16,
    "train.batch": 16,
}


def config_of(**changes: Any) -> Config:
    return override(
        Config(), SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    )


def plan_of(config: Config) -> Plan:
    return make_plan(config, jax.devices()[: devices_needed(config.mesh)])


# Layers.


def test_layers_are_even_or_have_more_in_the_middle() -> None:
    def counts(total: int, stages: int, **pipeline: Any) -> tuple[int, ...]:
        return layers_of(total, stages, Pipeline(**pipeline)).counts

    assert counts(8, 4) == (2, 2, 2, 2)
    assert counts(30, 4) == (7, 8, 8, 7)
    assert counts(9, 4) == (2, 3, 2, 2)
    assert counts(8, 2, virtual=2, schedule="interleaved") == (2, 2, 2, 2)
    assert counts(7, 4, layers=(1, 2, 3, 1)) == (1, 2, 3, 1)


def test_a_stage_has_its_chunks_together() -> None:
    found = layers_of(8, 2, Pipeline(virtual=2))
    assert found.order == (0, 1, 4, 5, 2, 3, 6, 7)  # virtual stages 0 and 2 on the first stage
    assert not found.natural
    assert layers_of(8, 2, Pipeline()).natural
    assert layers_of(5, 2, Pipeline(layers=(2, 3))).order == (0, 1, -1, 2, 3, 4)


@pytest.mark.parametrize("library", [np, jnp])
def test_orders_lead_from_one_to_another_and_back(library: Any) -> None:
    x = library.arange(14.0).reshape(7, 2) + 1
    uneven = layers_of(7, 4, Pipeline(layers=(1, 2, 3, 1))).order
    virtual = layers_of(7, 2, Pipeline(virtual=2, layers=(2, 2, 2, 1))).order
    there = reorder_layers(x, None, uneven, 7)
    assert there.shape == (12, 2)
    assert (np.asarray(there)[np.array(uneven) < 0] == 0).all()
    np.testing.assert_array_equal(reorder_layers(there, uneven, None, 7), x)
    np.testing.assert_array_equal(
        reorder_layers(reorder_layers(there, uneven, virtual, 7), virtual, None, 7),
        reorder_layers(x, None, None, 7),
    )


@pytest.mark.parametrize(
    ("layers", "stages", "pipeline", "said"),
    [
        (4, 8, {}, "model.layers=4 are fewer than 8 stages: try mesh.stage=4"),
        (4, 4, {"virtual": 2}, "fewer than 4 stages x 2 virtual: try pipeline.virtual=1"),
        (
            12,
            4,
            {"virtual": 2},
            "do not divide model.layers=12: try pipeline.virtual=1, or say that they may differ: "
            "pipeline.layers=[1, 1, 2, 2, 2, 2, 1, 1]",
        ),
        (24, 4, {"virtual": 4}, "try pipeline.virtual=3"),
        (8, 4, {"layers": (2, 2, 4)}, "4 numbers of at least 1 that add up to 8"),
        (8, 4, {"layers": (2, 2, 2, 3)}, "is 4 virtual stages of 9 layers"),
        (8, 4, {"layers": (0, 3, 3, 2)}, "at least 1"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    layers: int, stages: int, pipeline: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        layers_of(layers, stages, Pipeline(**pipeline))
    assert said in str(refused.value)


# Microbatches, and other input.


def microbatches_of(**changes: Any) -> int:
    config = config_of(**changes)
    return microbatches(config, total_sizes(config.mesh))


def test_microbatches_are_as_many_as_the_batch_allows() -> None:
    assert microbatches_of(mesh__stage=4, train__batch=64) == 16  # four a stage
    assert microbatches_of(mesh__stage=4, train__batch=12) == 12
    assert microbatches_of(mesh__stage=4, mesh__data=2, train__batch=12) == 6
    assert microbatches_of(mesh__stage=2, train__batch=14) == 7
    assert microbatches_of(mesh__stage=2, train__batch=16, train__accumulation=4) == 4


def test_stages_that_are_all_devices_count_in_the_microbatches() -> None:
    config = config_of(mesh__stage=-1, train__batch=64)
    assert make_plan(config, jax.devices()[:4]).pipeline.microbatches == 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"pipeline__microbatches": 3},
            "train.batch=16 does not split into pipeline.microbatches=3 of a sequence for "
            "each of 1 data-parallel shards: try pipeline.microbatches=2, or train.batch=18",
        ),
        ({"pipeline__microbatches": 32}, "try pipeline.microbatches=16, or train.batch=32"),
        (
            {"pipeline__microbatches": 16, "mesh__data": 2},
            "each of 2 data-parallel shards: try pipeline.micro",
        ),
        ({"pipeline__microbatches": -1}, "pipeline.microbatches=-1 is below 0"),
        ({"mesh__stage": 8}, "model.layers=4 are fewer than 8 stages: try mesh.stage=4"),
        (
            {"pipeline__virtual": 2},
            "pipeline.schedule 1f1b has one virtual stage a stage, found pipeline.virtual=2: "
            "try pipeline.schedule=interleaved, or pipeline.virtual=1",
        ),
        (
            {"pipeline__virtual": 4, "pipeline__schedule": "looped"},
            "fewer than 2 stages x 4 virtual",
        ),
        ({"rules__batch": ("data", "stage")}, "rules.batch splits over stage"),
        ({"rules__mlp": ("tensor", "stage")}, "rules.mlp splits over stage"),
        ({"rules__layers": ("fsdp",), "mesh__fsdp": 2}, "rules.layers"),
        (
            {"model__masks": ("window(9)", "causal"), "pipeline__layers": (1, 3)},
            "stages of [1, 3] layers, but "
            "model.masks has 2 kinds of layers in turn, and each stage begins with the first: "
            "try pipeline.layers=[2, 2]",
        ),
        (
            {"model__masks": ("window(9)", "causal") * 2},
            "begins with the first: try mesh.stage=1 or model.layers=8",
        ),
    ],
)
def test_bad_input_is_refused_with_what_to_change(changes: dict[str, Any], said: str) -> None:
    config = config_of(**{"mesh__stage": 2} | changes)
    with pytest.raises(UserError) as refused:
        plan_of(config)
    assert said in str(refused.value)


# The program.


@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 1),
        ("interleaved", 2),
        ("looped", 3),
    ],
)
@pytest.mark.parametrize(
    ("P", "M"),
    [
        (2, 2),
        (2, 7),
        (3, 2),
        (4, 8),
        (4, 13),
        (8, 3),
    ],
)
def test_slots_hold_what_is_read_from_them(name: Any, v: int, P: int, M: int) -> None:
    """The buffers run as the executor runs them, with names in place of arrays."""
    steps = program(schedule(name, P, M, v))
    empty: dict[str, list[Any]] = {
        "stash": [None] * steps.stash,
        "inbox": [None] * steps.inbox,
    }
    empty |= {"cotangents": [None] * steps.cotangents}
    buffers = [{name: list(slots) for name, slots in empty.items()} for _ in range(P)]
    leaving: list[Any] = [None] * P
    done: set[Any] = set()
    for segment in steps.segments:
        for r in range(segment.rounds):
            before = list(leaving)
            entering = []
            for kind, rows in segment.ticks.items():
                sent = [None] * P
                for s in range(P if kind == "backward" else 0):
                    buffers[s]["cotangents"][rows.arrives[r, s]] = before[(s + 1) % P]
                for s in range(P):
                    row = {field: getattr(rows, field)[r, s] for field in rows._fields[:-3]}
                    if row["on"]:
                        unit = (int(row["microbatch"]), int(row["chunk"]) * P + s)
                    else:
                        unit = None
                    mine = buffers[s]
                    if kind == "forward":
                        if unit and unit[1]:
                            assert mine["inbox"][row["taken"]] == ("activation", unit)
                        assert bool(row["ends"]) == (unit is not None and unit[1] == 0)
                        mine["stash"][row["kept"]] = unit
                        last = unit is not None and unit[1] == P * v - 1
                        assert bool(row["scores"]) == last
                        mine["cotangents"][row["cotangent"]] = ("cotangent", unit) if last else None
                        sent[s] = ("activation", (unit[0], unit[1] + 1)) if unit else None
                    elif unit is None:
                        leaving[s] = None
                    else:
                        assert mine["stash"][row["kept"]] == unit
                        assert mine["cotangents"][row["taken"]] == ("cotangent", unit)
                        assert bool(row["ends"]) == (unit[1] == 0)
                        leaving[s] = ("cotangent", (unit[0], unit[1] - 1))
                        done.add((kind, unit))
                if kind == "forward":
                    entering = sent
            for s in range(P if "forward" in segment.ticks else 0):
                buffers[s]["inbox"][segment.ticks["forward"].arrives[r, s]] = entering[s - 1]
    assert done == {("backward", (i, k)) for i in range(M) for k in range(P * v)}


def test_buffers_do_not_grow_with_microbatches() -> None:
    for name, v in (("1f1b", 1), ("interleaved", 2)):
        few, many = (program(schedule(name, 4, M, v))[1:] for M in (8, 64))
        assert few == many
    assert program(schedule("1f1b", 4, 64)).stash == 7
    assert program(schedule("gpipe", 4, 64)).stash > 64


# Functions taken apart.


def test_what_depends_on_the_last_argument_is_kept_and_the_rest_computed_again() -> None:
    def function(w: Any, x: Any) -> list[Any]:
        doubled = 2 * w
        return [w, doubled, x, jnp.sin(x), doubled + x, x]

    w = jnp.arange(3.0)
    x = jnp.arange(3.0) + 7
    found = choose_residuals(function, w, x)
    assert found.places == (2, 3, 4)
    arrays = [function(w, x)[at] for at in found.places]
    for got, want in zip(
        found.restore(arrays, w),
        function(w, x),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


# A model of a few numbers, which shows what keys, slots and sums a pipeline uses.


class Waves:
    """A model whose layers are `sin(w x)` plus a number of the key."""

    config = SimpleNamespace(layers=4, experts=0, scan_layers=True, kinds=1, query_layer=False)
    numbers_layers = False

    @property
    def axes(self) -> Any:
        return {
            "embed": (None, "embed"),
            "blocks": ("layers", "embed"),
            "head": (None, "embed"),
        }

    def trained(self, tree: Any) -> Any:
        return tree

    def with_text(self, batch: Any) -> Any:
        return batch

    def embed(
        self, params: Any, tokens_BS: Any, positions_BS: Any, plan: Plan, key: Any = None
    ) -> Any:
        return tokens_BS[..., None] * params["embed"] + jax.random.uniform(key)

    def layer(self, layer: Any, xs: Any, places: Any, plan: Plan, info: LayerInfo) -> Any:
        assert info.key is not None
        return tuple(jnp.sin(layer * x) + jax.random.uniform(info.key) for x in xs), None

    def score(
        self,
        params: Any,
        x_BSD: Any,
        labels_BS: Any,
        plan: Plan,
        weights: Any,
        soft: Any = None,
    ) -> LossSums:
        loss = jnp.sum(jnp.square(x_BSD * params["head"]) * jnp.maximum(labels_BS, 0)[..., None])
        return LossSums(
            loss,
            jax.lax.stop_gradient(loss),
            jnp.sum(
                labels_BS >= 0,
                dtype=jnp.float32,
            ),
        )


def waves(**how: Any) -> tuple[Any, Any]:
    """Gradients of three microbatches on two stages of two layers each, and their arguments:
    parameters, a batch, a key."""
    pipeline = Pipeline("1f1b", 3, stash="stage")
    plan = Plan(
        make_mesh(MeshSpec(stage=2), jax.devices()[:2]), pipeline=pipeline, remat="full", **how
    )
    blocks = jnp.array(
        [
            [0.5, 0.7],
            [1.1, 0.3],
            [0.9, 1.3],
            [0.4, 0.8],
        ]
    )
    params = {
        "embed": jnp.array([[0.2, 0.3]]),
        "blocks": blocks,
        "head": jnp.array([[1.5, 0.6]]),
    }
    batch = {
        "tokens": jnp.arange(12).reshape(6, 2),
        "labels": 1 + jnp.arange(12).reshape(6, 2) % 5,
    }

    def run(params: Any, batch: Any, key: Any) -> Any:
        return executor.gradients(Waves(), params, batch, plan, key, LIKELIHOOD)

    return run, (params, batch, jax.random.key(5))


def one_after_another(params: Any, batch: Any, key: Any) -> Any:
    """The loss of the microbatches in turn, with keys as `Model` splits them."""
    model = Waves()
    total = 0.0
    plan = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
    for i in range(3):
        embed_key, blocks_key = jax.random.split(jax.random.fold_in(key, i))
        x = model.embed(
            params,
            batch["tokens"][i::3],
            None,
            plan,
            embed_key,
        )
        for layer, layer_key in zip(
            params["blocks"],
            jax.random.split(blocks_key, 4),
            strict=True,
        ):
            ((x,), _) = model.layer(layer, (x,), (), plan, LayerInfo(layer_key))
        total += model.score(params, x, batch["labels"][i::3], plan, LIKELIHOOD).loss
    return total


@pytest.mark.slow
def test_keys_and_layers_of_a_stage_are_those_of_microbatches_one_after_another() -> None:
    """A stage keeps its input alone and has two layers, each with a key of its own in each
    microbatch.
    """
    run, args = waves()
    sums, found = jax.jit(run)(*args)
    loss, want = jax.jit(jax.value_and_grad(one_after_another))(*args)
    # float32 sums in another order, as the gradients are
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    chex.assert_trees_all_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("also", [(), ("segments",), ("segments", "text")])
def test_a_stage_knows_the_documents_of_its_microbatch(also: tuple[str, ...]) -> None:
    names = ("positions", *also)
    rows_MBS = {name: jnp.arange(24).reshape(3, 2, 4) + at for at, name in enumerate(names)}
    layers = layers_of(4, 2, Pipeline("1f1b", 3))
    order = jnp.asarray(layers.order)
    plan = Plan(make_mesh(MeshSpec(stage=2), jax.devices()[:2]))
    model = SimpleNamespace(numbers_layers=False)
    task = stage_inputs.Task(model, plan, LIKELIHOOD, layers, Any, True)  # pyright: ignore[reportArgumentType]
    arrays = stage_inputs.StageArrays({}, {}, rows_MBS, None, order, None)
    inputs = stage_inputs.StageInputs(task, arrays)
    (places,) = inputs.layer_context(2, 0, 1).places
    for name in ("positions", "segments", "text"):
        found = getattr(places, name)
        assert (found is not None) == (name in names)
        if found is not None:
            np.testing.assert_array_equal(found, rows_MBS[name][2])


def test_gradients_are_summed_over_stages_in_float32() -> None:
    """Whatever the dtype of their sums over microbatches; only traced."""
    run, args = waves(gradients="bfloat16", compute="bfloat16")
    sums = [
        eqn
        for eqn in equations(jax.make_jaxpr(run)(*args).jaxpr)
        if eqn.primitive.name.startswith("psum")
    ]
    assert len(sums) >= 4  # the loss's, and both ends
    assert {str(var.aval.dtype) for eqn in sums for var in eqn.invars} == {"float32"}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of loops and branches too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


# The compiled step.


def gradients(config: Config, key: Any = None) -> tuple[Any, Any]:
    """Loss sums and gradients in the model's own order of layers."""
    plan = plan_of(config)
    model = Model(config.model)
    order = stored_order(plan, config.model.layers)
    L = config.model.layers
    params = random_params(model)
    params["blocks"] = jax.tree.map(
        lambda x: reorder_layers(x, None, order, L),
        params["blocks"],
    )
    places = plan.sharding(model.axes, param_shapes(model, plan))

    def run(params: Any, batch: Any) -> Any:
        return step.gradients(Experiment(config, model, plan), params, batch, key)

    tokens = plan.sharding(TOKENS)
    jitted = jax.jit(
        run, in_shardings=(places, tokens), out_shardings=(replicated_sharding(plan), places)
    )
    sums, grads = jax.device_get(
        jitted(jax.device_put(params, places), jax.device_put(random_batch(config), tokens))
    )
    grads["blocks"] = jax.tree.map(
        lambda x: reorder_layers(x, order, None, L),
        grads["blocks"],
    )
    return sums, grads


DROPPING = config_of(model__dropout=0.3)


@functools.cache
def accumulated(query_layer: bool = False) -> tuple[Any, Any]:
    """What eight microbatches after another drop; that they drop at all."""
    config = override(DROPPING, {"model.query_layer": query_layer})
    want, grads = gradients(
        override(config, {"train.accumulation": 8}),
        jax.random.key(3),
    )
    assert abs(gradients(config)[0].loss - want.loss) > 1.0
    return want, grads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "policy", "query_layer"),
    [
        ("interleaved", "full", False),
        ("1f1b", "none", False),
        ("1f1b", "none", True),
        pytest.param("1f1b", "full", False, marks=pytest.mark.long),
    ],
)
def test_dropout_is_that_of_accumulated_microbatches(
    schedule: str, policy: str, query_layer: bool
) -> None:
    """The same keys, so the same bits: whatever the schedule, a pipeline drops what accumulation
    drops.
    """
    changes = {"memory.policy": policy, "model.query_layer": query_layer}
    dropping = override(DROPPING, changes)
    want, want_grads = accumulated(query_layer)
    piped = {
        "mesh.stage": 2,
        "pipeline.microbatches": 8,
        "pipeline.schedule": schedule,
        "pipeline.virtual": 2 if schedule == "interleaved" else 1,
    }
    got, grads = gradients(override(dropping, piped), jax.random.key(3))
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
    # Float32 sums in another order; a gradient that is zero by mathematics is rounding of the
    # others' size.
    floor = 0.1 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(want_grads))
    for one, other in zip(
        jax.tree.leaves(grads),
        jax.tree.leaves(want_grads),
        strict=True,
    ):
        scale = max(np.abs(other).max(), floor)
        np.testing.assert_allclose(one / scale, other / scale, atol=1e-5)


def compiled(config: Config) -> Any:
    plan = plan_of(config)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    return step.make_train_step(experiment).lower(*step.step_shapes(experiment)).compile()


def loops(nodes: Any) -> list[int]:
    """Trips of the loops that have loops inside."""
    found = []
    for node in nodes:
        if isinstance(node, Loop):
            inner = [n for n in node.body if isinstance(n, Loop)]
            found += [node.trips] if inner else loops(node.body)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("1f1b", 1),
        pytest.param("interleaved", 2, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("gpipe", 1), ("looped", 2))),
    ],
)
def test_the_compiled_program_runs_the_ticks_of_the_schedule(name: Any, v: int) -> None:
    config = config_of(
        mesh__stage=4,
        pipeline__microbatches=16,
        pipeline__schedule=name,
        pipeline__virtual=v,
        model__layers=16,
    )
    text = compiled(config).as_text()
    want = [segment.rounds for segment in program(schedule(name, 4, 16, v)).segments]
    ticks = sum(
        segment.rounds * len(segment.ticks)
        for segment in program(schedule(name, 4, 16, v)).segments
    )
    assert ticks == len(schedule(name, 4, 16, v).ticks)
    assert sorted(loops(read_program(text).nodes)) == sorted(want)


@pytest.mark.parametrize(
    ("name", "v", "policy"),
    [
        ("1f1b", 1, "full"),
        ("gpipe", 1, "none"),
        ("interleaved", 2, "none"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("1f1b", 1, "none"), ("gpipe", 1, "full"), ("interleaved", 2, "full"))
        ),
    ],
)
@pytest.mark.slow
def test_memory_does_not_grow_with_microbatches_but_for_gpipe(
    name: Any, v: int, policy: str
) -> None:
    def temporaries(M: int) -> int:
        config = config_of(
            mesh__stage=4,
            pipeline__microbatches=M,
            pipeline__schedule=name,
            pipeline__virtual=v,
            model__layers=8,
            train__batch=M,
            data__seq_len=64,
            model__max_seq_len=64,
            memory__policy=policy,
        )
        return compiled(config).memory_analysis().temp_size_in_bytes

    few = temporaries(8)
    many = temporaries(32)
    activation = 4 * 64 * 16
    tokens = 4 * 64 * 24 * 4  # ids, positions and labels of 24 more microbatches
    if name == "gpipe":
        assert many - few > 24 * activation
    else:
        assert many - few <= tokens


# Training.


def test_evaluation_in_a_pipeline_is_that_of_one_device() -> None:
    config = config_of(mesh__stage=4, pipeline__microbatches=8)
    batch = random_batch(config)
    sums = {}
    for stages in (1, 4):
        one = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, stage=stages))
        plan = plan_of(one)
        model = Model(one.model)
        params = jax.device_put(
            random_params(model),
            plan.sharding(model.axes, model.shapes()),
        )
        evaluate = step.make_eval_step(Experiment(one, model, plan))
        sums[stages] = evaluate(params, jax.device_put(batch, plan.sharding(TOKENS)))
    np.testing.assert_allclose(sums[4], sums[1], rtol=1e-6)


def test_an_evaluation_of_many_microbatches_keeps_few_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all microbatches of a chunk before the next chunk, as many activations would wait as
    there are of them.
    """
    config = config_of(
        mesh__stage=2,
        pipeline__microbatches=16,
        pipeline__schedule="interleaved",
        pipeline__virtual=2,
        model__layers=4,
    )
    plan = plan_of(config)
    model = Model(config.model)
    programs = []

    def note(*args: Any, **options: Any) -> Any:
        programs.append(program(*args, **options))
        return programs[-1]

    monkeypatch.setattr(executor, "program", note)
    state, batch = step.step_shapes(Experiment(config, model, plan))
    jax.eval_shape(
        lambda params, batch: executor.loss(model, params, batch, plan), state.params, batch
    )
    (made,) = programs
    assert made.inbox <= 2 * 2
    assert sum(segment.rounds for segment in made.segments) == 2 * 16 + 1, "and it waits no longer"


@pytest.mark.slow
def test_a_run_goes_on_with_other_stages(tmp_path: Path) -> None:
    """Layers are stored in another order and with gaps; the losses go on as if nothing had
    happened.
    """
    from jaxpar.launch.local import train_config as train
    from jaxpar.train.metrics import read_metrics

    text = tmp_path / "text.txt"
    text.write_text("in the beginning was the word, and the word was with code. " * 60)
    base = {
        "data.source": "text",
        "data.path": str(text),
        "train.steps": 8,
        "train.warmup_steps": 2,
        "checkpoint.every": 2,
        "metrics.log_every": 1,
        "train.eval_every": 4,
        "model.vocab_size": 256,
        "model.layers": 5,
        "mesh.platform": "cpu",
        "train.batch": 8,
        "model.max_seq_len": 16,
    }
    virtual = {
        "mesh.stage": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.virtual": 2,
        "pipeline.layers": (1, 2, 1, 1),
        "mesh.data": 4,
    }
    uneven = {"mesh.stage": 4, "mesh.data": 2}
    layouts = [
        ({"mesh.data": 8}, 2),
        (virtual, 4),
        (uneven, 6),
        ({"mesh.data": 8}, 8),
    ]
    for layout, stop in layouts:
        train(override(config_of(), base | layout | {"train.stop_at": stop}), tmp_path / "moved")
    train(override(config_of(), base | {"mesh.data": 8}), tmp_path / "still")
    moved, still = (
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row]
        for name in ("moved", "still")
    )
    np.testing.assert_allclose(moved, still, rtol=2e-5)


def test_sums_in_bfloat16_take_gradients_in_float32() -> None:
    config = config_of(mesh__stage=2, pipeline__microbatches=2, precision__gradients="bfloat16")
    plan = plan_of(config)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    traced = step.make_train_step(experiment).trace(*step.step_shapes(experiment))
    assert {leaf.dtype for leaf in jax.tree.leaves(traced.out_info[0].params)} == {
        jnp.dtype("float32")
    }


# Notes.


def notes_of(config: Config) -> list[str]:
    return plan_notes(experiment_of(config, plan_of(config)))


def test_the_log_has_the_schedule_in_figures() -> None:
    (line,) = notes_of(config_of(mesh__stage=4, pipeline__microbatches=16))
    assert line == (
        "pipeline: 1f1b, 4 stages, 16 microbatches: 38 ticks, idle 16 %, a stage keeps 7 "
        "inputs at most"
    )
    assert notes_of(config_of()) == []


def test_a_long_bubble_is_explained() -> None:
    _, said = notes_of(config_of(mesh__stage=4, pipeline__microbatches=4))
    assert said.startswith(
        "a pipeline of 4 with 4 microbatches idles 43 %; with 16 it would 16 %: try"
    )
    assert said.endswith("or mesh.fsdp in place of mesh.stage if the model fits so")
    uneven = notes_of(config_of(mesh__stage=4, model__layers=6))
    assert (
        "virtual stages have 1, 2, 2, 1 layers: each tick lasts as long as the largest, 2, on "
        "all of them" in uneven
    )
    twice = notes_of(config_of(mesh__stage=2, train__accumulation=2))
    assert (
        "the pipeline fills and drains 2 times a step: train.accumulation 1 and "
        "pipeline.microbatches=16" in twice[1]
    )
