"""A student learns its teacher's hidden states: the loss and every gradient are those of plain
arithmetic, the projections are trained, resumed and left behind, and what cannot be is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.batch_arrays import TEACHER_HIDDEN
from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.data.corpus import load_corpus
from jaxpar.models import Model
from jaxpar.models.hidden import normed_states
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.train.batch import batch_shapes, empty_batch
from jaxpar.train.distil import open_teacher
from jaxpar.train.experiments import make_experiment
from jaxpar.train.loop import run
from jaxpar.train.restore import export_run, load_params, load_run
from jaxpar.train.runs.folder.run_folder import keep_config
from jaxpar.train.step import loss_weights, make_train_step, step_shapes
from jaxpar.verify.of_config import checks as verify
from jaxpar.verify.of_config.random_inputs import random_params

SEQ = 16
SIZES: dict[str, Any] = {
    "model.layers": 3,
    "model.embed": 16,
    "model.heads": 4,
    "model.mlp": 32,
    "model.vocab_size": 8,
    "model.vocab_multiple": 8,
    "model.max_seq_len": SEQ,
    "data.source": "text",
    "data.tokenizer": "chars",
    "data.seq_len": SEQ,
    "train.batch": 8,
    "train.steps": 4,
    "train.warmup_steps": 1,
    "train.eval_every": 0,
    "train.final_eval_batches": 1,
    "checkpoint.every": 2,
    "mesh.platform": "cpu",
    "mesh.data": 2,
    "mesh.tensor": 2,
}
WIDTH = 24
LEARNS = {
    "distill.hidden": ("1:2", "last"),
    "distill.hidden_width": WIDTH,
    "distill.top_k": 4,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "letters.txt"
    file.write_text("".join(np.random.default_rng(0).choice(list("abcdefg "), 4000)))
    return file


def config_of(text: Path, **changes: Any) -> Config:
    return override(Config(), SIZES | {"data.path": str(text)} | changes)


def student_of(text: Path, teacher: Path, **changes: Any) -> Config:
    return config_of(text, **LEARNS | {"distill.teacher": str(teacher)} | changes)


@pytest.fixture(scope="module")
def teacher(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    changes = {"model.embed": WIDTH, "train.steps": 2, "model.layers": 4}
    run(config_of(text, **changes), folder)
    return folder


def test_the_loss_is_the_mean_square_of_what_is_missed(text: Path) -> None:
    """Each token that counts adds the mean over features and pairs, times the weight.

    Tolerance: float32 sums of 128 tokens in another order.
    """
    config = student_of(text, Path("none"), **{"distill.alpha": 0.0, "distill.hidden_weight": 3.0})
    experiment = make_experiment(config)
    model = experiment.model
    assert isinstance(model, Model)
    params = jax.tree.map(jnp.asarray, random_params(model))  # a fresh block adds next to nothing
    rng = np.random.default_rng(1)
    tokens, labels = rng.integers(0, 8, (2, 8, SEQ)).astype(np.int32)
    labels[:, ::3] = -1
    states = rng.standard_normal((8, SEQ, 2, WIDTH)).astype(np.float32)
    plain = {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(labels)}
    plan = experiment.plan

    @jax.jit
    def losses(params: Any, states: Any) -> tuple[LossSums, LossSums]:
        weights = loss_weights(config)
        learned = plain | {TEACHER_HIDDEN: states}
        return (
            model.loss(params, learned, plan, weights=weights),
            model.loss(params, plain, plan, weights=weights),
        )

    with_states, without = losses(params, states)
    assert without.hidden is None

    def stream(layers: int) -> np.ndarray:
        few = jax.tree.map(lambda x: x[:layers], params["blocks"])
        places = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape)
        batch = {"tokens": plain["tokens"], "positions": places}
        found = jax.jit(lambda few: model.hidden_states(params | {"blocks": few}, batch, plan)[0])
        return np.asarray(found(few), np.float64)

    total = 0.0
    for place, (name, layers) in enumerate((("1_to_2", 1), ("last", 3))):
        projection = np.asarray(params["distill"][name], np.float64)
        gap = stream(layers) @ projection - states[:, :, place]
        total += (gap**2).mean(axis=-1)[labels >= 0].sum() / 2
    np.testing.assert_allclose(with_states.loss - without.loss, 3 * total, rtol=1e-5)
    np.testing.assert_allclose(with_states.hidden, total, rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_says_how_far_the_hidden_states_are(text: Path, accumulation: int) -> None:
    """With two microbatches each device adds up its own, and the sums of devices come last."""
    config = student_of(text, Path("none"), **{"train.accumulation": accumulation})
    experiment = make_experiment(config)
    step = make_train_step(experiment)
    _, metrics = jax.eval_shape(step, *step_shapes(experiment))
    assert metrics["hidden_distance"].shape == ()


def test_every_array_of_a_batch_has_its_place(text: Path) -> None:
    config = student_of(text, Path("none"), **{"precision.compute": "bfloat16"})
    experiment = make_experiment(config)
    plan = experiment.plan
    shapes = batch_shapes(config, plan)
    assert shapes[TEACHER_HIDDEN].shape == (8, SEQ, 2, WIDTH)
    assert shapes[TEACHER_HIDDEN].dtype == jnp.bfloat16
    assert TEACHER_HIDDEN not in batch_shapes(config, plan, teacher=False)
    absent = empty_batch(config, plan, absent=True)
    assert absent[TEACHER_HIDDEN].shape == shapes[TEACHER_HIDDEN].shape
    assert absent[TEACHER_HIDDEN].dtype == shapes[TEACHER_HIDDEN].dtype
    projections = experiment.state.params["distill"]
    assert {name: leaf.shape for name, leaf in projections.items()} == {
        "1_to_2": (16, WIDTH),
        "last": (16, WIDTH),
    }
    alone = make_experiment(replace(config, distill=Config().distill)).model
    learned = 6 * 2 * 16 * WIDTH
    assert experiment.model.flops_per_token(SEQ) - alone.flops_per_token(SEQ) == learned


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"distill.hidden": ("2-4",)}, r"distill\.hidden has '2-4': .*2:4"),
    ({"distill.hidden": ("0:1",)}, "pair of layers"),
    ({"distill.hidden": ("4:1",)}, r"the model has 3 layers \(model\.layers\)"),
    ({"distill.hidden": ("last", "last")}, "has 'last' twice"),
    ({"distill.hidden_width": 0}, r"set distill\.hidden_width to its model\.embed"),
    ({"distill.hidden_weight": 0.0}, "hidden_weight=0: "),
    ({"mesh.stage": 2}, r"mesh\.stage=2: "),
    ({"model.lora.rank": 2, "train.init": "runs/a"}, "beside LoRA nothing else is trained"),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_what_cannot_be_learned_is_refused(text: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        check(student_of(text, Path("none"), **changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"distill.hidden_width": 20}, "have 24 features"),
        ({"distill.hidden": ("1:5",)}, r"distill\.hidden has 1:5, and .* has 4 layers"),
    ],
)
def test_a_teacher_of_other_sizes_is_refused(
    text: Path, tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    keep_config(tmp_path, config_of(text, **{"model.embed": WIDTH, "model.layers": 4}))
    config = student_of(text, tmp_path, **changes)
    corpus = load_corpus(config.data, config.model.vocab_size)
    with pytest.raises(UserError, match=match):
        open_teacher(make_experiment(config), corpus)


@pytest.mark.slow
def test_a_teacher_shows_its_streams_on_any_mesh(text: Path, teacher: Path) -> None:
    """Tolerance: the teacher's own mesh adds up in another order, float32."""
    changes = {"distill.mesh.fsdp": 2, "distill.mesh.tensor": 2, "train.accumulation": 2}
    config = student_of(text, teacher, **changes)
    student = make_experiment(config)
    corpus = load_corpus(config.data, config.model.vocab_size)
    opened = open_teacher(student, corpus)
    assert opened is not None
    held = opened.live
    assert held is not None
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 8, (8, SEQ)).astype(np.int32)
    given = jax.device_put({"tokens": tokens}, student.plan.sharding(("batch", None)))
    found = held.answer(given)[TEACHER_HIDDEN]
    assert found.sharding.mesh == student.plan.mesh
    model = held.experiment.model
    places = np.broadcast_to(np.arange(SEQ, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": places}

    @jax.jit
    def streams(params: Any, batch: Any) -> jax.Array:
        few = jax.tree.map(lambda x: x[:2], params["blocks"])
        plan = held.experiment.plan
        second, _ = model.hidden_states(params | {"blocks": few}, batch, plan)
        fourth, _ = model.hidden_states(params, batch, plan)
        return normed_states([second, fourth])

    want = np.asarray(streams(held.params, batch))
    np.testing.assert_allclose(found, want, atol=1e-4)
    np.testing.assert_allclose(np.mean(want**2, axis=-1), 1, atol=1e-2)


@pytest.mark.slow
def test_projections_are_trained_resumed_and_left_behind(
    text: Path, teacher: Path, tmp_path: Path
) -> None:
    config = student_of(text, teacher, **{"metrics.log_every": 1})
    run(config, tmp_path / "whole")
    run(override(config, {"train.stop_at": 2}), tmp_path / "cut")
    # On another mesh the sums are added up in another order, so the mesh stays.
    run(config, tmp_path / "cut")
    experiment = make_experiment(config)
    whole = load_run(tmp_path / "whole", 4, experiment)[1]
    cut = load_run(tmp_path / "cut", 4, experiment)[1]
    jax.tree.map(np.testing.assert_array_equal, whole, cut)
    fresh = experiment.model.init(jax.random.key(config.train.seed))
    rows = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    distances = [json.loads(row)["hidden_distance"] for row in rows if "objective" in row]
    assert len(distances) == config.train.steps
    assert all(0 < distance < 10 for distance in distances)
    for name, projection in whole["distill"].items():
        assert not np.allclose(projection, fresh["distill"][name])
    # what goes on from the student has the model's parameters, and projections of its own
    plain = load_params(tmp_path / "whole", make_experiment(config_of(text)), 4)
    assert set(plain) == {"embed", "blocks", "head"}
    np.testing.assert_array_equal(plain["blocks"]["up"], whole["blocks"]["up"])
    again = load_params(tmp_path / "whole", experiment, 4)
    np.testing.assert_array_equal(again["blocks"]["up"], whole["blocks"]["up"])
    np.testing.assert_allclose(again["distill"]["last"], fresh["distill"]["last"], rtol=1e-6)
    export_run(config, tmp_path / "whole", tmp_path / "exported", 4, "float32")
    imported = load_params(tmp_path / "exported", make_experiment(config_of(text)))
    np.testing.assert_array_equal(imported["blocks"]["up"], whole["blocks"]["up"])


def test_answers_on_disk_have_no_hidden_states(text: Path, tmp_path: Path) -> None:
    (tmp_path / "top_k.json").write_text("{}")
    config = student_of(text, tmp_path)
    corpus = load_corpus(config.data, config.model.vocab_size)
    with pytest.raises(UserError, match="no hidden states"):
        open_teacher(make_experiment(config), corpus)


PLANS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"train.accumulation": 2, "model.layers": 3}),
    (
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"memory.policy": "full", "model.masks": ("window(8)", "causal")},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "changes"), PLANS, ids=str)
def test_a_plan_gives_the_gradients_of_one_device(
    mesh: dict[str, int], changes: dict[str, Any]
) -> None:
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    told = {"distill.teacher": "none", "mesh.platform": "cpu"}
    found = verify.verify(override(Config(), LEARNS | told | sizes | changes))
    assert found.equal, str(found)
    assert any("distill.1_to_2" in row.name for row in found.checks[0].rows)
