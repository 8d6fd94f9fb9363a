"""The bodies of the Triton kernels of attention: the output, dq, and dk with dv.

Each is given a plan, the lists of visits, where queries and keys start, the ids, and its arrays,
and walks a row of `visits`. The part of a tile past the end of the sequence, or past a head_dim
that is no power of two, is masked out of loads and stores, and costs no copy. Exponentials are in
base 2, the base that the hardware has.

Shapes: as in `jaxpar.kernels.attention.call`; q and k places in a tile of queries and of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from jaxpar.kernels.attention.call import BLIND, MASKED, Index, Ref
from jaxpar.kernels.attention.visits import in_tile
from jaxpar.kernels.masks import Mask, Tiles

Carry = TypeVar("Carry")
LOG2_E = math.log2(math.e)
ONLY = np.int32(0)
"""The number of the head in a program that has only one. It is a numpy integer, as the interpreter
asks an index for its shape.
"""


class Plan(NamedTuple):
    """The values that a kernel knows while it is traced."""

    mask: Mask
    tiles: Tiles
    """The tiles count places within the arrays; the kernel adds where queries and keys start."""
    h: int
    """head_dim."""
    scale: float
    """The factor of the scores."""
    softcap: float
    """Scores become `softcap * tanh(score / softcap)`; 0 = no cap."""

    @property
    def unit(self) -> float:
        """The factor that turns the result of `_scores` into scores in base 2."""
        return (self.softcap or self.scale) * LOG2_E


def attention_forward(
    plan: Plan, lists: Ref, starts: Ref, ids: Ref, arrays: Ref, out_ref: Ref, lse_ref: Ref
) -> None:
    """Compute the output and log-sum-exp of a tile of queries, by a running maximum and total
    (algorithm 1).
    """
    q_ref, k_ref, v_ref = arrays
    # Under a causal mask the last queries have the most to do. They go first, so no long program is
    # left at the end.
    row = plan.tiles.shape[0] - 1 - pl.program_id(0)
    queries = _queries(plan, row)
    q_qh = queries.load(q_ref, ONLY)

    def visit(
        entry: Array, masked: bool, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        out_qh, most_q, total_q = carry
        keys = _keys(plan, entry, masked)
        scores_qk = _scores(plan, q_qh, keys.load(k_ref, ONLY))
        if masked:
            seen_qk = _visible(plan, starts, ids, queries, keys)
            scores_qk = jnp.where(seen_qk, scores_qk, -jnp.inf)
        next_q = jnp.maximum(most_q, jnp.max(scores_qk, axis=1) * plan.unit)
        weights_qk = jnp.exp2(scores_qk * plan.unit - next_q[:, None])
        before_q = jnp.exp2(most_q - next_q)
        v_kh = keys.load(v_ref, ONLY)
        added_qh = product(weights_qk.astype(v_kh.dtype), v_kh, 1, 0)
        out_qh = out_qh * before_q[:, None] + added_qh
        return out_qh, next_q, total_q * before_q + jnp.sum(weights_qk, axis=1)

    # The maximum is finite even where nothing is seen, so that hidden scores, minus infinity, get
    # weight 0 and not NaN.
    block = q_qh.shape[:1]
    begin = (_zeros(q_qh.shape), jnp.full(block, BLIND, jnp.float32), _zeros(block))
    out_qh, most_q, total_q = _walk(lists, row, visit, begin)
    blind_q = total_q == 0
    total_q = jnp.where(blind_q, 1, total_q)
    queries.store(out_ref, ONLY, out_qh / total_q[:, None])
    lse_q = most_q / LOG2_E + jnp.log(total_q)
    queries.store_row(lse_ref, ONLY, jnp.where(blind_q, MASKED, lse_q))


def attention_dq(plan: Plan, lists: Ref, starts: Ref, ids: Ref, arrays: Ref, dq_ref: Ref) -> None:
    """Compute the gradient of a tile of queries (algorithm 2, by rows)."""
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref = arrays
    row = plan.tiles.shape[0] - 1 - pl.program_id(0)
    queries = _queries(plan, row)
    q_qh = queries.load(q_ref, ONLY)
    dout_qh = queries.load(dout_ref, ONLY)
    lse_q1 = queries.load_row(lse_ref, ONLY)[:, None]
    delta_q1 = queries.load_row(delta_ref, ONLY)[:, None]

    def visit(entry: Array, masked: bool, dq_qh: Array) -> Array:
        keys = _keys(plan, entry, masked)
        k_kh = keys.load(k_ref, ONLY)
        if masked:
            seen_qk = _visible(plan, starts, ids, queries, keys)
        else:
            seen_qk = None
        scores_qk = _scores(plan, q_qh, k_kh)
        weights_qk = _weights(plan, scores_qk, seen_qk, lse_q1)
        dweights_qk = product(dout_qh, keys.load(v_ref, ONLY), 1, 1)
        dscores_qk = _dscores(plan, scores_qk, weights_qk, dweights_qk, delta_q1)
        return dq_qh + product(dscores_qk.astype(k_kh.dtype), k_kh, 1, 0)

    dq_qh = _walk(lists, row, visit, _zeros(q_qh.shape))
    queries.store(dq_ref, ONLY, dq_qh * plan.scale)


def attention_dkv(
    plan: Plan, lists: Ref, starts: Ref, ids: Ref, arrays: Ref, dk_ref: Ref, dv_ref: Ref
) -> None:
    """Compute the gradients of a tile of keys and values (algorithm 2, by columns), with scores
    transposed.
    """
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref = arrays
    row = pl.program_id(0)
    keys = _keys(plan, row, True)
    k_kh = keys.load(k_ref, ONLY)
    v_kh = keys.load(v_ref, ONLY)

    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def visit(entry: Array, masked: bool, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk_kh, dv_kh = carry
            queries = _queries(plan, entry)
            q_qh = queries.load(q_ref, head)
            dout_qh = queries.load(dout_ref, head)
            lse_1q = queries.load_row(lse_ref, head)[None]
            delta_1q = queries.load_row(delta_ref, head)[None]
            if masked:
                seen_kq = _visible(plan, starts, ids, queries, keys, transposed=True)
            else:
                seen_kq = None
            scores_kq = _scores(plan, k_kh, q_qh)
            weights_kq = _weights(plan, scores_kq, seen_kq, lse_1q)
            dv_kh += product(weights_kq.astype(dout_qh.dtype), dout_qh, 1, 0)
            dweights_kq = product(v_kh, dout_qh, 1, 1)
            dscores_kq = _dscores(plan, scores_kq, weights_kq, dweights_kq, delta_1q)
            dk_kh += product(dscores_kq.astype(q_qh.dtype), q_qh, 1, 0)
            return dk_kh, dv_kh

        return _walk(lists, row, visit, carry)

    begin = (_zeros(k_kh.shape), _zeros(k_kh.shape))
    dk_kh, dv_kh = lax.fori_loop(0, q_ref.shape[1], of_head, begin)
    keys.store(dk_ref, ONLY, dk_kh * plan.scale)
    keys.store(dv_ref, ONLY, dv_kh)


def _walk(
    lists: Ref, row: Index, visit: Callable[[Array, bool, Carry], Carry], carry: Carry
) -> Carry:
    """Call `visit(entry, masked, carry)` for each tile of a row: first the tiles that are seen in
    full, then the others.
    """
    entries, full, some = lists
    for masked, begin, end in ((False, 0, full[row]), (True, full[row], some[row])):
        carry = lax.fori_loop(
            begin, end, lambda w, carry, masked=masked: visit(entries[row, w], masked, carry), carry
        )
    return carry


class _Part(NamedTuple):
    """The places of a sequence that a tile has."""

    start: int | Array
    size: int
    end: int | None  # the end of the sequence where the tile may go past it, else None
    h: int

    @property
    def places(self) -> Array:
        return self.start + jnp.arange(self.size)

    def load(self, ref: Ref, head: Index) -> Array:
        """Load [size, h'] from [T, heads, h'], h' a power of two, with zeros past the array."""
        mask = self._entries(ref.shape[-1])
        other = None if mask is None else 0.0
        return plt.load(ref.at[self._slice, head], mask=mask, other=other)

    def store(self, ref: Ref, head: Index, value: Array) -> None:
        mask = self._entries(ref.shape[-1])
        plt.store(ref.at[self._slice, head], value.astype(ref.dtype), mask=mask)

    def load_row(self, ref: Ref, *head: Index) -> Array:
        """Load [size] from [heads, T] or from [T], with zeros past the array."""
        mask = self._rows
        other = None if mask is None else 0
        return plt.load(ref.at[*head, self._slice], mask=mask, other=other)

    def store_row(self, ref: Ref, head: Index, value: Array) -> None:
        plt.store(ref.at[head, self._slice], value, mask=self._rows)

    @property
    def _slice(self) -> slice | pl.Slice:
        return pl.ds(self.start, self.size)

    @property
    def _rows(self) -> Array | None:
        """The places that exist, [size]; None = all."""
        if self.end is None:
            return None
        return self.places < self.end

    def _entries(self, width: int) -> Array | None:
        """Find which entries exist, [size, width]; None = all."""
        rows = self._rows
        if width == self.h:
            if rows is None:
                return None
            return rows[:, None]
        columns = (jnp.arange(width) < self.h)[None]
        if rows is None:
            return columns
        return rows[:, None] & columns


def _queries(plan: Plan, tile: int | Array) -> _Part:
    block = plan.tiles.block_q
    S = plan.tiles.S
    return _Part(tile * block, block, S if S % block else None, plan.h)


def _keys(plan: Plan, tile: int | Array, last: bool) -> _Part:
    """Return the part of a tile of keys. Only with `last`, where the tile may be the last one, can
    it go past the end.
    """
    block = plan.tiles.block_k
    T = plan.tiles.T
    return _Part(tile * block, block, T if last and T % block else None, plan.h)


def _visible(
    plan: Plan, starts: Ref, ids: Ref, queries: _Part, keys: _Part, transposed: bool = False
) -> Array:
    """Find which places of a partial tile are seen, [q, k], or transposed [k, q]."""
    pairs = [(queries.load_row(q_ids), keys.load_row(kv_ids)) for q_ids, kv_ids in ids]
    if transposed:  # ids are compared for equality, so the two sides may change places
        i = queries.places[None]
        j = keys.places[:, None]
        pairs = [(kv_ids, q_ids) for q_ids, kv_ids in pairs]
    else:
        i = queries.places[:, None]
        j = keys.places[None]
    seen = in_tile(plan.mask, i + starts[0], j + starts[1], pairs)
    if keys.end is None:
        return seen
    return seen & (j < keys.end)


def product(a: Array, b: Array, dim_a: int, dim_b: int) -> Array:
    """Compute a product over one dim of each factor, in float32. float32 factors are not rounded to
    TF32, as they would be by default.
    """
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    else:
        precision = None
    dims = ((dim_a,), (dim_b,)), ((), ())
    return lax.dot_general(a, b, dims, precision, jnp.float32)


def _scores(plan: Plan, a: Array, b: Array) -> Array:
    """Compute the scores without the factor `plan.unit`: the products, or their tanh under a soft
    cap.
    """
    products = product(a, b, 1, 1)
    if plan.softcap:
        return jnp.tanh(products * (plan.scale / plan.softcap))
    return products


def _weights(plan: Plan, scores: Array, seen: Array | None, lse: Array) -> Array:
    """Compute the weights again from the log-sum-exp."""
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.exp2(scores * plan.unit - jnp.maximum(lse, BLIND) * LOG2_E)


def _dscores(plan: Plan, scores: Array, weights: Array, dweights: Array, delta: Array) -> Array:
    """Compute the gradient with respect to the products, without the factor `plan.scale`."""
    dscores = weights * (dweights - delta)
    if plan.softcap:
        return dscores * (1 - scores * scores)
    return dscores


def _zeros(shape: tuple[int, ...]) -> Array:
    return jnp.zeros(shape, jnp.float32)
