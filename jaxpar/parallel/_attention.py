"""Softmax attention on one device or many, by the fastest implementation that can serve the call.

Shapes: B batch, S sequence, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.plan import Strategy
from jaxpar.base.sharding import Axes, Layout, fit_rules, kv_copy_axes, output_axis, require_layout
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.libraries import stand_in_scope
from jaxpar.kernels.masks import Causal, Mask, Segments, apart_from_segments
from jaxpar.parallel.collectives import capability_of, manual, platform_of
from jaxpar.parallel.context import Split, check_split, kernel_for, split_attention
from jaxpar.parallel.linear import ATTENDED
from jaxpar.parallel.remat import named
from jaxpar.parallel.token_order import require_strategy

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

    Returns:
      The output, in the layout of q and the dtype of v.

    Raises:
      UserError: the shapes or the mask do not fit together, a number is out of its range, the
        implementation cannot serve, or `check_split` refuses.
    """
    dispatch.check_arguments(q_BSHh, k_BSKh, v_BSKh, mask, softcap, dropout_rate)
    dropping = key is not None and dropout_rate > 0
    rate = dropout_rate if dropping else 0.0
    attend = partial(
        dispatch.attention, dropout_rate=rate, key=key, softcap=softcap, with_lse=False
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
    split = Split(layout, context, implementation, softcap)
    (B, S, H, h) = q_BSHh.shape
    batch = max(B // layout.size("batch"), 1)
    name, why = choose_attention(
        split,
        mask,
        S,
        h,
        dropping=dropping,
        packed=segments_BS is not None,
        batch=batch,
        heads=max(H // layout.size("heads"), 1),
    )
    if split.devices > 1:
        check_split(layout, context, S, H, k_BSKh.shape[2], rate)

    def local(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BS: Array | None) -> Array:
        if segments_BS is None:
            seen = mask
        else:
            seen = mask & Segments(segments_BS, segments_BS)
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


def fit_heads(layout: Layout, heads: int, kv_heads: int) -> Layout:
    """Let attention run on more devices than there are heads: see `jaxpar.base.sharding.fit_rules`.
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
      seq_len: the length of the whole sequence, in tokens.
      head_dim: the size h of a head.
      split: how it runs on several devices; see `ops.split_of`.
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
    one = jax.ShapeDtypeStruct(shape, layout.dtype)
    ids: Any = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32)  # a mask takes arrays
    if packed:
        mask = mask & Segments(ids, ids)
    if split.devices > 1:
        return kernel_for(split, mask, one, one, platform)
    call = Call(softcap=split.softcap)
    capability = capability_of(layout)
    cut = _cut_heads(layout)
    request = dispatch.AttentionRequest(
        one, one, mask, call, with_lse=False, dropping=dropping, capability=capability, cut=cut
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
