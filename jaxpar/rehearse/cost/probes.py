"""Probes are small training steps, whose tasks a calibration times inside the step.

A step reads most of its data from main memory or from another core, which a program of one operation does not show.
The steps train plain transformers with AdamW, in plain JAX.

Shapes: B batch, S positions (T those attended to), D embed, H heads, h head_dim, F mlp, V vocab.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, jax.Array]
HEAD_DIM = 32


class Probe(NamedTuple):
    """The sizes of one training step."""

    batch: int
    seq: int
    embed: int
    mlp: int
    vocab: int
    layers: int = 1
    """The number of layers; `lax.scan` runs them if there are several."""
    gated: bool = False
    """Whether RMSNorm and SwiGLU, as in LLaMA, take the place of LayerNorm and GELU."""
    dtype: str = "float32"
    """The dtype of the matmuls."""


PROBES = {
    "small": Probe(4, 64, 128, 512, 256),
    "long": Probe(2, 512, 128, 512, 256),
    "wide": Probe(8, 128, 384, 1536, 4096),
    "scan": Probe(8, 128, 128, 512, 256, layers=3),
    "gated": Probe(4, 64, 128, 384, 256, gated=True),
    "gated_wide": Probe(8, 128, 256, 768, 1024, gated=True),
    "half": Probe(4, 128, 128, 512, 256, dtype="bfloat16"),
}


def initial(probe: Probe) -> tuple[tuple[Arrays, Arrays, Arrays], jax.Array]:
    """Make a step's state (the parameters and AdamW's two moments) and random tokens [B, S + 1]."""
    D, F, V, rng = probe.embed, probe.mlp, probe.vocab, np.random.default_rng(0)
    shapes = {"qkv": (3, D, D), "out": (D, D), "up": (D, F), "down": (F, D), "gains": (2, D)}
    shapes |= {"gate": (D, F)} if probe.gated else {}
    shapes = {name: (probe.layers, *shape) for name, shape in shapes.items()} | {"table": (V, D), "gain": (D,)}
    params = {name: jnp.asarray(0.02 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    tokens = jnp.asarray(rng.integers(0, V, (probe.batch, probe.seq + 1)), jnp.int32)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return (params, zeros, jax.tree.map(jnp.zeros_like, params)), tokens


def training_step(
    probe: Probe, state: tuple[Arrays, Arrays, Arrays], tokens: jax.Array
) -> tuple[tuple[Arrays, Arrays, Arrays], jax.Array]:
    """Take one step of AdamW on the gradient, clipped by its norm, and return the new state and the loss."""
    loss, grads = jax.value_and_grad(partial(_loss, probe))(state[0], tokens)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    new = {}
    for name, g in grads.items():
        p, m, v = (part[name] for part in state)
        g = g * jnp.minimum(1.0, 1.0 / norm)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        new[name] = p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v
    params, means, squares = ({name: three[i] for name, three in new.items()} for i in range(3))
    return (params, means, squares), loss


def _loss(probe: Probe, params: Arrays, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next token."""
    layers = {name: x for name, x in params.items() if name not in ("table", "gain")}
    x_BSD = params["table"][tokens[:, :-1]].astype(probe.dtype)
    if probe.layers > 1:
        x_BSD, _ = jax.lax.scan(lambda x, layer: (_block(probe, layer, x), None), x_BSD, layers)
    else:
        x_BSD = _block(probe, {name: x[0] for name, x in layers.items()}, x_BSD)
    x_BSD = _norm(probe, x_BSD, params["gain"])
    scores_BSV = jnp.einsum("bsd,vd->bsv", x_BSD, params["table"].astype(probe.dtype)).astype(jnp.float32)
    right_BS = jnp.take_along_axis(scores_BSV, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores_BSV, axis=-1) - right_BS)


def _block(probe: Probe, layer: Arrays, x_BSD: jax.Array) -> jax.Array:
    B, S, D = x_BSD.shape
    weights = {name: x.astype(probe.dtype) for name, x in layer.items()}
    y_BSD = _norm(probe, x_BSD, layer["gains"][0])
    q, k, v = ((y_BSD @ w).reshape(B, S, D // HEAD_DIM, HEAD_DIM) for w in weights["qkv"])
    scores_BHST = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / HEAD_DIM**0.5
    scores_BHST = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores_BHST, -1e30)
    shares_BHST = jax.nn.softmax(scores_BHST, axis=-1).astype(probe.dtype)
    mixed_BSHh = jnp.einsum("bhst,bthd->bshd", shares_BHST, v)
    x_BSD = x_BSD + mixed_BSHh.reshape(B, S, D) @ weights["out"]
    y_BSD = _norm(probe, x_BSD, layer["gains"][1])
    up_BSF = y_BSD @ weights["up"]
    hidden_BSF = jax.nn.silu(y_BSD @ weights["gate"]) * up_BSF if probe.gated else jax.nn.gelu(up_BSF)
    return x_BSD + hidden_BSF @ weights["down"]


def _norm(probe: Probe, x_BSD: jax.Array, gain_D: jax.Array) -> jax.Array:
    x = x_BSD.astype(jnp.float32)
    x = x if probe.gated else x - x.mean(-1, keepdims=True)
    return ((1 + gain_D) * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)).astype(probe.dtype)
