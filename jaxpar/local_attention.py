"""Attention of one block of queries against one block of keys: (out, log-sum-exp) pairs that merge, and their backward.

A block is a run of the sequence. It is taken a tile at a time with the softmax's maximum and sum carried along
(FlashAttention-2, arXiv:2307.08691), so memory grows with the rows and the columns, never with their product. A tile in
which nothing may be seen is left out: while tracing, where its place is known by then, else by a branch.

Shapes: B batch, K kv heads, G query heads per kv head, R query rows and C key columns of a block, r and c of a tile,
h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.attention import MASKED, product, scale

ROWS, COLUMNS = 512, 1024  # of a tile, at most
_FLOOR = MASKED / 2  # below any score and above what is masked: exp(MASKED - _FLOOR) is exactly 0


class Block(NamedTuple):
    """Which keys the queries of a block may see.

    Attributes:
      q_start, k_start: places of the first query and the first key; only their difference counts.
      window: a query sees so many keys up to its own; 0 = all before it.
      q_segments_BR, k_segments_BC: document of each token; a token sees its own document only. None = one document.
    """

    q_start: int | Array
    k_start: int | Array
    window: int = 0
    q_segments_BR: Int[Array, "B R"] | None = None
    k_segments_BC: Int[Array, "B C"] | None = None


Pair = tuple[Float[Array, "B K G R h"], Float[Array, "B K G R"]]
"""Float32 output and log-sum-exp of its scores; of a row that sees nothing, zeros and about `MASKED`."""


def attend(
    q_BKGRh: Float[Array, "B K G R h"], k_BKCh: Float[Array, "B K C h"], v_BKCh: Float[Array, "B K C h"], block: Block
) -> Pair:
    """Softmax attention over the keys of this block alone."""
    tiles = _Tiles(q_BKGRh.shape[3], k_BKCh.shape[2], block)
    q_BKGRh, k_BKCh, v_BKCh = tiles.pad_rows(q_BKGRh), tiles.pad_columns(k_BKCh), tiles.pad_columns(v_BKCh)
    rows = q_BKGRh.shape[:4]

    def visit(state: tuple[Array, ...], at: _Tile) -> tuple[Array, ...]:
        def seen() -> tuple[Array, ...]:
            k_BKch, v_BKch = at.columns_of(k_BKCh), at.columns_of(v_BKCh)
            scores = at.mask(product("BKGrh,BKch->BKGrc", at.rows_of(q_BKGRh), k_BKch) * scale(q_BKGRh))
            highest = jnp.maximum(most, jnp.max(scores, axis=-1))
            weights, kept = jnp.exp(scores - highest[..., None]), jnp.exp(most - highest)
            added = product("BKGrc,BKch->BKGrh", weights.astype(v_BKch.dtype), v_BKch)
            return out * kept[..., None] + added, highest, total * kept + jnp.sum(weights, axis=-1)

        out, most, total = old = tuple(at.rows_of(x) for x in state)
        return tuple(at.put_rows(x, new) for x, new in zip(state, at.where_seen(seen, old), strict=True))

    nothing = jnp.zeros(q_BKGRh.shape, jnp.float32), jnp.full(rows, _FLOOR, jnp.float32), jnp.zeros(rows, jnp.float32)
    out, most, total = (tiles.rows_only(x) for x in tiles.visit_all(visit, nothing))
    blind = total == 0
    total = jnp.where(blind, 1, total)
    return out / total[..., None], jnp.where(blind, MASKED, most + jnp.log(total))


def merge(first: Pair, second: Pair) -> Pair:
    """Attention over the keys of two blocks, from that over each: weighed by exp(log-sum-exp), the larger taken out."""
    (first_out, first_lse), (second_out, second_lse) = first, second
    most = jnp.maximum(first_lse, second_lse)
    weight, other = jnp.exp(first_lse - most), jnp.exp(second_lse - most)
    total = weight + other
    out = (weight / total)[..., None] * first_out + (other / total)[..., None] * second_out
    return out, most + jnp.log(total)


def attend_backward(
    q_BKGRh: Float[Array, "B K G R h"],
    k_BKCh: Float[Array, "B K C h"],
    v_BKCh: Float[Array, "B K C h"],
    dout_BKGRh: Float[Array, "B K G R h"],
    lse_BKGR: Float[Array, "B K G R"],
    delta_BKGR: Float[Array, "B K G R"],
    block: Block,
) -> tuple[Array, Array, Array]:
    """What this block of keys contributes to the gradients of q, k and v, in float32.

    Args:
      q_BKGRh, k_BKCh, v_BKCh, block: as given to `attend`.
      dout_BKGRh: gradient of the output over all keys, in the dtype of v.
      lse_BKGR: log-sum-exp over all keys.
      delta_BKGR: sum over h of that output times its gradient, float32.
    """
    tiles = _Tiles(q_BKGRh.shape[3], k_BKCh.shape[2], block)
    lse_BKGR = jnp.maximum(lse_BKGR, _FLOOR)  # of a row that sees nothing, no weight is above 0
    q_BKGRh, dout_BKGRh, lse_BKGR, delta_BKGR = map(tiles.pad_rows, (q_BKGRh, dout_BKGRh, lse_BKGR, delta_BKGR))
    k_BKCh, v_BKCh = tiles.pad_columns(k_BKCh), tiles.pad_columns(v_BKCh)

    def visit(state: tuple[Array, ...], at: _Tile) -> tuple[Array, ...]:
        def seen() -> tuple[Array, ...]:
            q_BKGrh, dout_BKGrh = at.rows_of(q_BKGRh), at.rows_of(dout_BKGRh)
            k_BKch, v_BKch = at.columns_of(k_BKCh), at.columns_of(v_BKCh)
            scores = at.mask(product("BKGrh,BKch->BKGrc", q_BKGrh, k_BKch) * scale(q_BKGRh))
            weights = jnp.exp(scores - at.rows_of(lse_BKGR)[..., None])
            dweights = product("BKGrh,BKch->BKGrc", dout_BKGrh, v_BKch)
            dscores = (weights * (dweights - at.rows_of(delta_BKGR)[..., None])).astype(k_BKch.dtype)
            return (
                dq + product("BKGrc,BKch->BKGrh", dscores, k_BKch),
                dk + product("BKGrc,BKGrh->BKch", dscores, q_BKGrh),
                dv + product("BKGrc,BKGrh->BKch", weights.astype(v_BKch.dtype), dout_BKGrh),
            )

        dq, dk, dv = old = at.rows_of(state[0]), at.columns_of(state[1]), at.columns_of(state[2])
        dq, dk, dv = at.where_seen(seen, old)
        return at.put_rows(state[0], dq), at.put_columns(state[1], dk), at.put_columns(state[2], dv)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_BKGRh, k_BKCh, v_BKCh))
    dq, dk, dv = tiles.visit_all(visit, zeros)
    factor = scale(q_BKGRh)
    return tiles.rows_only(dq) * factor, tiles.columns_only(dk) * factor, tiles.columns_only(dv)


class _Tiles:
    """The tiles of a block, all of one size; the last ones may reach past its end."""

    def __init__(self, R: int, C: int, block: Block):
        self.R, self.C, self.block = R, C, block
        self.rows, self.columns = _even(R, ROWS), _even(C, COLUMNS)

    def pad_rows(self, x: Array) -> Array:
        return _padded(x, 3, self.rows)

    def pad_columns(self, x: Array) -> Array:
        return _padded(x, 2, self.columns)

    def rows_only(self, x: Array) -> Array:
        return jax.lax.slice_in_dim(x, 0, self.R, axis=3)

    def columns_only(self, x: Array) -> Array:
        return jax.lax.slice_in_dim(x, 0, self.C, axis=2)

    def visit_all(self, visit: Callable[[Any, _Tile], Any], state: Any) -> Any:
        """The state after every tile that may hold something to see."""
        for places, masked in self.places():
            if len(places) == 1:
                state = visit(state, _Tile(self, int(places[0][0]), int(places[0][1]), masked))
            elif len(places):

                def step(state: Any, place: Array, masked: bool = masked) -> tuple[Any, None]:
                    return visit(state, _Tile(self, place[0], place[1], masked)), None

                state, _ = jax.lax.scan(step, state, jnp.asarray(places))
        return state

    def places(self) -> list[tuple[np.ndarray, bool]]:
        """First row and first column of the tiles in which all is seen, and of those that take a mask [tiles, 2]."""
        rows, columns = np.meshgrid(
            np.arange(0, self.R, self.rows, dtype=np.int32), np.arange(0, self.C, self.columns, dtype=np.int32),
            indexing="ij",
        )  # fmt: skip
        places = np.stack([rows.ravel(), columns.ravel()], axis=-1)
        q_start, k_start, window = self.block.q_start, self.block.k_start, self.block.window
        if not (isinstance(q_start, int) and isinstance(k_start, int)):
            return [(places, True)]
        last_row = np.minimum(places[:, 0] + self.rows, self.R) - 1
        last_column = np.minimum(places[:, 1] + self.columns, self.C) - 1
        # How far before its query a key lies, at least and at most.
        least, most = (q_start - k_start) + places[:, 0] - last_column, (q_start - k_start) + last_row - places[:, 1]
        some, whole = most >= 0, (least >= 0) & (places[:, 1] + self.columns <= self.C)
        if window:
            some, whole = some & (least < window), whole & (most < window)
        if self.block.q_segments_BR is not None:
            whole[:] = False
        return [(places[whole], False), (places[some & ~whole], True)]


class _Tile(NamedTuple):
    """One of the tiles: where it begins, and whether any of it may be hidden."""

    tiles: _Tiles
    row: int | Array
    column: int | Array
    masked: bool

    def rows_of(self, x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, self.row, self.tiles.rows, axis=3)

    def columns_of(self, x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, self.column, self.tiles.columns, axis=2)

    def put_rows(self, x: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.row, axis=3)

    def put_columns(self, x: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.column, axis=2)

    def _segments(self) -> tuple[Array, Array]:
        """Of the rows [B, r] and of the columns [B, c], those past the end as the last."""
        tiles, block = self.tiles, self.tiles.block
        assert block.q_segments_BR is not None
        assert block.k_segments_BC is not None
        rows = jnp.minimum(self.row + jnp.arange(tiles.rows), tiles.R - 1)
        columns = jnp.minimum(self.column + jnp.arange(tiles.columns), tiles.C - 1)
        return block.q_segments_BR[:, rows], block.k_segments_BC[:, columns]

    def where_seen(self, seen: Callable[[], Any], otherwise: Any) -> Any:
        """`seen()`, or `otherwise` where the place of the tile or its documents leave nothing to see."""
        tiles, (q_start, k_start, window, segments, _) = self.tiles, self.tiles.block
        checks = []
        if not (isinstance(q_start, int) and isinstance(k_start, int)):
            ahead = q_start - k_start + self.row - self.column
            checks.append(ahead + tiles.rows > 0)
            if window:
                checks.append(ahead - tiles.columns < window - 1)
        if segments is not None:
            rows, columns = self._segments()
            (first, last), (begin, end) = ((jnp.min(ids, axis=1), jnp.max(ids, axis=1)) for ids in (rows, columns))
            checks.append(jnp.any((first <= end) & (begin <= last)))
        if not checks:
            return seen()
        some = checks[0]
        for check in checks[1:]:
            some = some & check
        return jax.lax.cond(some, seen, lambda: otherwise)

    def mask(self, scores: Float[Array, "B K G r c"]) -> Float[Array, "B K G r c"]:
        """The scores, what may not be seen masked out."""
        if not self.masked:
            return scores
        tiles, (q_start, k_start, window, segments, _) = self.tiles, self.tiles.block
        row = self.row + jnp.arange(tiles.rows)[:, None]
        column = self.column + jnp.arange(tiles.columns)
        behind = (q_start - k_start) + row - column
        visible = (behind >= 0) & (column < tiles.C)
        if window:
            visible &= behind < window
        if segments is not None:
            rows, columns = self._segments()
            visible = visible & (rows[:, None, None, :, None] == columns[:, None, None, None, :])
        return jnp.where(visible, scores, MASKED)


def _even(size: int, most: int) -> int:
    """The size of as few equal parts as are at most so large; the last may be smaller."""
    return -(-size // -(-size // most))


def _padded(x: Array, dim: int, multiple: int) -> Array:
    missing = -x.shape[dim] % multiple
    return jnp.pad(x, [(0, missing if i == dim else 0) for i in range(x.ndim)]) if missing else x
