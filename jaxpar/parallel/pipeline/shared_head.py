"""The output of the last stage, shared out over all stages for the final norm and the loss.

No single stage runs the head, since all others would wait for it. Each stage takes a part of every
device's tokens, and the gradients of the parts are put together again (Yeung et al. 2024,
arXiv:2411.05288, share out the vocabulary instead, and wait for its sums).

Shapes: B batch, S sequence, T pieces of the sequence that a device has, P stages, D embed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.layout.plan import Plan
from jaxpar.parallel.collectives import manual, reduce_scatter
from jaxpar.parallel.linear import GATHERED, STORED


def share_tokens(y_BSD: Array, plan: Plan) -> Array:
    """Sum over the stages, all but one of which have zeros, and give each stage a part of every
    device's tokens.

    Args:
      y_BSD: the last stage's output [B, S, D], and zeros on the other stages.
      plan: the plan inside the `shard_map` over its stages.

    Returns:
      This stage's part [B, S / P, D]; a device's tokens are padded with zeros to a multiple of P.
    """
    axes = plan.mesh_axes("stage")
    stages = plan.size("stage")

    def local(y_BSD: Array) -> Array:
        missing = -y_BSD.shape[1] % stages
        y_BSD = jnp.pad(y_BSD, ((0, 0), (0, missing), (0, 0)))
        return reduce_scatter(y_BSD, axes, 1, stages)

    with jax.named_scope("share"):
        return manual(local, plan, (STORED,), STORED)(y_BSD)


def gather_tokens(part_BSD: Array, S: int, plan: Plan) -> Array:
    """Gather the parts of all stages on every stage: the inverse of `share_tokens`.

    Args:
      part_BSD: this stage's part [B, S / P, D], padded.
      S: the number of tokens of a sequence, without padding.
      plan: the plan inside the `shard_map` over its stages.

    Returns:
      All tokens [B, S, D].
    """
    axes = plan.mesh_axes("stage")
    here = S // plan.size("residual_seq")

    def local(part_BSD: Array) -> Array:
        return jax.lax.all_gather(part_BSD, axes, axis=1, tiled=True)[:, :here]

    with jax.named_scope("share"):
        return manual(local, plan, (STORED,), STORED)(part_BSD)


def own_labels(labels_BS: Array, plan: Plan, filler: int = -1) -> Array:
    """Choose the labels of this stage's part of the tokens.

    Args:
      labels_BS: the labels of a microbatch [B, S], or another of its arrays [B, S, ...].
      plan: the plan inside the `shard_map` over its stages.
      filler: the label of padding; the default, -1, does not count.

    Returns:
      The labels [B, S / P] of the tokens that `share_tokens` gives this stage.
    """
    stage = plan.mesh_axes("stage")
    stages = plan.size("stage")
    pieces = plan.size("residual_seq") // plan.size("seq")

    def local(labels_BS: Array) -> Array:
        B, S, *of_token = labels_BS.shape
        labels_BTS = labels_BS.reshape(B, pieces, S // pieces, *of_token)
        missing = -labels_BTS.shape[2] % stages
        whole = [(0, 0)] * len(of_token)
        labels_BTS = jnp.pad(
            labels_BTS,
            ((0, 0), (0, 0), (0, missing), *whole),
            constant_values=filler,
        )
        part = labels_BTS.shape[2] // stages
        labels_BTPS = labels_BTS.reshape(B, pieces, stages, part, *of_token)
        own = jax.lax.dynamic_index_in_dim(
            labels_BTPS,
            jax.lax.axis_index(stage),
            2,
            keepdims=False,
        )
        return own.reshape(B, pieces * part, *of_token)

    axes = (*GATHERED[:2], *[None] * (labels_BS.ndim - 2))
    return manual(local, plan, (axes,), axes)(labels_BS)
