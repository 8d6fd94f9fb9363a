"""Attention with a cache of keys and values: the ops with which a model reads a prompt, and those
of each next token.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import output_axis
from jaxpar.kernels.attention.call import MASKED, cap_scores
from jaxpar.kernels.masks import Mask
from jaxpar.parallel.ops import Ops

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


@dataclass(frozen=True)
class PrefillOps(Ops):
    """The ops that read prompts: attention also appends the layer's cache, with so many slots, to
    `caches`.
    """

    slots: int = 0
    caches: list[Cache] = field(default_factory=list)

    def attention(
        self,
        q_BSHh: Array,
        k_BSKh: Array,
        v_BSKh: Array,
        *args,
        **kwargs,
    ) -> Array:
        def store(x_BSKh: Array) -> Array:
            B, S, K, h = x_BSKh.shape
            return jnp.pad(
                x_BSKh.swapaxes(1, 2).reshape(B * K, S, h), ((0, 0), (0, self.slots - S), (0, 0))
            )

        kv = self.plan.spec(("batch", None, output_axis("kv_heads", self.plan)))
        run = _local(store, self.plan, kv, cache_spec(self.plan))
        self.caches.append((run(k_BSKh), run(v_BSKh)))
        return super().attention(q_BSHh, k_BSKh, v_BSKh, *args, **kwargs)


@dataclass(frozen=True)
class DecodeOps(Ops):
    """The ops of one new token in each row, which sees the tokens in the cache that its layer's
    mask shows.
    """

    before: Sequence[Cache] = ()
    """The caches of the layers."""
    slot: Int[Array, ""] | int = 0
    """The slot that the new tokens take, int32 scalar."""
    places_BT: Int[Array, "B T"] | None = None
    """The place in its row of the token in each slot; EMPTY for none. Later slots have later
    places.
    """
    place_B: Int[Array, " B"] | None = None
    """The places of the new tokens."""
    caches: list[Cache] = field(default_factory=list)
    """The caches with the new tokens, appended as each layer runs."""

    def attention(
        self,
        q_BSHh: Array,
        k_BSKh: Array,
        v_BSKh: Array,
        mask: Mask,
        segments_BS: Array | None = None,
        dropout_rate: float = 0.0,
        key: Array | None = None,
        softcap: float = 0.0,
        q_start: int = 0,
    ) -> Array:
        """Attention of one token a row. There are no documents, no dropout and no halves."""
        assert segments_BS is None and key is None, "generation has neither documents nor dropout"
        assert q_start == 0, "one token has no halves"
        assert self.place_B is not None and self.places_BT is not None
        place_B1 = self.place_B[:, None]
        plan = self.plan
        # A mask may show later places, which are not written yet.
        seen_BT = mask.visible(place_B1, self.places_BT) & (self.places_BT <= place_B1)
        heads, kv = (
            plan.spec(("batch", None, axis)) for axis in ("heads", output_axis("kv_heads", plan))
        )
        cache = (cache_spec(plan), cache_spec(plan))
        one = partial(attend, softcap=softcap)
        run = _local(
            one,
            plan,
            (heads, kv, kv, cache, P(), plan.spec(("batch",))),
            (heads, cache),
        )
        out_BSHh, after = run(
            q_BSHh, k_BSKh, v_BSKh, self.before[len(self.caches)], jnp.int32(self.slot), seen_BT
        )
        self.caches.append(after)
        return out_BSHh


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
