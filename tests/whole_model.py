"""A whole language model of a stranger's, in Flax NNX as Flax's pages write it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import jaxpar
from jaxpar.models import OwnModel, nnx_model

VOCAB = 256
WIDTH = 32
HIDDEN = 48


class Mixer(nnx.Module):
    """Each token sees the mean of those before it."""

    def __init__(self, rngs: nnx.Rngs):
        def dense(rows: int, columns: int, *names: str) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(rows, columns, use_bias=False, kernel_init=init, rngs=rngs)

        table = nnx.with_partitioning(nnx.initializers.normal(0.5), ("vocab", "embed"))
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=table, rngs=rngs)
        self.layers = nnx.List(
            [
                nnx.Dict(
                    norm=nnx.RMSNorm(WIDTH, rngs=rngs),
                    up=dense(WIDTH, HIDDEN, "embed", "mlp"),
                    down=dense(HIDDEN, WIDTH, "mlp", "embed"),
                )
                for _ in range(2)
            ]
        )

    def __call__(self, tokens, layout):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layout.constrain(x, ("batch", "seq", None))
            count = 1 + jnp.arange(x.shape[1])[:, None]
            seen = jnp.cumsum(layer.norm(x), axis=1) / count
            x = x + layer.down(nnx.gelu(layer.up(seen)))
        return self.embed.attend(x)


def loss(module: Mixer, batch, layout, key):
    logits = module(batch["tokens"], layout).astype(jnp.float32)
    counts = batch["labels"] >= 0
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.maximum(batch["labels"], 0)[..., None], axis=-1
    )
    return -jnp.sum(picked[..., 0] * counts), jnp.sum(counts)


def mixer() -> OwnModel:
    return nnx_model(Mixer, loss, vocab_size=VOCAB, max_seq_len=64)


def config_on(**mesh: int) -> jaxpar.Config:
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    return jaxpar.override(
        jaxpar.load_config("tiny"),
        {
            "mesh.data": 1,
            "mesh.fsdp": 1,
            "mesh.tensor": 1,
            **sizes,
            "data.max_bytes": 100_000,
            "data.seq_len": 32,
            "train.batch": 16,
            "train.steps": 8,
            "train.warmup_steps": 2,
            "train.learning_rate": 1e-2,
            "train.eval_every": 0,
            "train.eval_batches": 2,
            "train.final_eval_batches": 2,
            "checkpoint.every": 4,
            "metrics.log_every": 1,
            "memory.policy": "none",
        },
    )
