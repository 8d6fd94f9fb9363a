"""The parallel ops a model calls: lookup, column and row linear, attention, dropout, loss.

A model states logical axes; the plan says where they live. Each op has the layout its arrays are *stored* in between
ops (the residual stream split over `residual_seq`) and the one they are *used* in (the sequence gathered, heads or mlp
split), and its backward is written out, so that gathers and scatters stand at known places, weights are gathered in
the compute dtype, and weight gradients are summed in float32. This is the plain XLA form: the moves are sharding
constraints and XLA places the collectives. Overlapped forms replace the body of `_linear`, behind the same calls.

Shapes: B batch, S query length, T key length, D embed, H heads, K kv heads, G query heads per kv head, h head_dim,
V vocab, I and O the flattened input and output dims of a linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.sharding import LogicalAxis, Plan

_Axes = tuple[LogicalAxis | None, ...]
_STORED: _Axes = ("batch", "residual_seq", None)
_GATHERED: _Axes = ("batch", "seq", None)
_MASKED = -1e30  # a finite "minus infinity": exp gives exactly 0, and a row with nothing to see gives no NaN


class _Site(NamedTuple):
    """Layouts of one linear: x and y as they lie between ops and as they are multiplied, and the weights."""

    x_stored: _Axes
    x_used: _Axes
    weights: tuple[_Axes, ...]
    y_stored: tuple[_Axes, ...]
    y_used: tuple[_Axes, ...]
    out_dtype: str


def column_linear(
    x_BSD: Float[Array, "B S D"],
    weights: Sequence[Float[Array, "D ..."]],
    axes: Sequence[Sequence[LogicalAxis | None]],
    plan: Plan,
    biases: Sequence[Float[Array, ...] | None] | None = None,
) -> tuple[Array, ...]:
    """`x @ w` for several weights that share one gather of x: q, k, v together; gate and up together.

    Megatron's column-parallel linear (Shoeybi et al. 2019, arXiv:1909.08053): x arrives split over the sequence, is
    gathered once, and the outputs stay split over their first dim.

    Args:
      x_BSD: the residual stream, split over `residual_seq`.
      weights: arrays [D, *out], logical axes ("embed", *axes[i]).
      axes: logical axes of each weight's output dims, such as ("heads", "head_dim").
      plan: mesh, rules and compute dtype.
      biases: arrays [*out], or None where there is none.

    Returns:
      One array [B, S, *out] per weight, in the compute dtype.
    """
    outs: tuple[_Axes, ...] = tuple(("batch", "seq", *out) for out in axes)
    site = _Site(_STORED, _GATHERED, tuple(("embed", *out) for out in axes), outs, outs, plan.compute)
    ys: Any = _linear(plan, site, x_BSD, tuple(weights), tuple(biases or (None,) * len(weights)))
    return ys


def row_linear(
    h_BSI: Float[Array, "B S ..."],
    weight: Float[Array, "... D"],
    axes: Sequence[LogicalAxis | None],
    plan: Plan,
    bias: Float[Array, " D"] | None = None,
) -> Float[Array, "B S D"]:
    """`h @ w` where the contracted dims are split: Megatron's row-parallel linear, its sum scattered over the sequence.

    Args:
      h_BSI: array [B, S, *in], split as `axes` say.
      weight: array [*in, D], logical axes (*axes, "embed").
      axes: logical axes of the input dims, such as ("mlp",).
      plan: mesh, rules and compute dtype.
      bias: array [D], added once, after the sum.

    Returns:
      The residual stream's layout [B, S, D], in the compute dtype.
    """
    inside: _Axes = ("batch", "seq", *axes)
    site = _Site(inside, inside, ((*axes, "embed"),), (_STORED,), (_GATHERED,), plan.compute)
    ys: Any = _linear(plan, site, h_BSI, (weight,), (bias,))
    return ys[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(
    plan: Plan, site: _Site, x: Array, weights: tuple[Array, ...], biases: tuple[Array | None, ...]
) -> tuple[Array, ...]:
    x = plan.constrain(x.astype(plan.dtype), site.x_used)
    ys = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        used = _use(weight, site.weights[i], plan)
        y = _matmul(x, used, plan, site.out_dtype)
        y = plan.constrain(y, site.y_stored[i])
        ys.append(y if bias is None else y + bias.astype(y.dtype))
    return tuple(ys)


def _linear_forward(plan, site, x, weights, biases):
    return _linear(plan, site, x, weights, biases), (x, weights, biases)


def _linear_backward(plan, site, residuals, dys):
    x, weights, biases = residuals
    x_used = plan.constrain(x.astype(plan.dtype), site.x_used)
    dx, dweights, dbiases = None, [], []
    for i, (weight, bias, dy) in enumerate(zip(weights, biases, dys, strict=True)):
        dbiases.append(None if bias is None else jnp.sum(dy, axis=(0, 1), dtype=jnp.float32).astype(bias.dtype))
        dy = plan.constrain(dy.astype(plan.dtype), site.y_used[i])
        dweight = _matmul_transposed(x_used, dy, weight.shape, plan)
        dweights.append(plan.constrain(dweight, site.weights[i]).astype(weight.dtype))
        used = _use(weight, site.weights[i], plan)
        split = x.ndim - 2  # the weight's leading dims are x's trailing ones
        swapped = jnp.transpose(used, (*range(split, used.ndim), *range(split)))
        part = _matmul(dy, swapped, plan, plan.compute)
        dx = part if dx is None else dx + part
    assert dx is not None
    return plan.constrain(dx, site.x_stored).astype(x.dtype), tuple(dweights), tuple(dbiases)


_linear.defvjp(_linear_forward, _linear_backward)


def _use(weight: Array, axes: Sequence[LogicalAxis | None], plan: Plan) -> Array:
    """A weight as it is multiplied: cast first and gathered over `embed` after, so half the bytes travel."""
    return plan.constrain(weight.astype(plan.dtype), [None if axis == "embed" else axis for axis in axes])


def _tokens(x: Array, plan: Plan) -> tuple[int, ...]:
    """The leading dims of a matmul: one token dim where the sequence is whole, else (B, S).

    With two leading dims XLA:CPU transposes both operands of every weight gradient into fresh buffers first (a 1.3x
    slower step); merging two split dims would force a gather.
    """
    return (x.shape[0] * x.shape[1],) if plan.size("seq") == 1 else (x.shape[0], x.shape[1])


def _matmul(x: Array, weight: Array, plan: Plan, dtype: str) -> Array:
    """[B, S, *in] times [*in, *out], as a matmul of flattened dims."""
    out = weight.shape[x.ndim - 2 :]
    x_I = x.reshape(*_tokens(x, plan), -1)
    y_O = jnp.matmul(x_I, weight.reshape(x_I.shape[-1], -1), preferred_element_type=jnp.dtype(dtype))
    return y_O.reshape(*x.shape[:2], *out)


def _matmul_transposed(x: Array, dy: Array, shape: tuple[int, ...], plan: Plan) -> Array:
    """The weight gradient: [B, S, *in] and [B, S, *out] contracted over the tokens, summed in float32."""
    leading = _tokens(x, plan)
    x_I, dy_O, dims = x.reshape(*leading, -1), dy.reshape(*leading, -1), tuple(range(len(leading)))
    dweight = jax.lax.dot_general(x_I, dy_O, ((dims, dims), ((), ())), preferred_element_type=jnp.float32)
    return dweight.reshape(shape)


def lookup(
    table_VD: Float[Array, "V D"], ids_BS: Int[Array, "B S"], axis: LogicalAxis | None, plan: Plan
) -> Float[Array, "B S D"]:
    """Rows of an embedding table, in the compute dtype and the residual stream's layout.

    Args:
      table_VD: the table, logical axes (axis, "embed").
      ids_BS: row numbers.
      axis: logical axis of the table's rows: "vocab", or None for a table that is never split by rows.
      plan: mesh, rules and compute dtype.
    """
    rows: Any = _lookup(table_VD, ids_BS, axis, plan)
    return rows


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD: Array, ids_BS: Array, axis: LogicalAxis | None, plan: Plan) -> Array:
    table_VD = _use(table_VD, (axis, "embed"), plan)
    if plan.mesh.size == 1:
        return table_VD[ids_BS]

    # Left to itself XLA gathers the whole table. Each device looks up the rows it has, and the rest are zeros.
    def local(table_VD: Array, ids_BS: Array) -> Array:
        ids_BS, here_BS = _local_ids(ids_BS, table_VD.shape[0], axis, plan)
        return jax.lax.psum(jnp.where(here_BS[..., None], table_VD[ids_BS], 0), plan.mesh_axes(axis))

    specs = plan.spec((axis, None)), plan.spec(_GATHERED[:2])
    rows = jax.shard_map(local, mesh=plan.mesh, in_specs=specs, out_specs=plan.spec(_GATHERED), check_vma=False)
    return plan.constrain(rows(table_VD, ids_BS), _STORED)


def _local_ids(ids_BS: Array, rows: int, axis: LogicalAxis | None, plan: Plan) -> tuple[Array, Array]:
    """Inside shard_map: ids counted from this device's first row, and which of them it has."""
    shard = jax.lax.axis_index(plan.mesh_axes(axis)) if plan.mesh_axes(axis) else 0
    ids_BS = ids_BS - shard * rows
    here_BS = (ids_BS >= 0) & (ids_BS < rows)
    return jnp.where(here_BS, ids_BS, 0), here_BS


def _lookup_forward(table_VD, ids_BS, axis, plan):
    return _lookup(table_VD, ids_BS, axis, plan), (table_VD, ids_BS)


def _lookup_backward(axis, plan, residuals, dx_BSD):
    table_VD, ids_BS = residuals
    V, D = table_VD.shape
    if plan.mesh.size == 1:
        return jnp.zeros((V, D), jnp.float32).at[ids_BS].add(dx_BSD.astype(jnp.float32)).astype(table_VD.dtype), None

    # Tokens are split over `summed`; where the table's embed dim is split over some of these too, the sum over them is
    # a reduce-scatter.
    summed = (*plan.mesh_axes("batch"), *plan.mesh_axes("seq"))
    scattered = plan.mesh_axes("embed") if set(plan.mesh_axes("embed")) <= set(summed) else ()
    rest = tuple(mesh_axis for mesh_axis in summed if mesh_axis not in scattered)

    def local(dx_BSD: Array, ids_BS: Array) -> Array:
        rows = V // plan.size(axis)
        ids_BS, here_BS = _local_ids(ids_BS, rows, axis, plan)
        dx_BSD = jnp.where(here_BS[..., None], dx_BSD.astype(jnp.float32), 0)
        dtable_VD = jnp.zeros((rows, D), jnp.float32).at[ids_BS].add(dx_BSD)
        if scattered:
            dtable_VD = jax.lax.psum_scatter(dtable_VD, scattered, scatter_dimension=1, tiled=True)
        return jax.lax.psum(dtable_VD, rest)

    specs = plan.spec(_GATHERED), plan.spec(_GATHERED[:2])
    out_spec = plan.spec((axis, "embed" if scattered else None))
    dtable = jax.shard_map(local, mesh=plan.mesh, in_specs=specs, out_specs=out_spec, check_vma=False)
    dtable_VD = dtable(plan.constrain(dx_BSD, _GATHERED), ids_BS)
    return plan.constrain(dtable_VD, (axis, "embed")).astype(table_VD.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """`x` with a share `rate` of its entries zeroed and the rest scaled up; `x` itself when key is None.

    The bits depend on the key and the position in the global array only, so they are the same on every mesh.
    """
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    plan: Plan,
    segments_BS: Int[Array, "B S"] | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
) -> Float[Array, "B S H h"]:
    """Causal softmax attention, scores and softmax in float32, query heads grouped over kv heads (arXiv:2305.13245).

    Args:
      q_BSHh, k_BTKh, v_BTKh: projections of one sequence (S = T), H a multiple of K, split over heads.
      plan: mesh, rules and compute dtype.
      segments_BS: document of each token; a token sees its own document only. None = one document.
      dropout_rate, key: dropout of the attention weights; none when key is None.
    """
    B, S, H, h = q_BSHh.shape
    K = k_BTKh.shape[2]
    q_BSKGh = q_BSHh.reshape(B, S, K, H // K, h)
    scores_BKGST = jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BTKh, preferred_element_type=jnp.float32)
    visible_ST = jnp.tril(jnp.ones((S, S), bool))
    if segments_BS is None:
        visible = visible_ST
    else:
        visible = visible_ST & (segments_BS[:, None, None, :, None] == segments_BS[:, None, None, None, :])
    weights_BKGST = jax.nn.softmax(jnp.where(visible, scores_BKGST / math.sqrt(h), _MASKED), axis=-1)
    weights_BKGST = dropout(weights_BKGST, dropout_rate, key).astype(plan.dtype)
    out_BSHh = jnp.einsum("BKGST,BTKh->BSKGh", weights_BKGST, v_BTKh).reshape(B, S, H, h)
    return plan.constrain(out_BSHh, ("batch", "seq", "heads", "head_dim"))


class LossSums(NamedTuple):
    """Sums over the tokens that count, so that microbatches and shards add up exactly.

    Attributes:
      loss: negative log-likelihood in nats plus the z-loss: what is differentiated.
      nll: negative log-likelihood in nats.
      tokens: how many labels count.
    """

    loss: Float[Array, ""]
    nll: Float[Array, ""]
    tokens: Float[Array, ""]


def logits(
    x_BSD: Float[Array, "B S D"], head_VD: Float[Array, "V D"], vocab_size: int, plan: Plan
) -> Float[Array, "B S V"]:
    """Float32 scores of every vocabulary entry, split over `vocab`; those past `vocab_size` are masked out."""
    outs: tuple[_Axes, ...] = (("batch", "seq", "vocab"),)
    site = _Site(_STORED, _GATHERED, (("embed", "vocab"),), outs, outs, "float32")
    ys: Any = _linear(plan, site, x_BSD, (head_VD.T,), (None,))
    logits_BSV = ys[0]
    if vocab_size == head_VD.shape[0]:
        return logits_BSV
    return jnp.where(jnp.arange(head_VD.shape[0]) < vocab_size, logits_BSV, _MASKED)


def linear_cross_entropy(
    x_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    labels_BS: Int[Array, "B S"],
    vocab_size: int,
    plan: Plan,
    z_loss: float = 0.0,
) -> LossSums:
    """Summed cross-entropy of `x @ head.T` against the labels; a label below zero does not count.

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: vocabulary matrix, logical axes ("vocab", "embed"); its rows past `vocab_size` are padding.
      labels_BS: next tokens.
      vocab_size: the true vocabulary.
      plan: mesh, rules and compute dtype.
      z_loss: weight of the squared log-normaliser (arXiv:2204.02311, section 5).
    """
    logits_BSV = logits(x_BSD, head_VD, vocab_size, plan)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    # A masked sum, not a gather: it stays local to each vocabulary shard.
    is_label_BSV = jnp.arange(logits_BSV.shape[-1]) == labels_BS[..., None]
    nll_BS = lse_BS - jnp.sum(jnp.where(is_label_BSV, logits_BSV, 0), axis=-1)
    counts_BS = labels_BS >= 0
    nll = jnp.sum(jnp.where(counts_BS, nll_BS, 0))
    tokens = jnp.sum(counts_BS, dtype=jnp.float32)
    loss = nll + z_loss * jnp.sum(jnp.where(counts_BS, jnp.square(lse_BS), 0)) if z_loss else nll
    return LossSums(loss, nll, tokens)
