"""A stranger's mesh, ("data", "model"), and a logical axis of their own: a model over a plain dict,
verified, trained, saved, restored on another mesh, and rehearsed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxpar
from jaxpar import parallel, rehearse, verify
from jaxpar.kernels import masks

VOCAB = 32
EMBED = 16
HEADS = 4
HEAD_DIM = 4
HIDDEN = 64
BATCH = 8
SEQ = 12
RULES = {
    "embed": "data",
    "heads": "model",
    "mlp": "model",
    "vocab": "model",
    "gates": ("data", "model"),
}
AXES = {
    "tokens": ("vocab", "embed"),
    "q": ("embed", "heads", "head_dim"),
    "k": ("embed", "kv_heads", "head_dim"),
    "v": ("embed", "kv_heads", "head_dim"),
    "out": ("heads", "head_dim", "embed"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "gates": ("gates",),
}
SHAPES = {
    "tokens": (VOCAB, EMBED),
    "q": (EMBED, HEADS, HEAD_DIM),
    "k": (EMBED, HEADS, HEAD_DIM),
    "v": (EMBED, HEADS, HEAD_DIM),
    "out": (HEADS, HEAD_DIM, EMBED),
    "up": (EMBED, HIDDEN),
    "down": (HIDDEN, EMBED),
    "gates": (EMBED,),
}
OPTIMIZER = optax.adamw(3e-2)


def init(key):
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    return {name: 0.2 * jax.random.normal(keys[name], shape) for name, shape in SHAPES.items()}


def loss(layout, params, tokens):
    """The mean loss of the next token."""
    x = parallel.lookup(params["tokens"], tokens[:, :-1], "vocab", layout)
    x = x * (1 + params["gates"]).astype(x.dtype)
    axes = [AXES[name][1:] for name in ("q", "k", "v")]
    weights = [params[name] for name in ("q", "k", "v")]
    q, k, v = parallel.column_linear(x, weights, axes, layout)
    mixed = parallel.attention(q, k, v, masks.Causal(), layout)
    x = x + parallel.row_linear(mixed, params["out"], ("heads", "head_dim"), layout)
    hidden = jax.nn.gelu(parallel.column_linear(x, params["up"], ("mlp",), layout))
    x = x + parallel.row_linear(hidden, params["down"], ("mlp",), layout)
    sums = parallel.linear_cross_entropy(x, params["tokens"], tokens[:, 1:], layout)
    return sums.loss / sums.tokens


def plain_loss(params, tokens):
    """The same, as plain mathematics."""
    x = params["tokens"][tokens[:, :-1]] * (1 + params["gates"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / HEAD_DIM**0.5
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    x = x + jnp.einsum("bhst,bthk,hkd->bsd", weights, v, params["out"])
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    nll = optax.softmax_cross_entropy_with_integer_labels(x @ params["tokens"].T, tokens[:, 1:])
    return nll.mean()


def batch(seed):
    """Sequences that count upwards, each from its own start."""
    starts = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, 1))
    return (starts + np.arange(SEQ + 1)) % VOCAB


def verdict_of(mesh):
    layout = jaxpar.Layout(mesh, RULES)
    places = layout.sharding(AXES, SHAPES_OF_PARAMS), layout.sharding(("batch", None))
    params = init(jax.random.key(0))
    return verify.gradients(partial(loss, layout), plain_loss, params, batch(0), places)


SHAPES_OF_PARAMS = jax.eval_shape(init, jax.random.key(0))


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def step(layout, params, state, tokens):
    value, grads = jax.value_and_grad(partial(loss, layout))(params, tokens)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def train(layout, steps, start=0, params=None, state=None):
    """Losses of `steps` after `start`, and what was trained."""
    if params is None:
        places = layout.sharding(AXES, SHAPES_OF_PARAMS)
        params = jax.jit(init, out_shardings=places)(jax.random.key(0))
        state = jaxpar.optimizer_state(OPTIMIZER, params)
    losses = []
    for number in range(start, start + steps):
        tokens = jax.device_put(batch(number), layout.sharding(("batch", None)))
        params, state, value = step(layout, params, state, tokens)
        losses.append(float(value))
    return losses, params, state


def save(folder: Path, params, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", (params, state))


def restore(folder: Path, layout):
    """What `save` wrote, as it lies under this layout, on whatever mesh it was written."""
    places = layout.sharding(AXES, SHAPES_OF_PARAMS)
    params = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
        SHAPES_OF_PARAMS,
        places,
    )
    there = params, jaxpar.optimizer_state(OPTIMIZER, params)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", there)


def report_for(name, axes, shape):
    """The step's rehearsal for a target, whose devices form a mesh of these axes."""
    target = jaxpar.load_target(name)
    mesh = jax.sharding.Mesh(np.array(target.devices()).reshape(shape), axes)
    layout = jaxpar.Layout(mesh, RULES, compute="bfloat16")

    def array(shape, place):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    places = layout.sharding(AXES, SHAPES_OF_PARAMS)
    params = jax.tree.map(array, SHAPES_OF_PARAMS, places)
    state = jaxpar.optimizer_state(OPTIMIZER, params)
    tokens = jax.ShapeDtypeStruct(
        (BATCH, SEQ + 1), jnp.int32, sharding=layout.sharding(("batch", None))
    )
    there = jax.jit(partial(step, layout))
    return rehearse.step(there, params, state, tokens, target=target, tokens=BATCH * SEQ)


if __name__ == "__main__":
    made = jax.make_mesh((2, jax.device_count() // 2), ("data", "model"))
    print(verdict_of(made))
    losses, *_ = train(jaxpar.Layout(made, RULES), 20)
    print(f"{losses[0]:.3f} -> {losses[-1]:.3f}")
