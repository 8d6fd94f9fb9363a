"""Collective matmuls: a matmul and the gather before it, or the sum and scatter after it, as
one op.

Following Wang et al. 2023, "Overlap communication with dependent computation via decomposition in
large deep learning models" (ASPLOS), chunks of a gathered array are multiplied as they arrive, and
each chunk of a product is added to a sum that passes by on its way to the device that it belongs
to. The loops are unrolled, and a hop is written before the work that should hide it, so that the
compiler's scheduler sees every step. In `linear` each op is the other's transpose.

Everything here runs inside `manual`, on local arrays whose dim 1 is the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.plan import Form
from jaxpar.base.layout.sharding import Axes, Layout
from jaxpar.base.registry import FORMS, registering
from jaxpar.parallel.collectives import further_split, gather, reduce
from jaxpar.parallel.linear.zero_blocks import Factor, ZeroBlocks


class Lane(NamedTuple):
    """A part of a chunk that travels by itself: `rows` rows, beginning with the row `first`.

    Attributes:
      way: the neighbour that it goes to at each hop: 1 = the next one, -1 = the one before.
    """

    first: int
    rows: int
    way: int


Lanes = Callable[[int], list[Lane]]
"""A function from the number of rows of a chunk to the parts in which it travels, which cover the
chunk one after another."""


def register_form(name: str) -> Callable[[Lanes], Lanes]:
    """Make a form of ring known by a name, to the ops and to configs (`overlap`).

    The decorator that this returns is put on a function from the number of rows of a chunk, at
    least 1, to its parts, and leaves the function as it is. `overlap auto` tries every form.

    Args:
      name: a word that no other form has.

    Raises:
      UserError: the name is no word. The decorator raises it where the name is taken, or it is put
        on something that cannot be called so.
    """
    return registering(FORMS, name, lambda lanes: lanes, ("rows",))


@dataclass(frozen=True)
class _Collective:
    """The form without a ring: a collective before or after the matmul."""


FORMS.add("xla", _Collective())


@register_form("ring")
def whole_chunks(rows: int) -> list[Lane]:
    """Send whole chunks, all of them one way."""
    return [Lane(0, rows, 1)]


@register_form("bidirectional")
def half_each_way(rows: int) -> list[Lane]:
    """Send one half of each chunk either way. A single row goes one way only."""
    half = rows // 2
    if not half:
        return whole_chunks(rows)
    return [Lane(0, half, -1), Lane(half, rows - half, 1)]


def ring_forms() -> dict[str, Lanes]:
    """Return the forms that are rings, by name."""
    return {name: lanes for name, lanes in FORMS.items() if not isinstance(lanes, _Collective)}


def all_gather_matmul(
    x: jax.Array,
    weights: Sequence[Factor],
    stored: Axes,
    used: Axes,
    dtype: str,
    layout: Layout,
    form: Form,
) -> tuple[jax.Array, list[jax.Array]]:
    """Gather an array and multiply it by weights that share the gather.

    Args:
      x: an array [B, S, *in] in the layout `stored`.
      weights: arrays [*in, *out], ready to be multiplied.
      stored: the logical axes of x as it is stored.
      used: the logical axes of x as it is multiplied.
      dtype: the dtype of the products.
      form: how the gather runs beside the matmuls, a word of `FORMS`.

    Returns:
      x in the layout `used`, and for each weight an array [B, S, *out] of `dtype`.

    Raises:
      UserError: there is no such form.
    """
    ring = _ring(stored, used, form, layout)
    if ring is None:
        x = gather(x, stored, used, layout)
        return x, [matmul(x, weight, dtype) for weight in weights]
    rows = x.shape[1] * ring.size
    wholes = []
    for first, chunk in _gather_chunks(x, ring):
        parts = (chunk, *(matmul(chunk, weight, dtype) for weight in weights))
        wholes = wholes or [
            jax.lax.empty((len(part), rows, *part.shape[2:]), part.dtype) for part in parts
        ]
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        wholes = [put(whole, part) for whole, part in zip(wholes, parts, strict=True)]
    return wholes[0], wholes[1:]


def matmul_reduce_scatter(
    products: Sequence[tuple[jax.Array, Factor]],
    partial: Collection[MeshAxis],
    used: Axes,
    stored: Axes,
    layout: Layout,
    form: Form,
) -> jax.Array:
    """Sum some matmuls, where the sum is partial over mesh axes, into the layout that the sum is
    stored in.

    In a ring, sums are added in float32 and rounded at each hop.

    Args:
      products: pairs of an array [B, S, *in] and a weight [*in, *out].
      partial: the mesh axes over which the sum is partial.
      used: the logical axes of the sum before it is scattered.
      stored: the logical axes of the sum as it is stored.
      form: how the scatter runs beside the matmuls, a word of `FORMS`.

    Returns:
      This device's part of the sum [B, S, *out], in the compute dtype, in which it also travels.

    Raises:
      UserError: there is no such form.
    """
    ring = _ring(stored, used, form, layout)
    if ring is None or set(partial) != set(ring.axes):
        return reduce(
            _sum(matmul(x, weight, layout.compute) for x, weight in products),
            partial,
            used,
            stored,
            layout,
        )

    def summand(first: jax.Array, count: int) -> jax.Array:
        rows = [
            (jax.lax.dynamic_slice_in_dim(x, first, count, axis=1), weight)
            for x, weight in products
        ]
        return _sum(matmul(x, weight, "float32") for x, weight in rows)

    return _scatter_sums(
        summand,
        products[0][0].shape[1] // ring.size,
        layout.dtype,
        ring,
    )


def matmul(x: jax.Array, weight: Factor, dtype: str) -> jax.Array:
    """Multiply by a matmul of flattened dims.

    Args:
      x: an array [B, S, *in].
      weight: an array [*in, *out]. Its blocks of zeros, if they are known, are skipped where the
        product has the dtype of x: kernels make products of no other dtype.
      dtype: the dtype of the product.

    Returns:
      The product [B, S, *out].
    """
    out = weight.shape[x.ndim - 2 :]
    x_TI = x.reshape(x.shape[0] * x.shape[1], -1)
    if isinstance(weight, ZeroBlocks):
        if x.dtype == dtype:
            return weight.multiply(x_TI).reshape(*x.shape[:2], *out)
        weight = weight.array
    y_TO = jnp.matmul(
        x_TI, weight.reshape(x_TI.shape[1], -1), preferred_element_type=jnp.dtype(dtype)
    )
    return y_TO.reshape(*x.shape[:2], *out)


def _sum(parts: Iterator[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _ring(stored: Axes, used: Axes, form: Form, layout: Layout) -> _Ring | None:
    """Find the ring that replaces the gather from one layout to the other, or its transpose; None =
    no ring does.
    """
    lanes = FORMS[form]
    moves = further_split(stored, used, layout)
    if isinstance(lanes, _Collective) or [dim for dim, _ in moves] != [1]:
        return None
    axes = moves[0][1]
    return _Ring(axes, layout.pieces(axes), form, lanes)


class _Ring(NamedTuple):
    """Devices that hand chunks on to their neighbours."""

    axes: tuple[MeshAxis, ...]
    """The mesh axes, treated as one."""
    size: int
    """The number of devices along the mesh axes."""
    form: Form
    lanes: Lanes

    def checked_lanes(self, rows: int) -> list[Lane]:
        """Return the parts of a chunk of so many rows.

        Raises:
          UserError: the parts do not cover the chunk one after another, or a part goes neither way.
        """
        found = self.lanes(rows)
        wrong = UserError(
            f"the form {self.form!r} of a collective takes a chunk of {rows} rows apart into "
            f"{short(found)}: return Lanes(first, rows, way) that cover it one after another, each "
            "with the way 1 or -1"
        )
        if not isinstance(found, list | tuple):
            raise wrong
        end = 0
        for lane in found:
            if not isinstance(lane, Lane):
                raise wrong
            if lane.first != end or lane.rows < 1 or lane.way not in (1, -1):
                raise wrong
            end += lane.rows
        if end != rows:
            raise wrong
        return list(found)

    def hop(self, x: jax.Array, way: int) -> jax.Array:
        """Pass an array on to the neighbour in this direction, and return what comes from the
        neighbour behind.
        """
        return jax.lax.ppermute(
            x, self.axes, [(i, (i + way) % self.size) for i in range(self.size)]
        )

    def behind(self, hops: int, way: int) -> jax.Array:
        """Return the device that is so many hops behind this one."""
        return (jax.lax.axis_index(self.axes) - way * hops) % self.size


def _gather_chunks(
    x: jax.Array,
    ring: _Ring,
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield the chunks of the all-gather of `x` as (first row, rows), this device's own first; the
    next chunk travels meanwhile.
    """
    rows = x.shape[1]
    parts = [
        (first, direction, jax.lax.slice_in_dim(x, first, first + count, axis=1))
        for first, count, direction in ring.checked_lanes(rows)
    ]
    for hops in range(ring.size):
        last = hops == ring.size - 1
        if last:
            arriving = []
        else:
            arriving = [(first, way, ring.hop(part, way)) for first, way, part in parts]
        for first, way, part in parts:
            yield ring.behind(hops, way) * rows + first, part
        parts = arriving


def _scatter_sums(
    summand: Callable[[jax.Array, int], jax.Array], rows: int, dtype: jnp.dtype, ring: _Ring
) -> jax.Array:
    """Reduce-scatter an array whose local summand `summand(first, count)` makes piece by piece, in
    float32.

    Sums travel in `dtype`; `rows` is the length of the chunk that stays here.
    """
    lanes = ring.checked_lanes(rows)
    sums: list[jax.Array] = []
    # the chunk with the longest way goes first, one's own last
    for hops in reversed(range(ring.size)):
        arriving = [
            ring.hop(passing, way) for passing, (_, _, way) in zip(sums, lanes, strict=False)
        ]
        sums = []
        for i, (first, count, way) in enumerate(lanes):
            own = summand(ring.behind(-hops, way) * rows + first, count)
            sums.append((own + arriving[i].astype(own.dtype) if arriving else own).astype(dtype))
    if len(sums) > 1:
        return jnp.concatenate(sums, axis=1)
    return sums[0]
