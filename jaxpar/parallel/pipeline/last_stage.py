"""Share the last stage's output out over all stages: each computes the loss of a part of every device's tokens.

Shapes: B batch, S sequence, T pieces of the sequence that a device has, P stages, D embed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.plan import Plan
from jaxpar.parallel.collectives import manual, reduce_scatter
from jaxpar.parallel.linear import GATHERED, STORED


def share_tokens(y_BSD: Array, plan: Plan) -> Array:
    """Sum over the stages, all but one of which have zeros, and give each stage a part of every device's tokens."""
    axes, stages = plan.mesh_axes("stage"), plan.size("stage")

    def local(y_BSD: Array) -> Array:
        y_BSD = jnp.pad(y_BSD, ((0, 0), (0, -y_BSD.shape[1] % stages), (0, 0)))
        return reduce_scatter(y_BSD, axes, 1, stages)

    with jax.named_scope("share"):
        return manual(local, plan, (STORED,), STORED)(y_BSD)


def gather_tokens(part_BSD: Array, S: int, plan: Plan) -> Array:
    """The inverse of `share_tokens`: gather all parts of the S tokens on every stage."""
    axes, here = plan.mesh_axes("stage"), S // plan.size("residual_seq")

    def local(part_BSD: Array) -> Array:
        return jax.lax.all_gather(part_BSD, axes, axis=1, tiled=True)[:, :here]

    with jax.named_scope("share"):
        return manual(local, plan, (STORED,), STORED)(part_BSD)


def own_labels(labels_BS: Array, plan: Plan) -> Array:
    """Return the labels of this stage's part; those of padding tokens do not count."""
    axes, stages = plan.mesh_axes("stage"), plan.size("stage")
    pieces = plan.size("residual_seq") // plan.size("seq")

    def local(labels_BS: Array) -> Array:
        labels_BTS = labels_BS.reshape(len(labels_BS), pieces, -1)
        missing = -labels_BTS.shape[2] % stages
        labels_BTS = jnp.pad(labels_BTS, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
        labels_BTPS = labels_BTS.reshape(*labels_BTS.shape[:2], stages, -1)
        own = jax.lax.dynamic_index_in_dim(labels_BTPS, jax.lax.axis_index(axes), 2, keepdims=False)
        return own.reshape(len(labels_BS), -1)

    return manual(local, plan, (GATHERED[:2],), GATHERED[:2])(labels_BS)
