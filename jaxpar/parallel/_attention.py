"""Softmax attention on one device or many, by the fastest implementation that can serve the call.

Shapes: B batch, S queries, T keys, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Strategy
from jaxpar.base.layout.sharding import Axes, Layout, output_axis, require_layout
from jaxpar.base.number_checks import require_whole
from jaxpar.base.registry import KERNELS
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.libraries import stand_in_scope
from jaxpar.kernels.masks import Causal, Mask, apart_from_segments, without_segments
from jaxpar.parallel._choose_attention import choose_attention, cut_heads
from jaxpar.parallel.collectives import capability_of, manual, platform_of
from jaxpar.parallel.context import Split, check_split, split_attention
from jaxpar.parallel.context.task import with_documents_from
from jaxpar.parallel.linear import ATTENDED
from jaxpar.parallel.remat import named
from jaxpar.parallel.zigzag import context_sizes, require_strategy

_CAUSAL = Causal()
_HEADS: Axes = (*ATTENDED[:2], "heads", "head_dim")
"""The logical axes of queries, and of what attention returns."""


def attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    mask: Mask = _CAUSAL,
    layout: Layout | None = None,
    *,
    context: Strategy = "ring",
    implementation: str = "auto",
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    softcap: float = 0.0,
    q_start: int = 0,
) -> Float[Array, "B S H h"]:
    """Softmax attention, inside any jitted function.

    Args:
      q_BSHh: queries, of a floating dtype; H is a multiple of K. With a layout q, k and v share one
        sequence and are split as by `column_linear`: over `batch`, `attention_seq`, and `heads` or
        `kv_heads`.
      k_BTKh: keys.
      v_BTKh: values.
      mask: a mask of `jaxpar.kernels.masks`, such as `Causal() & Window(1023) & Segments(ids,
        ids)`. Where a `ring` splits the sequence, the tokens must be `in_order`.
      layout: mesh, rules and compute dtype; None = one device, or a device's own part inside a
        `shard_map`.
      context: how keys and values come together where the layout splits the sequence: see
        `jaxpar.parallel.context`.
      implementation: a value of the setting `kernels.attention`; `auto` = the first that serves,
        which the log names.
      dropout_rate: dropout of the attention weights, from 0 to below 1.
      key: of the dropout; there is none when it is None.
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = as
        they are.
      q_start: the place of the first query among the keys; the last one stands where the last key
        does. With a layout, any `Segments` of the mask are those of the keys, for queries too:
        `Segments(ids, ids)`. No device may split the sequence then.

    Returns:
      The output, in the layout of q and the dtype of v.

    Raises:
      UserError: the shapes or the mask do not fit together, a number is out of its range, the
        implementation cannot serve, or `check_split` refuses.
    """
    if layout is not None and q_start:
        checked = without_segments(mask)
    else:
        checked = mask
    dispatch.check_arguments(q_BSHh, k_BTKh, v_BTKh, checked, softcap, dropout_rate)
    _require_start(q_start, q_BSHh.shape[1], k_BTKh.shape[1])
    dropping = key is not None and dropout_rate > 0
    rate = dropout_rate if dropping else 0.0
    attend = partial(
        dispatch.attention,
        dropout_rate=rate,
        key=key,
        softcap=softcap,
        with_lse=False,
        q_start=q_start,
    )
    if layout is None:
        return attend(q_BSHh, k_BTKh, v_BTKh, mask, implementation=implementation)[0]
    require_layout(layout, "attention")
    require_strategy(context)
    _require_laid_out(q_BSHh, k_BTKh, v_BTKh, layout)
    mask, segments_BS = apart_from_segments(mask)
    split = Split(layout, context, implementation, softcap, q_start=q_start)
    B, S, H, h = q_BSHh.shape
    name, why = choose_attention(
        split,
        mask,
        q_start + S,
        h,
        dropping=dropping,
        packed=segments_BS is not None,
        batch=max(B // layout.size("batch"), 1),
        heads=max(H // layout.size("heads"), 1),
    )
    if split.devices > 1:
        _require_whole(split)
        check_split(layout, context, S, H, k_BTKh.shape[2], rate)
    chosen = partial(
        attend,
        implementation=name,
        platform=platform_of(layout),
        capability=capability_of(layout),
    )
    with jax.named_scope("core"), stand_in_scope(name, why):
        if split.devices == 1 and (cut_heads(layout) or dropping):
            # Which weights are dropped depends on their place in the whole array.
            seen = with_documents_from(q_start, mask, segments_BS)
            out_BSHh = chosen(q_BSHh, k_BTKh, v_BTKh, seen)[0]
            return named(layout.constrain(out_BSHh, _HEADS), "attention_out")
        if KERNELS[name].merges or split.devices > 1:
            return split_attention(split, mask, q_BSHh, k_BTKh, v_BTKh, segments_BS)
        return _on_each_device(chosen, split, mask, q_BSHh, k_BTKh, v_BTKh, segments_BS)


def _on_each_device(
    attend: Callable[..., tuple[Array, Array | None]],
    split: Split,
    mask: Mask,
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    segments_BS: Array | None,
) -> Array:
    """Attend where each device has whole sequences, and some of the heads."""

    def local(q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, segments_BS: Array | None) -> Array:
        seen = with_documents_from(split.q_start, mask, segments_BS)
        return attend(q_BSHh, k_BTKh, v_BTKh, seen)[0]

    layout = split.layout
    kv_heads = _kv_heads(layout)
    in_axes = (_HEADS, kv_heads, kv_heads, None if segments_BS is None else ATTENDED[:2])
    return manual(local, layout, in_axes, _HEADS)(q_BSHh, k_BTKh, v_BTKh, segments_BS)


def _kv_heads(layout: Layout) -> Axes:
    """The logical axes of keys and values, which lie as query heads do where they are copied."""
    return (*ATTENDED[:2], output_axis("kv_heads", layout), "head_dim")


def _require_laid_out(q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, layout: Layout) -> None:
    """Refuse arrays that the mesh does not divide."""
    layout.sharding(_HEADS, q_BSHh.shape, "q")
    layout.sharding(_kv_heads(layout), k_BTKh.shape, "k")


def _require_start(q_start: int, S: int, T: int) -> None:
    """Refuse queries that begin later than the keys and do not end where the keys end."""
    require_whole("attention", "q_start", q_start, least=0)
    if q_start and q_start + S != T:
        raise UserError(
            f"attention with q_start={q_start} takes that many keys more than queries, and was "
            f"given {T} keys and {S} queries: give it {q_start + S} keys"
        )


def _require_whole(split: Split) -> None:
    """Refuse queries that begin later than the keys where devices split the sequence."""
    if split.q_start:
        raise UserError(
            f"attention with q_start={split.q_start} needs the whole sequence on each device, and "
            f"it is split over {context_sizes(split.layout)}: leave it whole (rules.attention_seq)"
        )
