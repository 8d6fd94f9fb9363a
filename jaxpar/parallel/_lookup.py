"""The lookup of tokens in an embedding table that is split by rows.

Shapes: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import Axes, Layout, LogicalAxis, require_layout, state_axes
from jaxpar.parallel.collectives import first_row, gather, manual_vjp, reduce, split_over
from jaxpar.parallel.linear import GATHERED, STORED, gather_weight


def lookup(
    table_VD: Float[Array, "V D"],
    ids_BS: Int[Array, "B S"],
    axis: LogicalAxis | None,
    layout: Layout,
) -> Float[Array, "B S D"]:
    """Look up rows of an embedding table.

    Args:
      table_VD: the table, with logical axes (axis, "embed").
      ids_BS: the rows to look up, of an integer dtype.
      axis: the logical axis of the table's rows: "vocab", or None for a table that is never split
        by rows.

    Returns:
      The rows [B, S, D], in the compute dtype and the residual stream's layout.

    Raises:
      UserError: the rules split tokens and rows over the same mesh axis, or an argument has another
        shape, dtype or type.
    """
    require_layout(layout, "lookup")
    if not (axis is None or isinstance(axis, str)):
        raise UserError(
            f'lookup takes one logical axis, such as "vocab", or None, and was given {axis!r}'
        )
    layout.sharding((*GATHERED[:2], axis), name="lookup")
    layout.sharding(GATHERED[:2], ids_BS.shape, "ids")
    if not jnp.issubdtype(ids_BS.dtype, jnp.integer):
        raise UserError(f"lookup takes ids of an integer dtype, and was given {ids_BS.dtype}")
    stored: Axes = (axis, "embed")

    # XLA by itself would gather the whole table. Here each device looks up the rows it has, and the
    # rest are zeros.
    def forward(table_VD: Array, ids_BS: Array) -> Array:
        table_VD = gather_weight(table_VD, stored, layout)
        ids_BS, here_BS = _local_ids(ids_BS, table_VD.shape[0], axis, layout)
        rows_BSD = jnp.where(here_BS[..., None], table_VD[ids_BS], 0)
        return reduce(rows_BSD, layout.mesh_axes(axis), GATHERED, STORED, layout)

    def backward(table_VD: Array, ids_BS: Array, dx_BSD: Array) -> tuple[Array, None]:
        dx_BSD = gather(dx_BSD, STORED, GATHERED, layout)
        rows = table_VD.shape[0]
        ids_BS, here_BS = _local_ids(ids_BS, rows, axis, layout)
        dx_BSD = jnp.where(here_BS[..., None], dx_BSD.astype(jnp.float32), 0)
        dtable_VD = jnp.zeros((rows, dx_BSD.shape[-1]), jnp.float32).at[ids_BS].add(dx_BSD)
        tokens = split_over(GATHERED[:2], layout)
        dtable_VD = reduce(dtable_VD, tokens, (axis, None), state_axes(stored), layout)
        return dtable_VD.astype(table_VD.dtype), None

    run = manual_vjp(forward, backward, layout, (stored, GATHERED[:2]), STORED)
    return run(table_VD, ids_BS)


def _local_ids(
    ids_BS: Array, rows: int, axis: LogicalAxis | None, layout: Layout
) -> tuple[Array, Array]:
    """Inside `manual`: count ids from this device's first row, and say which of them it has."""
    ids_BS = ids_BS - first_row(axis, rows, layout)
    here_BS = (ids_BS >= 0) & (ids_BS < rows)
    return jnp.where(here_BS, ids_BS, 0), here_BS
