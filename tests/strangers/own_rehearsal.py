"""A stranger's training step, rehearsed for a TPU slice and for GPUs that are not here."""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar import rehearse

BATCH = 16
SEQ = 512
EMBED = 1024
HIDDEN = 4096
OPTIMIZER = optax.sgd(0.1)


def loss(params, x):
    hidden = jax.nn.relu(x @ params["up"].astype(x.dtype))
    return jnp.mean(jnp.square((hidden @ params["down"].astype(x.dtype)).astype(jnp.float32)))


@partial(jax.jit, donate_argnums=(0, 1))
def step(params, moments, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, moments = OPTIMIZER.update(grads, moments)
    return optax.apply_updates(params, updates), moments, value


def shapes(layout):
    """What the step is called with: ShapeDtypeStructs that say where each array would lie."""

    def array(axes, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes, shape))

    params = {
        "up": array(("embed", "mlp"), (EMBED, HIDDEN)),
        "down": array(("mlp", "embed"), (HIDDEN, EMBED)),
    }
    batch = array(("batch", "seq", None), (BATCH, SEQ, EMBED), jnp.bfloat16)
    return params, jax.eval_shape(OPTIMIZER.init, params), batch


def report_for(name, **sizes):
    target = jaxpar.load_target(name)
    mesh = jaxpar.make_mesh(devices=target.devices(), **sizes)
    return rehearse.step(
        step,
        *shapes(jaxpar.Layout(mesh)),
        target=target,
        tokens=BATCH * SEQ,
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or ("v5e-8", "h100x8"):
        rehearse.show(report_for(name, data=2, tensor=4))
