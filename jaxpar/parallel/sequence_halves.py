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

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, output_axis
from jaxpar.kernels.masks import Mask, looks_back
from jaxpar.parallel.attention_state import run_with_states
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.domino import Places
from jaxpar.parallel.ops import AttentionCall, Ops
from jaxpar.parallel.zigzag import TOKENS

T = TypeVar("T")


class Keys(NamedTuple):
    """What an attention of the first half leaves for that of the second."""

    k_BSKh: Array
    v_BSKh: Array
    segments_BS: Array | None


def run_parts(
    block: Callable[[Array, Places, Ops], T],
    xs: Sequence[Array],
    places: Sequence[Places],
    ops: Ops,
    plan: Plan,
) -> list[T]:
    """Run a block on each part of a batch in turn (`domino.halves`).

    Args:
      block: runs it on a part, with the ops of that part.
      xs: the residual stream of each part.
      places: the places of its tokens.
      ops: the ops of the whole batch.
      plan: says what the parts are.

    Returns:
      What the block returned of each part.

    Raises:
      UserError: each sequence is cut in two, and a mask may show the first half keys of the second.
    """
    parts = list(zip(xs, places, strict=True))
    if not plan.overlap.cuts_sequence:
        return [block(x_BSD, place, ops) for x_BSD, place in parts]
    first, second = (partial(block, x_BSD, place) for x_BSD, place in parts)
    ys, keys = run_with_states(first, ops, attend_in_first_half)
    zs, _ = run_with_states(second, ops, partial(attend_in_second_half, plan=plan), keys)
    return [ys, zs]


def attend_in_first_half(call: AttentionCall, state: None, ops: Ops) -> tuple[Array, Keys]:
    """Attend within the first half, and leave its keys and values.

    Raises:
      UserError: the mask may show later keys.
    """
    require_no_later_keys(call.mask)
    return ops.attention(call), Keys(call.k_BTKh, call.v_BTKh, call.segments_BT)


def attend_in_second_half(
    call: AttentionCall, state: Keys, ops: Ops, *, plan: Plan
) -> tuple[Array, None]:
    """Attend to both halves, with the queries of the second.

    Args:
      call: the attention of the second half.
      state: the keys and values of the first.
      ops: the ops that attend.
      plan: says how the arrays lie.

    Returns:
      The output of the second half; nothing is left for another.
    """
    kv: Axes = ("batch", "attention_seq", output_axis("kv_heads", plan), None)
    segments_BT = None
    if state.segments_BS is not None and call.segments_BT is not None:
        segments_BT = _joined(state.segments_BS, call.segments_BT, TOKENS, plan)
    of_both = call._replace(
        k_BTKh=_joined(state.k_BSKh, call.k_BTKh, kv, plan),
        v_BTKh=_joined(state.v_BSKh, call.v_BTKh, kv, plan),
        segments_BT=segments_BT,
        q_start=state.k_BSKh.shape[1],
    )
    return ops.attention(of_both), None


def _joined(first: Array, second: Array, axes: Axes, plan: Plan) -> Array:
    """The two along the sequence, which no device splits."""

    def join(first: Array, second: Array) -> Array:
        return jnp.concatenate([first, second], axis=1)

    return manual(join, plan, (axes, axes), axes)(first, second)


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
