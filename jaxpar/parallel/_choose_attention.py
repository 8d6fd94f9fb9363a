"""Which implementation of attention serves a layout, and how a layout is made to serve more devices
than there are heads.

Shapes: B batch, S sequence, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.sharding import Layout, kv_copy_axes
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import Mask
from jaxpar.parallel.collectives import capability_of, platform_of
from jaxpar.parallel.context import Split, kernel_for
from jaxpar.parallel.context.task import with_documents_from


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
      split: how it runs on several devices; see `ops.attention_calls`.
      mask: the mask without its documents.
      seq_len: the length of the whole sequence, in tokens; the queries are those from
        `split.q_start` on.
      head_dim: the size h of a head.
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
    cut = cut_heads(layout)
    request = AttentionRequest(
        queries, keys, mask, call, with_lse=False, dropping=dropping, capability=capability, cut=cut
    )
    name, why = dispatch.choose(request, platform, split.implementation)
    if split.implementation != "auto":
        dispatch.say_once(f"attention by {name}, which kernels.attention asks for")
    return name, why


def cut_heads(layout: Layout) -> str:
    """Why a device's query heads and kv heads do not fit together whole; empty = they do."""
    if layout.size("head_dim") > 1:
        return "heads are split inside"
    otherwise = layout.mesh_axes("heads") != layout.mesh_axes("kv_heads") and not kv_copy_axes(
        layout
    )
    if otherwise:
        return "kv heads are split otherwise than heads"
    return ""


def fit_heads(layout: Layout, heads: int, kv_heads: int) -> Layout:
    """Let attention run on more devices than there are heads: see `base.layout.fit_heads`.
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
