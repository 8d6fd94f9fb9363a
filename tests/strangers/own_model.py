"""A stranger's language model in Flax NNX, trained on data x fsdp x tensor with optax, in their own
loop.

The parameters carry logical axes; the layout says where they lie. State is made sharded, and no
device ever holds it whole; after a checkpoint the run goes on as if nothing had been.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jaxpar
from jaxpar import parallel

VOCAB = 32
EMBED = 16
HIDDEN = 64
BATCH = 8
SEQ = 12


def weight(rngs, shape, axes):
    return nnx.Param(
        nnx.initializers.normal(0.1)(rngs.params(), shape), out_sharding=axes, eager_sharding=False
    )


class Mixer(nnx.Module):
    """An embedding, a causal mean over what came before, an MLP, an output table."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = weight(rngs, (VOCAB, EMBED), ("vocab", "embed"))
        self.up = weight(rngs, (EMBED, HIDDEN), ("embed", "mlp"))
        self.down = weight(rngs, (HIDDEN, EMBED), ("mlp", "embed"))
        self.scale = weight(rngs, (EMBED,), (None,))

    def __call__(self, tokens, layout):
        # else XLA gathers the whole table
        x = parallel.lookup(self.tokens[...], tokens, "vocab", layout)
        x = layout.constrain(x, ("batch", "seq", None))
        mean = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        hidden = layout.constrain(
            jax.nn.gelu((x + mean) @ self.up[...]),
            ("batch", "seq", "mlp"),
        )
        return (x + hidden @ self.down[...] * (1 + self.scale[...])) @ self.tokens[...].T


def build(layout):
    """The initializer of the sharded state, and the step."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Mixer(nnx.Rngs(0))))
    optimizer = optax.adamw(3e-2)
    params = layout.sharding(nnx.get_partition_spec(shapes), shapes)
    make = jax.jit(lambda: nnx.state(Mixer(nnx.Rngs(0))), out_shardings=params)

    def init():
        state = make()
        return state, jaxpar.optimizer_state(optimizer, state)

    def loss(state, tokens):
        scores = nnx.merge(graph, state)(tokens[:, :-1], layout)
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(state, opt_state, tokens):
        value, grads = jax.value_and_grad(loss)(state, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, state)
        return optax.apply_updates(state, updates), opt_state, value

    return init, step


def batches(layout):
    """Sequences that count upwards, each from its own start."""
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, VOCAB, (BATCH, 1))
        tokens = (starts + np.arange(SEQ + 1)) % VOCAB
        yield jax.device_put(tokens, layout.sharding(("batch", None), tokens.shape))


def train(mesh, steps, folder: Path | None = None, save_at=0):
    """Losses of a training; with a folder, saved after `save_at` steps and read back before
    going on.
    """
    layout = jaxpar.Layout(mesh)
    init, step = build(layout)
    state, opt_state = init()
    data = batches(layout)
    losses = []
    for number in range(steps):
        if folder is not None and number == save_at:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(folder / "state", (state, opt_state))
                checkpointer.wait_until_finished()
                there = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state, opt_state))
                state, opt_state = checkpointer.restore(folder / "state", there)
        state, opt_state, value = step(state, opt_state, next(data))
        losses.append(float(value))
    return losses, state


if __name__ == "__main__":
    losses, state = train(
        jaxpar.make_mesh(data=2, fsdp=2, tensor=-1),
        30,
    )
    print(
        f"{losses[0]:.3f} -> {losses[-1]:.3f}",
        {name: leaf.sharding.spec for name, leaf in nnx.to_pure_dict(state).items()},
    )
