"""Ring attention: keys and values go round the devices, and the contributions of the blocks are merged.

This is Liu et al. 2023, arXiv:2310.01889, with tokens in zigzag order: under a causal mask every device has two full
pairs of chunks in each step. A hop is written before the work that should hide it. All of it runs inside `manual`, on
local arrays.

Shapes: B batch, S sequence of one device, C chunk of it, H heads, K kv heads, h head_dim. A leading 2 counts a device's
chunks, the early one first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.sharding import PyTree
from jaxpar.kernels.attention.call import Call, merge
from jaxpar.kernels.masks import Mask
from jaxpar.parallel.token_order import ContextTask, join_chunks, own_chunks, stack_chunks

KeysValues = tuple[Array, Array]
Place = Array | int  # the number of a half, of a chunk, or of hops, known at run time or before
State = TypeVar("State")
UNROLLED = 8  # up to so many devices every step of the ring is written out; beyond, the middle steps are a loop


def forward(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, work: ContextTask) -> tuple[Array, Array]:
    """Return the output and the log-sum-exp, both in float32."""
    q, kv, early, late = *_halve(q_BSHh, k_BSKh, v_BSKh), *own_chunks(work)
    C = q.shape[2]

    def tile(q_half: Place, kv: KeysValues, kv_half: Place, how: tuple[Mask, Call]) -> tuple[Array, Array]:
        return work.kernel.forward(q[q_half], kv[0][kv_half], kv[1][kv_half], *how)

    def own() -> tuple[Array, Array]:
        of_late = merge(tile(1, kv, 1, work.diagonal(late, C)), tile(1, kv, 0, work.pair(late, early, C)))
        return jax.tree.map(lambda *x: jnp.stack(x), tile(0, kv, 0, work.diagonal(early, C)), of_late)

    def visit(pairs: tuple[Array, Array], kv: KeysValues, hops: Place) -> tuple[Array, Array]:
        first, second = _visible(work, hops)
        for q_half, kv_half, q_chunk, kv_chunk in (first, second):
            old = pairs[0][q_half], pairs[1][q_half]
            new = merge(old, tile(q_half, kv, kv_half, work.pair(q_chunk, kv_chunk, C)))
            pairs = pairs[0].at[q_half].set(new[0]), pairs[1].at[q_half].set(new[1])
        return pairs

    out, lse = _around(work, kv, own, visit)
    return join_chunks(out, 1), join_chunks(lse, 2)


def backward(
    q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, dout_BSHh: Array, lse_BHS: Array, delta_BHS: Array, work: ContextTask
) -> tuple[Array, Array, Array]:
    """Return the gradients; the sums of dk and dv follow their keys one hop late, and so travel beside the work too.

    A device's own pairs are split between the two ends of the loop: the two diagonals are computed while the first keys
    are on their way, the full pair while the sums come home.
    """
    q, kv, early, late = *_halve(q_BSHh, k_BSKh, v_BSKh), *own_chunks(work)
    dout, lse, delta = stack_chunks(dout_BSHh, 1), stack_chunks(lse_BHS, 2), stack_chunks(delta_BHS, 2)
    C = q.shape[2]

    def tile(
        sums: tuple[Array, ...], q_half: Place, kv: KeysValues, kv_half: Place, how: tuple[Mask, Call]
    ) -> tuple[Array, ...]:
        """Add what one pair of chunks contributes to the sums (dq, dk, dv), each [2, ...]."""
        mine = q[q_half], kv[0][kv_half], kv[1][kv_half], dout[q_half], lse[q_half], delta[q_half]
        places = q_half, kv_half, kv_half
        return tuple(s.at[i].add(x) for s, i, x in zip(sums, places, work.kernel.backward(*mine, *how), strict=True))

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, *kv))

    def diagonals() -> PyTree:
        sums = tile(zeros, 0, kv, 0, work.diagonal(early, C))
        dq, *own = tile(sums, 1, kv, 1, work.diagonal(late, C))
        return dq, tuple(own), None

    def visit(state: PyTree, kv: KeysValues, hops: Place) -> PyTree:
        dq, own, passing = state
        passing = zeros[1:] if passing is None else work.hop(passing)
        sums = dq, *passing
        for q_half, kv_half, q_chunk, kv_chunk in _visible(work, hops):
            sums = tile(sums, q_half, kv, kv_half, work.pair(q_chunk, kv_chunk, C))
        return sums[0], own, sums[1:]

    dq, own, passing = _around(work, kv, diagonals, visit)
    home = work.hop(passing)
    dq, *own = tile((dq, *own), 1, kv, 0, work.pair(late, early, C))
    dk, dv = (a + b for a, b in zip(own, home, strict=True))
    return join_chunks(dq, 1), join_chunks(dk, 1), join_chunks(dv, 1)


def _around(
    work: ContextTask, kv: KeysValues, own: Callable[[], State], visit: Callable[[State, KeysValues, Place], State]
) -> State:
    """Return the state after the keys and values of every device have been here; the next travel while some are at
    work.

    `own` makes the state from this device's keys and values. `visit` adds the keys and values that have made so many
    hops; the first visit may change the form of the state.
    """

    def turn(carry: tuple[KeysValues, State], hops: Place) -> tuple[tuple[KeysValues, State], None]:
        kv, state = carry
        coming = work.hop(kv)
        return (coming, visit(state, kv, hops)), None

    last = work.size - 1
    carry = work.hop(kv), own()
    unrolled = range(1, last if work.size <= UNROLLED else 2)
    for hops in unrolled:
        carry, _ = turn(carry, hops)
    if last > unrolled.stop:
        carry, _ = jax.lax.scan(turn, carry, jnp.arange(unrolled.stop, last))
    kv, state = carry
    return visit(state, kv, last)


def _visible(work: ContextTask, hops: Place) -> Sequence[tuple[Place, Place, Array, Array]]:
    """The two pairs of chunks that have something to see in the block of the device so many hops behind.

    Returns:
      For each pair: which half of this device's queries, which half of that device's keys, and the numbers of the
        chunks. The late queries see its early keys; besides, the early queries see its early keys or the late queries
        its late keys.
    """
    early, late = own_chunks(work)
    behind = (early - hops) % work.size
    half = jnp.where(behind < early, 0, 1)
    q_chunk, kv_chunk = jnp.where(half == 0, early, late), jnp.where(half == 0, behind, 2 * work.size - 1 - behind)
    return (1, 0, late, behind), (half, half, q_chunk, kv_chunk)


def _halve(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array) -> tuple[Array, KeysValues]:
    return stack_chunks(q_BSHh, 1), (stack_chunks(k_BSKh, 1), stack_chunks(v_BSKh, 1))
