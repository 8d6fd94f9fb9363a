"""Attention on TPUs: three Pallas kernels after FlashAttention-2 (arXiv:2307.08691, algorithms 1
and 2).

`tpu_kernels` has the work of each kernel on a tile, and `tpu_grid` the list of tiles and the way of
their arrays to the kernel. dk and dv are summed over the query heads of a kv head inside their
kernel.

Shapes: as in `jaxpar.kernels.attention.call`; Q tiles of q queries, t keys of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.kernels.attention.call import BLIND, DEFAULT, Call, Unserved
from jaxpar.kernels.attention.tpu_grid import ArrayKind, by_tile, cut_tiles, launch, make_walk
from jaxpar.kernels.attention.tpu_kernels import dkv_kernel, dq_kernel, forward_kernel
from jaxpar.kernels.attention.visits import check_list, most_steps
from jaxpar.kernels.masks import Mask, segments_in

_HEAD_DIM = 256


def refusal(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: DTypeLike,
    mask: Mask,
    call: Call = DEFAULT,
) -> str:
    """Say why these arrays cannot be served; empty = they can."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(dtype).name} is not float32 or bfloat16"
    if q_shape[-1] > _HEAD_DIM:
        return f"head_dim {q_shape[-1]} is more than {_HEAD_DIM}"
    try:
        tiles = cut_tiles(q_shape, k_shape[1], dtype, mask, call)
        batch = q_shape[0] if segments_in(mask) else 1
        check_list(batch * max(most_steps(mask, tiles, by_keys) for by_keys in (False, True)))
    except Unserved as unserved:
        return str(unserved)
    return ""


def forward(
    q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, mask: Mask, call: Call = DEFAULT, tile: int = 0
) -> tuple[Array, Array]:
    """Return (out, lse) as `jaxpar.kernels.attention.call` defines them.

    Args:
      tile: the most queries, and the most keys, of a tile; 0 = as fits.

    Raises:
      Unserved: for the reasons that `refusal` says.
    """
    B, S, H, h = q_BSHh.shape
    walk = make_walk(q_BSHh, k_BTKh, mask, call, tile)
    q = walk.tiles.block_q
    t = walk.tiles.block_k
    arrays: dict[ArrayKind, list[Array]] = {
        "queries": [walk.by_head(q_BSHh, q)],
        "keys": [walk.by_head(k_BTKh, t), walk.by_head(v_BTKh, t)],
    }
    outputs: list[tuple[ArrayKind, DTypeLike]] = [
        ("queries", call.out_dtype or q_BSHh.dtype),
        ("per_query", jnp.float32),
    ]
    sums = [(1, q), (1, q), (h, q)]
    out, lse_BHQ1q = launch(forward_kernel, walk, arrays, outputs, sums, products=2)
    lse_BHS = lse_BHQ1q.reshape(B, H, -1)[:, :, :S]
    return walk.by_place(out, S), lse_BHS


def backward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    dout_BSHh: Array,
    lse_BHS: Array,
    delta_BHS: Array,
    mask: Mask,
    call: Call = DEFAULT,
    tile: int = 0,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) as `jaxpar.kernels.attention.call` defines them.

    Args:
      tile: the most queries, and the most keys, of a tile; 0 = as fits.

    Raises:
      Unserved: for the reasons that `refusal` says.
    """
    _, S, _, h = q_BSHh.shape
    T = k_BTKh.shape[1]
    of_queries = make_walk(q_BSHh, k_BTKh, mask, call, tile)
    of_keys = make_walk(q_BSHh, k_BTKh, mask, call, tile, of_keys=True)
    q = of_queries.tiles.block_q
    t = of_queries.tiles.block_k
    arrays: dict[ArrayKind, list[Array]] = {
        "queries": [
            of_queries.by_head(q_BSHh, q),
            of_queries.by_head(dout_BSHh.astype(v_BTKh.dtype), q),
        ],
        "keys": [of_keys.by_head(k_BTKh, t), of_keys.by_head(v_BTKh, t)],
        "per_query": [by_tile(jnp.maximum(lse_BHS, BLIND), q), by_tile(delta_BHS, q)],
    }
    of_q, of_k, of_v = (call.out_dtype or x.dtype for x in (q_BSHh, k_BTKh, v_BTKh))
    of_dq: list[tuple[ArrayKind, DTypeLike]] = [("queries", of_q)]
    of_dkv: list[tuple[ArrayKind, DTypeLike]] = [("keys", of_k), ("keys", of_v)]
    (dq,) = launch(dq_kernel, of_queries, arrays, of_dq, sums=[(h, q)], products=3)
    dk, dv = launch(dkv_kernel, of_keys, arrays, of_dkv, sums=[(t, h), (t, h)], products=4)
    return of_queries.by_place(dq, S), of_keys.by_place(dk, T), of_keys.by_place(dv, T)
