"""Attention with a cache of keys and values: the ops with which a model reads a prompt, and those of each next token.

A layer's cache is a pair of arrays [B, K, T, h] of slots. The prompts lie in the first slots, filled up on the right,
and each new token takes the next slot of every row at once, so that one slice is written in place. The slots of a row
whose prompt is shorter than others stay unused in between; `places_BT` says which token of its row a slot holds.

Shapes: B batch, S sequence, T slots, H heads, K kv heads, G query heads per kv head, h head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.heads import output_axis
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import Axes
from jaxpar.kernels.attention.call import MASKED, cap_scores
from jaxpar.kernels.masks import Mask
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.ops import Ops

Cache = tuple[Array, Array]
"""The keys and the values of a layer [B, K, T, h]."""
EMPTY = 2**30
"""The place of a slot that holds nothing."""


def cache_axes(plan: Plan) -> Axes:
    """Return the logical axes of a cache; kv heads that are copied (`kv_copy_axes`) lie as heads do."""
    return ("batch", output_axis("kv_heads", plan), None, "head_dim")


@dataclass(frozen=True)
class PrefillOps(Ops):
    """The ops that read prompts: attention also appends the layer's cache, with so many slots, to `caches`."""

    slots: int = 0
    caches: list[Cache] = field(default_factory=list)

    def attention(self, q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, *args, **kwargs) -> Array:
        room = ((0, 0), (0, 0), (0, self.slots - k_BSKh.shape[1]), (0, 0))
        k_BKTh, v_BKTh = (
            self.plan.constrain(jnp.pad(x.swapaxes(1, 2), room), cache_axes(self.plan)) for x in (k_BSKh, v_BSKh)
        )
        self.caches.append((k_BKTh, v_BKTh))
        return super().attention(q_BSHh, k_BSKh, v_BSKh, *args, **kwargs)


@dataclass(frozen=True)
class DecodeOps(Ops):
    """The ops of one new token in each row, which sees the tokens in the cache that its layer's mask shows.

    Attributes:
      before: the caches of the layers.
      slot: the slot that the new tokens take, int32 scalar.
      places_BT: the place in its row of the token in each slot; EMPTY for none. Later slots have later places.
      place_B: the places of the new tokens.
      caches: the caches with the new tokens, appended as each layer runs.
    """

    before: Sequence[Cache] = ()
    slot: Int[Array, ""] | int = 0
    places_BT: Int[Array, "B T"] | None = None
    place_B: Int[Array, " B"] | None = None
    caches: list[Cache] = field(default_factory=list)

    def attention(
        self, q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, mask: Mask, segments_BS: Array | None = None,
        dropout_rate: float = 0.0, key: Array | None = None, softcap: float = 0.0,
    ) -> Array:  # fmt: skip
        """Attention of one token a row. There are no documents and no dropout."""
        assert segments_BS is None and key is None, "generation has neither documents nor dropout"
        assert self.place_B is not None and self.places_BT is not None
        place_B1 = self.place_B[:, None]
        # A mask may show later places, which are not written yet.
        seen_BT = mask.visible(place_B1, self.places_BT) & (self.places_BT <= place_B1)
        heads, slots = ("batch", None, "heads", "head_dim"), cache_axes(self.plan)
        kv = ("batch", None, slots[1], "head_dim")
        run = manual(
            partial(attend, softcap=softcap),
            self.plan,
            (heads, kv, kv, (slots, slots), (), ("batch", None)),
            (heads, (slots, slots)),
        )
        out_BSHh, cache = run(q_BSHh, k_BSKh, v_BSKh, self.before[len(self.caches)], jnp.int32(self.slot), seen_BT)
        self.caches.append(cache)
        return out_BSHh


def attend(
    q_BSHh: Float[Array, "B 1 H h"], k_BSKh: Float[Array, "B 1 K h"], v_BSKh: Float[Array, "B 1 K h"], cache: Cache,
    slot: Int[Array, ""], seen_BT: Bool[Array, "B T"], softcap: float = 0.0,
) -> tuple[Float[Array, "B 1 H h"], Cache]:  # fmt: skip
    """Write the new tokens' keys and values into a slot, and attend with one query a row; softmax is float32."""
    k_BKTh, v_BKTh = (
        jax.lax.dynamic_update_slice_in_dim(old, new.swapaxes(1, 2), slot, axis=2)
        for old, new in zip(cache, (k_BSKh, v_BSKh), strict=True)
    )
    (B, _, H, h), K = q_BSHh.shape, k_BSKh.shape[2]
    q_BKGh = q_BSHh.reshape(B, K, H // K, h)
    scores_BKGT = jnp.einsum("BKGh,BKTh->BKGT", q_BKGh, k_BKTh, preferred_element_type=jnp.float32)
    scores_BKGT = cap_scores(scores_BKGT / h**0.5, softcap)
    weights_BKGT = jax.nn.softmax(jnp.where(seen_BT[:, None, None], scores_BKGT, MASKED), axis=-1)
    out_BKGh = jnp.einsum("BKGT,BKTh->BKGh", weights_BKGT.astype(v_BKTh.dtype), v_BKTh)
    return out_BKGh.reshape(q_BSHh.shape), (k_BKTh, v_BKTh)
