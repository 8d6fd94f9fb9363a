"""Attention kernels of a stranger's own: one that JAX differentiates, and one with a backward, which
so serves a ring too.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpar.kernels import register_kernel


def no_softcap(request, platform):
    """What neither kernel serves."""
    return "a soft cap" if request.call.softcap else ""


def scores_of(q, k, mask, call):
    """The scores, minus infinity where a query does not see a key."""
    H = q.shape[2]
    k = jnp.repeat(k, H // k.shape[2], axis=2)
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * call.scale_of(q)
    rows = jnp.arange(q.shape[1])[:, None] + call.q_start
    seen = mask.visible(rows, jnp.arange(k.shape[1]) + call.k_start)
    if seen.ndim == 3:  # documents, which differ from row to row of a batch
        seen = seen[:, None]
    return jnp.where(seen, scores, -jnp.inf)


@register_kernel("whole_rows", refusal=no_softcap)
def whole_rows(q, k, v, mask, call):
    """All scores at once, for masks under which every query sees a key."""
    scores = scores_of(q, k, mask, call)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    out = jnp.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), v)
    return out.astype(q.dtype)


def both_ways_backward(q, k, v, dout, lse, delta, mask, call):
    """The gradients of q, k and v, from the log-sum-exp over all keys and not these alone."""
    weights = jnp.exp(scores_of(q, k, mask, call) - lse[..., None])
    per_kv_head = q.shape[2] // k.shape[2]
    long_k, long_v = (jnp.repeat(x, per_kv_head, axis=2) for x in (k, v))
    dweights = jnp.einsum("bshd,bthd->bhst", dout, long_v)
    dscores = weights * (dweights - delta[..., None]) * call.scale_of(q)
    dq = jnp.einsum("bhst,bthd->bshd", dscores, long_k)
    dk = jnp.einsum("bhst,bshd->bthd", dscores, q)
    dv = jnp.einsum("bhst,bshd->bthd", weights, dout)
    dk, dv = (x.reshape(*k.shape[:3], per_kv_head, -1).sum(3) for x in (dk, dv))
    return tuple(x.astype(call.out_dtype or q.dtype) for x in (dq, dk, dv))


@register_kernel("both_ways", backward=both_ways_backward, refusal=no_softcap)
def both_ways(q, k, v, mask, call):
    """Likewise, with a log-sum-exp, and zeros for a query that sees nothing."""
    scores = scores_of(q, k, mask, call)
    most = jnp.maximum(scores.max(-1), -1e30)
    weights = jnp.exp(scores - most[..., None])
    total = weights.sum(-1)
    lse = jnp.where(total > 0, most + jnp.log(jnp.maximum(total, 1e-30)), -1e30)
    shares = weights / jnp.maximum(total, 1e-30)[..., None]
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    out = jnp.einsum("bhst,bthd->bshd", shares, v)
    return out.astype(call.out_dtype or q.dtype), lse
