"""The query layer on top of a stack: its mathematics in float64, and what it costs.

Shapes: B batch, S sequence, D embed, H heads, h head_dim, V vocab.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Float, Int

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.config.sparsity import Sparsity
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model
from jaxpar.models.masks import reach
from jaxpar.models.query_layer import QueryLayer

CONFIG = ModelConfig(
    vocab_size=13,
    vocab_multiple=1,
    layers=2,
    embed=8,
    heads=2,
    mlp=12,
    max_seq_len=6,
    init_std=0.3,
    query_layer=True,
)
ONE = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
Arrays = dict[str, Any]


def norm(x: np.ndarray, of: Arrays) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred / spread * of["scale"] + of["bias"]


def layer(x_BSD: np.ndarray, given_BSD: np.ndarray | None, of: Arrays) -> np.ndarray:
    """A block of GPT-2, with queries of what is given, or of the normed stream."""
    normed_BSD = norm(x_BSD, of["attention_norm"])
    q_from_BSD = normed_BSD if given_BSD is None else given_BSD
    q_BSHh = np.einsum("BSD,DHh->BSHh", q_from_BSD, of["q"]) + of["q_bias"]
    k_BSHh = np.einsum("BSD,DHh->BSHh", normed_BSD, of["k"]) + of["k_bias"]
    v_BSHh = np.einsum("BSD,DHh->BSHh", normed_BSD, of["v"]) + of["v_bias"]
    scores_BHST = np.einsum("BSHh,BTHh->BHST", q_BSHh, k_BSHh) / np.sqrt(q_BSHh.shape[-1])
    S = x_BSD.shape[1]
    scores_BHST = np.where(np.tril(np.ones((S, S), bool)), scores_BHST, -np.inf)
    weights_BHST = np.exp(scores_BHST - scores_BHST.max(-1, keepdims=True))
    weights_BHST /= weights_BHST.sum(-1, keepdims=True)
    mixed_BSHh = np.einsum("BHST,BTHh->BSHh", weights_BHST, v_BSHh)
    x_BSD = x_BSD + np.einsum("BSHh,HhD->BSD", mixed_BSHh, of["out"]) + of["out_bias"]
    up_BSF = norm(x_BSD, of["mlp_norm"]) @ of["up"] + of["up_bias"]
    inner_BSF = np.sqrt(2 / np.pi) * (up_BSF + 0.044715 * up_BSF**3)
    hidden_BSF = up_BSF * (1 + np.tanh(inner_BSF)) / 2
    return x_BSD + hidden_BSF @ of["down"] + of["down_bias"]


def log_likelihoods(params: Arrays, tokens_BS: np.ndarray) -> np.ndarray:
    """Those of the vocabulary after each token, in NumPy's float64."""
    S = tokens_BS.shape[1]
    embed = params["embed"]
    x_BSD = embed["tokens"][tokens_BS] + embed["positions"][:S]
    for i in range(CONFIG.layers):
        x_BSD = layer(x_BSD, None, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]))
    query = params["query"]
    next_BSD = np.broadcast_to(query["next_positions"][:S], x_BSD.shape)
    x_BSD = layer(x_BSD, next_BSD, query)
    scores_BSV = norm(x_BSD, params["head"]["norm"]) @ embed["tokens"].T
    return scores_BSV - np.log(np.exp(scores_BSV).sum(-1, keepdims=True))


def loss_of(params: Arrays, tokens_BS: np.ndarray, labels_BS: np.ndarray) -> float:
    found = log_likelihoods(params, tokens_BS)
    return -float(np.take_along_axis(found, labels_BS[..., None], -1).sum())


@pytest.fixture(scope="module")
def case() -> tuple[Model, Arrays, Int[np.ndarray, "B S"], Int[np.ndarray, "B S"]]:
    model = Model(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    leaves, form = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    # biases and scales that are not all alike
    moved = [leaf + 0.2 * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    tokens_BS = rng.integers(0, 13, (3, 6))
    return model, jax.tree.unflatten(form, moved), tokens_BS, rng.integers(0, 13, (3, 6))


def test_scores_are_those_of_plain_mathematics_in_float64(case: Any) -> None:
    model, params, tokens_BS, _ = case
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    run = jax.jit(lambda params, tokens: model.logits(params, {"tokens": tokens}, ONE))
    found: Float[np.ndarray, "B S V"] = jax.nn.log_softmax(run(params, jnp.asarray(tokens_BS)))
    # float32 beside float64: three layers of sums of some ten terms of about one
    np.testing.assert_allclose(found, log_likelihoods(exact, tokens_BS), atol=2e-5)


def test_gradients_are_those_of_plain_mathematics_in_float64(case: Any) -> None:
    """Each parameter is moved along a direction, and the loss follows as the gradient says."""
    model, params, tokens_BS, labels_BS = case
    batch = {"tokens": jnp.asarray(tokens_BS), "labels": jnp.asarray(labels_BS)}
    grads = jax.jit(jax.grad(lambda params: model.loss(params, batch, ONE).loss))(params)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    rng = np.random.default_rng(1)
    step = 1e-5  # whose square is the error of a central difference
    checked = 0
    leaves, form = jax.tree.flatten(exact)
    for place, (path, grad) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        direction = rng.standard_normal(grad.shape)
        ends = []
        for sign in (1, -1):
            moved = [*leaves]
            moved[place] = leaves[place] + sign * step * direction
            ends.append(loss_of(jax.tree.unflatten(form, moved), tokens_BS, labels_BS))
        want = (ends[0] - ends[1]) / (2 * step)
        got = float(np.sum(np.asarray(grad, np.float64) * direction))
        # float32 sums; a bias of keys has no gradient but rounding
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=str(path))
        checked += "next_positions" in str(path) and abs(want) > 0.01
    assert checked == 1


def test_what_it_costs_is_a_block_and_a_table_that_is_looked_up() -> None:
    model = Model(CONFIG)
    without = Model(dataclasses.replace(CONFIG, query_layer=False))
    deeper = Model(dataclasses.replace(CONFIG, query_layer=False, layers=3))
    table = CONFIG.max_seq_len * CONFIG.embed
    block = deeper.parameter_count() - without.parameter_count()
    assert model.parameter_count() == without.parameter_count() + block + table
    assert model.flops_per_token(6) == deeper.flops_per_token(6)
    # its mask is that of a layer after the last
    masked = dataclasses.replace(CONFIG, masks=("window(2)", "window(2)", "causal"))
    more = Model(masked).flops_per_token(6)
    more -= Model(dataclasses.replace(masked, masks=("window(2)",))).flops_per_token(6)
    assert more == 12 * CONFIG.embed * (reach("causal", 6) - reach("window(2)", 6))


def test_it_has_neither_pairs_nor_sparse_matrices() -> None:
    sparse = dataclasses.replace(CONFIG, sparsity=Sparsity("2:4"))
    top = QueryLayer(sparse, nnx.Rngs(0))
    assert top.linear("up").form is None
    with_pairs = Model(dataclasses.replace(CONFIG, lora=Lora(rank=2)))
    assert list(with_pairs.trained(with_pairs.axes)) == ["blocks"]
    assert "lora" not in with_pairs.axes["query"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"family": "llama"}, "llama turns queries by their positions"),
        ({"family": "bert", "masks": ("full",)}, "bert norms the stream after"),
        ({"sublayers": "parallel"}, "model.sublayers=parallel reads queries and the MLP's input"),
    ],
)
def test_where_it_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"model.query_layer=true: {why}"):
        Model(dataclasses.replace(CONFIG, **changes))
