"""Ring attention: keys and values go round the devices, and what each block contributes is merged
(Liu et al. 2023, arXiv:2310.01889).

Tokens are in zigzag order, so that under a causal mask every device has two full pairs of chunks in
each step: see `jaxpar.parallel.zigzag`. Under a mask that does not look back it has all four
pairs, of which a kernel leaves out the tiles that show nothing. A hop is written before the work
that should hide it.

Shapes: B batch, S sequence of one device, C chunk of it, H heads, K kv heads, h head_dim. A leading
2 counts a device's chunks, the early one first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.kernels.attention.call import Call, merge
from jaxpar.kernels.masks import Mask
from jaxpar.parallel.context.task import ChunkNumber, ContextTask

KeysValues = list[Array]
"""The keys and the values of a device, each [2, B, C, K, h]."""
State = TypeVar("State")
_EARLY = 0
_LATE = 1


def ring_forward(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    work: ContextTask,
) -> tuple[Float[Array, "B S H h"], Float[Array, "B H S"]]:
    """Compute attention inside `manual`.

    Args:
      q_BSHh: one device's queries, two chunks of them in zigzag order.
      k_BSKh: its keys.
      v_BSKh: its values.
      work: the task.

    Returns:
      The output and the log-sum-exp, both in float32.
    """
    q = _stack(q_BSHh, 1)
    kv = [_stack(k_BSKh, 1), _stack(v_BSKh, 1)]
    early, late = work.chunks
    C = q.shape[2]

    def attend(
        q_half: ChunkNumber, kv: KeysValues, kv_half: ChunkNumber, how: tuple[Mask, Call]
    ) -> tuple[Array, Array]:
        keys, values = kv
        return work.kernel.forward(q[q_half], keys[kv_half], values[kv_half], *how)

    def own() -> tuple[Array, Array]:
        late_on_late = attend(_LATE, kv, _LATE, work.diagonal(late, C))
        late_on_early = attend(_LATE, kv, _EARLY, work.pair(late, early, C))
        of_late = merge(late_on_late, late_on_early)
        of_early = attend(_EARLY, kv, _EARLY, work.diagonal(early, C))
        if not work.looks_back:
            early_on_late = attend(_EARLY, kv, _LATE, work.pair(early, late, C))
            of_early = merge(of_early, early_on_late)
        return jax.tree.map(lambda *halves: jnp.stack(halves), of_early, of_late)

    def visit(state: tuple[Array, Array], kv: KeysValues, hops: ChunkNumber) -> tuple[Array, Array]:
        for pair in _visible(work, hops):
            out, lse = state
            old = (out[pair.q_half], lse[pair.q_half])
            how = work.pair(pair.q_chunk, pair.kv_chunk, C)
            new_out, new_lse = merge(old, attend(pair.q_half, kv, pair.kv_half, how))
            state = (out.at[pair.q_half].set(new_out), lse.at[pair.q_half].set(new_lse))
        return state

    out, lse = _around(work, kv, own, visit)
    return _join(out, 1), _join(lse, 2)


class _Sums(NamedTuple):
    """Sums of gradients in float32."""

    dq: Array
    """Of this device's queries, [2, B, C, H, h]."""
    dkv: tuple[Array, ...]
    """Of some device's keys and values, each [2, B, C, K, h]."""


class _Passing(NamedTuple):
    """The sums of a device while the keys of the others are here."""

    dq: Array
    own: tuple[Array, ...]
    """Of this device's keys and values, by its own queries."""
    passing: tuple[Array, ...] | None
    """Of the keys and values that were here last, by the queries of the devices that they have
    passed; None before the first."""


class _OwnQueries(NamedTuple):
    """What the backward reads of this device's queries, its two chunks stacked."""

    work: ContextTask
    q: Array
    dout: Array
    lse: Array
    delta: Array

    def add(
        self,
        sums: _Sums,
        q_half: ChunkNumber,
        kv: KeysValues,
        kv_half: ChunkNumber,
        how: tuple[Mask, Call],
    ) -> _Sums:
        """Add what one pair of chunks contributes."""
        keys, values = kv
        dq, dk, dv = self.work.backward(
            self.q[q_half],
            keys[kv_half],
            values[kv_half],
            self.dout[q_half],
            self.lse[q_half],
            self.delta[q_half],
            *how,
        )
        total_dq = sums.dq.at[q_half].add(dq)
        total_dk, total_dv = sums.dkv
        total_dk = total_dk.at[kv_half].add(dk)
        total_dv = total_dv.at[kv_half].add(dv)
        return _Sums(total_dq, (total_dk, total_dv))


def ring_backward(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    dout_BSHh: Float[Array, "B S H h"],
    lse_BHS: Float[Array, "B H S"],
    delta_BHS: Float[Array, "B H S"],
    work: ContextTask,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of attention inside `manual`.

    The sums of dk and dv follow their keys one hop late, and so travel beside the work too. A
    device's own pairs are split between the two ends of the loop: the two diagonals are computed
    while the first keys are on their way, the other pairs while the sums come home.

    Args:
      q_BSHh: as for `ring_forward`, and so are the keys and values.
      k_BSKh: see there.
      v_BSKh: see there.
      dout_BSHh: the output's gradient.
      lse_BHS: the log-sum-exp over all keys.
      delta_BHS: as in `jaxpar.kernels.attention.call`.
      work: the task.

    Returns:
      The gradients of q, k and v in float32, in the forward's shapes.
    """
    q = _stack(q_BSHh, 1)
    kv = [_stack(k_BSKh, 1), _stack(v_BSKh, 1)]
    dout = _stack(dout_BSHh, 1)
    own_queries = _OwnQueries(work, q, dout, _stack(lse_BHS, 2), _stack(delta_BHS, 2))
    early, late = work.chunks
    C = q.shape[2]
    dq_zeros = jnp.zeros(q.shape, jnp.float32)
    dkv_zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in kv)

    def diagonals() -> _Passing:
        sums = _Sums(dq_zeros, dkv_zeros)
        sums = own_queries.add(sums, _EARLY, kv, _EARLY, work.diagonal(early, C))
        sums = own_queries.add(sums, _LATE, kv, _LATE, work.diagonal(late, C))
        return _Passing(sums.dq, sums.dkv, None)

    def visit(state: _Passing, kv: KeysValues, hops: ChunkNumber) -> _Passing:
        if state.passing is None:
            passing = dkv_zeros
        else:
            passing = work.hop(state.passing)
        sums = _Sums(state.dq, passing)
        for pair in _visible(work, hops):
            how = work.pair(pair.q_chunk, pair.kv_chunk, C)
            sums = own_queries.add(sums, pair.q_half, kv, pair.kv_half, how)
        return _Passing(sums.dq, state.own, sums.dkv)

    state = _around(work, kv, diagonals, visit)
    home = work.hop(state.passing)
    sums = _Sums(state.dq, state.own)
    sums = own_queries.add(sums, _LATE, kv, _EARLY, work.pair(late, early, C))
    if not work.looks_back:
        sums = own_queries.add(sums, _EARLY, kv, _LATE, work.pair(early, late, C))
    dk, dv = (own + others for own, others in zip(sums.dkv, home, strict=True))
    return _join(sums.dq, 1), _join(dk, 1), _join(dv, 1)


def _around(
    work: ContextTask,
    kv: KeysValues,
    own: Callable[[], State],
    visit: Callable[[State, KeysValues, ChunkNumber], State],
) -> State:
    """Return the state after the keys and values of every device have been here; the next travel
    meanwhile.

    `own` makes the state from this device's keys and values. `visit` adds the keys and values that
    have made so many hops; the first visit may change the form of the state.
    """

    def turn(
        carry: tuple[KeysValues, State], hops: ChunkNumber
    ) -> tuple[tuple[KeysValues, State], None]:
        kv, state = carry
        coming = work.hop(kv)
        return (coming, visit(state, kv, hops)), None

    last = work.size - 1
    carry = (work.hop(kv), own())
    unrolled = range(1, last if work.size <= work.unrolled else 2)
    for hops in unrolled:
        carry, _ = turn(carry, hops)
    if last > unrolled.stop:
        carry, _ = jax.lax.scan(turn, carry, jnp.arange(unrolled.stop, last))
    kv, state = carry
    return visit(state, kv, last)


class _Pair(NamedTuple):
    """A chunk of this device's queries, and one of the keys that are here."""

    q_half: ChunkNumber
    """Which of this device's two chunks."""
    kv_half: ChunkNumber
    """Which of the two chunks of the device that the keys are from."""
    q_chunk: Array
    """The number of the queries' chunk in the sequence."""
    kv_chunk: Array
    """The number of the keys' chunk in the sequence."""


def _visible(work: ContextTask, hops: ChunkNumber) -> tuple[_Pair, ...]:
    """The pairs of chunks that may have something to see in the block of the device so many hops
    behind.

    Under a causal mask they are two: the late queries see its early keys; besides, early queries
    see its early keys, or late ones its late keys.
    """
    early, late = work.chunks
    behind = (early - hops) % work.size
    if not work.looks_back:
        early_keys = behind
        late_keys = 2 * work.size - 1 - behind
        return (
            _Pair(_EARLY, _EARLY, early, early_keys),
            _Pair(_EARLY, _LATE, early, late_keys),
            _Pair(_LATE, _EARLY, late, early_keys),
            _Pair(_LATE, _LATE, late, late_keys),
        )
    half = jnp.where(behind < early, _EARLY, _LATE)
    q_chunk = jnp.where(half == _EARLY, early, late)
    kv_chunk = jnp.where(half == _EARLY, behind, 2 * work.size - 1 - behind)
    return _Pair(_LATE, _EARLY, late, behind), _Pair(half, half, q_chunk, kv_chunk)


def _stack(x: Array, dim: int) -> Array:
    """Stack the two chunks of a device."""
    return jnp.stack(jnp.split(x, 2, axis=dim))


def _join(x: Array, dim: int) -> Array:
    """The inverse of `_stack`."""
    return jnp.concatenate([x[0], x[1]], axis=dim)
