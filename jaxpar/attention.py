"""Causal attention: the whole score matrix, a few query rows at a time, or jax's splash kernel on TPUs.

All three compute `softmax(q k^T / sqrt(h)) v` over the keys at or before each query, scores and softmax in float32,
query heads grouped over kv heads (arXiv:2305.13245). `whole` is the reference of the other two.

Shapes: B batch, S sequence, H heads, K kv heads, G query heads per kv head, h head_dim, R query rows and C key columns
of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jaxtyping import Array, Float, Int

from jaxpar.hardware import LANES

Implementation = Literal["whole", "chunked", "splash"]
MASKED = -1e30  # a finite "minus infinity": exp gives exactly 0, and a row with nothing to see gives no NaN
_ROWS, _CHUNKS, _BLOCK = 512, 8, 1024


def choose(platform: str, seq_len: int, head_dim: int, dropping: bool, layout: str = "") -> tuple[Implementation, str]:
    """The fastest implementation that can serve, and why it is not splash.

    Args:
      platform: `jax.Device.platform` of the devices it is compiled for.
      seq_len: query and key length on one device.
      head_dim: size of a head.
      dropping: attention weights are dropped out.
      layout: why arrays that lie as these do cannot be given to a kernel; empty = they can.
    """
    reasons = [
        (bool(layout), layout),
        (platform != "tpu", f"on {platform}"),
        (head_dim % LANES != 0, f"head_dim {head_dim} is no multiple of {LANES}"),
        (seq_len % LANES != 0, f"sequence length {seq_len} is no multiple of {LANES}"),
        (dropping, "dropout of attention weights"),
    ]
    why = next((text for applies, text in reasons if applies), "")
    if not why:
        return "splash", ""
    return ("chunked" if seq_len > _ROWS else "whole"), why


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """`x` with a share `rate` of its entries zeroed and the rest scaled up; `x` itself when key is None.

    The bits depend on the key and the position in the global array only, so they are the same on every mesh.
    """
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def whole(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    segments_BS: Int[Array, "B S"] | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    window: int = 0,
) -> Float[Array, "B S H h"]:
    """The reference: all scores at once, every one of them kept for the backward.

    Args:
      q_BSHh, k_BSKh, v_BSKh: projections of one sequence, H a multiple of K.
      segments_BS: document of each token; a token sees its own document only. None = one document.
      dropout_rate, key: dropout of the attention weights; none when key is None.
      window: a token sees so many tokens up to itself; 0 = all before it.
    """
    B, S, H, h = q_BSHh.shape
    K = k_BSKh.shape[2]
    q_BSKGh = q_BSHh.reshape(B, S, K, H // K, h)
    scores_BKGSS = jnp.einsum("BSKGh,BTKh->BKGST", q_BSKGh, k_BSKh, preferred_element_type=jnp.float32)
    visible = _visible(slice(0, S), slice(0, S), window)
    if segments_BS is not None:
        visible = visible & (segments_BS[:, None, None, :, None] == segments_BS[:, None, None, None, :])
    weights_BKGSS = jax.nn.softmax(jnp.where(visible, scores_BKGSS / math.sqrt(h), MASKED), axis=-1)
    kept = _kept(weights_BKGSS.shape, dropout_rate, key)
    weights_BKGSS = _dropped(weights_BKGSS, dropout_rate, kept).astype(v_BSKh.dtype)
    return jnp.einsum("BKGST,BTKh->BSKGh", weights_BKGSS, v_BSKh).reshape(B, S, H, h)


@partial(jax.custom_vjp, nondiff_argnums=(4, 6, 7))
def chunked(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    segments_BS: Int[Array, "B S"] | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    rows: int | None = None,
    window: int = 0,
) -> Float[Array, "B S H h"]:
    """`whole`, a chunk of query rows at a time against the keys that it can see, and no scores kept.

    The backward makes the weights again from the log-sum-exp (FlashAttention-2, arXiv:2307.08691, algorithm 2); blocks
    above the diagonal are not computed, those below need no causal mask, and keys before the window are left out.

    Args:
      rows: query rows of a chunk; None = an eighth of the sequence, but at least 512. The rest as for `whole`, but that
        the same key drops other weights: it has one draw a chunk.
    """
    return _chunked_forward(q_BSHh, k_BSKh, v_BSKh, segments_BS, dropout_rate, key, rows, window)[0]


def _chunked_forward(q_BSHh, k_BSKh, v_BSKh, segments_BS, rate, key, rows, window):
    K, k_BKSh, v_BKSh = k_BSKh.shape[2], k_BSKh.swapaxes(1, 2), v_BSKh.swapaxes(1, 2)
    q_BKGSh = grouped(q_BSHh, K)
    outs, lses = [], []
    for chunk, tiles in _tiles(q_BSHh.shape[1], rows, window):
        scores = [_scores(q_BKGSh, k_BKSh, segments_BS, chunk, tile, window) for tile in tiles]
        most = [jnp.max(tile_scores, axis=-1, keepdims=True) for tile_scores in scores]
        most_BKGR1 = most[0] if len(most) == 1 else jnp.maximum(*most)
        kept = _kept(_tile_shape(q_BKGSh, chunk), rate, key, chunk.start)
        out: Any = 0.0
        total: Any = 0.0
        for tile, tile_scores in zip(tiles, scores, strict=True):
            weights = jnp.exp(tile_scores - most_BKGR1)
            total += jnp.sum(weights, axis=-1, keepdims=True)
            weights = _dropped(weights, rate, kept, tile).astype(v_BSKh.dtype)
            out += product("BKGRC,BKCh->BKGRh", weights, v_BKSh[:, :, tile])
        outs.append((out / total).astype(v_BSKh.dtype))
        lses.append(most_BKGR1 + jnp.log(total))
    out_BSHh = ungrouped(jnp.concatenate(outs, axis=3))
    return out_BSHh, (q_BSHh, k_BSKh, v_BSKh, segments_BS, key, out_BSHh, jnp.concatenate(lses, axis=3))


def _chunked_backward(rate, rows, window, residuals, dout_BSHh):
    q_BSHh, k_BSKh, v_BSKh, segments_BS, key, out_BSHh, lse_BKGS1 = residuals
    K, k_BKSh, v_BKSh = k_BSKh.shape[2], k_BSKh.swapaxes(1, 2), v_BSKh.swapaxes(1, 2)
    q_BKGSh = grouped(q_BSHh, K)
    delta_BSH1 = jnp.sum(dout_BSHh.astype(jnp.float32) * out_BSHh.astype(jnp.float32), axis=-1, keepdims=True)
    delta_BKGS1, dout_BKGSh = grouped(delta_BSH1, K), grouped(dout_BSHh, K).astype(v_BSKh.dtype)
    dqs, dk_BKSh, dv_BKSh = [], jnp.zeros(k_BKSh.shape, jnp.float32), jnp.zeros(v_BKSh.shape, jnp.float32)
    for chunk, tiles in _tiles(q_BSHh.shape[1], rows, window):
        dq: Any = 0.0
        q_BKGRh, dout_BKGRh = q_BKGSh[:, :, :, chunk], dout_BKGSh[:, :, :, chunk]
        kept = _kept(_tile_shape(q_BKGSh, chunk), rate, key, chunk.start)
        for tile in tiles:
            weights = jnp.exp(_scores(q_BKGSh, k_BKSh, segments_BS, chunk, tile, window) - lse_BKGS1[:, :, :, chunk])
            dweights = _dropped(product("BKGRh,BKCh->BKGRC", dout_BKGRh, v_BKSh[:, :, tile]), rate, kept, tile)
            dscores = (weights * (dweights - delta_BKGS1[:, :, :, chunk])).astype(k_BSKh.dtype)
            weights = _dropped(weights, rate, kept, tile).astype(v_BSKh.dtype)
            dq += product("BKGRC,BKCh->BKGRh", dscores, k_BKSh[:, :, tile])
            dk_BKSh = dk_BKSh.at[:, :, tile].add(product("BKGRC,BKGRh->BKCh", dscores, q_BKGRh))
            dv_BKSh = dv_BKSh.at[:, :, tile].add(product("BKGRC,BKGRh->BKCh", weights, dout_BKGRh))
        dqs.append((dq * scale(q_BSHh)).astype(q_BSHh.dtype))
    dq_BSHh = ungrouped(jnp.concatenate(dqs, axis=3))
    dk_BSKh = (dk_BKSh * scale(q_BSHh)).swapaxes(1, 2).astype(k_BSKh.dtype)
    dv_BSKh = dv_BKSh.swapaxes(1, 2).astype(v_BSKh.dtype)
    return dq_BSHh, dk_BSKh, dv_BSKh, None, None


chunked.defvjp(_chunked_forward, _chunked_backward)


def _tiles(seq_len: int, rows: int | None, window: int = 0) -> Iterator[tuple[slice, list[slice]]]:
    """Chunks of query rows, each with the key columns before it (from the window on) and its own (on the diagonal)."""
    rows = rows or max(_ROWS, -(-seq_len // _CHUNKS))
    for first in range(0, seq_len, rows):
        chunk = slice(first, min(first + rows, seq_len))
        before = slice(max(0, first - window + 1) if window else 0, first)
        yield chunk, [before, chunk] if before.stop > before.start else [chunk]


def _tile_shape(q_BKGSh: Array, chunk: slice) -> tuple[int, ...]:
    """[B, K, G, R, C] of a chunk's rows over the keys up to its end."""
    return (*q_BKGSh.shape[:3], chunk.stop - chunk.start, chunk.stop)


def _kept(shape: tuple[int, ...], rate: float, key: jax.Array | None, place: int = 0) -> Array | None:
    """Which weights [B, K, G, R, C] dropout keeps, None = all; `place` tells draws from one key apart."""
    if key is None or rate == 0:
        return None
    B, K, G, R, C = shape
    # The same bits as of a draw over five dims, which takes XLA:CPU three times as long to compile.
    kept = jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, (B, K * G, R * C))
    return kept.reshape(shape)


def _dropped(x: Array, rate: float, kept: Array | None, tile: slice = slice(None)) -> Array:
    return x if kept is None else jnp.where(kept[..., tile], x / (1 - rate), 0)


def _visible(chunk: slice, tile: slice, window: int) -> Array:
    """Which keys of a tile the queries of a chunk may see [R, C]."""
    ahead = jnp.arange(tile.start, tile.stop) - jnp.arange(chunk.start, chunk.stop)[:, None]
    return (ahead <= 0) & (ahead > -window) if window else ahead <= 0


def _scores(
    q_BKGSh: Array, k_BKSh: Array, segments_BS: Array | None, chunk: slice, tile: slice, window: int = 0
) -> Array:
    """Scaled float32 scores of one tile, what may not be seen masked out."""
    scores = product("BKGRh,BKCh->BKGRC", q_BKGSh[:, :, :, chunk], k_BKSh[:, :, tile]) * scale(q_BKGSh)
    visible = None
    if chunk == tile or (window and chunk.stop - tile.start > window):
        visible = _visible(chunk, tile, window)
    if segments_BS is not None:
        same = (segments_BS[:, chunk, None] == segments_BS[:, None, tile])[:, None, None]
        visible = same if visible is None else visible & same
    return scores if visible is None else jnp.where(visible, scores, MASKED)


def scale(x: Array) -> float:
    return 1 / math.sqrt(x.shape[-1])


def product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def grouped(x_BSHh: Array, K: int) -> Array:
    """[B, S, H, h] as [B, K, G, S, h]."""
    B, S, H, h = x_BSHh.shape
    return x_BSHh.reshape(B, S, K, H // K, h).transpose(0, 2, 3, 1, 4)


def ungrouped(x_BKGSh: Array) -> Array:
    """The inverse of `grouped`."""
    B, K, G, S, h = x_BKGSh.shape
    return x_BKGSh.transpose(0, 3, 1, 2, 4).reshape(B, S, K * G, h)


def splash(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    segments_BS: Int[Array, "B S"] | None = None,
    window: int = 0,
    interpret: bool = False,
) -> Float[Array, "B S H h"]:
    """`whole` by jax's own Pallas kernel for TPUs; local arrays only (it cannot be split by the compiler).

    Args:
      interpret: run the kernel step by step on any device, to test it. The rest as for `whole`.
    """
    S, H = q_BSHh.shape[1:3]
    block = math.gcd(S, _BLOCK)
    sizes = splash_kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    one = splash_mask.LocalMask((S, S), (window - 1, 0), 0) if window else splash_mask.CausalMask((S, S))
    mask = splash_mask.MultiHeadMask([one] * H)
    kernel = splash_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret)

    def of_sequence(q_HSh: Array, k_KSh: Array, v_KSh: Array, segments_S: Array | None) -> Array:
        segments: Any = None if segments_S is None else splash_kernel.SegmentIds(segments_S, segments_S)
        out_HSh: Any = kernel(q_HSh, k_KSh, v_KSh, segments)
        return out_HSh

    # The kernel does not scale. In float32, because the scale itself may not fit the dtype.
    q_BHSh = (q_BSHh.swapaxes(1, 2).astype(jnp.float32) * scale(q_BSHh)).astype(q_BSHh.dtype)
    out_BHSh = jax.vmap(of_sequence)(q_BHSh, k_BSKh.swapaxes(1, 2), v_BSKh.swapaxes(1, 2), segments_BS)
    return out_BHSh.swapaxes(1, 2)


def kernel_cost(name: str, shapes: list[tuple[int, ...]]) -> float | None:
    """FLOPs of one call of a kernel, which the compiled program does not say; None for a kernel not from here.

    Args:
      name: the call's instruction name: `splash_mha_fwd_residuals.3`.
      shapes: shapes of its operands.
    """
    matmuls = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
    count = next((n for prefix, n in matmuls.items() if name.startswith(prefix)), None)
    heads = [shape for shape in shapes if len(shape) >= 3 and shape[-1] % LANES == 0 and shape[-2] > 8]
    if count is None or not heads:
        return None
    *batch, S, h = heads[0]
    return count * 2 * math.prod(batch) * h * S * S / 2
