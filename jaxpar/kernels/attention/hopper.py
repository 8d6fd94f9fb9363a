"""Attention on Hopper GPUs (H100, H200), by Pallas Mosaic GPU. It was compiled for them but has not yet run on one.

The forward is FlashAttention-3's (arXiv:2407.08608, algorithm 1) without its overlap inside a warpgroup. The backward
makes the weights again from the log-sum-exp (FlashAttention-2, arXiv:2307.08691, algorithm 2). It has two kernels, so
that no two blocks add to the same place. The one for dq has strips of queries. The one for dk and dv has strips of
keys, which walk the queries of all heads of their kv head; its scores are transposed, so that its weights too stay in
registers.

Shapes: as in `jaxpar.kernels.attention.call`; in a kernel, R rows of its strip and C rows of a tile in the ring
(`hopper_block`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.base.jax_compat import cuda_version
from jaxpar.kernels.attention.call import BLIND, DEFAULT, MASKED, Call, Ref, Unserved
from jaxpar.kernels.attention.hopper_block import LOG2E, ROWS, KernelBlock, Visit, job_of, launch, over
from jaxpar.kernels.masks import Mask

MOST_HEAD_DIM = 256
_LN2 = math.log(2)


def refusal(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: DTypeLike, mask: Mask, call: Call = DEFAULT
) -> str:
    """Why these arrays cannot be served; empty = they can."""
    if why := _misfit():
        return why
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"{jnp.dtype(dtype)} is not bfloat16"
    if q_shape[-1] > MOST_HEAD_DIM:
        return f"head_dim {q_shape[-1]} is more than {MOST_HEAD_DIM}"
    try:
        for of_keys in (False, True):
            job_of(q_shape, k_shape, dtype, mask, call).cut(of_keys, (2, 2), 64)
    except Unserved as refused:
        return str(refused)
    return ""


def _misfit() -> str:
    """Why the GPU that is here cannot run it; empty where there is none, as we may compile for one elsewhere."""
    if jax.default_backend() != "gpu":
        return ""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    if capability != "9.0":
        return f"compute capability {capability} is not Hopper's 9.0"
    if 12080 <= cuda_version() < 12091:
        return "ptxas of CUDA 12.8.0 to 12.9.0 miscompiles causal masks: jax refuses its own kernel there too"
    return ""


def forward(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    mask: Mask,
    call: Call = DEFAULT,
) -> tuple[Float[Array, "B S H h"], Float[Array, "B H S"]]:
    """See `jaxpar.kernels.attention.call`."""
    job = job_of(q_BSHh.shape, k_BTKh.shape, q_BSHh.dtype, mask, call).cut(False, (1, 2), 128, 64)
    outputs = _like(q_BSHh, job.out_dtype), jax.ShapeDtypeStruct((job.B, job.H, job.S), jnp.float32)
    out_BSHh, lse_BHS = launch(_forward, job, [q_BSHh], [[k_BTKh], [v_BTKh]], outputs)
    return out_BSHh, lse_BHS


def backward(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    dout_BSHh: Float[Array, "B S H h"],
    lse_BHS: Float[Array, "B H S"],
    delta_BHS: Float[Array, "B H S"],
    mask: Mask,
    call: Call = DEFAULT,
) -> tuple[Float[Array, "B S H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
    """See `jaxpar.kernels.attention.call`."""
    job = job_of(q_BSHh.shape, k_BTKh.shape, q_BSHh.dtype, mask, call)
    dout_BSHh, lse_BHS = dout_BSHh.astype(q_BSHh.dtype), jnp.maximum(lse_BHS, BLIND) * LOG2E
    # Registers hold scores and gradients of 64 x 128 at once beside sums of head_dim 64, but not beside those of 128.
    of_queries = job.cut(False, (2, 2), *(128, 64)[job.h > 64 :])
    strips, ring = [q_BSHh, dout_BSHh, lse_BHS, delta_BHS], [[k_BTKh], [v_BTKh]]
    (dq_BSHh,) = launch(_dq, of_queries, strips, ring, [_like(q_BSHh, job.out_dtype)])
    of_keys, outputs = job.cut(True, (2, 2), 64), [_like(x, job.out_dtype) for x in (k_BTKh, v_BTKh)]
    strips, ring = [k_BTKh, v_BTKh], [[q_BSHh, lse_BHS], [dout_BSHh, delta_BHS]]
    if job.h <= 128:
        dk_BTKh, dv_BTKh = launch(_dk_dv, of_keys, strips, ring, outputs)
    else:  # Registers do not hold both sums, so the weights are made twice.
        (dk_BTKh,) = launch(_dk, of_keys, strips, ring, outputs[:1])
        (dv_BTKh,) = launch(_dv, job.cut(True, (1, 2), 64), strips[:1], [ring[0], [dout_BSHh]], outputs[1:])
    return dq_BSHh, dk_BTKh, dv_BTKh


def _like(x: Array, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype)


# The kernels. Each is given refs of its strips and of the ring's slots, and gives its strip of the outputs. Scores,
# the maximum subtracted from them, and `lse` in the backward are multiplied by log2(e).


def _forward(block: KernelBlock, q: Ref, k: Ref, v: Ref) -> list[Array]:
    def step(visit: Visit, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        sums, most, total = carry
        visit.wait(0)
        scores, _ = visit.scores(block.product(q, k.at[visit.slot], transposed=True))
        now = jnp.maximum(most, jnp.max(scores, axis=1))
        weights, kept = jnp.exp2(scores - over(now, scores)), jnp.exp2(most - now)
        total = total * kept + jnp.sum(weights, axis=1)
        visit.wait(1)
        sums = block.product(weights.astype(v.dtype), v.at[visit.slot], onto=sums * over(kept, sums))
        return sums, now, total

    nothing = jnp.full((ROWS,), BLIND * LOG2E, jnp.float32)
    sums, most, total = block.walk(step, (_zeros(block), nothing, jnp.zeros((ROWS,), jnp.float32)))
    divisor = jnp.where(total == 0, 1.0, total)
    return [sums * over(1 / divisor, sums), jnp.where(total == 0, MASKED, most * _LN2 + jnp.log(divisor))]


def _dq(block: KernelBlock, q: Ref, dout: Ref, lse: Ref, delta: Ref, k: Ref, v: Ref) -> list[Array]:
    lse_R, delta_R = lse[...], delta[...]

    def step(visit: Visit, dq: Array) -> Array:
        visit.wait(0)
        scores, slope = visit.scores(block.product(q, k.at[visit.slot], transposed=True))
        weights = jnp.exp2(scores - over(lse_R, scores))
        visit.wait(1)
        dweights = block.product(dout, v.at[visit.slot], transposed=True)
        dscores = _apply_slope(weights * (dweights - over(delta_R, dweights)), slope)
        return block.product(dscores.astype(k.dtype), k.at[visit.slot], onto=dq)

    return [block.walk(step, _zeros(block)) * block.job.scale]


def _dk_dv(block: KernelBlock, k: Ref, v: Ref, q: Ref, lse: Ref, dout: Ref, delta: Ref) -> list[Array]:
    def step(visit: Visit, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        weights, slope = _of_keys(visit, k, q, lse)
        dk, dv = carry
        dv = block.product(weights.astype(dout.dtype), dout.at[visit.slot], onto=dv)
        return _onto_dk(visit, dk, weights, slope, v, q, dout, delta), dv

    dk, dv = block.walk(step, (_zeros(block), _zeros(block)))
    return [dk * block.job.scale, dv]


def _dk(block: KernelBlock, k: Ref, v: Ref, q: Ref, lse: Ref, dout: Ref, delta: Ref) -> list[Array]:
    def step(visit: Visit, dk: Array) -> Array:
        return _onto_dk(visit, dk, *_of_keys(visit, k, q, lse), v, q, dout, delta)

    return [block.walk(step, _zeros(block)) * block.job.scale]


def _dv(block: KernelBlock, k: Ref, q: Ref, lse: Ref, dout: Ref) -> list[Array]:
    def step(visit: Visit, dv: Array) -> Array:
        weights, _ = _of_keys(visit, k, q, lse)
        return block.product(weights.astype(dout.dtype), dout.at[visit.slot], onto=dv)

    return [block.walk(step, _zeros(block))]


def _of_keys(visit: Visit, k: Ref, q: Ref, lse: Ref) -> tuple[Array, Array | None]:
    """The weights of keys for queries, and the slope of the soft cap; once it returns, the whole slot has arrived."""
    visit.wait(0)
    scores, slope = visit.scores(visit.block.product(k, q.at[visit.slot], transposed=True))
    weights = jnp.exp2(scores - over(lse[visit.slot], scores, dim=1))
    visit.wait(1)
    return weights, slope


def _onto_dk(
    visit: Visit, dk: Array, weights: Array, slope: Array | None, v: Ref, q: Ref, dout: Ref, delta: Ref
) -> Array:  # fmt: skip
    dweights = visit.block.product(v, dout.at[visit.slot], transposed=True)
    dscores = _apply_slope(weights * (dweights - over(delta[visit.slot], dweights, dim=1)), slope)
    return visit.block.product(dscores.astype(q.dtype), q.at[visit.slot], onto=dk)


def _zeros(block: KernelBlock) -> Array:
    return jnp.zeros((ROWS, block.job.h), jnp.float32)


def _apply_slope(dscores: Array, slope: Array | None) -> Array:
    return dscores if slope is None else dscores * slope
