"""A stranger's loss under `shard_map`, with its own sums over devices: right, and wrong in five
ways.

A tiny causal model on data x context: rows over `data`, the sequence over `context`. Each device
has its own tokens' positions and mask; keys and values are gathered. The gradients are its own:
partial ones, summed over the mesh.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import verify

B = 4
S = 16
D = 8
V = 11
NAMES = {"tokens", "positions", "q", "k", "v", "head"}
AXES = ("data", "context")


def forward(params, tokens, positions, keys_of, places):
    """Scores of each token: one attention over what `keys_of` gathers, positions added."""
    x = params["tokens"][tokens] + params["positions"][positions]
    k = keys_of(x @ params["k"])
    v = keys_of(x @ params["v"])
    scores = jnp.einsum("bsd,btd->bst", x @ params["q"], k)
    seen = places[:, :, None] >= keys_of(places)[:, None, :]
    mixed = jax.nn.softmax(jnp.where(seen, scores, -1e30)) @ v
    return jnp.tanh(x + mixed) @ params["head"]


def nll(params, batch, keys_of):
    scores = forward(params, batch["tokens"], batch["positions"], keys_of, batch["places"])
    of_label = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["labels"][..., None], axis=-1)[
        ..., 0
    ]
    return -jnp.sum(of_label * batch["mask"]), jnp.sum(batch["mask"])


def reference(params, batch):
    total, count = nll(params, batch, lambda x: x)
    return total / count


def sharded(mesh, fault=""):
    """`(params, batch)` -> (loss, gradients), every sum over devices written out."""
    gather = partial(jax.lax.all_gather, axis_name="context", axis=1, tiled=True)

    def local(params, batch):
        if fault == "mask of the first shard":
            first = jax.lax.all_gather(batch["mask"], "data")[0]
            batch = batch | {"mask": first}
        if fault == "stale positions":  # each device counts from its own first token
            batch = batch | {
                "positions": jnp.broadcast_to(
                    jnp.arange(S // mesh.shape["context"]), batch["tokens"].shape
                )
            }
        count = jax.lax.psum(jnp.sum(batch["mask"]), AXES)
        if fault == "mean of a shard":
            count = jnp.sum(jax.lax.psum(batch["mask"], "context")) * mesh.shape["data"]

        def of_shard(params):
            return nll(params, batch, gather)[0] / count

        loss, grads = jax.value_and_grad(of_shard)(params)
        loss, grads = jax.lax.psum((loss, grads), "context")
        whole = jax.lax.psum(grads, "data")
        if fault == "missing psum":
            whole["head"] = grads["head"]
        if fault == "doubled psum":
            whole["q"] = jax.lax.psum(whole["q"], "data")
        return jax.lax.psum(loss, "data"), whole

    specs = P(), P("data", "context")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
        check_vma=False,
    )


def inputs():
    rng = np.random.default_rng(0)
    shapes = {
        "tokens": (V, D),
        "positions": (S, D),
        "q": (D, D),
        "k": (D, D),
        "v": (D, D),
        "head": (D, V),
    }
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tokens, labels = rng.integers(0, V, (2, B, S))
    mask = (rng.random((B, S)) < np.asarray([0.9, 0.8, 0.4, 0.3])[:, None]).astype(np.float32)
    positions = np.broadcast_to(np.arange(S), (B, S))
    batch = {
        "tokens": tokens,
        "labels": labels,
        "mask": mask,
        "positions": positions,
        "places": positions,
    }
    return params, batch


def verdict_of(fault=""):
    mesh = jaxpar.make_mesh(data=2, context=4)
    layout = jaxpar.Layout(mesh)
    shardings = layout.sharding(()), layout.sharding(("batch", "seq"))
    return verify.gradients(sharded(mesh, fault), reference, *inputs(), shardings)


if __name__ == "__main__":
    for fault in (
        "",
        "missing psum",
        "doubled psum",
        "mask of the first shard",
        "mean of a shard",
        "stale positions",
    ):
        print(fault or "right", "->", verdict_of(fault))
