"""A mixture of experts that is tuned on chat data has, on every layout, the loss that its
definition says, in float64.

The definition is written here in numpy: the mean over the labels that count, plus the weights times
the losses of the routers, each of which is a mean over the tokens that are text, however few of
their labels count.

Tolerances: a float32 forward pass of some dozen ops rounds a loss of about 6 nats by a few ulps
(4e-7 of it), so 3e-6. The slope is held against a central difference in float64 (with h = 1e-4 its
own error is 1e-7 of it); float32 gradients are off by at most 1e-5 of the largest entry (see
`jaxpar.verify`), so 1e-4 of the slope.

Shapes: B batch, S sequence, D embed, H heads, h head_dim, F mlp, V vocab, E experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from tiers import some

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.layout.sharding import replicated_sharding
from jaxpar.data.corpus import load_corpus, train_batches
from jaxpar.models import Model
from jaxpar.parallel.zigzag import TOKENS
from jaxpar.train import make_plan
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.state import param_shardings
from jaxpar.train.step import gradients

STEPS = 3
RATE = 0.3
SIZES = {
    "model.layers": 2,
    "model.embed": 16,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.mlp": 16,
    "model.init_std": 0.3,
    "model.vocab_size": 257,
    "model.vocab_multiple": 2,
    "model.max_seq_len": 64,
    "data.seq_len": 64,
    "train.batch": 8,
    "data.source": "chat",
    "data.val_fraction": 0.0,
    "train.balance_loss": 0.5,
    "train.router_z_loss": 0.1,
    "mesh.fsdp": 1,
    "mesh.expert": 1,
    "mesh.tensor": 1,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulation": {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, "train.accumulation": 2},
    "context, packed": {"mesh.context": 2, "mesh.expert": 2, "mesh.tensor": 2, "data.pack": True},
    "pipeline": {
        "mesh.stage": 2,
        "mesh.expert": 2,
        "mesh.tensor": 2,
        "pipeline.microbatches": 2,
        "train.accumulation": 2,
    },
}


class Objective(NamedTuple):
    """The mean likelihood of a label, the means of the routers over text and layers, and what is
    differentiated.
    """

    nll: float
    balance: float
    z: float
    loss: float


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def rotated(x_SHh: np.ndarray, positions_S: np.ndarray, theta: float) -> np.ndarray:
    half = x_SHh.shape[-1] // 2
    angles = positions_S[:, None, None] * theta ** (-np.arange(half) / half)
    a = x_SHh[..., :half]
    b = x_SHh[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def objective(
    params: Any,
    batch: dict[str, np.ndarray],
    config: Config,
) -> Objective:
    """The definition: rows one by one, without their padding, every expert on every token."""
    table = params["embed"]["tokens"]
    head = params["head"]["table"]
    blocks = params["blocks"]
    nll = 0.0
    labels = 0
    text = 0
    balance = 0.0
    z = 0.0
    for at in range(len(batch["tokens"])):
        row = {name: rows[at] for name, rows in batch.items()}
        # In this data no token of text is 0: it is words, and the end of text is 256.
        n = int(np.max(np.nonzero(row["tokens"])[0])) + 1
        row = {name: x[:n] for name, x in row.items()}
        positions = row.get("positions", np.arange(n))
        segments = row.get("segments", np.ones(n))
        x = table[row["tokens"]]
        for layer in range(config.model.layers):
            weights = jax.tree.map(lambda x, layer=layer: x[layer], blocks)
            x = x + attention(
                normed(x, weights["attention_norm"]["scale"]), weights, positions, segments, config
            )
            y, more_balance, more_z = experts(
                normed(x, weights["mlp_norm"]["scale"]), weights, config
            )
            x = x + y
            balance = balance + n * more_balance
            z = z + more_z
        scores = normed(x, params["head"]["norm"]["scale"]) @ head[: config.model.vocab_size].T
        counted = np.nonzero(row["labels"] >= 0)[0]
        nll -= np.sum(
            np.log(softmax(scores[counted]))[np.arange(len(counted)), row["labels"][counted]]
        )
        labels = labels + len(counted)
        text = text + n
    assert labels < 0.5 * text < 0.5 * batch["tokens"].size, (
        "few labels count, and there is padding"
    )
    layers = config.model.layers
    balance = balance / text / layers
    z = z / text / layers
    train = config.train
    return Objective(
        nll / labels,
        balance,
        z,
        nll / labels + train.balance_loss * balance + train.router_z_loss * z,
    )


def attention(
    x: np.ndarray, weights: Any, positions: np.ndarray, segments: np.ndarray, config: Config
) -> np.ndarray:
    q, k, v = (np.einsum("sd,dhk->shk", x, weights[name]) for name in "qkv")
    q, k = (rotated(part, positions, config.model.rope_theta) for part in (q, k))
    k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
    seen = np.tril(np.ones((len(x), len(x)), bool)) & (segments[:, None] == segments)
    scores = np.einsum("shk,thk->hst", q, k) / np.sqrt(q.shape[-1])
    mixed = np.einsum(
        "hst,thk->shk",
        softmax(np.where(seen, scores, -np.inf)),
        v,
    )
    return np.einsum("shk,hkd->sd", mixed, weights["out"])


def experts(
    x: np.ndarray,
    weights: Any,
    config: Config,
) -> tuple[np.ndarray, float, float]:
    """The output, the balance of the row, and its sum of squared log-normalisers."""
    E = config.model.experts
    K = config.model.experts_per_token
    scores = x @ weights["router"]
    probabilities = softmax(scores)
    chosen = np.argsort(-scores, -1)[:, :K]
    y = np.zeros_like(x)
    choices = np.zeros(E)
    for s, token in enumerate(x):
        total = np.sum(probabilities[s, chosen[s]])
        for e in chosen[s]:
            choices[e] += 1
            gate = token @ weights["gate"][e]
            hidden = gate / (1 + np.exp(-gate)) * (token @ weights["up"][e])
            y[s] += probabilities[s, e] / total * (hidden @ weights["down"][e])
    balance = E * np.sum(choices / (len(x) * K) * probabilities.mean(0))
    return (
        y,
        balance,
        float(
            np.sum(np.log(np.exp(scores).sum(-1)) ** 2),
        ),
    )


def chat_file(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = []
    for n in range(24):
        asked = " ".join(str(number) for number in rng.integers(10, 99, rng.integers(2, 9)))
        rows.append({"prompt": f"the largest of {asked}: ", "completion": str(n)})
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("layout", some(["pipeline", "accumulation", "context, packed"], 3))
def test_chat_tuning_of_experts_has_the_loss_of_its_definition(layout: str, tmp_path: Path) -> None:
    changes = SIZES | LAYOUTS[layout] | {"data.path": str(chat_file(tmp_path))}
    config = override(load_config("tiny_moe"), changes)
    plan = make_plan(config, jax.devices())
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    part = load_corpus(config.data, config.model.vocab_size).train
    batches = train_batches(part, config.data, 8, range(8), config.model.vocab_size)
    places = param_shardings(model.shapes(), model, plan)
    step = jax.jit(
        lambda params, batch: gradients(experiment, params, batch, None),
        in_shardings=(places, plan.sharding(TOKENS)),
        out_shardings=(replicated_sharding(plan), places),
    )
    params = jax.tree.map(
        lambda x: np.asarray(x, np.float64),
        model.init(jax.random.key(0)),
    )
    for n in range(STEPS):
        batch = next(batches)
        # The reference takes the float32 numbers that the step takes.
        params = jax.tree.map(
            lambda x: x.astype(np.float32).astype(np.float64),
            params,
        )
        given = jax.device_put(jax.tree.map(np.float32, params), places)
        sums, grads = jax.device_get(step(given, put_batch(batch, plan)))
        want = objective(params, batch, config)
        text = np.count_nonzero(batch["tokens"])
        found = Objective(
            sums.nll / sums.tokens,
            sums.routed.balance / text,
            sums.routed.z / text,
            sums.loss / sums.tokens,
        )
        np.testing.assert_allclose(found, want, rtol=3e-6)
        slopes = jax.tree.map(
            lambda x, tokens=sums.tokens: np.asarray(x, np.float64) / tokens, grads
        )
        if n == 0:
            size = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(slopes)))
            up, down = (
                jax.tree.map(
                    lambda x, g, by=h / size: x + by * g,
                    params,
                    slopes,
                )
                for h in (1e-4, -1e-4)
            )
            rise = objective(up, batch, config).loss - objective(down, batch, config).loss
            assert rise / 2e-4 == pytest.approx(size, rel=1e-4)
        params = jax.tree.map(lambda x, g: x - RATE * g, params, slopes)
