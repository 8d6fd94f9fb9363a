"""Softmax attention on one device or many, by the fastest implementation that can serve the call.

Shapes: B batch, S sequence, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxpar.base.arguments import require_whole
from jaxpar.base.errors import UserError
from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.plan import Strategy
from jaxpar.base.layout.sharding import Axes, Layout, kv_copy_axes, output_axis, require_layout
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.libraries import stand_in_scope
from jaxpar.kernels.masks import Causal, Mask, apart_from_segments, without_segments
from jaxpar.parallel.collectives import capability_of, manual, platform_of
from jaxpar.parallel.context import Split, check_split, kernel_for, split_attention
from jaxpar.parallel.context.task import with_documents_from
from jaxpar.parallel.linear import ATTENDED
from jaxpar.parallel.remat import named
from jaxpar.parallel.token_order import context_sizes, require_strategy

_CAUSAL = Causal()


def attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
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
      k_BSKh: keys.
      v_BSKh: values.
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
    dispatch.check_arguments(q_BSHh, k_BSKh, v_BSKh, checked, softcap, dropout_rate)
    _check_start(q_start, q_BSHh.shape[1], k_BSKh.shape[1])
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
        return attend(q_BSHh, k_BSKh, v_BSKh, mask, implementation=implementation)[0]
    require_layout(layout, "attention")
    require_strategy(context)
    for name, array, axis in (
        ("q", q_BSHh, "heads"),
        ("k", k_BSKh, output_axis("kv_heads", layout)),
    ):
        layout.sharding((*ATTENDED[:2], axis, "head_dim"), array.shape, name)
    mask, segments_BS = apart_from_segments(mask)
    split = Split(layout, context, implementation, softcap, q_start=q_start)
    (B, S, H, h) = q_BSHh.shape
    batch = max(B // layout.size("batch"), 1)
    name, why = choose_attention(
        split,
        mask,
        q_start + S,
        h,
        dropping=dropping,
        packed=segments_BS is not None,
        batch=batch,
        heads=max(H // layout.size("heads"), 1),
    )
    if split.devices > 1:
        _check_whole(split)
        check_split(layout, context, S, H, k_BSKh.shape[2], rate)

    def local(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BS: Array | None) -> Array:
        seen = with_documents_from(q_start, mask, segments_BS)
        on_layout = partial(attend, platform=platform_of(layout), capability=capability_of(layout))
        return on_layout(q_BSHh, k_BSKh, v_BSKh, seen, implementation=name)[0]

    heads: Axes = (*ATTENDED[:2], "heads", "head_dim")
    with jax.named_scope("core"), stand_in_scope(name, why):
        if split.devices == 1 and (_cut_heads(layout) or dropping):
            # Which weights are dropped depends on their place in the whole array.
            return named(
                layout.constrain(local(q_BSHh, k_BSKh, v_BSKh, segments_BS), heads), "attention_out"
            )
        if name in dispatch.PAIRS or split.devices > 1:
            return split_attention(split, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS)
        kv_heads: Axes = (*ATTENDED[:2], output_axis("kv_heads", layout), "head_dim")
        layouts = heads, kv_heads, kv_heads, None if segments_BS is None else ATTENDED[:2]
        return manual(local, layout, layouts, heads)(q_BSHh, k_BSKh, v_BSKh, segments_BS)


def _check_start(q_start: int, S: int, T: int) -> None:
    """Refuse queries that begin later than the keys and do not end where the keys end."""
    require_whole("attention", "q_start", q_start, least=0)
    if q_start and q_start + S != T:
        raise UserError(
            f"attention with q_start={q_start} takes that many keys more than queries, and was "
            f"given {T} keys and {S} queries: give it {q_start + S} keys"
        )


def _check_whole(split: Split) -> None:
    """Refuse queries that begin later than the keys where devices split the sequence."""
    if split.q_start:
        raise UserError(
            f"attention with q_start={split.q_start} needs the whole sequence on each device, and "
            f"it is split over {context_sizes(split.layout)}: leave it whole (rules.attention_seq)"
        )


def fit_heads(layout: Layout, heads: int, kv_heads: int) -> Layout:
    """Let attention run on more devices than there are heads: see `layout.rules.fit_rules`.
    The log says once what was changed.

    Args:
      layout: mesh and rules of the model's arrays.
      heads: the number of query heads H.
      kv_heads: the number of kv heads K.

    Returns:
      The same layout with the fitting rules.
    """
    rules, notes = fit_rules(layout.rules, heads, kv_heads, layout.mesh.shape)
    for note in notes:
        dispatch.say_once(note)
    return replace(layout, rules=rules)


def choose_attention(
    split: Split,
    mask: Mask,
    seq_len: int,
    head_dim: int,
    *,
    dropping: bool = False,
    packed: bool = False,
    platform: str = "",
    batch: int = 1,
    heads: int = 0,
) -> tuple[str, str]:
    """Which implementation computes `attention`, or its parts where the sequence is split, and why
    no earlier one does.

    Args:
      seq_len: the length of the whole sequence, in tokens; the queries are those from
        `split.q_start` on.
      head_dim: the size h of a head.
      split: how it runs on several devices; see `ops.attention_calls`.
      mask: the mask without its documents.
      dropping: whether attention weights are dropped out.
      packed: whether the mask is limited to documents besides.
      platform: `gpu` or `tpu`; empty = the platform of the layout's devices.
      batch: how many sequences one device has.
      heads: how many query heads one device has, before `ulysses` shares them out; 0 = enough for
        all devices.

    Returns:
      The name of the implementation, and the reasons against those before it.

    Raises:
      UserError: the implementation that was asked for cannot serve.
    """
    layout = split.layout
    platform = platform or platform_of(split.layout)
    shape = (batch, seq_len // split.devices, heads or split.devices, head_dim)
    keys = jax.ShapeDtypeStruct(shape, layout.dtype)
    queries = keys.update(shape=(batch, shape[1] - split.q_start, *shape[2:]))
    ids: Any = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32)  # a mask takes arrays
    if split.q_start:
        ids = np.zeros(ids.shape, ids.dtype)  # of which a part is cut
    if packed:
        mask = with_documents_from(split.q_start, mask, ids)
    if split.devices > 1:
        return kernel_for(split, mask, queries, keys, platform)
    call = Call(softcap=split.softcap, q_start=split.q_start)
    capability = capability_of(layout)
    cut = _cut_heads(layout)
    request = dispatch.AttentionRequest(
        queries, keys, mask, call, with_lse=False, dropping=dropping, capability=capability, cut=cut
    )
    name, why = dispatch.choose(request, platform, split.implementation)
    if split.implementation != "auto":
        dispatch.say_once(f"attention by {name}, which kernels.attention asks for")
    return name, why


def _cut_heads(layout: Layout) -> str:
    """Why a device's query heads and kv heads do not fit together whole; empty = they do."""
    if layout.size("head_dim") > 1:
        return "heads are split inside"
    otherwise = layout.mesh_axes("heads") != layout.mesh_axes("kv_heads") and not kv_copy_axes(
        layout
    )
    if otherwise:
        return "kv heads are split otherwise than heads"
    return ""
