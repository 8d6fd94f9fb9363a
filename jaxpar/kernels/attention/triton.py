"""Attention on NVIDIA GPUs by Pallas' Triton lowering, after FlashAttention-2 (arXiv:2307.08691,
algorithms 1 and 2).

There are three kernels (`triton_kernels`). One gives the output and its log-sum-exp, and one gives
dq; both have a program for each tile of queries of a head. The third gives dk and dv: it has a
program for each tile of keys of a kv head, which walks the query heads of that kv head, so that
nothing is added atomically. Arrays are read where they lie.

jax 0.12 still has this lowering, but warns that a later version will not.

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.kernels.attention.call import DEFAULT, Arrays, Call, Index, Unserved
from jaxpar.kernels.attention.triton_kernels import (
    Plan,
    attention_dkv,
    attention_dq,
    attention_forward,
)
from jaxpar.kernels.attention.triton_tiles import LEAST, Tile, TileSizes, tile_sizes_here
from jaxpar.kernels.attention.visits import Visits, block_units, visits
from jaxpar.kernels.masks import Mask, Tiles, segments_in

MOST_HEAD_DIM = 256


def refusal(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: DTypeLike,
    mask: Mask,
    call: Call = DEFAULT,
) -> str:
    """Say why these arrays cannot be served; empty = they can."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(dtype)} is neither float32 nor bfloat16"
    if not LEAST <= q_shape[-1] <= MOST_HEAD_DIM:
        return f"head_dim {q_shape[-1]} is not between {LEAST} and {MOST_HEAD_DIM}"
    try:
        _fit_tile(Tile(LEAST, LEAST), q_shape[1], k_shape[1], mask, call)
    except Unserved as refused:
        return str(refused)
    return ""


def forward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    call: Call = DEFAULT,
    sizes: TileSizes | None = None,
) -> tuple[Array, Array]:
    """Return (out, lse) as `jaxpar.kernels.attention.call` defines them.

    Args:
      sizes: the sizes of the tiles; None = the sizes for the chip.

    Raises:
      Unserved: no tile divides the mask's blocks.
    """
    B, S, H, h = q_BSHh.shape
    tile = (sizes or tile_sizes_here(h, q_BSHh.dtype)).forward
    out = jax.ShapeDtypeStruct(q_BSHh.shape, call.out_dtype or q_BSHh.dtype)
    lse = jax.ShapeDtypeStruct((B, H, S), jnp.float32)
    out_BSHh, lse_BHS = _run(
        attention_forward, 2, tile, [q_BSHh, k_BTKh, v_BTKh], [out, lse], mask, call
    )
    return out_BSHh, lse_BHS


def backward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    dout_BSHh: Array,
    lse_BHS: Array,
    delta_BHS: Array,
    mask: Mask,
    call: Call = DEFAULT,
    sizes: TileSizes | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) as `jaxpar.kernels.attention.call` defines them.

    Args:
      sizes: the sizes of the tiles; None = the sizes for the chip.

    Raises:
      Unserved: no tile divides the mask's blocks.
    """
    _, dq_tile, dkv_tile = sizes or tile_sizes_here(q_BSHh.shape[-1], q_BSHh.dtype)
    arrays = [q_BSHh, k_BTKh, v_BTKh, dout_BSHh.astype(v_BTKh.dtype), lse_BHS, delta_BHS]
    dq, dk, dv = (jax.ShapeDtypeStruct(x.shape, call.out_dtype or x.dtype) for x in arrays[:3])
    (dq_BSHh,) = _run(attention_dq, 3, dq_tile, arrays, [dq], mask, call)
    dk_BTKh, dv_BTKh = _run(attention_dkv, 4, dkv_tile, arrays, [dk, dv], mask, call, of_keys=True)
    return dq_BSHh, dk_BTKh, dv_BTKh


def _run(
    kernel: Callable[..., None],
    products: int,
    tile: Tile,
    arrays: Sequence[Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    mask: Mask,
    call: Call,
    of_keys: bool = False,
) -> list[Array]:
    """Run a program for each tile of queries of each head; with `of_keys`, for each tile of keys of
    each kv head.

    Args:
      kernel: one of `triton_kernels`.
      products: the number of matrix products for each visited tile. The program states their FLOPs,
        which with ids are an upper bound.
      tile: the tile's size, before it is fitted to the sequence.
      arrays: the queries, the keys, and the other arrays that the kernel reads.
      outs: the shapes and dtypes of the arrays that it writes.
      mask: which keys a query sees.
      of_keys: whether rows are tiles of keys, and not tiles of queries.
    """
    B, S, H, h = arrays[0].shape
    T, K = arrays[1].shape[1:3]
    tile = _fit_tile(tile, S, T, mask, call)
    tiles = Tiles(S, T, tile.block_q, tile.block_k, call.q_start, call.k_start, call.multiple)
    lists = visits(mask, tiles, of_keys)
    ids = [(leaf.q_ids, leaf.kv_ids) for leaf in segments_in(mask)]
    heads = K if of_keys else H
    given = ([jnp.asarray(x) for x in lists], call.starts(), ids, list(arrays))
    plan = Plan(mask, tiles, h, call.scale_of(arrays[0]), call.softcap)
    if isinstance(lists.some, jax.Array):
        most_visits = lists.entries.size
    else:
        most_visits = int(lists.some.sum())
    visited = most_visits * B // len(lists.some)
    of_tile = 2 * products * H * h * tile.block_q * tile.block_k
    flops = of_tile * visited
    moved = sum(x.size * x.dtype.itemsize for x in (*arrays, *outs))
    return pl.pallas_call(
        partial(kernel, plan),
        grid=(lists.entries.shape[1], heads, B),
        in_specs=(
            [_of_sequence(x) for x in lists],
            pl.BlockSpec((2,), lambda *_: (0,)),
            [(_of_sequence(q), _of_sequence(kv)) for q, kv in ids],
            [_of_head(x, heads) for x in arrays],
        ),
        out_specs=[_of_head(x, heads) for x in outs],
        out_shape=list(outs),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=call.interpret,
        name=kernel.__name__,
        metadata={
            "flops": str(flops),
            "bytes_accessed": str(moved),
            "kernel": "pallas_gpu",
            "keys": str(T),
            "seen_flops": str(of_tile * _seen_tiles(lists) * B // len(lists.some)),
        },
    )(*given)


def _seen_tiles(lists: Visits) -> int:
    """Count the visited tiles, those that a mask's edge crosses as halves: one with the diagonal
    shows half of its scores.
    """
    if isinstance(lists.some, jax.Array) or isinstance(lists.full, jax.Array):
        return lists.entries.size  # known only as it runs
    return int((lists.some + lists.full).sum()) // 2


def _fit_tile(tile: Tile, S: int, T: int, mask: Mask, call: Call) -> Tile:
    """Make a tile smaller where the sequence is short, or where it would cut a block mask's
    blocks.

    Raises:
      Unserved: no tile divides the blocks.
    """
    unit_q, unit_k = block_units(mask, call)
    enough_q = pl.next_power_of_2(max(S, LEAST))
    enough_k = pl.next_power_of_2(max(T, LEAST))
    block_q = math.gcd(min(tile.block_q, enough_q), unit_q)
    block_k = math.gcd(min(tile.block_k, enough_k), unit_k)
    if min(block_q, block_k) < LEAST:
        raise Unserved(f"tiles of less than {LEAST} places: {block_q} x {block_k} of {mask}")
    # eight would do the same work twice in a small tile
    warps = min(tile.warps, max(4, block_q * block_k // 256))
    return tile._replace(block_q=block_q, block_k=block_k, warps=warps)


def _of_sequence(x: Arrays) -> pl.BlockSpec:
    """Make the spec of a sequence's part of an array [B, ...], or of an array [1, ...] that all
    sequences share.
    """
    shared = x.shape[0] == 1
    rest = x.shape[1:]

    def index(_: Index, n: Index, b: Index) -> tuple[Index, ...]:
        sequence = 0 if shared else b
        return (sequence, *[0] * len(rest))

    return pl.BlockSpec((None, *rest), index)


def _of_head(x: Arrays, programs: int) -> pl.BlockSpec:
    """Make the spec of the heads of [B, S, H, h] or [B, H, S] that program n reads: its own, or one
    that several programs share.
    """
    H = x.shape[2] if x.ndim == 4 else x.shape[1]
    own = max(H // programs, 1)
    sharing = max(programs // H, 1)
    if x.ndim == 3:
        return pl.BlockSpec((None, own, x.shape[2]), lambda _, n, b: (b, n // sharing, 0))
    shape = (None, x.shape[1], own, pl.next_power_of_2(x.shape[3]))
    return pl.BlockSpec(shape, lambda _, n, b: (b, 0, n // sharing, 0))
