"""Cross-entropy of the output layer without its logits: some tokens' scores exist at a time.

The gradient is made in the forward pass, chunk by chunk, while the scores are there (the idea of Hsu et al. 2024,
arXiv:2410.10989, section 3.2): what is kept is the gradient of x and of the matrix, and no score is computed twice.

Shapes: B batch, S sequence, T tokens of a chunk, N chunks, D embed, V vocab.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.collectives import gather, manual, reduce, split_over
from jaxpar.experts import RouterSums
from jaxpar.kernels.call import MASKED, capped, through_cap
from jaxpar.parallel import GATHERED, STORED, use
from jaxpar.sharding import LogicalAxis, Plan, state_axes

_HEAD: tuple[LogicalAxis, ...] = ("vocab", "embed")
_ROWS = 128  # chunks are multiples of so many tokens, where there are more: a matmul unit's rows


class LossSums(NamedTuple):
    """Sums over the tokens that count, so that microbatches and shards add up exactly.

    Attributes:
      loss: negative log-likelihood in nats plus the z-loss: what is differentiated.
      nll: negative log-likelihood in nats; no gradient flows through it.
      tokens: how many labels count.
      routed: the router's sums, means over the layers; None in a model without experts. The loss has them weighted.
    """

    loss: Float[Array, ""]
    nll: Float[Array, ""]
    tokens: Float[Array, ""]
    routed: RouterSums | None = None


class LossWeights(NamedTuple):
    """What is added to the likelihood, each by its weight; see `jaxpar.config.TrainConfig`."""

    z_loss: float = 0.0
    balance_loss: float = 0.0
    router_z_loss: float = 0.0


_SCALARS: Any = ((),) * 3  # logical axes of the sums


def linear_cross_entropy(
    x_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    labels_BS: Int[Array, "B S"],
    vocab_size: int,
    plan: Plan,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> LossSums:
    """Summed cross-entropy of `x @ head.T` against the labels; a label below zero does not count.

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: vocabulary matrix, logical axes ("vocab", "embed"); its rows past `vocab_size` are padding.
      labels_BS: next tokens.
      vocab_size: the true vocabulary.
      plan: mesh, rules, compute dtype, and how many scores there may be at a time.
      z_loss: weight of the squared log-normaliser (arXiv:2204.02311, section 5).
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = as they are.

    Raises:
      UserError: rules that split tokens and vocabulary over the same mesh axis.
    """
    plan.sharding((*GATHERED[:2], "vocab"), name="loss")
    sums: Any = _sums(plan, _Scores(vocab_size, z_loss, softcap), x_BSD, head_VD, labels_BS)
    return LossSums(sums.loss, jax.lax.stop_gradient(sums.nll), sums.tokens)


class _Scores(NamedTuple):
    """What becomes of the scores; as for `linear_cross_entropy`."""

    vocab_size: int
    z_loss: float
    softcap: float


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(plan: Plan, how: _Scores, x_BSD: Array, head_VD: Array, labels_BS: Array) -> LossSums:
    def local(x_BSD: Array, head_VD: Array, labels_BS: Array) -> LossSums:
        x_BSD, head_VD = gather(x_BSD.astype(plan.dtype), STORED, GATHERED, plan), use(head_VD, _HEAD, plan)

        def add(total: LossSums, chunk: tuple[Array, Array]) -> tuple[LossSums, None]:
            sums, _ = _chunk_sums(*chunk, head_VD, plan, how)
            return jax.tree.map(jnp.add, total, sums), None

        total, _ = jax.lax.scan(add, LossSums(*jnp.zeros(3)), _chunks(x_BSD, labels_BS, head_VD, plan))
        return _over_devices(total, plan)

    layouts = (STORED, _HEAD, GATHERED[:2])
    return manual(local, plan, layouts, LossSums(*_SCALARS))(x_BSD, head_VD, labels_BS)


def _sums_forward(plan, how, x_BSD, head_VD, labels_BS):
    def local(x_BSD: Array, head_VD: Array, labels_BS: Array) -> tuple[LossSums, Array, Array]:
        stored, x_BSD = x_BSD, gather(x_BSD.astype(plan.dtype), STORED, GATHERED, plan)
        used_VD = use(head_VD, _HEAD, plan)

        def add(carry: tuple[LossSums, Array], chunk: tuple[Array, Array]) -> tuple[tuple[LossSums, Array], Array]:
            (total, dhead_VD), x_TD = carry, chunk[0]
            sums, dlogits_TV = _chunk_sums(*chunk, used_VD, plan, how)
            dlogits_TV = dlogits_TV.astype(plan.dtype)
            dhead_VD += jnp.matmul(dlogits_TV.T, x_TD, preferred_element_type=jnp.float32)
            dx_TD = jnp.matmul(dlogits_TV, used_VD, preferred_element_type=plan.dtype)
            return (jax.tree.map(jnp.add, total, sums), dhead_VD), dx_TD

        zeros = LossSums(*jnp.zeros(3)), jnp.zeros(used_VD.shape, jnp.float32)
        (total, dhead_VD), dx_NTD = jax.lax.scan(add, zeros, _chunks(x_BSD, labels_BS, used_VD, plan))
        dx_BSD = dx_NTD.reshape(-1, x_BSD.shape[-1])[: labels_BS.size].reshape(x_BSD.shape)
        dx_BSD = reduce(dx_BSD, plan.mesh_axes("vocab"), GATHERED, STORED, plan)
        dhead_VD = reduce(dhead_VD, split_over(GATHERED[:2], plan), ("vocab", None), state_axes(_HEAD), plan)
        return _over_devices(total, plan), dx_BSD.astype(stored.dtype), dhead_VD.astype(head_VD.dtype)

    layouts = (STORED, _HEAD, GATHERED[:2])
    outs = (LossSums(*_SCALARS), STORED, state_axes(_HEAD))
    sums, dx_BSD, dhead_VD = manual(local, plan, layouts, outs)(x_BSD, head_VD, labels_BS)
    return sums, (dx_BSD, dhead_VD)


def _sums_backward(plan, how, residuals, cotangents):
    dx_BSD, dhead_VD = residuals
    scale = cotangents.loss
    return (dx_BSD * scale).astype(dx_BSD.dtype), dhead_VD * scale, None


_sums.defvjp(_sums_forward, _sums_backward)


def chunk_count(tokens: int, rows: int, plan: Plan) -> int:
    """Into how many chunks a device's tokens go.

    Args:
      tokens: of a device.
      rows: of the vocabulary matrix that it has.
      plan: says how many scores there may be at a time.
    """
    most = plan.loss_mib * 2**20 // (4 * rows)
    return -(-tokens // max(most // _ROWS * _ROWS, _ROWS))


def _chunks(x_BSD: Array, labels_BS: Array, head_VD: Array, plan: Plan) -> tuple[Array, Array]:
    """A device's tokens in as few equal chunks [N, T, D] and [N, T] as the plan's memory allows.

    The last chunk is filled up with tokens that do not count.
    """
    N = chunk_count(labels_BS.size, head_VD.shape[0], plan)
    missing = -labels_BS.size % N
    x_TD = jnp.pad(x_BSD.reshape(labels_BS.size, -1), ((0, missing), (0, 0)))
    labels_T = jnp.pad(labels_BS.reshape(-1), (0, missing), constant_values=-1)
    return x_TD.reshape(N, -1, x_BSD.shape[-1]), labels_T.reshape(N, -1)


def _chunk_sums(x_TD: Array, labels_T: Array, head_VD: Array, plan: Plan, how: _Scores) -> tuple[LossSums, Array]:
    """Inside `manual`: the sums of these tokens, and the loss's gradient by their float32 scores [T, V of a device]."""
    vocab = plan.mesh_axes("vocab")
    rows = head_VD.shape[0]
    first = jax.lax.axis_index(vocab) * rows if vocab else 0
    entries_V = first + jnp.arange(rows)
    logits_TV = capped(jnp.matmul(x_TD, head_VD.T, preferred_element_type=jnp.float32), how.softcap)
    logits_TV = jnp.where(entries_V < how.vocab_size, logits_TV, MASKED)
    # A masked sum, not a gather: it stays local to each vocabulary shard.
    is_label_TV = entries_V == labels_T[:, None]
    most_T = jnp.max(logits_TV, axis=-1)
    most_T = jax.lax.pmax(most_T, vocab) if vocab else most_T
    total_T = jnp.sum(jnp.exp(logits_TV - most_T[:, None]), axis=-1)
    label_T = jnp.sum(jnp.where(is_label_TV, logits_TV, 0), axis=-1)
    total_T, label_T = jax.lax.psum((total_T, label_T), vocab) if vocab else (total_T, label_T)
    lse_T = most_T + jnp.log(total_T)
    counts_T = (labels_T >= 0).astype(jnp.float32)
    nll = jnp.sum(counts_T * (lse_T - label_T))
    loss = nll + how.z_loss * jnp.sum(counts_T * jnp.square(lse_T))
    dlse_T = counts_T * (1 + 2 * how.z_loss * lse_T)
    softmax_TV = jnp.exp(logits_TV - lse_T[:, None])
    dlogits_TV = dlse_T[:, None] * softmax_TV - jnp.where(is_label_TV, counts_T[:, None], 0)
    return LossSums(loss, nll, jnp.sum(counts_T)), through_cap(dlogits_TV, logits_TV, how.softcap)


def _over_devices(sums: LossSums, plan: Plan) -> LossSums:
    """Inside `manual`: sums over the devices that hold different tokens."""
    axes = split_over(GATHERED[:2], plan)
    return jax.lax.psum(sums, axes) if axes else sums
