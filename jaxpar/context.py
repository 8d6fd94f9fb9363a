"""Context parallelism: causal attention over a sequence that is split over devices.

Three strategies. `ring` sends keys and values round the devices, and merges what each block contributes (Liu et al.
2023, arXiv:2310.01889); `all_gather` gathers them (as LLaMA 3 does, arXiv:2407.21783, section 3.3.2); `ulysses` trades
the split of the sequence for a split of the heads (Jacobs et al. 2023, arXiv:2309.14509).

The first two keep tokens in zigzag order, so that every device has the same work: see `jaxpar.zigzag`;
`batches.in_order` puts a batch in that order. A strategy runs inside `manual`, on local arrays.

Shapes: B batch, S sequence of one device, C chunk of it, T whole sequence, H heads, K kv heads, G query heads per kv
head, h head_dim; a leading 2 counts a device's chunks, the early one first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar import ring_attention
from jaxpar.attention import grouped, ungrouped
from jaxpar.collectives import further_split, gather, manual, reduce
from jaxpar.errors import UserError
from jaxpar.local_attention import Block, Pair, attend, attend_backward
from jaxpar.mesh import describe, largest_divisor
from jaxpar.sharding import LogicalAxis, Plan, beside
from jaxpar.zigzag import Work, chunk_order, inverse, own_chunks, reordered, stacked

_Axes = tuple[LogicalAxis | None, ...]
_Q: _Axes = ("batch", "attention_seq", "heads", None)
# Log-sum-exps are kept as a device made them, [B, 1, H, S]: Ulysses has other heads and tokens than q and the output.
_LSE: _Axes = ("batch", "attention_seq", "heads", None)
_SEGMENTS: _Axes = ("batch", None)
_GROUPED: _Axes = (None, None, "attention_seq", None)  # k and v as [B, K, S, h]
_WHOLE: _Axes = (None,) * 4


def check_chunks(plan: Plan, seq_len: int) -> None:
    """Refuse a sequence that is not cut into equal chunks.

    Raises:
      UserError: such a one, with the nearest lengths that are.
    """
    chunks = max(plan.size("attention_seq"), len(chunk_order(plan)))
    if seq_len % chunks:
        below = seq_len // chunks * chunks
        shorter = f"--data.seq-len {below} or " if below else ""
        raise UserError(
            f"data.seq_len={seq_len} is not cut into {chunks} equal chunks, which {plan.context.strategy} over "
            f"{_sizes(plan)} needs: try {shorter}--data.seq-len {below + chunks}"
        )


def check_split(plan: Plan, seq_len: int, heads: int, kv_heads: int, dropout: float = 0.0) -> None:
    """Refuse a sequence or heads that the plan's strategy cannot split.

    Dropout is refused too: it draws its bits by the place of a token in the array, which depends on the plan here.

    Args:
      plan: mesh, rules and strategy.
      seq_len: of the training sequences.
      heads, kv_heads: of the model.
      dropout: rate.

    Raises:
      UserError: what `check_chunks` refuses; dropout; heads too few for Ulysses; kv heads that are split where heads
        are not; a mesh axis that splits both the sequence and the heads.
    """
    n = plan.size("attention_seq")
    if n == 1:
        return
    check_chunks(plan, seq_len)
    if dropout > 0:
        raise UserError(
            f"model.dropout={dropout} with the sequence split over {_sizes(plan)}: what is dropped would depend on the "
            "mesh: try --model.dropout 0, or leave the sequence whole"
        )
    plan.sharding((*_Q[1:3], None), (seq_len, heads, 1), "queries")
    plan.sharding(("attention_seq", "kv_heads"), (seq_len, kv_heads), "keys and values")
    if plan.mesh_axes(beside("kv_heads", plan)) != plan.mesh_axes("heads"):
        further_split(("heads",), ("kv_heads",), plan)
    here, axis = heads // plan.size("heads"), plan.mesh_axes("attention_seq")[-1]
    if plan.context.strategy == "ulysses" and here % n:
        fits = largest_divisor(here, plan.mesh.shape[axis])
        raise UserError(
            f"Ulysses with too few heads: {_sizes(plan)} cannot share out {here} heads (model.heads={heads} over "
            f"{plan.size('heads')} devices): try --context.strategy ring, or --mesh.{axis} {fits}"
        )


def _sizes(plan: Plan) -> str:
    return describe({axis: plan.mesh.shape[axis] for axis in plan.mesh_axes("attention_seq")})


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def split_attention(
    plan: Plan,
    window: int,
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    segments_BS: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S H h"]:
    """Causal attention by the plan's strategy, as `jaxpar.attention.whole` but for the order of the tokens.

    Args:
      plan: mesh, rules and strategy; `attention_seq` is split.
      window: keys that a query sees up to its own; 0 = all before it.
      q_BSHh, k_BSKh, v_BSKh: projections of one sequence in `chunk_order`, H a multiple of K; kv heads as
        `parallel.column_linear` leaves them.
      segments_BS: document of each token, in the same order. None = one document.
    """
    return _forward(plan, window, q_BSHh, k_BSKh, v_BSKh, segments_BS)[0]


def _forward(plan, window, q_BSHh, k_BSKh, v_BSKh, segments_BS):
    def local(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None) -> tuple[Array, Array]:
        work, (forward, _) = Work(plan, window, segments_BT), _STRATEGIES[plan.context.strategy]
        q_BKGSh, k_BKSh, v_BKSh = grouped(q_BSHh, k_BSKh.shape[2]), k_BSKh.swapaxes(1, 2), v_BSKh.swapaxes(1, 2)
        out_BKGSh, lse_BKGS = forward(q_BKGSh, k_BKSh, v_BKSh, work)
        B, S = lse_BKGS.shape[0], lse_BKGS.shape[3]
        return ungrouped(out_BKGSh).astype(v_BSKh.dtype), lse_BKGS.reshape(B, 1, -1, S)

    kv = _kv_axes(plan)
    layouts, outs = (_Q, kv, kv, _segment_axes(segments_BS)), (_Q, _LSE)
    out_BSHh, lse = manual(local, plan, layouts, outs)(q_BSHh, k_BSKh, v_BSKh, segments_BS)
    return out_BSHh, (q_BSHh, k_BSKh, v_BSKh, segments_BS, out_BSHh, lse)


def _backward(plan, window, residuals, dout_BSHh):
    q_BSHh, k_BSKh, v_BSKh, segments_BS, out_BSHh, lse = residuals

    def local(
        q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None, out_BSHh: Array, lse: Array,
        dout_BSHh: Array,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        # They are sent again: what came by in the forward pass, the keys of all devices, is not to be kept.
        q_BSHh, k_BSKh, v_BSKh = jax.lax.optimization_barrier((q_BSHh, k_BSKh, v_BSKh))
        work, (_, backward) = Work(plan, window, segments_BT), _STRATEGIES[plan.context.strategy]
        K, k_BKSh, v_BKSh = k_BSKh.shape[2], k_BSKh.swapaxes(1, 2), v_BSKh.swapaxes(1, 2)
        delta_BSH1 = jnp.sum(dout_BSHh.astype(jnp.float32) * out_BSHh.astype(jnp.float32), axis=-1, keepdims=True)
        dout_BKGSh, delta_BKGS = grouped(dout_BSHh.astype(v_BSKh.dtype), K), grouped(delta_BSH1, K)[..., 0]
        dq, dk, dv = backward(grouped(q_BSHh, K), k_BKSh, v_BKSh, dout_BKGSh, lse[:, 0], delta_BKGS, work)
        dk_BSKh, dv_BSKh = dk.swapaxes(1, 2), dv.swapaxes(1, 2)
        return ungrouped(dq).astype(q_BSHh.dtype), dk_BSKh.astype(k_BSKh.dtype), dv_BSKh.astype(v_BSKh.dtype)

    kv = _kv_axes(plan)
    layouts = (_Q, kv, kv, _segment_axes(segments_BS), _Q, _LSE, _Q)
    gradients = manual(local, plan, layouts, (_Q, kv, kv))(
        q_BSHh, k_BSKh, v_BSKh, segments_BS, out_BSHh, lse, dout_BSHh
    )
    return *gradients, None


split_attention.defvjp(_forward, _backward)


def _segment_axes(segments_BS: Array | None) -> Any:
    return None if segments_BS is None else _SEGMENTS


def _kv_axes(plan: Plan) -> _Axes:
    return ("batch", "attention_seq", beside("kv_heads", plan), None)


def needed_kv_heads(first: Any, heads: int, group: int) -> Array:
    """The kv heads of query heads `first` to `first + heads - 1`, each once, or one a query head where groups are cut.

    Args:
      first: a multiple of `heads`.
      heads: how many.
      group: query heads per kv head.
    """
    if heads % group == 0 or group % heads == 0:
        return first // group + jnp.arange(max(heads // group, 1))
    return (first + jnp.arange(heads)) // group


# All-gather.


def _gather_forward(q_BKGSh: Array, k_BKSh: Array, v_BKSh: Array, work: Work) -> Pair:
    k_BKTh, v_BKTh = (_natural(gather(x, _GROUPED, _WHOLE, work.plan), work, 2) for x in (k_BKSh, v_BKSh))
    pairs = [
        attend(q, k_BKTh[:, :, :T], v_BKTh[:, :, :T], block)
        for q, (T, block) in zip(stacked(q_BKGSh, 3), _against_all(work, k_BKSh), strict=True)
    ]
    return jnp.concatenate([out for out, _ in pairs], axis=3), jnp.concatenate([lse for _, lse in pairs], axis=3)


def _gather_backward(
    q_BKGSh: Array, k_BKSh: Array, v_BKSh: Array, dout_BKGSh: Array, lse_BHS: Array, delta_BKGS: Array, work: Work
) -> tuple[Array, Array, Array]:
    k_BKTh, v_BKTh = (_natural(gather(x, _GROUPED, _WHOLE, work.plan), work, 2) for x in (k_BKSh, v_BKSh))
    of_rows = [stacked(x, 3) for x in (q_BKGSh, dout_BKGSh, lse_BHS.reshape(delta_BKGS.shape), delta_BKGS)]
    dqs, dk, dv = [], jnp.zeros(k_BKTh.shape, jnp.float32), jnp.zeros(v_BKTh.shape, jnp.float32)
    for half, (T, block) in enumerate(_against_all(work, k_BKSh)):
        q, dout, lse, delta = (x[half] for x in of_rows)
        dq, more_dk, more_dv = attend_backward(q, k_BKTh[:, :, :T], v_BKTh[:, :, :T], dout, lse, delta, block)
        dqs.append(dq)
        dk, dv = dk.at[:, :, :T].add(more_dk), dv.at[:, :, :T].add(more_dv)
    dk, dv = (reduce(_zigzag(x, work, 2), work.axes, _WHOLE, _GROUPED, work.plan) for x in (dk, dv))
    return jnp.concatenate(dqs, axis=3), dk, dv


def _against_all(work: Work, k_BKSh: Array) -> list[tuple[int, Block]]:
    """Of one's early and late chunk, how many keys from the first it may see, and the mask."""
    C, n = k_BKSh.shape[2] // 2, work.size
    segments_BT = None if work.segments_BT is None else _natural(work.segments_BT, work, 1)

    def of_first(T: int) -> Array | None:
        return None if segments_BT is None else segments_BT[:, :T]

    return [
        (T, Block(chunk * C, 0, work.window, work.segments_of(chunk, C), of_first(T)))
        for chunk, T in zip(own_chunks(work), (n * C, 2 * n * C), strict=True)
    ]


def _natural(x: Array, work: Work, dim: int) -> Array:
    return reordered(x, inverse(chunk_order(work.plan)), dim)


def _zigzag(x: Array, work: Work, dim: int) -> Array:
    return reordered(x, chunk_order(work.plan), dim)


# Ulysses.


def _ulysses_forward(q_BKGSh: Array, k_BKSh: Array, v_BKSh: Array, work: Work) -> Pair:
    shares = _Shares.of(q_BKGSh, work)
    k, v = shares.send_kv(k_BKSh), shares.send_kv(v_BKSh)
    out, lse = attend(shares.send_q(q_BKGSh), k, v, Block(0, 0, work.window, *[work.segments_BT] * 2))
    return shares.back_q(out.astype(v_BKSh.dtype)), lse


def _ulysses_backward(
    q_BKGSh: Array, k_BKSh: Array, v_BKSh: Array, dout_BKGSh: Array, lse_BHT: Array, delta_BKGS: Array, work: Work
) -> tuple[Array, Array, Array]:
    shares = _Shares.of(q_BKGSh, work)
    q, k, v = shares.send_q(q_BKGSh), shares.send_kv(k_BKSh), shares.send_kv(v_BKSh)
    dout, delta = shares.send_q(dout_BKGSh), shares.send_q(delta_BKGS[..., None])[..., 0]
    block = Block(0, 0, work.window, *[work.segments_BT] * 2)
    dq, dk, dv = attend_backward(q, k, v, dout, lse_BHT.reshape(delta.shape), delta, block)
    dq, dk, dv = dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
    return shares.back_q(dq), shares.back_kv(dk), shares.back_kv(dv)


class _Shares(NamedTuple):
    """How Ulysses deals out a device's heads: `sent` are the kv heads that each device is sent, one after another."""

    work: Work
    kv_heads: int
    group: int
    sent: Array

    @staticmethod
    def of(q_BKGSh: Array, work: Work) -> _Shares:
        _, K, G, _, _ = q_BKGSh.shape
        heads = K * G // work.size
        sent = jnp.concatenate([needed_kv_heads(to * heads, heads, G) for to in range(work.size)])
        return _Shares(work, K, G, sent)

    def send_q(self, x_BKGSh: Array) -> Array:
        """[B, K, G, S, h] to a share of the heads over the whole sequence, grouped by the kv heads that are sent."""
        B, K, G, S, h = x_BKGSh.shape
        x_BHTh = self._to_heads(x_BKGSh.reshape(B, K * G, S, h))
        return x_BHTh.reshape(B, len(self.sent) // self.work.size, -1, *x_BHTh.shape[2:])

    def back_q(self, x_BKGTh: Array) -> Array:
        B, _, _, T, h = x_BKGTh.shape
        x_BHSh = self._to_sequence(x_BKGTh.reshape(B, -1, T, h))
        return x_BHSh.reshape(B, self.kv_heads, self.group, -1, h)

    def send_kv(self, x_BKSh: Array) -> Array:
        return self._to_heads(jnp.take(x_BKSh, self.sent, axis=1))

    def back_kv(self, dx_BKTh: Array) -> Array:
        """The transpose of `send_kv`, summed in float32."""
        dx_BKSh = self._to_sequence(dx_BKTh).astype(jnp.float32)
        B, _, S, h = dx_BKSh.shape
        return jnp.zeros((B, self.kv_heads, S, h), jnp.float32).at[:, self.sent].add(dx_BKSh)

    def _to_heads(self, x: Array) -> Array:
        return jax.lax.all_to_all(x, self.work.axes, split_axis=1, concat_axis=2, tiled=True)

    def _to_sequence(self, x: Array) -> Array:
        return jax.lax.all_to_all(x, self.work.axes, split_axis=2, concat_axis=1, tiled=True)


_STRATEGIES: dict[str, tuple[Callable[..., Pair], Callable[..., tuple[Array, Array, Array]]]] = {
    "ring": (ring_attention.forward, ring_attention.backward),
    "all_gather": (_gather_forward, _gather_backward),
    "ulysses": (_ulysses_forward, _ulysses_backward),
}
