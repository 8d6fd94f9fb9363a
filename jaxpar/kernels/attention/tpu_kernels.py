"""The bodies of the TPU kernels of attention: the output, dq, and dk with dv.

Each takes a step, which is a visited tile, refs to the tile's arrays and outputs, and refs to the
sums of the tile's row, which stay in VMEM from the row's first step to its last. `rows` gives an
array as [places, h] and `columns` gives it as [h, places], whichever way it lies.

Scores lie as [keys, queries], so that a number for each query, such as its maximum, lies along the
lanes, and sums over keys need no shuffles between lanes. In this layout libtpu 0.0.42 makes 1,440
bundles of instructions on v5e and 1,058 on v6e for the forward of a tile of 512 x 512 with head_dim
128; for [queries, keys] it makes 1,832 and 1,779.

Shapes: as in `jaxpar.kernels.attention.call`; q queries and t keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxpar.kernels.attention.call import BLIND, MASKED, Call, Ref, cap_scores, through_cap
from jaxpar.kernels.masks import FULL, PARTIAL

Shown = Callable[[Array, float], Array]
"""A function from a tile's array and a value for the places that are not seen to an array that may
be summed.
"""


class Step(NamedTuple):
    """A step of a kernel: the visit to one tile of a row."""

    call: Call
    scale: float
    first: Array
    """Whether it is the first step of its row, where sums begin."""
    last: Array
    """Whether it is the last step of its row, where sums are written."""
    state: Array
    """Whether its tile is EMPTY, PARTIAL or FULL."""
    seen: Callable[[], Array]
    """A function that says which places of a partial tile are seen, [t, q]."""
    across: bool
    """Whether arrays lie with their places along the lanes."""

    def rows(self, x: Ref) -> Array:
        """Turn an array as it lies into [places, h], or turn such rows into an array that lies
        so.
        """
        return x[...].T if self.across else x[...]

    def columns(self, x: Ref) -> Array:
        """Turn an array as it lies into [h, places], or turn such columns into an array that
        lies so.
        """
        return x[...] if self.across else x[...].T

    def scores(self, q: Ref, k: Ref) -> Array:
        """Compute the scores of a tile [t, q], capped."""
        scores = product(self.rows(k), self.columns(q)) * self.scale
        return cap_scores(scores, self.call.softcap)

    def gradients(
        self, shown: Shown, q: Ref, dout: Ref, k: Ref, v: Ref, lse: Ref, delta: Ref
    ) -> tuple[Array, Array]:
        """Compute the weights of the tile, again from the log-sum-exp, and the gradient of its
        scores.
        """
        scores = self.scores(q, k)
        weights = shown(jnp.exp(scores - lse[...]), 0.0)
        dcapped = weights * (product(self.rows(v), self.columns(dout)) - delta[...])
        return weights, through_cap(dcapped, scores, self.call.softcap)

    def visit(self, body: Callable[[Shown], None]) -> None:
        """Run `body` on a tile of which something is seen; only a partial one is masked."""

        def whole(x: Array, hidden: float) -> Array:
            return x

        def masked(x: Array, hidden: float) -> Array:
            return jnp.where(self.seen(), x, hidden)

        pl.when(self.state == FULL)(lambda: body(whole))
        pl.when(self.state == PARTIAL)(lambda: body(masked))


def forward_kernel(step: Step, q, k, v, out, lse, most, total, weighted) -> None:
    """Compute the output of a row and its log-sum-exp, by a running maximum and total of each
    query.
    """

    @pl.when(step.first)
    def _() -> None:
        most[...] = jnp.full_like(most, BLIND)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    @step.visit
    def _(shown: Shown) -> None:
        scores = shown(step.scores(q, k), MASKED)
        before = most[...]
        now = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp(scores - now)
        kept = jnp.exp(before - now)
        most[...] = now
        total[...] = total[...] * kept + jnp.sum(weights, axis=0, keepdims=True)
        added = product(step.columns(v), weights.astype(v.dtype))
        weighted[...] = weighted[...] * kept + added

    @pl.when(step.last)
    def _() -> None:
        divisor = jnp.where(total[...] == 0, 1, total[...])
        out[...] = step.columns(weighted[...] / divisor).astype(out.dtype)
        lse[...] = most[...] + jnp.log(divisor)


def dq_kernel(step: Step, q, dout, k, v, lse, delta, dq, dq_sum) -> None:
    """Compute the gradient of the queries of a row."""

    @pl.when(step.first)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @step.visit
    def _(shown: Shown) -> None:
        _, dscores = step.gradients(shown, q, dout, k, v, lse, delta)
        dq_sum[...] += product(step.columns(k), dscores.astype(k.dtype))

    @pl.when(step.last)
    def _() -> None:
        dq[...] = step.columns(dq_sum[...] * step.scale).astype(dq.dtype)


def dkv_kernel(step: Step, q, dout, k, v, lse, delta, dk, dv, dk_sum, dv_sum) -> None:
    """Compute the gradients of the keys and values of a row, summed over all query heads of their
    kv head.
    """

    @pl.when(step.first)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @step.visit
    def _(shown: Shown) -> None:
        weights, dscores = step.gradients(shown, q, dout, k, v, lse, delta)
        dv_sum[...] += product(weights.astype(dout.dtype), step.rows(dout))
        dk_sum[...] += product(dscores.astype(q.dtype), step.rows(q))

    @pl.when(step.last)
    def _() -> None:
        dk[...] = step.rows(dk_sum[...] * step.scale).astype(dk.dtype)
        dv[...] = step.rows(dv_sum[...]).astype(dv.dtype)


def product(a: Array, b: Array, dim_a: int = 1, dim_b: int = 0) -> Array:
    """Compute a matrix product over one dim of each factor, summed in float32. float32 factors keep
    all their bits.
    """
    if a.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    else:
        precision = jax.lax.Precision.DEFAULT
    dims = ((dim_a,), (dim_b,)), ((), ())
    return jax.lax.dot_general(a, b, dims, precision, jnp.float32)
