"""The ops of blocks that run on the two halves of each sequence, one after the other.

All ops but attention work on single tokens, and take the tokens of a half as they would take a
batch of shorter sequences. In attention no query of the first half sees a later key, so it is that
of a sequence half as long. The queries of the second half see the keys and values of both: the
first half's are handed on from one to the other, and that is all that the second waits for. What
one half gathers and scatters may so run beside what the other computes (ISO, Xiao & Su 2024,
arXiv:2409.11155, does so where prompts are read).

Shapes: B batch, S sequence of a half, T whole sequence, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, output_axis
from jaxpar.kernels.masks import Mask, looks_back
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.zigzag import TOKENS


class _Handed(NamedTuple):
    """What an attention of the first half leaves for that of the second."""

    k_BSKh: Array
    v_BSKh: Array
    segments_BS: Array | None


@dataclass(frozen=True)
class FirstHalfOps(Ops):
    """The ops of the first half: attention also appends its keys and values to `handed`."""

    handed: deque[_Handed] = field(default_factory=deque)

    def attention(
        self,
        q_BSHh: Array,
        k_BSKh: Array,
        v_BSKh: Array,
        mask: Mask,
        segments_BS: Array | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Array:
        """Attend within the first half.

        Raises:
          UserError: the mask may show later keys, or as for `Ops.attention`.
        """
        require_no_later_keys(mask)
        self.handed.append(_Handed(k_BSKh, v_BSKh, segments_BS))
        return super().attention(q_BSHh, k_BSKh, v_BSKh, mask, segments_BS, *args, **kwargs)


@dataclass(frozen=True)
class SecondHalfOps(Ops):
    """The ops of the second half: attention takes the oldest keys and values of `handed` before its
    own.
    """

    handed: deque[_Handed] = field(default_factory=deque)

    def attention(
        self,
        q_BSHh: Array,
        k_BSKh: Array,
        v_BSKh: Array,
        mask: Mask,
        segments_BS: Array | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Array:
        """Attend to both halves, with the queries of the second."""
        first = self.handed.popleft()
        kv: Axes = ("batch", "attention_seq", output_axis("kv_heads", self.plan), None)
        k_BTKh = _joined(first.k_BSKh, k_BSKh, kv, self.plan)
        v_BTKh = _joined(first.v_BSKh, v_BSKh, kv, self.plan)
        if first.segments_BS is None or segments_BS is None:
            segments_BT = None
        else:
            segments_BT = _joined(first.segments_BS, segments_BS, TOKENS, self.plan)
        before = first.k_BSKh.shape[1]
        return super().attention(
            q_BSHh, k_BTKh, v_BTKh, mask, segments_BT, *args, **kwargs, q_start=before
        )


def _joined(first: Array, second: Array, axes: Axes, plan: Plan) -> Array:
    """The two along the sequence, which no device splits."""

    def join(first: Array, second: Array) -> Array:
        return jnp.concatenate([first, second], axis=1)

    return manual(join, plan, (axes, axes), axes)(first, second)


def ops_of_parts(ops: Any, plan: Plan) -> tuple[Any, ...]:
    """Return the ops of each part that a block runs on in turn (`halves.halves`).

    Args:
      ops: the ops of the whole.
      plan: says what the parts are.

    Returns:
      For the halves of each sequence ops whose attention knows of the other half, otherwise the
      same ops for each part.

    Raises:
      UserError: the ops are others than `Ops`, and the sequence is cut.
    """
    if not plan.overlap.cuts_sequence:
        return (ops,) * plan.overlap.parts
    if type(ops) is not Ops:
        raise UserError(
            f"overlap.domino cuts each sequence in two, and the ops {type(ops).__name__} do not "
            "hand keys on from half to half: leave domino out"
        )
    handed = deque[_Handed]()
    return FirstHalfOps(plan, handed), SecondHalfOps(plan, handed)


def require_no_later_keys(mask: Mask) -> None:
    """Refuse a mask under which the first half of a sequence may see keys of the second.

    Raises:
      UserError: it may.
    """
    if not looks_back(mask):
        raise UserError(
            f"overlap.domino cuts each sequence in two, and under the mask {mask} a query of the "
            "first half may see keys of the second: join it to Causal() by &, give each device an "
            "even number of sequences, or leave domino out"
        )
