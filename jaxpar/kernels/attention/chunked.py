"""Attention in plain XLA, a tile of scores at a time: memory grows with queries and keys, never
with their product.

The softmax's maximum and sum are carried along, and the backward computes the weights again from
the log-sum-exp (FlashAttention-2, arXiv:2307.08691). A tile in which nothing is seen is left out,
either while tracing, if that is known then, or by a branch. This serves every mask, shape and dtype
on every platform.

Shapes: as in `jaxpar.kernels.attention.call`; G query heads per kv head, r queries and c keys of a
tile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.kernels.attention.call import (
    BLIND,
    MASKED,
    Call,
    cap_scores,
    drop_weights,
    pad_to,
    through_cap,
)
from jaxpar.kernels.attention.visits import possible_states
from jaxpar.kernels.masks import EMPTY, FULL, Mask, Segments, Tiles, tile_states

State = TypeVar("State")


class TileSize(NamedTuple):
    """The most queries and keys of a tile."""

    rows: int = 512
    columns: int = 1024


TILE = TileSize()
# JAX keeps traced functions; those traced with other tiles are not taken for this one's.
_MOST = jax.make_user_context(TILE)


def tiles_at_most(size: TileSize) -> AbstractContextManager[None]:
    """Return a context in which functions are traced with tiles of at most this size, so that a
    short sequence has as many tiles as a long one.
    """
    return _MOST(size)


class Dropout(NamedTuple):
    """Dropout of the weights, with one random draw for each tile. The same key for the whole array
    gives the same bits on every mesh.
    """

    rate: float
    key: jax.Array


def forward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    call: Call,
    dropout: Dropout | None = None,
) -> tuple[Array, Array]:
    """Return (out, lse) as `jaxpar.kernels.attention.call` defines them."""
    work = _Work.of(q_BSHh, k_BTKh, mask, call, dropout)
    q_BKGSh, k_BKTh, v_BKTh = work.lay_out(q_BSHh, k_BTKh, v_BTKh)
    rows = q_BKGSh.shape[:4]

    def visit(state: tuple[Array, ...], at: _Tile) -> tuple[Array, ...]:
        def seen() -> tuple[Array, ...]:
            v_BKch = at.columns_of(v_BKTh)
            scores = at.scores(q_BKGSh, k_BKTh)
            highest = jnp.maximum(most, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - highest[..., None])
            kept = jnp.exp(most - highest)
            dropped = at.drop(weights).astype(v_BKch.dtype)
            added = _product("BKGrc,BKch->BKGrh", dropped, v_BKch)
            next_out = out * kept[..., None] + added
            next_total = total * kept + jnp.sum(weights, axis=-1)
            return next_out, highest, next_total

        old = tuple(at.rows_of(x) for x in state)
        out, most, total = old
        found = at.where_seen(seen, old)
        return tuple(at.put_rows(x, new) for x, new in zip(state, found, strict=True))

    nothing = (
        jnp.zeros(q_BKGSh.shape, jnp.float32),
        jnp.full(rows, BLIND, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    out, most, total = (x[:, :, :, : work.tiles.S] for x in work.visit_all(visit, nothing))
    total = jnp.where(total == 0, 1, total)
    out_BSHh = _ungroup_heads(out / total[..., None]).astype(call.out_dtype or q_BSHh.dtype)
    lse_BKGS = most + jnp.log(total)
    B, _, _, S = lse_BKGS.shape
    return out_BSHh, lse_BKGS.reshape(B, -1, S)


def backward(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    dout_BSHh: Array,
    lse_BHS: Array,
    delta_BHS: Array,
    mask: Mask,
    call: Call,
    dropout: Dropout | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) as `jaxpar.kernels.attention.call` defines them."""
    work = _Work.of(q_BSHh, k_BTKh, mask, call, dropout)
    q_BKGSh, k_BKTh, v_BKTh = work.lay_out(q_BSHh, k_BTKh, v_BTKh)
    dout_BKGSh = work.pad_rows(_group_heads(dout_BSHh.astype(v_BTKh.dtype), k_BTKh.shape[2]))
    of_rows = (*q_BKGSh.shape[:3], lse_BHS.shape[-1])
    lse_BKGS, delta_BKGS = (
        work.pad_rows(x.reshape(of_rows)) for x in (jnp.maximum(lse_BHS, BLIND), delta_BHS)
    )
    inputs = _Inputs(q_BKGSh, k_BKTh, v_BKTh, dout_BKGSh, lse_BKGS, delta_BKGS)

    def visit(sums: _Gradients, at: _Tile) -> _Gradients:
        dq_BKGrh = at.rows_of(sums.dq)
        dk_BKch = at.columns_of(sums.dk)
        dv_BKch = at.columns_of(sums.dv)
        old = _Gradients(dq_BKGrh, dk_BKch, dv_BKch)
        new = at.where_seen(lambda: _add_tile(old, inputs, at), old)
        return _Gradients(
            at.put_rows(sums.dq, new.dq),
            at.put_columns(sums.dk, new.dk),
            at.put_columns(sums.dv, new.dv),
        )

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (q_BKGSh, k_BKTh, v_BKTh))
    sums = work.visit_all(visit, _Gradients(*zeros))
    scale = call.scale_of(q_BSHh)
    tiles = work.tiles
    dq_BSHh = _ungroup_heads(sums.dq[:, :, :, : tiles.S] * scale)
    dk_BTKh, dv_BTKh = (x[:, :, : tiles.T].swapaxes(1, 2) for x in (sums.dk * scale, sums.dv))
    return (
        dq_BSHh.astype(call.out_dtype or q_BSHh.dtype),
        dk_BTKh.astype(call.out_dtype or k_BTKh.dtype),
        dv_BTKh.astype(call.out_dtype or v_BTKh.dtype),
    )


class _Inputs(NamedTuple):
    """The arrays that the backward reads, padded to whole tiles."""

    q_BKGSh: Array
    k_BKTh: Array
    v_BKTh: Array
    dout_BKGSh: Array
    lse_BKGS: Array
    delta_BKGS: Array


class _Gradients(NamedTuple):
    """Float32 sums of the gradients, of all tiles or of one."""

    dq: Array
    """[B, K, G, S, h], or of a tile [B, K, G, r, h]."""
    dk: Array
    """[B, K, T, h], or of a tile [B, K, c, h]."""
    dv: Array
    """[B, K, T, h], or of a tile [B, K, c, h]."""


def _add_tile(sums: _Gradients, inputs: _Inputs, at: _Tile) -> _Gradients:
    """Add the gradients that a tile contributes to the sums of its rows and columns."""
    q_BKGrh = at.rows_of(inputs.q_BKGSh)
    dout_BKGrh = at.rows_of(inputs.dout_BKGSh)
    k_BKch = at.columns_of(inputs.k_BKTh)
    v_BKch = at.columns_of(inputs.v_BKTh)
    scores = at.scores(inputs.q_BKGSh, inputs.k_BKTh)
    weights = jnp.exp(scores - at.rows_of(inputs.lse_BKGS)[..., None])
    dweights = at.drop(_product("BKGrh,BKch->BKGrc", dout_BKGrh, v_BKch))
    dcapped = weights * (dweights - at.rows_of(inputs.delta_BKGS)[..., None])
    dscores = through_cap(dcapped, scores, at.work.call.softcap).astype(k_BKch.dtype)
    weights = at.drop(weights).astype(v_BKch.dtype)
    return _Gradients(
        sums.dq + _product("BKGrc,BKch->BKGrh", dscores, k_BKch),
        sums.dk + _product("BKGrc,BKGrh->BKch", dscores, q_BKGrh),
        sums.dv + _product("BKGrc,BKGrh->BKch", weights, dout_BKGrh),
    )


class _Work(NamedTuple):
    """The tiles, all of one size; the last ones may reach past the end."""

    tiles: Tiles
    mask: Mask
    call: Call
    scale: float
    dropout: Dropout | None

    @staticmethod
    def of(
        q_BSHh: Array,
        k_BTKh: Array,
        mask: Mask,
        call: Call,
        dropout: Dropout | None,
    ) -> _Work:
        S = q_BSHh.shape[1]
        T = k_BTKh.shape[1]
        most = cast(TileSize, _MOST.value)
        block_q = _even_part(S, most.rows)
        block_k = _even_part(T, most.columns)
        tiles = Tiles(S, T, block_q, block_k, call.q_start, call.k_start, call.multiple)
        return _Work(tiles, mask, call, call.scale_of(q_BSHh), dropout)

    def lay_out(
        self,
        q_BSHh: Array,
        k_BTKh: Array,
        v_BTKh: Array,
    ) -> tuple[Array, Array, Array]:
        """Lay the arrays out as [B, K, G, S, h] and [B, K, T, h], padded to whole tiles."""
        k_BKTh, v_BKTh = (pad_to(x.swapaxes(1, 2), 2, self.tiles.block_k) for x in (k_BTKh, v_BTKh))
        return self.pad_rows(_group_heads(q_BSHh, k_BTKh.shape[2])), k_BKTh, v_BKTh

    def pad_rows(self, x: Array) -> Array:
        return pad_to(x, 3, self.tiles.block_q)

    def visit_all(self, visit: Callable[[State, _Tile], State], state: State) -> State:
        """Visit every tile in which something may be seen, and return the state after the last."""
        found = tile_states(self.mask, self.tiles)
        known = isinstance(found, np.ndarray) and found.ndim == 2
        if known:
            likely = found
            full = likely == FULL
            states = None
        else:
            likely = possible_states(self.mask, self.tiles)
            full = np.zeros_like(likely, bool)
            if found.ndim == 3:
                states = jnp.max(found, axis=0)
            else:
                states = jnp.asarray(found)
        if self.tiles.T % self.tiles.block_k:
            full[:, -1] = False
        partial = (likely != EMPTY) & ~full
        for places, masked in ((full, False), (partial, True)):
            numbers = np.argwhere(places).astype(np.int32)
            if len(numbers) == 1:
                row, column = map(int, numbers[0])
                state = visit(state, _Tile(self, row, column, masked, states))
            elif len(numbers):

                def step(state: State, number: Array, masked: bool = masked) -> tuple[State, None]:
                    row, column = number[0], number[1]
                    return visit(state, _Tile(self, row, column, masked, states)), None

                state, _ = jax.lax.scan(step, state, jnp.asarray(numbers))
        return state


class _Tile(NamedTuple):
    """One tile: its numbers, whether any of it may be hidden, and the states of all tiles if they
    are found at run time.
    """

    work: _Work
    row: int | Array
    column: int | Array
    masked: bool
    states: Int[Array, "Q K"] | None

    def rows_of(self, x: Array) -> Array:
        size = self.work.tiles.block_q
        return jax.lax.dynamic_slice_in_dim(x, self.row * size, size, axis=3)

    def columns_of(self, x: Array) -> Array:
        size = self.work.tiles.block_k
        return jax.lax.dynamic_slice_in_dim(x, self.column * size, size, axis=2)

    def put_rows(self, x: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(
            x, part, self.row * self.work.tiles.block_q, axis=3
        )

    def put_columns(self, x: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(
            x, part, self.column * self.work.tiles.block_k, axis=2
        )

    def where_seen(self, seen: Callable[[], State], otherwise: State) -> State:
        """Return `seen()`, or `otherwise` where ids or places leave nothing to see."""
        if self.states is None:
            return seen()
        return jax.lax.cond(
            self.states[self.row, self.column] != EMPTY,
            seen,
            lambda: otherwise,
        )

    def scores(self, q_BKGSh: Array, k_BKTh: Array) -> Float[Array, "B K G r c"]:
        """Compute the float32 scores as the softmax takes them, with the places that may not be
        seen masked out.
        """
        work = self.work
        scores = (
            _product("BKGrh,BKch->BKGrc", self.rows_of(q_BKGSh), self.columns_of(k_BKTh))
            * work.scale
        )
        scores = cap_scores(scores, work.call.softcap)
        if not self.masked:
            return scores
        tiles = work.tiles
        row = self.row * tiles.block_q + jnp.arange(tiles.block_q)
        column = self.column * tiles.block_k + jnp.arange(tiles.block_k)

        def of_tile(leaf: Mask) -> Mask:
            if not isinstance(leaf, Segments):
                return leaf
            # Places past the end read as the last one: their rows are dropped, and their columns
            # are hidden below.
            rows = jnp.minimum(row, tiles.S - 1)
            columns = jnp.minimum(column, tiles.T - 1)
            q_ids = jnp.asarray(leaf.q_ids)[:, rows]
            kv_ids = jnp.asarray(leaf.kv_ids)[:, columns]
            return replace(leaf, q_ids=q_ids, kv_ids=kv_ids)

        visible = work.mask.replaced(of_tile).visible(
            row[:, None] + tiles.q_start, column + tiles.k_start
        )
        visible = visible & (column < tiles.T)
        if visible.ndim > 2:  # sequences differ
            visible = visible[:, None, None]
        return jnp.where(visible, scores, MASKED)

    def drop(self, weights: Array) -> Array:
        """Return the weights, with some of them dropped."""
        if self.work.dropout is None:
            return weights
        rate, key = self.work.dropout
        number = self.row * self.work.tiles.shape[1] + self.column
        return drop_weights(weights, rate, jax.random.fold_in(key, number))


def _even_part(size: int, most: int) -> int:
    """Return the size of the fewest equal parts that are no larger than `most`; the last part may
    be smaller.
    """
    return -(-size // -(-size // most))


def _product(subscripts: str, a: Array, b: Array) -> Array:
    """Compute an einsum that sums in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _group_heads(x_BSHh: Array, K: int) -> Array:
    """Turn [B, S, H, h] into [B, K, G, S, h]."""
    B, S, H, h = x_BSHh.shape
    x_BSKGh = x_BSHh.reshape(B, S, K, H // K, h)
    return x_BSKGh.transpose(0, 2, 3, 1, 4)


def _ungroup_heads(x_BKGSh: Array) -> Array:
    """Turn [B, K, G, S, h] into [B, S, H, h]."""
    B, K, G, S, h = x_BKGSh.shape
    x_BSKGh = x_BKGSh.transpose(0, 3, 1, 2, 4)
    return x_BSKGh.reshape(B, S, K * G, h)
