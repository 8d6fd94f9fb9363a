"""Column- and row-parallel linears with their gradients: Megatron's pair, sequence parallelism and
FSDP at once.

The caller states logical axes; the layout says where they live. Each op has one layout in which its
arrays are *stored* between ops (the residual stream split over `residual_seq`) and one in which
they are *used* (the sequence gathered, heads or mlp split). The forward and the backward are
written out, with every collective where it stands: weights are gathered in the compute dtype, and
weight gradients are summed in float32.

In the order in which to read: `column` and `row`, each other's transpose; `pieces`, the parts that
both are made of; `ring_matmul`, the gather and the scatter that overlap with their matmuls, in the
form that `overlap` names; and how a stored weight is read (`weight_view`, `zero_blocks`).
"""

from jaxpar.parallel.linear.column import column_linear, logits, rank_linear
from jaxpar.parallel.linear.pieces import (
    ATTENDED,
    GATHERED,
    STORED,
    gather_weight,
    require_head,
    used_axes,
)
from jaxpar.parallel.linear.row import row_linear

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
