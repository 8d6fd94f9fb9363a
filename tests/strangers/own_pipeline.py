"""A stranger's blocks in a pipeline: embed, block and score functions of their own, and a
schedule's table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar
from jaxpar import parallel, verify
from jaxpar.parallel import pipeline

B = 16
S = 8
D = 12
F = 20
V = 32
LAYERS = 8
AXES = {
    "tokens": ("vocab", "embed"),
    "positions": (None, "embed"),
    "blocks": {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "scale": ("layers", None),
    },
    "head": ("vocab", "embed"),
}


def functions(layout):
    """Embed, block and score. Lookup and loss are the library's: of a table that is split, plain
    indexing inside a pipeline aborts XLA's partitioner."""

    def embed(params, tokens, positions):
        x = parallel.lookup(params["tokens"], tokens, "vocab", layout)
        return x + parallel.lookup(params["positions"], positions, None, layout)

    def score(params, x, labels):
        return parallel.linear_cross_entropy(x, params["head"], labels, layout).loss

    return embed, block, score


def block(layer, x, positions):
    """A causal mean and an MLP, in plain JAX: XLA splits it as its weights lie."""
    mean = jnp.cumsum(x, axis=1) / (1 + positions[..., None])
    return x + jnp.tanh((x + mean) @ layer["up"]) @ layer["down"] * layer["scale"]


def reference(params, batch):
    positions = jnp.broadcast_to(jnp.arange(S), batch["tokens"].shape)
    x = params["tokens"][batch["tokens"]] + params["positions"][positions]
    for n in range(LAYERS):
        x = block(
            jax.tree.map(lambda leaf, n=n: leaf[n], params["blocks"]),
            x,
            positions,
        )
    scores = jax.nn.log_softmax(x @ params["head"].T)
    labels = batch["labels"]
    of_label = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(labels >= 0, of_label, 0)) / jnp.sum(labels >= 0)


def inputs():
    rng = np.random.default_rng(0)
    shapes = {
        "up": (LAYERS, D, F),
        "down": (LAYERS, F, D),
        "scale": (LAYERS, D),
    }
    params = {
        "tokens": (V, D),
        "positions": (S, D),
        "blocks": shapes,
        "head": (V, D),
    }
    params = jax.tree.map(
        lambda shape: (rng.standard_normal(shape) / 2).astype(np.float32),
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    labels = np.where(
        rng.random((B, S)) < 0.2,
        -1,
        rng.integers(0, V, (B, S)),
    )
    return params, {
        "tokens": rng.integers(0, V, (B, S)),
        "labels": labels,
    }


@pipeline.register_schedule("last_first")
def last_first(stages, microbatches, virtual):
    """GPipe, whose last microbatch has its backward first: a schedule of one's own, by its name."""

    def turned(action):
        if action is None or action.kind == "forward":
            return action
        return action._replace(microbatch=microbatches - 1 - action.microbatch)

    table = pipeline.schedule("gpipe", stages, microbatches, virtual)
    rounds = tuple(
        tuple(tuple(turned(action) for action in tick) for tick in part) for part in table.rounds
    )
    return pipeline.Table(stages, microbatches, virtual, rounds)


def verdict_of(schedule="1f1b", microbatches=8, virtual=1, **mesh):
    layout = jaxpar.Layout(jaxpar.make_mesh(**mesh))
    params, batch = inputs()
    run = pipeline.value_and_grad(
        *functions(layout),
        AXES,
        layout,
        microbatches=microbatches,
        schedule=schedule,
        virtual=virtual,
    )
    shardings = layout.sharding(AXES, params), layout.sharding(("batch", None))
    return verify.gradients(run, reference, params, batch, shardings)


if __name__ == "__main__":
    for name, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("looped", 2)):
        print(name, verdict_of(name, virtual=virtual, stage=4, data=2))
    print(
        "a table",
        verdict_of(
            pipeline.schedule("1f1b", 2, 4),
            stage=2,
            fsdp=2,
            tensor=2,
        ),
    )
