"""A student learns from a teacher that runs beside it, or from answers on disk: the same answer,
found at its place whatever the batch and the mesh, and refused where it is another's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.base.batch_arrays import TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.data.corpus import load_corpus, train_batches
from jaxpar.data.streams.tokens import Tokens
from jaxpar.data.top_k_files import HEADER, describe, open_answers, writing_answers
from jaxpar.models import Params
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.batch import batch_shapes, empty_batch
from jaxpar.train.distil import open_teacher, write_top_k
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.loop import run
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.run_folder import keep_config
from jaxpar.train.step import gradients
from jaxpar.train.teacher_memory import teacher_bytes

SEQ = 16
SIZES = {
    "model.layers": 1,
    "model.embed": 32,
    "model.heads": 4,
    "model.mlp": 64,
    "model.vocab_size": 31,
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
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "it",
    "sleeps",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(rng.choice(WORDS, 700)))
    return file


def config_of(text: Path, **changes: Any) -> Config:
    return override(Config(), SIZES | {"data.path": str(text)} | changes)


@pytest.fixture(scope="module")
def teacher(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two layers that has trained a little."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    run(config_of(text, **{"model.layers": 2}), folder)
    return folder


@pytest.fixture
def answers(text: Path, tmp_path: Path) -> Path:
    """Answers that nobody gave: their first entry is the number of the window, in base 31."""
    folder = tmp_path / "drawn"
    config = config_of(text)
    corpus = load_corpus(config.data, config.model.vocab_size)
    header = describe(corpus, config.data, config.model.vocab_size, 6)
    count = header.windows[0]
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 31, (count, SEQ, 6))
    ids[:, 0, 0] = np.arange(count) // 31
    ids[:, 0, 1] = np.arange(count) % 31
    log_probs = -rng.exponential(1.0, ids.shape)
    with writing_answers(folder, header._replace(teacher="nobody", step=1)) as writer:
        for first in range(0, count, 50):
            here = slice(first, first + 50)
            writer.write(ids[here], log_probs[here], 50)
    return folder


@pytest.fixture(scope="module")
def written(text: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher's answers, written in batches of another size than training has."""
    folder = tmp_path_factory.mktemp("answers") / "top_k"
    config = config_of(text, **{"model.layers": 2, "train.batch": 6, "train.accumulation": 3})
    write_top_k(config, teacher, folder, 6)
    return folder


def test_a_folder_with_answers_is_refused_before_a_teacher_is_read(tmp_path: Path) -> None:
    (tmp_path / HEADER).touch()
    with pytest.raises(UserError, match="name another --out"):
        write_top_k(Config(), tmp_path / "no teacher", tmp_path, 6)


def student_of(text: Path, folder: Path, **changes: Any) -> Config:
    changes = {"distill.teacher": str(folder), "distill.top_k": 4} | changes
    return config_of(text, **changes)


def rows_of(config: Config, folder: Path, batch: int, count: int) -> list[dict[str, np.ndarray]]:
    """Some training batches with what is read beside them."""
    corpus = load_corpus(config.data, config.model.vocab_size)
    found = open_answers(folder)
    found.require(describe(corpus, config.data, config.model.vocab_size, 4))
    batches = train_batches(
        corpus.train,
        config.data,
        batch,
        range(batch),
        config.model.vocab_size,
        beside=lambda part, window: found.read(part, window, 4),
    )
    return [next(batches) for _ in range(count)]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.slow
def test_a_teacher_beside_and_its_answers_on_disk_are_the_same(
    text: Path, teacher: Path, written: Path
) -> None:
    """Tolerance: the teacher's own mesh adds up in another order, float32."""
    config = student_of(text, teacher, **{"distill.mesh.fsdp": 2, "distill.mesh.tensor": 2})
    config = override(config, {"train.accumulation": 2})
    student = make_experiment(config)
    corpus = load_corpus(config.data, config.model.vocab_size)
    opened = open_teacher(student, corpus)
    assert opened is not None
    assert opened.live is not None
    # the last window was in a batch that was filled up
    assert open_answers(written).header.windows[0] % 6
    rows = rows_of(config, written, 8, 1)[0]
    batch = {name: rows[name] for name in ("tokens", "labels")}
    found = opened.live.answer(jax.device_put(batch, student.plan.sharding(("batch", None))))
    assert {x.sharding.mesh for x in found.values()} == {student.plan.mesh}
    np.testing.assert_array_equal(found[TEACHER_IDS], rows[TEACHER_IDS])
    np.testing.assert_allclose(found[TEACHER_LOG_PROBS], rows[TEACHER_LOG_PROBS], atol=1e-5)
    # and they are what the teacher's scores say
    held = opened.live
    shown = jax.device_get(
        jax.jit(lambda params: held.experiment.model.logits(params, batch, held.experiment.plan))(
            held.params
        )
    )
    want = jax.nn.log_softmax(shown)
    picked = np.take_along_axis(np.asarray(want), rows[TEACHER_IDS], axis=-1)
    np.testing.assert_allclose(rows[TEACHER_LOG_PROBS], picked, atol=1e-5)
    np.testing.assert_array_equal(rows[TEACHER_IDS][..., 0], np.argmax(want, axis=-1))
    size = teacher_bytes(student)
    on_one = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(held.params)]
    assert size == sum(on_one)


LAYOUTS = [
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}, {"train.accumulation": 2}),
    ({"fsdp": 2, "context": 2, "tensor": 2}, {"data": 8, "fsdp": 1}, {}),
    ({"data": 2, "tensor": 2, "stage": 2}, None, {"model.layers": 2, "train.accumulation": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "theirs", "changes"), LAYOUTS, ids=str)
def test_a_teacher_gives_the_gradients_of_one_device_on_any_layout(
    text: Path,
    teacher: Path,
    written: Path,
    mesh: dict[str, int],
    theirs: dict[str, int] | None,
    changes: dict[str, Any],
) -> None:
    """Of a teacher that runs beside, and of its answers on disk; a pipeline takes the latter too.

    Tolerance: float32 sums in another order, of the student and of the teacher.
    """
    one = {"mesh.data": 1, "mesh.tensor": 1, "train.accumulation": 1}
    alone = student_of(text, written, **changes | one)
    rows = rows_of(alone, written, 8, 1)[0]
    want = loss_and_gradients(make_experiment(alone), rows)
    sizes = {f"mesh.{axis}": size for axis, size in ({"data": 1, "tensor": 1} | mesh).items()}
    student = make_experiment(student_of(text, written, **changes | sizes))
    compare(loss_and_gradients(student, rows), want)
    if theirs is None:
        return
    its_mesh = {f"distill.mesh.{axis}": size for axis, size in theirs.items()}
    config = student_of(text, teacher, **changes | sizes | its_mesh)
    student = make_experiment(config)
    opened = open_teacher(student, load_corpus(config.data, config.model.vocab_size))
    assert opened is not None
    assert opened.live is not None
    tokens = {name: rows[name] for name in ("tokens", "labels")}
    given = jax.device_put(tokens, student.plan.sharding(("batch", None)))
    compare(loss_and_gradients(student, {**given, **opened.live.answer(given)}), want)


def loss_and_gradients(student: Experiment, batch: Mapping[str, Any]) -> tuple[Any, Params]:
    """The loss and the gradients of fresh parameters, with the layers in the model's order."""
    plan = student.plan
    config = student.config
    model = student.model
    key = jax.random.key(config.train.seed)
    order = stored_order(plan, config.model.layers)
    shapes = model.shapes(order)

    @partial(jax.jit, out_shardings=plan.sharding(model.axes, shapes))
    def init() -> Params:
        return model.init(key, order)

    @jax.jit
    def run(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Params]:
        sums, grads = gradients(student, params, batch, None)
        return sums.loss, grads

    there = jax.device_put(dict(batch), plan.sharding(("batch", None)))
    loss, grads = jax.device_get(run(init(), there))
    assert order is None or list(order) == sorted(order)
    return loss, grads


def compare(got: tuple[Any, Params], want: tuple[Any, Params]) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    # The gradient of a key's bias is zero, but for rounding.
    least = 1e-2 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(want[1]))

    def one(found: np.ndarray, wanted: np.ndarray) -> None:
        scale = max(np.abs(wanted).max(), least)
        np.testing.assert_allclose(found, wanted, atol=2e-5 * scale)

    jax.tree.map(one, got[1], want[1])


def test_a_row_is_found_whatever_the_batch(text: Path, answers: Path) -> None:
    config = student_of(text, answers)
    many = rows_of(config, answers, 8, 3)
    few = rows_of(config, answers, 4, 6)
    for name in many[0]:
        np.testing.assert_array_equal(
            np.concatenate([rows[name] for rows in many]),
            np.concatenate([rows[name] for rows in few]),
        )
    corpus = load_corpus(config.data, config.model.vocab_size)
    assert isinstance(corpus.train, Tokens)
    for rows in many:
        first = rows[TEACHER_IDS][:, 0]
        windows = first[:, 0] * 31 + first[:, 1]
        there = [corpus.train.tokens[SEQ * n : SEQ * n + SEQ] for n in windows]
        np.testing.assert_array_equal(rows["tokens"], there)


@pytest.mark.slow
def test_a_student_resumes_to_the_bit(text: Path, written: Path, tmp_path: Path) -> None:
    answers = written
    config = student_of(text, answers, **{"metrics.log_every": 1, "distill.temperature": 2.0})
    run(config, tmp_path / "whole")
    run(override(config, {"train.stop_at": 2}), tmp_path / "cut")
    run(config, tmp_path / "cut")
    whole = metrics_of(tmp_path / "whole")
    cut = metrics_of(tmp_path / "cut")
    assert [row["objective"] for row in cut] == [row["objective"] for row in whole]
    assert whole[0]["objective"] != whole[0]["loss"]
    # other answers under the same name are refused
    file = answers / "log_probs.bin"
    before = file.read_bytes()
    run(override(config, {"train.stop_at": 2}), tmp_path / "other")
    try:
        file.write_bytes(before[:4] + bytes(4) + before[8:])
        with pytest.raises(UserError, match="was trained with"):
            run(config, tmp_path / "other")
    finally:
        file.write_bytes(before)
    assert Checkpoints(tmp_path / "other" / "checkpoints").latest() == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"distill.top_k": 7}, r"answers of 6 entries a token, and distill\.top_k=7: try"),
        ({"data.seq_len": 8}, r"data\.seq_len was 16, and is 8 here"),
        ({"data.stride": 4}, r"data\.stride was 16, and is 4 here"),
        ({"data.val_fraction": 0.3}, "number of training tokens"),
        ({"data.tokenizer": "bytes", "model.vocab_size": 256}, "of a vocabulary of 31"),
        ({"model.vocab_size": 32}, r"a vocabulary of 31, and model\.vocab_size=32"),
    ],
)
def test_answers_to_something_else_are_refused(
    text: Path, answers: Path, changes: dict[str, Any], match: str
) -> None:
    config = student_of(text, answers, **changes)
    corpus = load_corpus(config.data, config.model.vocab_size)
    found = open_answers(answers)
    wanted = describe(corpus, config.data, config.model.vocab_size, config.distill.top_k)
    with pytest.raises(UserError, match=match):
        found.require(wanted)


def test_answers_to_other_text_or_of_another_tokenizer_are_refused(
    text: Path, answers: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().swapcase())
    config = student_of(other, answers)
    corpus = load_corpus(config.data, config.model.vocab_size)
    wanted = describe(corpus, config.data, 31, 4)
    found = open_answers(answers)
    with pytest.raises(UserError, match="in another tokenizer's tokens"):
        found.require(wanted)
    with pytest.raises(UserError, match="to other data: "):
        found.require(wanted._replace(tokenizer=found.header.tokenizer))


def test_answers_that_are_cut_short_are_refused(answers: Path, tmp_path: Path) -> None:
    for file in answers.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "ids.bin").write_bytes(b"12")
    with pytest.raises(UserError, match=r"ids\.bin has 2 bytes, and its top_k\.json says"):
        open_answers(tmp_path)
    (tmp_path / "top_k.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match="what the answers"):
        open_answers(tmp_path)


def test_a_teacher_of_another_vocabulary_is_refused(text: Path, tmp_path: Path) -> None:
    keep_config(tmp_path, config_of(text))
    config = student_of(text, tmp_path, **{"model.vocab_size": 40})
    student = make_experiment(config)
    corpus = load_corpus(config.data, config.model.vocab_size)
    with pytest.raises(UserError, match=r"has a vocabulary of 31, and model\.vocab_size=40"):
        open_teacher(student, corpus)


def test_an_evaluation_has_no_teacher(text: Path) -> None:
    config = student_of(text, Path("none"))
    plan = make_experiment(config).plan
    assert set(batch_shapes(config, plan, teacher=False)) == {"tokens", "labels"}
    assert set(empty_batch(config, plan)) == {"tokens", "labels"}
    shapes = batch_shapes(config, plan)
    absent = empty_batch(config, plan, absent=True)
    assert {name: x.shape for name, x in absent.items()} == {
        name: (8, *leaf.shape[1:]) for name, leaf in shapes.items()
    }
