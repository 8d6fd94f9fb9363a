"""A whole trainer in one file, over the public ops: mesh, rules, model, loss, optimizer, data,
checkpoint. Read it first; `jaxpar train` does the same with everything that a long run needs.

    python docs/trainer.py FOLDER [STEPS]

It trains a small decoder on the text of Python's own library, on data=2 x fsdp=2 x tensor=2 of
eight simulated devices. On a pod, leave out the line that asks for them, and take a larger mesh: no
other line changes. A call that was stopped goes on where it was, from the last step that is saved.

Shapes: B batch, S sequence, D embed, L layers.
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jaxpar
from jaxpar import data, parallel
from jaxpar.base.config import DataConfig
from jaxpar.base.layout.placements import local_rows
from jaxpar.kernels import masks

VOCAB, EMBED, HEADS, SIZE, MLP, LAYERS = 256, 64, 4, 16, 256, 2
BATCH, SEQ, RATE, SAVE_EVERY = 16, 64, 3e-3, 10
HEADED = ("heads", "head_dim")

# A mesh, and the rules by which logical axes lie on it: those of the library, where none is given.
layout = jaxpar.Layout(jaxpar.make_mesh(data=2, fsdp=2, tensor=2), jaxpar.ShardingRules())

# What the parameters are: the logical axis of each dim, and its size.
AXES = {
    "tokens": ("vocab", "embed"),
    "blocks": {
        "norm": ("layers", None),
        "qkv": ("layers", None, "embed", *HEADED),
        "out": ("layers", *HEADED, "embed"),
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
    },
}
SHAPES = {
    "tokens": (VOCAB, EMBED),
    "blocks": {
        "norm": (LAYERS, 2 * EMBED),
        "qkv": (LAYERS, 3, EMBED, HEADS, SIZE),
        "out": (LAYERS, HEADS, SIZE, EMBED),
        "up": (LAYERS, EMBED, MLP),
        "down": (LAYERS, MLP, EMBED),
    },
}


def init(key):
    """Small random numbers, and norms that change nothing."""
    leaves, tree = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    params = tree.unflatten(
        0.05 * jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)
    )
    params["blocks"]["norm"] = jnp.ones(SHAPES["blocks"]["norm"])
    return params


def norm(x_BSD, scale):
    mean_square = jnp.mean(x_BSD.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
    return (x_BSD * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(x_BSD.dtype)


def block(x_BSD, layer):
    """Attention and an MLP beside the residual stream. The ops send what the layout asks for."""
    before, after = jnp.split(layer["norm"], 2)
    heads = (HEADED, HEADED, HEADED)
    q, k, v = parallel.column_linear(norm(x_BSD, before), tuple(layer["qkv"]), heads, layout)
    mixed = parallel.attention(q, k, v, masks.Causal(), layout)
    x_BSD = x_BSD + parallel.row_linear(mixed, layer["out"], HEADED, layout)
    hidden = parallel.column_linear(norm(x_BSD, after), layer["up"], ("mlp",), layout)
    return x_BSD + parallel.row_linear(jax.nn.gelu(hidden), layer["down"], ("mlp",), layout), None


def loss_of(params, batch):
    """The mean loss of the labels in nats, without an array of all scores."""
    x_BSD = parallel.lookup(params["tokens"], batch["tokens"], "vocab", layout)
    x_BSD = layout.constrain(x_BSD, ("batch", "residual_seq", None))
    x_BSD, _ = jax.lax.scan(block, x_BSD, params["blocks"])
    sums = parallel.linear_cross_entropy(x_BSD, params["tokens"], batch["labels"], layout)
    return sums.loss / sums.tokens


optimizer = optax.adamw(RATE)


@partial(jax.jit, donate_argnums=0)
def step(state, batch):
    """One update of parameters and optimizer."""
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def main(folder, steps):
    """Train, or go on with what the folder has."""
    # Each device makes its own part of the parameters, and of the moments, in place.
    shapes = jax.eval_shape(init, jax.random.key(0))
    params = jax.jit(init, out_shardings=layout.sharding(AXES, shapes))(jax.random.key(0))
    state = (params, jaxpar.optimizer_state(optimizer, params))

    # Windows of text in a random order, the same on any number of processes; each reads its rows.
    settings = DataConfig(source="stdlib", seq_len=SEQ)
    text = data.load_corpus(settings, VOCAB).train
    sharding = layout.sharding(("batch",))
    batches = data.train_batches(text, settings, BATCH, local_rows(sharding, BATCH), VOCAB)

    with ocp.CheckpointManager(Path(folder).absolute()) as checkpoints:
        after = checkpoints.latest_step() or 0
        if after:
            items = ocp.args.Composite(
                state=ocp.args.StandardRestore(state), place=ocp.args.JsonRestore()
            )
            found = checkpoints.restore(after, args=items)
            state = found.state
            batches.set_state(found.place)
        for number in range(after + 1, steps + 1):
            batch = {
                name: jax.make_array_from_process_local_data(sharding, array)
                for name, array in next(batches).items()
            }
            state, loss = step(state, batch)
            if number % SAVE_EVERY == 0 or number == steps:
                print(json.dumps({"step": number, "loss": float(loss)}), flush=True)
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(state), place=ocp.args.JsonSave(batches.get_state())
                )
                checkpoints.save(number, args=items)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
