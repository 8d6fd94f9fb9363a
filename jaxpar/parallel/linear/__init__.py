"""Column- and row-parallel linears with their gradients (`linears`), the matmuls that overlap with
their collectives (`ring_matmul`), and how a stored weight is read (`weight_view`, `zero_blocks`).
"""

from jaxpar.parallel.linear.linears import (
    ATTENDED,
    GATHERED,
    STORED,
    column_linear,
    gather_weight,
    logits,
    rank_linear,
    require_head,
    row_linear,
    used_axes,
)

__all__ = [
    "ATTENDED",
    "GATHERED",
    "STORED",
    "column_linear",
    "gather_weight",
    "logits",
    "rank_linear",
    "require_head",
    "row_linear",
    "used_axes",
]
