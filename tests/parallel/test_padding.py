"""Which tokens are text, by hand and in the rows that data make; what routers' losses are means
over.
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

from jaxpar.base.config import Config, DataConfig, ModelConfig, TrainConfig, override
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.data.corpus import load_corpus, train_batches
from jaxpar.models import Model
from jaxpar.models.top_k import teacher_answer
from jaxpar.parallel.cross_entropy import LossWeights
from jaxpar.parallel.padding import count_tokens, text_tokens
from jaxpar.train.experiment import Experiment
from jaxpar.train.step import gradients
from jaxpar.verify.of_config.losses_and_gradients import text_of
from jaxpar.verify.of_config.random_inputs import random_batch


def test_padding_is_the_filled_end_of_a_row_in_which_no_label_counts() -> None:
    tokens = np.array(
        [
            [5, 0, 7, 0, 0, 0],
            [5, 6, 7, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
            [5, 6, 7, 8, 9, 4],
        ]
    )
    labels = np.array(
        [
            [6, 7, 0, -1, -1, -1],
            [-1, 7, 0, 0, -1, -1],
            [-1] * 6,
            [-1] * 6,
        ]
    )
    batch = {"tokens": tokens, "labels": labels}
    want = np.array(
        [
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [0] * 6,
            [1] * 6,
        ],
        bool,
    )
    np.testing.assert_array_equal(text_tokens(batch), want)
    counts = count_tokens(batch)
    assert (float(counts.labels), float(counts.text)) == (6, 13)
    assert float(counts.labels_per_token) == pytest.approx(6 / 13)
    # A packed row says itself where it is filled up; there a token 0 is a token like others.
    segments = np.array(
        [
            [1, 1, 2, 2, 2, 0],
            [1, 1, 1, 1, 1, 1],
            [1, 0, 0, 0, 0, 0],
            [1, 1, 2, 2, 0, 0],
        ]
    )
    np.testing.assert_array_equal(
        np.sum(text_tokens(batch | {"segments": segments}), axis=1), [5, 6, 1, 4]
    )
    assert np.all(text_tokens({"tokens": tokens})), "a token 0 may be text"
    packed = {"tokens": tokens, "segments": np.where(want, 1, 0)}
    np.testing.assert_array_equal(text_tokens(packed), want)


@pytest.mark.slow
def test_padding_takes_no_expert_in_scores_or_a_teacher_s_answers() -> None:
    """Where experts choose tokens, what they choose is what they choose in the loss.

    Tolerance: sums of a few hundred float32 terms in another order.
    """
    config = ModelConfig(
        family="llama",
        vocab_size=32,
        layers=1,
        embed=16,
        heads=2,
        mlp=16,
        max_seq_len=12,
        experts=4,
        experts_per_token=1,
        init_std=0.5,
        router="expert_choice",
    )
    model = Model(config)
    plan = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.zeros((2, 12), np.int32)
    tokens[:, :5] = np.arange(1, 11).reshape(2, 5)
    labels = np.full((2, 12), -1, np.int32)
    labels[:, :4] = tokens[:, 1:5]
    batch = {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(labels)}
    want = model.loss(params, batch, plan).nll
    scores = jax.nn.log_softmax(model.logits(params, batch, plan))
    found = teacher_answer(model, params, batch, plan, k=32).top
    by_entry = jnp.take_along_axis(found.log_probs, jnp.argsort(found.ids, axis=-1), axis=-1)
    for log_probs in (scores, by_entry):
        taken = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        nll = -jnp.sum(jnp.where(labels >= 0, taken, 0))
        np.testing.assert_allclose(nll, want, rtol=1e-5)


@pytest.mark.parametrize("pack", [False, True])
def test_what_fills_the_rows_of_chat_data_is_padding_and_nothing_else_is(
    tmp_path: Path, pack: bool
) -> None:
    rows = [{"prompt": "ask " * n, "completion": "say " * (9 - n)} for n in range(1, 9)]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        source="chat",
        path=str(file),
        seq_len=64,
        val_fraction=0.0,
        pack=pack,
    )
    part = load_corpus(data, 257).train
    batch = next(train_batches(part, data, 4, range(4), 257))
    text = np.asarray(text_tokens(batch))
    np.testing.assert_array_equal(text, batch["tokens"] != 0)
    assert 0.3 < np.mean(text) < 0.97
    assert np.sum(text) > np.sum(batch["labels"] >= 0), "prompts are text"


@pytest.mark.parametrize("pack", [False, True])
def test_the_reference_of_verify_tells_padding_by_itself_and_has_some(pack: bool) -> None:
    config = override(Config(), {"model.family": "llama", "model.experts": 4, "data.pack": pack})
    batch = random_batch(config)
    text = text_of(batch)
    np.testing.assert_array_equal(text, text_tokens(batch))
    assert 0.6 < np.mean(text) < 0.9
    assert np.std(np.sum(text, axis=1)) > 5, "rows differ in length"


# The losses of routers.

ONE = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
WEIGHTS = LossWeights(0.0, 0.03, 0.02)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "vocab_multiple": 1,
    "layers": 1,
    "embed": 16,
    "heads": 2,
    "kv_heads": 1,
    "mlp": 16,
}
CONFIG = ModelConfig(family="llama", experts=4, max_seq_len=16, init_std=0.3, **SIZES)
MODEL = Model(CONFIG)
TOKENS = np.random.default_rng(0).integers(1, 61, (8, 16)).astype(np.int32)
ALL = np.roll(TOKENS, -1, 1)


def added(sums: Any) -> float:
    """What the losses of the routers add to the mean loss of a label."""
    return (float(sums.loss) - float(sums.nll)) / float(sums.tokens)


@pytest.fixture(scope="module")
def params() -> Any:
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def loss(params: Any) -> Any:
    return jax.jit(lambda batch: MODEL.loss(params, batch, ONE, None, WEIGHTS))


def test_losses_of_routers_do_not_depend_on_how_many_labels_count(loss: Any) -> None:
    whole = added(loss({"tokens": TOKENS, "labels": ALL}))
    assert whole > 0.03, "a balance is at least 1"
    for keep in (8, 1):
        some = np.where(np.arange(16) < keep, ALL, -1)
        # A float32 loss of some 500 is off by 3e-5, which is shared among as few as 8 labels.
        assert added(loss({"tokens": TOKENS, "labels": some})) == pytest.approx(whole, abs=1e-5)


def test_losses_of_routers_do_not_depend_on_padding(loss: Any) -> None:
    labels = np.where(np.arange(16) < 3, ALL, -1)
    short = added(loss({"tokens": TOKENS[:, :4], "labels": labels[:, :4]}))
    filled = np.where(np.arange(16) < 4, TOKENS, 0)
    assert added(loss({"tokens": filled, "labels": labels})) == pytest.approx(short, abs=1e-5)
    assert abs(added(loss({"tokens": TOKENS, "labels": labels})) - short) > 1e-3, (
        "all tokens give another value"
    )


def test_losses_of_routers_are_means_over_the_whole_step_and_not_over_its_microbatches(
    loss: Any, params: Any
) -> None:
    lengths = np.array([[4], [16]] * 4)
    inside = np.arange(16) < lengths
    batch = {
        "tokens": np.where(inside, TOKENS, 0),
        "labels": np.where(np.arange(16) < lengths - 2, ALL, -1),
    }
    # Two microbatches: one with all the short rows, and the other with few labels.
    batch["labels"][1::2, 2:] = -1

    one = loss(batch)
    train = TrainConfig(
        accumulation=2,
        z_loss=WEIGHTS.z_loss,
        balance_loss=WEIGHTS.balance_loss,
        router_z_loss=WEIGHTS.router_z_loss,
    )
    experiment = Experiment(Config(model=CONFIG, train=train), MODEL, ONE)
    two = jax.jit(lambda batch: gradients(experiment, params, batch, None)[0])(batch)
    assert added(two) == pytest.approx(added(one), abs=1e-5)
    assert float(two.routed.balance) == pytest.approx(
        float(one.routed.balance),
        rel=1e-6,
    )
    halves = [loss({name: rows[i::2] for name, rows in batch.items()}) for i in (0, 1)]
    alone = sum(float(half.loss) - float(half.nll) for half in halves) / float(one.tokens)
    assert abs(alone - added(one)) > 1e-3, "the microbatches by themselves would give another value"


def test_a_row_of_padding_alone_gives_no_number_that_is_not_finite(params: Any) -> None:
    batch = {"tokens": TOKENS.copy(), "labels": ALL.copy()}
    batch["tokens"][2:4] = 0
    batch["labels"][2:4] = -1
    batch = jax.tree.map(jnp.asarray, batch)
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda params: MODEL.loss(params, batch, ONE, None, WEIGHTS).loss)
    )
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(value_and_grad(params)))


def test_one_expert_a_token_gives_the_router_a_gradient() -> None:
    """Its weight is its probability: the constant 1 would teach the router nothing."""
    model = Model(replace(CONFIG, experts_per_token=1))
    batch = {"tokens": jnp.asarray(TOKENS), "labels": jnp.asarray(ALL)}
    grads = jax.jit(jax.grad(lambda params: model.loss(params, batch, ONE).loss))(
        model.init(jax.random.key(0))
    )
    norms = {name: float(jnp.linalg.norm(grads["blocks"][name])) for name in ("router", "gate")}
    assert norms["router"] > 1e-2 * norms["gate"] > 0
