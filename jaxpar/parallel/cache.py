"""Attention with a cache of keys and values: `fill_cache` where a model reads a prompt, and
`attend_cached` for each next token (`attention_state`).

A layer's cache is a pair of arrays [N, T, h]: T slots for each kv head of each row. The prompts lie
in the first slots, filled up on the right, and each new token takes the next slot of every row at
once, so that one slice is written in place. The slots of a row whose prompt is shorter than others
stay unused in between; `places_BT` says which token of its row a slot holds. Each device has a
block of N for its own rows and kv heads. They are one dim because XLA:CPU copies a cache five times
a token where a matmul has to reshape it (with one row, say).

Shapes: B batch, S sequence, T slots, H heads, K kv heads, N rows x kv heads, G query heads per kv
head, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import output_axis
from jaxpar.kernels.attention.call import MASKED, cap_scores
from jaxpar.parallel.ops import AttentionCall, Ops

Cache = tuple[Array, Array]
"""The keys and the values of a layer [N, T, h]."""
EMPTY = 2**30
"""The place of a slot that holds nothing."""


def cache_spec(plan: Plan) -> P:
    """Lay out a cache, whose first dim merges the sequences and the kv heads of a device. Kv heads
    that are copied (`kv_copy_axes`) lie as heads do.

    Args:
      plan: the plan of the run.

    Returns:
      The PartitionSpec of a cache [N, T, h].
    """
    return P(
        (
            *plan.mesh_axes("batch"),
            *plan.mesh_axes(output_axis("kv_heads", plan)),
        )
    )


def _local(
    function: Callable[..., Any],
    plan: Plan,
    ins: Any,
    outs: Any,
) -> Callable[..., Any]:
    """Run a function on each device's own part, as `manual` does, but by PartitionSpecs: a cache
    merges two dims.
    """
    if plan.mesh.size == 1:
        return function
    return jax.shard_map(
        function,
        mesh=plan.mesh,
        in_specs=ins,
        out_specs=outs,
        check_vma=False,
    )


def fill_cache(
    call: AttentionCall, state: None, ops: Ops, *, plan: Plan, slots: int
) -> tuple[Array, Cache]:
    """Attend within the prompts, and leave the layer's cache.

    Args:
      call: the attention of the layer.
      state: nothing was left before.
      ops: the ops that attend.
      plan: the plan of the run.
      slots: how many slots the cache has.

    Returns:
      The output, and the cache.
    """

    def store(x_BSKh: Array) -> Array:
        B, S, K, h = x_BSKh.shape
        return jnp.pad(x_BSKh.swapaxes(1, 2).reshape(B * K, S, h), ((0, 0), (0, slots - S), (0, 0)))

    kv = plan.spec(("batch", None, output_axis("kv_heads", plan)))
    run = _local(store, plan, kv, cache_spec(plan))
    cache = (run(call.k_BTKh), run(call.v_BTKh))
    return ops.attention(call), cache


class NewTokens(NamedTuple):
    """Where the new tokens stand, one of each row, and those that are in the cache."""

    slot: Int[Array, ""] | int
    """The slot that the new tokens take."""
    place_B: Int[Array, " B"]
    """The place of each in its row."""
    places_BT: Int[Array, "B T"]
    """The place in its row of the token in each slot; EMPTY for none. Later slots have later
    places."""


def attend_cached(
    call: AttentionCall, state: Cache, ops: Ops, *, plan: Plan, new: NewTokens
) -> tuple[Array, Cache]:
    """Attend with one new token in each row, which sees the tokens in the cache that the layer's
    mask shows.

    Args:
      call: the attention of the layer. There are no documents, no dropout and no halves.
      state: the cache of the layer.
      ops: not used: the cache has all that is attended to.
      plan: the plan of the run.
      new: where the new tokens stand.

    Returns:
      The output, and the cache with the new tokens.
    """
    assert call.segments_BT is None and call.key is None, "there are no documents and no dropout"
    assert call.q_start == 0, "one token has no halves"
    place_B1 = new.place_B[:, None]
    # A mask may show later places, which are not written yet.
    seen_BT = call.mask.visible(place_B1, new.places_BT) & (new.places_BT <= place_B1)
    heads, kv = (
        plan.spec(("batch", None, axis)) for axis in ("heads", output_axis("kv_heads", plan))
    )
    cache = (cache_spec(plan), cache_spec(plan))
    run = _local(
        partial(attend, softcap=call.softcap),
        plan,
        (heads, kv, kv, cache, P(), plan.spec(("batch",))),
        (heads, cache),
    )
    return run(call.q_BSHh, call.k_BTKh, call.v_BTKh, state, jnp.int32(new.slot), seen_BT)


def attend(
    q_BSHh: Float[Array, "B 1 H h"],
    k_BSKh: Float[Array, "B 1 K h"],
    v_BSKh: Float[Array, "B 1 K h"],
    cache: Cache,
    slot: Int[Array, ""],
    seen_BT: Bool[Array, "B T"],
    softcap: float = 0.0,
) -> tuple[Float[Array, "B 1 H h"], Cache]:
    """Write the new tokens' keys and values into a slot, and attend with one query a row. The
    softmax is in float32.

    Args:
      q_BSHh: the queries of the new tokens; H is a multiple of K.
      k_BSKh: their keys.
      v_BSKh: their values.
      cache: the keys and the values of the layer so far, [B K, T, h] each.
      slot: the place in T that is written.
      seen_BT: which of the T places a row's query sees.
      softcap: as for `jaxpar.parallel.attention`.

    Returns:
      The output, and the cache with the new tokens.
    """
    (B, _, H, h) = q_BSHh.shape
    K = k_BSKh.shape[2]
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot, axis=1)
    k_NTh = put(cache[0], k_BSKh.reshape(B * K, 1, h))
    v_NTh = put(cache[1], v_BSKh.reshape(B * K, 1, h))
    q_NGh = q_BSHh.reshape(B * K, H // K, h)
    scores_NGT = jnp.einsum("NGh,NTh->NGT", q_NGh, k_NTh, preferred_element_type=jnp.float32)
    scores_NGT = cap_scores(scores_NGT / h**0.5, softcap)
    seen_N1T = jnp.repeat(seen_BT, K, axis=0)[:, None]
    weights_NGT = jax.nn.softmax(jnp.where(seen_N1T, scores_NGT, MASKED), axis=-1)
    out_NGh = jnp.einsum("NGT,NTh->NGh", weights_NGT.astype(v_NTh.dtype), v_NTh)
    return out_NGh.reshape(q_BSHh.shape), (k_NTh, v_NTh)
